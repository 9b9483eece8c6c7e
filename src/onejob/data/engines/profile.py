"""A profile of every column, per split: what monitoring compares traffic with, and what a person looks at first.

Sums are exact (`math.fsum`), so the profile's bytes don't depend on threads or on a machine's vector width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from onejob.core.artifact import Json
from onejob.data.engines.shards import SHARD_ROWS

BINS = 20
TOP = 20
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
Floats = np.ndarray[Any, np.dtype[np.float64]]


def profile(splits: Mapping[str, pl.DataFrame]) -> dict[str, Json]:
    """{split: {column: figures}}; histograms of all splits have the edges of the first, to be compared."""
    edges = {name: _edges(values) for name, values in _numbers(next(iter(splits.values()))).items()}
    return {split: _columns(frame, edges) for split, frame in splits.items()}


def _columns(frame: pl.DataFrame, edges: Mapping[str, Floats]) -> dict[str, Json]:
    numbers = _numbers(frame)
    figures: dict[str, Json] = {}
    for column in frame.get_columns():
        present = column.drop_nulls()
        entry: dict[str, Json] = {
            "type": str(column.dtype),
            "count": len(present),
            "nulls": column.null_count(),
            "distinct": present.n_unique(),
        }
        if column.name in numbers:
            entry |= _figures(numbers[column.name], edges.get(column.name, np.empty(0)))
        elif column.dtype.is_temporal() and len(present):
            # as text in the column's own time zone; Python's own dates would need a time zone database
            entry |= {"min": present.sort().head(1).cast(pl.String).item()}
            entry |= {"max": present.sort().tail(1).cast(pl.String).item()}
        if column.dtype == pl.String or column.dtype == pl.Boolean or column.dtype.is_integer():
            entry["top"] = _top(present)
        figures[column.name] = entry
    return figures


def _numbers(frame: pl.DataFrame) -> dict[str, Floats]:
    """The values of the numeric columns, without the missing ones."""
    return {
        column.name: column.drop_nulls().cast(pl.Float64).to_numpy()
        for column in frame.get_columns()
        if column.dtype.is_numeric() or column.dtype == pl.Boolean
    }


def _figures(values: Floats, edges: Floats) -> dict[str, Json]:
    finite = values[np.isfinite(values)]
    entry: dict[str, Json] = {"not_finite": len(values) - len(finite)}
    if not len(finite):
        return entry
    mean = _sum(finite) / len(finite)
    entry |= {
        "min": float(finite.min()),
        "max": float(finite.max()),
        "mean": mean,
        "std": math.sqrt(_sum((finite - mean) ** 2) / len(finite)),
        "quantiles": {str(q): float(value) for q, value in zip(QUANTILES, np.quantile(finite, QUANTILES), strict=True)},
    }
    if len(edges):
        counts, _ = np.histogram(finite, bins=edges)
        entry["histogram"] = {
            "edges": edges.tolist(),
            "counts": counts.tolist(),
            "below": int((finite < edges[0]).sum()),
            "above": int((finite > edges[-1]).sum()),
        }
    return entry


def _edges(values: Floats) -> Floats:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return np.empty(0)
    low, high = float(finite.min()), float(finite.max())
    return np.linspace(low, high if high > low else low + 1.0, BINS + 1)


def _sum(values: Floats) -> float:
    """The sum, rounded once for each piece: the same wherever it is computed."""
    pieces = (values[start : start + SHARD_ROWS] for start in range(0, len(values), SHARD_ROWS))
    return math.fsum(math.fsum(piece.tolist()) for piece in pieces)


def _top(present: pl.Series) -> list[list[Json]]:
    """The most frequent values, [value, rows]; equally frequent ones in their own order."""
    counted = present.to_frame("value").group_by("value").len("rows")
    first = counted.sort(["rows", "value"], descending=[True, False]).head(TOP)
    return [[value, rows] for value, rows in first.iter_rows()]
