"""Expectations: what must hold for the rows after the last step; what doesn't is shown with the rows that broke it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import polars as pl

from onejob.data.options import did_you_mean
from onejob.data.spec import Columns, Expect
from onejob.data.steps.split import HELD_OUT
from onejob.errors import DataError, ExpectationError

EXPECTATION = "onejob_expectation"
"""The column of an offending row that says what it broke."""
SHOWN_ROWS, SHOWN_WIDTH = 5, 24


@dataclass(frozen=True)
class Broken:
    """An expectation that doesn't hold: which, what is there instead, and the rows at fault (where rows can be)."""

    expectation: str
    found: str
    rows: pl.DataFrame | None = None
    columns: tuple[str, ...] = ()
    """The columns that matter, shown first."""


def check(frame: pl.DataFrame, expect: Expect, columns: Columns, dropped: int) -> list[Broken]:
    """All expectations that don't hold. `frame` has the column of the split; `dropped` counts rows with a reason."""
    _refuse_unknown(frame, expect)
    return [
        *_counts(frame, expect, dropped),
        *_rows(frame, expect),
        *_shares(frame, expect),
        *_label_share(frame, expect, columns),
    ]


def offending(broken: Sequence[Broken]) -> pl.DataFrame | None:
    """The rows at fault, each with the expectation that it broke; None where no rows are."""
    frames = [
        each.rows.drop(HELD_OUT).with_columns(pl.lit(each.expectation).alias(EXPECTATION))
        for each in broken
        if each.rows is not None
    ]
    return pl.concat(frames) if frames else None


def error(broken: Sequence[Broken], columns: Columns, where: str) -> ExpectationError:
    """The error that shows, for each broken expectation, what was found and the first rows at fault."""
    parts = []
    for each in broken:
        parts.append(f"{each.expectation}: {each.found}")
        if each.rows is not None:
            shown = dict.fromkeys([*each.columns, *(name for name in (columns.id, columns.time) if name)])
            others = [name for name in each.rows.columns if name not in shown and name != HELD_OUT]
            parts.append(_table(each.rows.select([*shown, *others][: max(6, len(each.columns))])))
    some = "1 expectation doesn't hold" if len(broken) == 1 else f"{len(broken)} expectations don't hold"
    cure = f"All the rows at fault: {where}" if any(each.rows is not None for each in broken) else ""
    return ExpectationError("\n".join([some, *parts]), place="[data] expect", cure=cure)


# ---- the checks --------------------------------------------------------------------------------------------------


def _counts(frame: pl.DataFrame, expect: Expect, dropped: int) -> Iterator[Broken]:
    rows, held_out = frame.height, int(frame[HELD_OUT].sum())
    if expect.rows_min is not None and rows < expect.rows_min:
        yield Broken(f"rows_min = {expect.rows_min}", f"there are {rows} rows")
    if expect.rows_max is not None and rows > expect.rows_max:
        yield Broken(f"rows_max = {expect.rows_max}", f"there are {rows} rows")
    if expect.holdout_min is not None and held_out < expect.holdout_min:
        yield Broken(f"holdout_min = {expect.holdout_min}", f"{held_out} rows are held out")
    if expect.dropped_share is not None and dropped > expect.dropped_share * (rows + dropped):
        yield Broken(
            f"dropped_share = {expect.dropped_share}",
            f"{dropped} of {rows + dropped} rows were dropped ({dropped / (rows + dropped):.4f})",
        )


