"""`drop_nulls`: drop rows with missing values."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from onejob.data.steps.dropped import Dropped, Result


def drop_nulls(frame: pl.LazyFrame, *, columns: Sequence[str]) -> Result:
    """Rows with a value in all of `columns` (none named: in all) stay; the reason names the first column without."""
    rest, dropped = frame, []
    for column in list(columns) or frame.collect_schema().names():
        dropped.append(Dropped(f"{column} is missing", rest.filter(pl.col(column).is_null())))
        rest = rest.filter(pl.col(column).is_not_null())
    return rest, dropped
