"""When requests are due: a load is a closed loop, a paced one, or an open one; arrivals are even or random (Poisson),
at one rate or at one that rises. Pure: numbers in, times out.

An open loop's requests are due by the clock, whatever became of those before, as from users who don't know of each
other. Several processes share a load: together their arrivals are those of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from onejob.core.artifact import Json

Array = np.ndarray[Any, np.dtype[np.float64]]
CHUNK = 4096
"""Arrivals that are made at once."""
CLOSED, PACED, OPEN = "closed", "paced", "open"


@dataclass(frozen=True, slots=True)
class Load:
    """How requests are sent."""

    loop: str
    """`closed`: each connection asks again once it has its answer. `paced`: the same, at most at its share of the rate.
    `open`: requests are due by the clock, and wait for a free connection."""
    connections: int
    rate: float | None = None
    """Requests a second, over all connections; None in a closed loop."""
    rate_to: float | None = None
    """The rate at the end, where it rises (or falls) evenly from `rate` on."""
    arrivals: str = "poisson"
    """`even` or `poisson`, in an open loop."""

    @property
    def mean_rate(self) -> float | None:
        """Requests a second that are due in the measured time."""
        if self.rate is None or self.rate_to is None:
            return self.rate
        return (self.rate + self.rate_to) / 2

    @property
    def interval(self) -> float | None:
        """Seconds between two requests of one connection, in a paced loop."""
        return self.connections / self.rate if self.loop == PACED and self.rate else None

    def to_json(self) -> dict[str, Json]:
        return asdict(self)

    def __str__(self) -> str:
        connections = f"{self.connections:,} connection{'' if self.connections == 1 else 's'}"
        if self.loop == CLOSED:
            return f"closed loop, {connections}"
        assert self.rate is not None
        rate = f"{self.rate:,.6g}/s" if self.rate_to is None else f"{self.rate:,.6g}/s to {self.rate_to:,.6g}/s"
        if self.loop == PACED:
            return f"closed loop at {rate}, {connections}"
        return f"open loop at {rate} ({self.arrivals}), up to {connections}"


@dataclass(frozen=True, slots=True)
class Turn:
    """One target under one load for one stretch of time."""

    target: int
    """Which of the targets, from 0."""
    load: Load
    warmup: float
    """Seconds at the beginning that aren't counted."""
    seconds: float | None
    """That are measured; None: until `requests` are answered."""
    requests: int | None = None
    round: int = 0
    """Turns of the same round are compared with each other."""


def turns(
    targets: int,
    loads: Sequence[Load],
    *,
    warmup: float,
    seconds: float | None,
    requests: int | None = None,
    rounds: int = 1,
) -> list[Turn]:
    """Every load for every target, in rounds: A B, B A, A B … so that what drifts meets both alike.

    `seconds` and `requests` are for each target and load, all rounds together.
    """
    each = None if seconds is None else seconds / rounds
    few = None if requests is None else math.ceil(requests / rounds)
    order = list(range(targets))
    return [
        Turn(target, load, warmup, each, few, number)
        for load in loads
        for number in range(rounds)
        for target in (order if number % 2 == 0 else order[::-1])
    ]


def share(whole: int, part: int, parts: int) -> int:
    """How much of a whole number falls to one of several processes; together they have all of it."""
    return whole // parts + (1 if part < whole % parts else 0)


def arrivals(
    load: Load, warmup: float, seconds: float | None, *, part: int = 0, parts: int = 1, seed: int = 0
) -> Iterator[Array]:
    """When the requests of one of several processes are due, in seconds after the start, in chunks, in order.

    Without `seconds` they never end. The rate stays at its first value during the warm-up.
    """
    assert load.rate is not None
    rates = _Rates(load.rate, load.rate_to, warmup, seconds)
    end = math.inf if seconds is None else warmup + seconds
    for count in _counts(load.arrivals, part, parts, seed):
        times = rates.time_of(count)
        if times[-1] >= end:
            yield times[times < end]
            return
        yield times


def _counts(kind: str, part: int, parts: int, seed: int) -> Iterator[Array]:
    """The numbers of a process's requests among all: 0, 1, 2 … for even ones, with random gaps of mean 1 otherwise."""
    if kind == "even":
        first = 0
        while True:
            yield (np.arange(first, first + CHUNK, dtype=np.float64)) * parts + part
            first += CHUNK
    source, last = np.random.default_rng([seed, part]), 0.0
    while True:
        counts = last + np.cumsum(source.exponential(parts, CHUNK))
        last = float(counts[-1])
        yield counts


@dataclass(frozen=True, slots=True)
class _Rates:
    """The rate over time: level during the warm-up, then level or along a line."""

    begin: float
    end: float | None
    warmup: float
    seconds: float | None

    def time_of(self, count: Array) -> Array:
        """When so many requests are due: the inverse of how many are due by a time."""
        level = count / self.begin
        if self.end is None or self.seconds is None or self.end == self.begin:
            return level
        slope = (self.end - self.begin) / self.seconds
        after = np.maximum(count - self.begin * self.warmup, 0.0)
        most = (self.begin + self.end) / 2 * self.seconds
        inside = np.maximum(self.begin**2 + 2 * slope * np.minimum(after, most), 0.0)
        ramp = (np.sqrt(inside) - self.begin) / slope
        late = np.maximum(after - most, 0.0) / self.end  # beyond the end: not asked for, but in order
        return np.where(level < self.warmup, level, self.warmup + ramp + late)
