"""`select`: keep some columns."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl


def select(frame: pl.LazyFrame, *, columns: Sequence[str], without: Sequence[str]) -> pl.LazyFrame:
    """The columns named, in that order; or all but those in `without`. A column that isn't there is an error."""
    return frame.select(list(columns)) if columns else frame.drop(list(without), strict=True)
