"""`with_columns`: add or replace columns by SQL expressions."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl


def with_columns(frame: pl.LazyFrame, *, columns: Mapping[str, str]) -> pl.LazyFrame:
    """Every expression sees the columns as they were before the step."""
    return frame.with_columns(pl.sql_expr(text).alias(name) for name, text in columns.items())
