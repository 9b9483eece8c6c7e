"""Rows become Arrow files whose bytes depend on the rows alone: not on threads, machine, or how they were computed.

Two frames with equal rows can differ in memory: how strings are laid out, what stands where a value is missing, whether
a column without nulls carries a bitmap of them. So each column of a shard is laid out anew before it is written.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from onejob.core.artifact import Json
from onejob.core.faults import reach

SHARD_ROWS = 65_536


def write_split(frame: pl.DataFrame, folder: Path, name: str) -> dict[str, Json]:
    """`<name>/00000.arrow` and so on; gives the split's entry of the dataset's metadata."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    shards = []
    for number, start in enumerate(range(0, frame.height, SHARD_ROWS)):
        path = f"{name}/{number:05d}.arrow"
        shard = frame.slice(start, SHARD_ROWS)
        write_arrow(shard, folder / path)
        shards.append({"path": path, "rows": shard.height})
        reach("data.shard_written")
    return {"rows": frame.height, "shards": shards}


def write_arrow(frame: pl.DataFrame, path: Path) -> None:
    """One Arrow IPC file, uncompressed, one record batch, in the layout that every Arrow reader knows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = pl.DataFrame([_laid_out(column) for column in frame.get_columns()])
    # one batch a file; strings as one run of bytes with offsets (the newer views depend on how they were computed)
    written = plain.write_ipc(
        None, compression="uncompressed", compat_level=pl.CompatLevel.oldest(), record_batch_size=max(1, plain.height)
    )
    path.write_bytes(written.getbuffer())


def _laid_out(column: pl.Series) -> pl.Series:
    """The same values in fresh memory: zero where one is missing, and a bitmap of nulls only where there are any."""
    if isinstance(column.dtype, pl.Categorical | pl.Enum):
        # codes of categories depend on the order in which values were met
        column = column.cast(pl.String)
    if column.dtype.is_nested() or column.dtype in (pl.Null, pl.Object):
        return column.rechunk()
    if column.dtype == pl.String or column.dtype == pl.Binary:
        # a cast would share the memory; building from values doesn't
        return pl.Series(column.name, column.to_list(), dtype=column.dtype)
    physical = column.to_physical()
    zero = False if physical.dtype == pl.Boolean else 0
    values = pl.Series(column.name, physical.fill_null(zero).to_numpy(), dtype=physical.dtype)
    if column.null_count():
        present = pl.Series("present", column.is_not_null().to_numpy())
        values = pl.select(pl.when(present).then(values).otherwise(None).alias(column.name)).to_series()
    return values.cast(column.dtype)