def _rows(frame: pl.DataFrame, expect: Expect) -> Iterator[Broken]:
    for unique in expect.unique:
        key = [unique] if isinstance(unique, str) else list(unique)
        yield from _where(frame, pl.struct(key).is_duplicated(), f"unique = {unique}", tuple(key))
    for name in expect.not_null:
        yield from _where(frame, pl.col(name).is_null(), f"not_null = {name}", (name,))
    for name, (low, high) in expect.between.items():
        _refuse_type(frame, name, "between", frame[name].dtype.is_numeric(), "a number")
        # NaN compares as larger than any number, so it is outside
        outside = ~pl.col(name).is_between(low, high)
        yield from _where(frame, outside, f"between.{name} = [{low:g}, {high:g}]", (name,))
    for name, values in expect.values.items():
        try:
            allowed = pl.Series(values).cast(frame[name].dtype)
        except (pl.exceptions.PolarsError, TypeError) as mismatch:
            raise DataError(
                f"{values} are no values of a column of type {frame[name].dtype}", place=f"[data] expect.values.{name}"
            ) from mismatch
        yield from _where(frame, ~pl.col(name).is_in(allowed.implode()), f"values.{name} = {values}", (name,))
    for name, pattern in expect.matches.items():
        _refuse_type(frame, name, "matches", frame[name].dtype == pl.String, "text")
        unlike = ~pl.col(name).str.contains(f"^(?:{pattern})$")
        yield from _where(frame, unlike, f"matches.{name} = {pattern!r}", (name,))


def _shares(frame: pl.DataFrame, expect: Expect) -> Iterator[Broken]:
    for name, most in expect.null_share.items():
        nulls = frame[name].null_count()
        if nulls > most * frame.height:
            yield Broken(
                f"null_share.{name} = {most}",
                f"{nulls} of {frame.height} values are missing ({nulls / frame.height:.4f})",
                frame.filter(pl.col(name).is_null()),
                (name,),
            )


def _label_share(frame: pl.DataFrame, expect: Expect, columns: Columns) -> Iterator[Broken]:
    if expect.label_share is None:
        return
    label = frame[columns.label]
    fits = label.dtype == pl.Boolean or label.dtype.is_numeric()
    _refuse_type(frame, columns.label, "label_share", fits, "a truth value or 0 and 1")
    low, high = expect.label_share
    for held_out, split in ((False, "train"), (True, "holdout")):
        part = frame.filter(pl.col(HELD_OUT) == held_out)[columns.label]
        share = float((part.cast(pl.Float64) == 1.0).sum()) / len(part) if len(part) else None
        if share is not None and not low <= share <= high:
            yield Broken(f"label_share = [{low:g}, {high:g}]", f"it is {share:.4f} in {split}")


def _where(frame: pl.DataFrame, broken: pl.Expr, expectation: str, columns: tuple[str, ...]) -> Iterator[Broken]:
    rows = frame.filter(broken.fill_null(False))
    if rows.height:
        yield Broken(expectation, f"{rows.height} of {frame.height} rows break it", rows, columns)


def _refuse_unknown(frame: pl.DataFrame, expect: Expect) -> None:
    named = [
        *(name for each in expect.unique for name in ([each] if isinstance(each, str) else each)),
        *expect.not_null,
        *expect.null_share,
        *expect.between,
        *expect.values,
        *expect.matches,
    ]
    known = [name for name in frame.columns if name != HELD_OUT]
    for name in named:
        if name not in known:
            raise DataError(
                f"there is no column {name!r} after the last step.{did_you_mean(name, known)}",
                place="[data] expect",
                cure=f"Columns: {', '.join(known)}.",
            )


def _refuse_type(frame: pl.DataFrame, name: str, key: str, fits: bool, wanted: str) -> None:
    if not fits:
        raise DataError(f"column {name!r} is of type {frame[name].dtype}, not {wanted}", place=f"[data] expect.{key}")


def _table(rows: pl.DataFrame) -> str:
    """The first rows as a small table of text."""
    first = rows.head(SHOWN_ROWS)
    cells = [first.columns, *([_cell(value) for value in row] for row in first.select(pl.all().cast(pl.String)).rows())]
    widths = [max(len(row[index]) for row in cells) for index in range(len(first.columns))]
    lines = ["  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in cells]
    more = [f"  … and {rows.height - SHOWN_ROWS} more"] if rows.height > SHOWN_ROWS else []
    return "\n".join([*(line.rstrip() for line in lines), *more])


def _cell(value: str | None) -> str:
    text = "null" if value is None else value
    return text if len(text) <= SHOWN_WIDTH else text[: SHOWN_WIDTH - 1] + "…"
