"""Reads a split of a dataset artifact as numpy columns, in the form that a family's encoding takes.

It sits below the stages because training and measuring both read datasets, and never import each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from onejob.core.artifact import Json
from onejob.errors import DamagedError, DataError

Array = np.ndarray[Any, Any]


def read_split(
    folder: Path, meta: Mapping[str, Json], split: str, columns: Sequence[str] | None = None
) -> dict[str, Array]:
    """Columns of a split, by name, each a 1-D array with one entry a row, in the dataset's order.

    Numbers are float64 with NaN for a missing value; categories are object arrays of str or None; the label and other
    columns keep their own types (times: datetime64). `columns` defaults to the label, the categories and the numbers.
    DataError: there is no such split or column. DamagedError: a shard isn't what the metadata says.
    """
    roles = meta["columns"]
    wanted = list(columns) if columns is not None else [roles["label"], *roles["categories"], *roles["numbers"]]
    if split not in meta["splits"]:
        raise DataError(f"the dataset has no split {split!r}", cure=f"It has: {', '.join(meta['splits'])}.")
    unknown = [name for name in wanted if name not in meta["schema"]]
    if unknown:
        raise DataError(f"the dataset has no column {unknown[0]!r}", cure=f"It has: {', '.join(meta['schema'])}.")
    shards = [_read_shard(folder, shard, wanted) for shard in meta["splits"][split]["shards"]]
    if not shards:
        # a split without rows has no file; any shard says what the columns are
        shards = [_read_shard(folder, meta["splits"]["train"]["shards"][0], wanted).clear()]
    frame = pl.concat(shards)
    return {name: _array(frame[name], name, roles) for name in wanted}


def _read_shard(folder: Path, shard: Mapping[str, Json], columns: Sequence[str]) -> pl.DataFrame:
    path = folder / shard["path"]
    try:
        frame = pl.read_ipc(path, columns=list(columns))
    except (OSError, pl.exceptions.PolarsError) as error:
        raise DamagedError(
            f"the shard can't be read: {error}", place=str(path), cure="`onejob verify` says what is damaged."
        ) from error
    if frame.height != shard["rows"]:
        raise DamagedError(
            f"the shard has {frame.height} rows, not {shard['rows']}",
            place=str(path),
            cure="`onejob verify` says what is damaged.",
        )
    return frame


def _array(column: pl.Series, name: str, roles: Mapping[str, Json]) -> Array:
    if name in roles["numbers"]:
        return column.cast(pl.Float64).fill_null(float("nan")).to_numpy(writable=True)
    if name in roles["categories"] or column.dtype == pl.String:
        values = np.empty(len(column), dtype=object)
        values[:] = column.cast(pl.String).to_list()
        return values
    return column.to_numpy()
