"""The rows after the last step, cut down to the dataset's columns, each of a type that fits its role."""

from __future__ import annotations

import polars as pl

from onejob.data.options import did_you_mean
from onejob.data.spec import Columns
from onejob.data.steps.cast import first_bad
from onejob.errors import DataError

_PLACE = "[data] columns"


def in_roles(frame: pl.DataFrame, columns: Columns) -> pl.DataFrame:
    """The columns that have a role, in the dataset's order; categories as text. DataError where a type doesn't fit."""
    for name in columns.names:
        if name not in frame.columns:
            raise DataError(
                f"there is no column {name!r} after the last step.{did_you_mean(name, frame.columns)}",
                place=_PLACE,
                cure=f"Columns: {', '.join(frame.columns)}.",
            )
    for name in columns.numbers:
        _refuse_no_number(frame, name)
    for name in columns.categories:
        dtype = frame[name].dtype
        if not (dtype in (pl.String, pl.Categorical, pl.Enum, pl.Boolean) or dtype.is_integer() or dtype == pl.Null):
            raise DataError(
                f"category {name!r} is of type {dtype}", place=_PLACE, cure="Cast it to text, or list it in 'numbers'."
            )
    _refuse_missing_label(frame, columns.label)
    # served requests name categories by text, so training sees them as text too
    return frame.select(columns.names).with_columns(pl.col(columns.categories).cast(pl.String))


def _refuse_no_number(frame: pl.DataFrame, name: str) -> None:
    dtype = frame[name].dtype
    if dtype.is_numeric() or dtype == pl.Boolean:
        return
    found = first_bad(frame.lazy(), name, pl.col(name).cast(pl.Float64, strict=False)) if dtype == pl.String else None
    shown = f"; row {found[0]} holds {found[1]!r}" if found else ""
    raise DataError(
        f"number {name!r} is of type {dtype}{shown}",
        place=_PLACE,
        cure="Say what means 'missing' in format.nulls, declare it in format.types, or cast it in a step.",
    )


def _refuse_missing_label(frame: pl.DataFrame, label: str) -> None:
    column = frame[label]
    missing = column.null_count() + (int(column.is_nan().sum()) if column.dtype.is_float() else 0)
    if missing:
        raise DataError(
            f"label {label!r} is missing in {missing} of {frame.height} rows",
            place=_PLACE,
            cure=f"Add the step {{ drop_nulls = {{ columns = ['{label}'] }} }}: it keeps the rows with the reason.",
        )
