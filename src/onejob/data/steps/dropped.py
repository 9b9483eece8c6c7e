"""Rows that a step drops, with the reason: what a step gives back beside the rows that it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

REASON = "onejob_reason"
"""The column of a dropped row that says why."""
ROW = "onejob_row"
"""A helper column that numbers the rows inside a step; never left in a result."""


@dataclass(frozen=True)
class Dropped:
    """Rows that a step dropped for one reason; None means: the rest of its rows, which is counted but not kept."""

    reason: str
    rows: pl.LazyFrame | None


Result = tuple[pl.LazyFrame, Sequence[Dropped]]
"""What stays, and what was dropped."""


def part(frame: pl.LazyFrame, stays: pl.Expr, reason: str, *, keep: bool = True) -> Result:
    """The rows for which an expression is true, and the others (false or null) with the reason."""
    true = stays.fill_null(False)
    return frame.filter(true), [Dropped(reason, frame.filter(~true) if keep else None)]
