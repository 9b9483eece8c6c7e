"""`sort`: order the rows."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl


def sort(frame: pl.LazyFrame, *, by: Sequence[str], descending: bool) -> pl.LazyFrame:
    """Rows in order; equal rows keep theirs; missing values come last."""
    return frame.sort(list(by), descending=descending, nulls_last=True, maintain_order=True)
