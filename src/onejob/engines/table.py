"""Reads a table of a file that only a data engine reads, as plain records."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from onejob.errors import SourceError


def parquet_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 1, record) of each row; times are ISO text, with their zone if they have one."""
    try:
        frame = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise SourceError(f"it can't be read as Parquet: {error}", place=str(path)) from error
    for number, record in enumerate(frame.iter_rows(named=True), 1):
        yield number, {name: _plain(value) for name, value in record.items()}


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime.date) else value
