"""Which rows make which batch: a full shuffle of every epoch that needs no memory and can be resumed at any row.

A Feistel network over the row numbers gives a permutation of each epoch from (seed, epoch) alone: the row at a place is
computed, not looked up. Rank r of W takes its slice of each global batch, so the batches don't depend on how many ranks
there are. What a resumed training must know of the data is four values: `State`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from onejob.core.artifact import Json

Rows = NDArray[np.int64]

ROUNDS = 6
WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class State:
    """How far the data has been read."""

    dataset: str
    """The dataset's digest."""
    seed: int
    epoch: int
    samples_seen: int
    """Rows of this epoch that are done; always less than the rows of an epoch."""

    def to_json(self) -> dict[str, Json]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> State:
        return cls(**data)


def take(state: State, rows: int, batch: int) -> tuple[Rows, State]:
    """The next global batch (the last of an epoch may be smaller), and the state after it."""
    assert 0 <= state.samples_seen < rows
    end = min(state.samples_seen + batch, rows)
    taken = permute(np.arange(state.samples_seen, end, dtype=np.int64), rows, state.seed, state.epoch)
    if end == rows:
        return taken, replace(state, epoch=state.epoch + 1, samples_seen=0)
    return taken, replace(state, samples_seen=end)


def share(batch: Rows, rank: int, world: int) -> Rows:
    """A rank's slice of a global batch: the slices in rank order are the batch; one may be empty."""
    return batch[rank * len(batch) // world : (rank + 1) * len(batch) // world]


def steps_per_epoch(rows: int, batch: int) -> int:
    return -(-rows // batch)


def permute(places: Rows, rows: int, seed: int, epoch: int) -> Rows:
    """The rows at these places of an epoch's order; a bijection of [0, rows).

    A balanced Feistel network permutes [0, 4^k), the smallest such range that holds all rows; a number that falls
    outside the rows is sent through again until it falls inside (cycle walking), which keeps it a bijection.
    """
    half = max(1, (max(1, rows - 1).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    found = _network(places.astype(np.uint64), half, keys)
    while (outside := found >= rows).any():
        found[outside] = _network(found[outside], half, keys)
    return found.astype(np.int64)


def _network(values: NDArray[np.uint64], half: int, keys: list[int]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ np.uint64(key)) & mask)
    return cast(NDArray[np.uint64], (left << bits) | right)


def _keys(seed: int, epoch: int) -> list[int]:
    """One key a round, from (seed, epoch)."""
    start = int(_mix(_mix(np.array([seed & WORD], np.uint64)) + np.uint64(epoch & WORD))[0])
    steps = np.array([(start + (n + 1) * 0x9E3779B97F4A7C15) & WORD for n in range(ROUNDS)], np.uint64)
    return cast(list[int], _mix(steps).tolist())


def _mix(values: NDArray[np.uint64]) -> NDArray[Any]:
    """SplitMix64's finaliser; uint64 arithmetic wraps around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
