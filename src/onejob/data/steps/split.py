"""`split`: say for each row whether it is held out; the last step."""

from __future__ import annotations

import math

import polars as pl

from onejob.data.steps import chance
from onejob.data.steps.dropped import Result, part
from onejob.errors import DataError

HELD_OUT = "onejob_holdout"
"""The column that `split` adds: whether the row is held out."""


def split(
    frame: pl.LazyFrame,
    *,
    by: str,
    test: float | None,
    at: str | int | float | None,
    group: str | None,
    time: str | None,
    seed: int,
) -> Result:
    """By time: rows are put in order of the time column, and the last are held out; at random: the order stays."""
    if by == "time":
        assert time is not None, "the spec asks for columns.time"
        dated, undated = part(frame, pl.col(time).is_not_null(), f"{time} is missing")
        ordered = dated.sort(time, maintain_order=True)
        held_out = pl.col(time) >= (_last(time, test) if test is not None else _moment(frame, time, at))
        return ordered.with_columns(held_out.alias(HELD_OUT)), undated
    drawn = chance.of_values(group, seed) if group else chance.of_rows(seed)
    return frame.with_columns((drawn < test).alias(HELD_OUT)), []


def _last(time: str, share: float) -> pl.Expr:
    """The moment from which about a share of the rows lie; rows of one moment stay together, so nothing leaks."""
    first = (pl.len() * (1 - share)).ceil().cast(pl.Int64).clip(upper_bound=(pl.len() - 1).cast(pl.Int64))
    return pl.col(time).sort().get(first, null_on_oob=True)


def _moment(frame: pl.LazyFrame, time: str, at: str | int | float | None) -> pl.Expr:
    """`at` in the type and the time zone of the time column; DataError where it doesn't fit."""
    schema = frame.collect_schema()
    if time not in schema:
        raise DataError(f"there is no column {time!r}", cure=f"Columns: {', '.join(schema.names())}.")
    dtype = schema[time]
    if dtype.is_numeric():
        if isinstance(at, int | float) and math.isfinite(at):
            return pl.lit(at)
        raise DataError(f"at = {at!r} is no number, but column {time!r} is of type {dtype}")
    try:
        if isinstance(dtype, pl.Date):
            return pl.lit(pl.Series([str(at)]).str.to_date("%Y-%m-%d").item())
        if isinstance(dtype, pl.Datetime):
            text = str(at) if len(str(at)) > len("2013-02-22") else f"{at} 00:00:00"
            naive = pl.Series([text.replace("T", " ")]).str.to_datetime("%Y-%m-%d %H:%M:%S", time_unit="us")
            return pl.lit(naive).first().dt.replace_time_zone(dtype.time_zone)
    except pl.exceptions.PolarsError:
        raise DataError(f"at = {at!r} is no time of the form '2013-02-22' or '2013-02-22T18:00:00'") from None
    raise DataError(f"column {time!r} is of type {dtype}, which has no order in time", cure="Cast it to a datetime.")
