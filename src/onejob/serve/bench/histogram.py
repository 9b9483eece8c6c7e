"""Latencies as counts in log-linear buckets, as HdrHistogram has them: cheap to record, exact to a thousandth, and two
of them added are the histogram of both.

Values are whole nanoseconds. Below 2,048 each has a bucket of its own; above, each octave has 1,024, so a bucket is
never wider than a 1,024th of its value. A quantile is the upper end of its bucket: never too low. The largest value is
kept exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from onejob.core.artifact import Json

BITS = 10
PER_OCTAVE = 1 << BITS
TOP_BITS = 43
"""Values from 2**43 ns (2.4 hours) on are counted in the last bucket."""
SIZE = (TOP_BITS - BITS + 1) << BITS
COARSE = 5
"""Buckets of a coarse histogram are 2**5 as wide: 3 % of their value."""

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Histogram:
    """Counts of latencies; only ever counts up."""

    __slots__ = ("counts", "highest", "sum")

    def __init__(self) -> None:
        self.counts: Ints = np.zeros(SIZE, np.int64)
        self.sum = 0
        """Of all values, in nanoseconds."""
        self.highest = 0

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def record(self, values: ArrayLike) -> None:
        """Count each of these latencies; one below zero (clocks!) counts as zero."""
        array = np.maximum(np.asarray(values, np.int64).reshape(-1), 0)
        if array.size:
            self.sum += int(array.sum())
            self.highest = max(self.highest, int(array.max()))
            self.counts += np.bincount(index_of(array), minlength=SIZE)

    def add(self, other: Histogram) -> None:
        """Count what another has counted, too."""
        self.counts += other.counts
        self.sum += other.sum
        self.highest = max(self.highest, other.highest)

    def quantile(self, share: float) -> int | None:
        """The smallest bucket's end below or at which this share of the values lies; None without values."""
        cumulated = np.cumsum(self.counts)
        total = int(cumulated[-1])
        if not total:
            return None
        rank = min(max(math.ceil(share * total * (1 - 1e-12)), 1), total)  # 0.55 * 100 is 55.00000000000001
        return min(upper_of(int(np.searchsorted(cumulated, rank))), self.highest)

    @property
    def mean(self) -> float | None:
        total = self.total
        return self.sum / total if total else None

    def corrected(self, interval: int) -> Histogram:
        """With the requests that were never sent, because their connection waited for an answer longer than `interval`.

        A latency v stands for a stall: a client that asks every `interval` would have measured v - interval,
        v - 2 interval … as well, down to the interval (HdrHistogram's correction for coordinated omission).
        """
        made = Histogram()
        made.add(self)
        if interval <= 0:
            return made
        for index in np.flatnonzero(self.counts):
            value = min(upper_of(int(index)), self.highest)
            missing = np.arange(value - interval, interval - 1, -interval, dtype=np.int64)
            if missing.size:
                times = int(self.counts[index])
                made.counts += np.bincount(index_of(missing), minlength=SIZE) * times
                made.sum += int(missing.sum()) * times
        return made

    def since(self, earlier: Ints) -> Histogram:
        """What was counted after `earlier`, a copy of the counts, in coarse buckets: little to send, enough to draw."""
        made = Histogram()
        grown = (self.counts - earlier).reshape(-1, 1 << COARSE).sum(axis=1)
        made.counts[(1 << COARSE) - 1 :: 1 << COARSE] = grown
        made.highest = self.highest
        return made

    def to_json(self) -> dict[str, Json]:
        """The buckets that hold something, by their numbers."""
        filled = np.flatnonzero(self.counts)
        return {
            "index": filled.tolist(),
            "count": self.counts[filled].tolist(),
            "sum": self.sum,
            "highest": self.highest,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Histogram:
        made = cls()
        made.counts[np.asarray(data["index"], np.int64)] = data["count"]
        made.sum, made.highest = int(data["sum"]), int(data["highest"])
        return made


def index_of(values: Ints) -> Ints:
    """The bucket of each value."""
    values = np.minimum(values, (1 << TOP_BITS) - 1)
    _, bits = np.frexp(values.astype(np.float64))  # exact below 2**53: the number of bits that a value needs
    octave = np.maximum(bits.astype(np.int64) - BITS - 1, 0)
    return (octave << BITS) + (values >> octave)


def upper_of(index: int) -> int:
    """The largest value that a bucket holds."""
    octave = max((index >> BITS) - 1, 0)
    return ((index - (octave << BITS) + 1) << octave) - 1
