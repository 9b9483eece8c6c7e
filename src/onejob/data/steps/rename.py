"""`rename`: give columns new names."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl


def rename(frame: pl.LazyFrame, *, columns: Mapping[str, str]) -> pl.LazyFrame:
    """The same columns in the same order, some under new names. A column that isn't there is an error."""
    return frame.rename(dict(columns), strict=True)
