"""Which blocks' labels have been waited for: only those are evidence.

A block's first labels are not a sample of all: what went wrong is often known later, or sooner, than what went well. So
a block counts once every row of it has had its horizon, or once so many rows have a label as usually have one in the
end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onejob.core.artifact import Json
from onejob.monitor.blocks import Grouping
from onejob.monitor.engines.reading import Labelled, blocks_of

Array = np.ndarray[Any, Any]

ENOUGH = 7
"""Blocks past the horizon that say what coverage is usual; with fewer of them, nearly all rows must have a label."""
NEARLY_ALL = 0.98
FALL = 0.02
"""A coverage that lies below the usual by no more is usual."""
MOST = 0.99
"""Labels that are as late as this share of them, or less: then they are due."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of labelled rows; each array has one entry a block, the oldest first."""

    grouping: Grouping
    begins: Array
    ends: Array
    """Event time of the last row."""
    rows: Array
    labelled: Array
    over: Array
    """Whether it has ended: no newer row can belong to it."""
    settled: Array
    due: Array
    """Whether nearly all labels that ever come should be there by now."""

    @property
    def coverage(self) -> Array:
        return np.asarray(self.labelled / self.rows)


def blocks(rows: Labelled, options: Mapping[str, Json]) -> Blocks:
    """Put rows into blocks, and tell which of them count."""
    now, horizon = float(rows.meta["now"]), float(options["horizon"])
    grouping = blocks_of(rows.time, options)
    count = len(grouping.ids)
    total = np.bincount(grouping.index, minlength=count)
    known = np.bincount(grouping.index[rows.known], minlength=count)
    ends = np.full(count, -np.inf)
    np.maximum.at(ends, grouping.index, rows.time)
    running = blocks_of(np.array([now]), options).ids[0]
    over = np.array([name < running for name in grouping.ids], bool)
    past = over & (ends + horizon <= now)
    coverage = known / np.maximum(total, 1)
    usual = float(coverage[past].mean()) - FALL if int(past.sum()) >= ENOUGH else NEARLY_ALL
    delays = (rows.label_time - rows.time)[rows.known]
    delay = float(np.quantile(delays, MOST)) if delays.size else horizon
    return Blocks(
        grouping=grouping,
        begins=grouping.first,
        ends=ends,
        rows=total,
        labelled=known,
        over=over,
        settled=past | (over & (coverage >= usual)),
        due=past | (over & (ends + min(delay, horizon) <= now)),
    )
