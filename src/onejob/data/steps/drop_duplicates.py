"""`drop_duplicates`: drop rows that repeat another."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from onejob.data.steps.dropped import ROW, Dropped, Result


def drop_duplicates(frame: pl.LazyFrame, *, columns: Sequence[str], keep: str) -> Result:
    """Of rows with equal values in `columns` (none named: in all), the first or the last stays; the order stays too."""
    subset = list(columns) or frame.collect_schema().names()
    numbered = frame.with_row_index(ROW)
    kept = numbered.unique(subset, keep="last" if keep == "last" else "first", maintain_order=True).sort(ROW)
    dropped = numbered.join(kept.select(ROW), on=ROW, how="anti", maintain_order="left")
    reason = f"duplicate of another row in {', '.join(columns)}" if columns else "duplicate of another row"
    return kept.drop(ROW), [Dropped(reason, dropped.drop(ROW))]
