"""`join`: add columns of another table, so that a row never silently becomes two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from onejob.data.steps.dropped import Dropped, Result
from onejob.errors import DataError


def join(
    frame: pl.LazyFrame,
    *,
    tables: Mapping[str, pl.LazyFrame],
    table: str,
    on: Sequence[str],
    left_on: Sequence[str],
    right_on: Sequence[str],
    how: str,
    columns: Sequence[str],
    prefix: str,
    duplicates: str,
) -> Result:
    """Left: every row stays, once. Inner: rows without a partner are dropped. Null keys have no partner."""
    other = tables[table]
    here, there = list(on or left_on), list(on or right_on)
    _refuse_unknown(table, other, [*there, *columns])
    wanted = list(columns) or [name for name in other.collect_schema().names() if name not in there]
    if duplicates == "fail":
        _refuse_duplicates(table, other, there)
    else:
        other = other.unique(there, keep="first", maintain_order=True)
    # the keys get names of their own, so that no column of the table can clash with them
    keys = {key: f"onejob_key_{index}" for index, key in enumerate(there)}
    right = other.select(
        *(pl.col(key).alias(name) for key, name in keys.items()),
        *(pl.col(name).alias(prefix + name) for name in wanted),
    )
    clash = sorted(set(frame.collect_schema().names()) & {prefix + name for name in wanted})
    if clash:
        raise DataError(
            f"both tables have a column {clash[0]!r}", cure=f"Name the columns to take, or give prefix = '{table}_'."
        )
    names = list(keys.values())
    joined = frame.join(right, left_on=here, right_on=names, how="left", maintain_order="left")
    if how == "left":
        return joined, []
    joined = frame.join(right, left_on=here, right_on=names, how="inner", maintain_order="left")
    alone = frame.join(right, left_on=here, right_on=names, how="anti", maintain_order="left")
    return joined, [Dropped(f"no partner in {table}", alone)]


def _refuse_unknown(table: str, other: pl.LazyFrame, wanted: Sequence[str]) -> None:
    known = other.collect_schema().names()
    missing = [name for name in wanted if name not in known]
    if missing:
        raise DataError(f"table {table!r} has no column {missing[0]!r}", cure=f"It has: {', '.join(known)}.")


def _refuse_duplicates(table: str, other: pl.LazyFrame, keys: list[str]) -> None:
    # null keys never match, so two of them do no harm
    keyed = other.select(keys).drop_nulls()
    twice = keyed.group_by(keys, maintain_order=True).len("rows").filter(pl.col("rows") > 1).collect()
    if twice.height:
        first = ", ".join(f"{key} = {twice[key][0]!r}" for key in keys)
        raise DataError(
            f"table {table!r} has {twice.height} keys more than once; the first: {first} ({twice['rows'][0]} rows)",
            cure="Join on more columns, or choose duplicates = 'first'.",
        )
