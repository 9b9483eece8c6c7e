"""Expectations: what must hold for the rows after the last step; what doesn't is shown with the rows that broke it.

Of a retraining's dataset the same is asked, as far as it can be: what is asked of single rows of the captured ones (the
others were checked when they were read), and shares of each split, since what has just broken is in the newest rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import polars as pl

from onejob.data.options import did_you_mean
from onejob.data.spec import Columns, Expect
from onejob.data.steps.dropped import REASON
from onejob.data.steps.split import HELD_OUT
from onejob.errors import DataError, ExpectationError

EXPECTATION = "onejob_expectation"
"""The column of an offending row that says what it broke."""
SHOWN_ROWS, SHOWN_WIDTH = 5, 24
SPLITS = ((False, "train"), (True, "holdout"))
STRAYS = 0.01
"""A larger share of a split's captured rows that break an expectation is no accident. Fewer are left out: one odd
request must not stop all retrainings to come."""


@dataclass(frozen=True)
class Broken:
    """An expectation that doesn't hold: which, what is there instead, and the rows at fault (where rows can be)."""

    expectation: str
    found: str
    rows: pl.DataFrame | None = None
    columns: tuple[str, ...] = ()
    """The columns that matter, shown first."""


@dataclass(frozen=True)
class _Condition:
    """What is asked of single rows: true where a row breaks it."""

    broken: pl.Expr
    expectation: str
    columns: tuple[str, ...]


def check(frame: pl.DataFrame, expect: Expect, columns: Columns, dropped: int) -> list[Broken]:
    """All expectations that don't hold. `frame` has the column of the split; `dropped` counts rows with a reason."""
    _refuse_unknown(frame, expect)
    return [
        *_counts(frame, expect, dropped),
        *_rows(frame, expect),
        *_shares(frame, expect),
        *_label_share(frame, expect, columns),
    ]


def check_captured(
    captured: pl.DataFrame, expect: Expect, columns: Columns
) -> tuple[pl.DataFrame, list[pl.DataFrame], list[Broken]]:
    """What stays of the captured rows, the strays that don't with the reason, and what is no accident any more."""
    strays: list[pl.DataFrame] = []
    broken: list[Broken] = []
    for each in _conditions(captured, expect, as_text=columns.categories):
        is_bad = each.broken.fill_null(False)
        bad = captured.filter(is_bad)
        told = []
        for held_out, split in SPLITS:
            count, of = (int((frame[HELD_OUT] == held_out).sum()) for frame in (bad, captured))
            if count > STRAYS * of:
                told.append(f"{count} of {of} captured rows in {split} break it")
        if told:
            broken.append(Broken(each.expectation, ", ".join(told), bad, each.columns))
        elif bad.height:
            strays.append(bad.with_columns(pl.lit(f"breaks {each.expectation}").alias(REASON)))
            captured = captured.filter(~is_bad)
    return captured, strays, broken


def check_extended(frame: pl.DataFrame, expect: Expect, columns: Columns) -> list[Broken]:
    """What is asked of all rows of a retraining's dataset together, and doesn't hold."""
    shares = [
        broken
        for held_out, split in SPLITS
        for broken in _shares(frame.filter(pl.col(HELD_OUT) == held_out), expect, f" in {split}")
    ]
    return [*_counts(frame, expect, dropped=0), *shares, *_label_share(frame, expect, columns)]


def offending(broken: Sequence[Broken]) -> pl.DataFrame | None:
    """The rows at fault, each with the expectation that it broke; None where no rows are."""
    frames = [
        each.rows.drop(HELD_OUT).with_columns(pl.lit(each.expectation).alias(EXPECTATION))
        for each in broken
        if each.rows is not None
    ]
    return pl.concat(frames, how="vertical_relaxed") if frames else None


def error(broken: Sequence[Broken], marks: Sequence[str], where: str, cure: str = "") -> ExpectationError:
    """The error that shows, for each broken expectation, what was found and the first rows at fault.

    `marks` are the columns by which a person knows a row.
    """
    parts = []
    for each in broken:
        parts.append(f"{each.expectation}: {each.found}")
        if each.rows is not None:
            shown = dict.fromkeys([*each.columns, *marks])
            others = [name for name in each.rows.columns if name not in shown and name != HELD_OUT]
            parts.append(_table(each.rows.select([*shown, *others][: max(6, len(each.columns))])))
    some = "1 expectation doesn't hold" if len(broken) == 1 else f"{len(broken)} expectations don't hold"
    kept = f"All the rows at fault: {where}" if any(each.rows is not None for each in broken) else ""
    return ExpectationError("\n".join([some, *parts]), place="[data] expect", cure=" ".join(filter(None, (cure, kept))))


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
    for each in _conditions(frame, expect):
        rows = frame.filter(each.broken.fill_null(False))
        if rows.height:
            yield Broken(each.expectation, f"{rows.height} of {frame.height} rows break it", rows, each.columns)


def _conditions(frame: pl.DataFrame, expect: Expect, as_text: Sequence[str] = ()) -> Iterator[_Condition]:
    """`as_text`: columns that are text by now, whatever they were when the expectations were first checked."""
    for unique in expect.unique:
        key = [unique] if isinstance(unique, str) else list(unique)
        yield _Condition(pl.struct(key).is_duplicated(), f"unique = {unique}", tuple(key))
    for name in expect.not_null:
        yield _Condition(pl.col(name).is_null(), f"not_null = {name}", (name,))
    for name, (low, high) in expect.between.items():
        was_number = name in as_text
        _refuse_type(frame, name, "between", frame[name].dtype.is_numeric() or was_number, "a number")
        value = pl.col(name).cast(pl.Float64, strict=False) if was_number else pl.col(name)
        # NaN compares as larger than any number, so it is outside, as is text that is no number
        outside = pl.col(name).is_not_null() & ~value.is_between(low, high).fill_null(False)
        yield _Condition(outside, f"between.{name} = [{low:g}, {high:g}]", (name,))
    for name, values in expect.values.items():
        try:
            allowed = pl.Series(values).cast(frame[name].dtype)
        except (pl.exceptions.PolarsError, TypeError) as mismatch:
            raise DataError(
                f"{values} are no values of a column of type {frame[name].dtype}", place=f"[data] expect.values.{name}"
            ) from mismatch
        yield _Condition(~pl.col(name).is_in(allowed.implode()), f"values.{name} = {values}", (name,))
    for name, pattern in expect.matches.items():
        _refuse_type(frame, name, "matches", frame[name].dtype == pl.String, "text")
        unlike = ~pl.col(name).str.contains(f"^(?:{pattern})$")
        yield _Condition(unlike, f"matches.{name} = {pattern!r}", (name,))


def _shares(frame: pl.DataFrame, expect: Expect, within: str = "") -> Iterator[Broken]:
    for name, most in expect.null_share.items():
        nulls = frame[name].null_count()
        if nulls > most * frame.height:
            yield Broken(
                f"null_share.{name} = {most}",
                f"{nulls} of {frame.height} values{within} are missing ({nulls / frame.height:.4f})",
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
    for held_out, split in SPLITS:
        part = frame.filter(pl.col(HELD_OUT) == held_out)[columns.label]
        share = float((part.cast(pl.Float64) == 1.0).sum()) / len(part) if len(part) else None
        if share is not None and not low <= share <= high:
            yield Broken(f"label_share = [{low:g}, {high:g}]", f"it is {share:.4f} in {split}")


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
