"""`cast`: change the types of columns, with a say in what happens to values that aren't of the type."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from onejob.data.steps.dropped import Dropped, Result
from onejob.errors import DataError

TYPES: Mapping[str, pl.DataType] = {
    "int": pl.Int64(),
    "float": pl.Float64(),
    "text": pl.String(),
    "bool": pl.Boolean(),
    "date": pl.Date(),
    "datetime": pl.Datetime("us"),
}
_BOOLS = {"true": True, "false": False, "t": True, "f": False, "yes": True, "no": False, "1": True, "0": False}


def cast(frame: pl.LazyFrame, *, columns: Mapping[str, str], on_error: str) -> Result:
    """Columns in their new types. A value that isn't of the type fails, or drops its row, or becomes null."""
    schema = frame.collect_schema()
    missing = [name for name in columns if name not in schema]
    if missing:
        raise DataError(f"there is no column {missing[0]!r}", cure=f"Columns: {', '.join(schema.names())}.")
    if on_error == "null":
        return frame.with_columns(converted(name, schema[name], to) for name, to in columns.items()), []
    if on_error == "fail":
        for name, to in columns.items():
            refuse(frame, name, to)
        return frame.with_columns(converted(name, schema[name], to) for name, to in columns.items()), []
    dropped = []
    for name, to in columns.items():
        bad = pl.col(name).is_not_null() & converted(name, schema[name], to).is_null()
        dropped.append(Dropped(f"{name} is not of type {to}", frame.filter(bad)))
        frame = frame.filter(~bad)
    return frame.with_columns(converted(name, schema[name], to) for name, to in columns.items()), dropped


def refuse(frame: pl.LazyFrame, name: str, to: str) -> None:
    """Raise DataError for the first value of a column that isn't of a type."""
    dtype = frame.collect_schema()[name]
    found = first_bad(frame, name, converted(name, dtype, to))
    if found:
        row, value = found
        raise DataError(
            f"column {name!r}, row {row}: {value!r} is not of type {to}",
            cure="Mend the value, or choose on_error = 'drop' or 'null'.",
        )


def first_bad(frame: pl.LazyFrame, name: str, converted: pl.Expr) -> tuple[int, object] | None:
    """(row counted from 1, value) of the first value that a conversion makes null, or None."""
    bad = frame.select(pl.col(name).alias("value"), converted.alias("converted")).with_row_index("row", offset=1)
    found = bad.filter(pl.col("value").is_not_null() & pl.col("converted").is_null()).head(1).collect()
    return (found["row"].item(), found["value"].item()) if found.height else None


def converted(name: str, dtype: pl.DataType, to: str) -> pl.Expr:
    """A column in another type, null where a value isn't of it."""
    column = pl.col(name)
    if dtype == pl.String and to in ("int", "float"):
        return column.str.strip_chars().cast(TYPES[to], strict=False)
    if dtype == pl.String and to == "bool":
        return column.str.strip_chars().str.to_lowercase().replace_strict(_BOOLS, default=None, return_dtype=pl.Boolean)
    if dtype == pl.String and to == "date":
        return column.str.to_date("%Y-%m-%d", strict=False)
    if dtype == pl.String and to == "datetime":
        return column.str.to_datetime(time_unit="us", strict=False)
    if to == "int" and dtype.is_float():
        # 2.5 is no int: a cast would cut it to 2 without a word
        return pl.when(column == column.round()).then(column).cast(pl.Int64, strict=False)
    if to == "datetime" and dtype == pl.Datetime:
        return column.dt.cast_time_unit("us")
    return column.cast(TYPES[to], strict=False)
