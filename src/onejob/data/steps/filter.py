"""`filter`: keep the rows for which a SQL expression is true."""

from __future__ import annotations

import polars as pl

from onejob.data.steps.dropped import Result, part


def filter_rows(frame: pl.LazyFrame, *, where: str, reason: str, keep: bool) -> Result:
    """Rows for which `where` is true stay; those for which it is false or null are dropped."""
    return part(frame, pl.sql_expr(where), reason or f"not ({where})", keep=keep)
