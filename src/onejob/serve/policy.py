"""When the batcher runs what: pure functions of what waits and of how long the engine's recent batches took.

Nothing is to be tuned. A batch of n rows takes about `fixed + n * each`; both are fitted to the recent batches, the
newer ones counting more. From them follow the size (the smallest at which a row costs nearly the least, and that keeps
the latency goal: a request may have to wait for another batch first) and the wait: a request waits for company no
longer than the fixed cost that company would save, so waiting costs at most as much again as never waiting, whatever
comes (the ski-rental argument: Karlin, Manasse, Rudolph & Sleator, "Competitive snoopy caching", Algorithmica 3, 1988).
`[serve] batch` bounds both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

DECAY = 0.98
"""What a batch counts for when the next one has been measured."""
NEARLY = 1.03
"""A row that costs no more than so many times the least costs nearly the least."""
FALLS, RISES = 0.5, 0.02
"""What a new measurement counts for: a batch is held up by a neighbour often, and never helped."""
TIMER_NS = 500_000
"""A shorter wait isn't worth a timer, whose grain is a millisecond: then the batch starts at once."""
SHARE = 2
"""A request of more rows than this part of a batch is large: it is split, and the small ones go with it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a batch and the queue; times in nanoseconds."""

    rows: int = 64
    wait_ns: int = 2_000_000
    queue: int = 1024
    """Rows that may wait."""
    timeout_ns: int = 30_000_000_000
    goal_ns: int = 0
    """The latency that is wanted; 0: none, only throughput counts."""
    queue_bytes: int = 256 << 20
    """Bytes of request bodies that may wait."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Most rows that run at once, and how long a request may wait for others."""

    size: int
    wait_ns: int


class Fit:
    """Least squares of a batch's duration over its rows, the newer ones counting more."""

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y", "costs", "each", "fixed")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self.fixed = self.each = 0.0
        """Nanoseconds of a batch, and of each of its rows."""
        self.costs: dict[int, float] = {}
        """Power of two -> nanoseconds a row in batches of so many rows, or up to twice as many: a straight line doesn't
        know of caches."""

    def add(self, rows: int, took: int) -> None:
        """One more batch."""
        self._n = self._n * DECAY + 1
        self._x = self._x * DECAY + rows
        self._y = self._y * DECAY + took
        self._xx = self._xx * DECAY + rows * rows
        self._xy = self._xy * DECAY + rows * took
        spread = self._n * self._xx - self._x * self._x
        if spread > 1e-3 * self._n * self._xx:
            self.each = max(0.0, (self._n * self._xy - self._x * self._y) / spread)
        elif self.each == 0.0:  # batches of one size only don't tell the two apart: half of it may be either
            self.each = self._y / max(self._x, 1.0) / 2
        self.fixed = max(0.0, (self._y - self.each * self._x) / self._n)
        power, cost = rows.bit_length() - 1, took / max(rows, 1)
        before = self.costs.get(power, cost)
        self.costs[power] = before + (FALLS if cost < before else RISES) * (cost - before)

    def predict(self, rows: int) -> float:
        """Nanoseconds that a batch of so many rows takes."""
        return self.fixed + self.each * rows


def choose(fit: Fit, limits: Limits) -> Choice:
    """Size and wait for an engine that has been measured."""
    size = cheapest(fit, limits.rows)
    if limits.goal_ns and fit.each > 0:
        size = max(1, min(size, int((limits.goal_ns / 2 - fit.fixed) / fit.each)))
    wait = min(limits.wait_ns, int(fit.fixed))
    if limits.goal_ns:
        wait = min(wait, int(limits.goal_ns - 2 * fit.predict(size)))
    return Choice(size, wait if wait >= TIMER_NS else 0)


def cheapest(fit: Fit, most: int) -> int:
    """The smallest power of two at which a row costs nearly the least; `most` where larger ones may be cheaper."""
    if not fit.costs:
        return most
    bound = NEARLY * min(fit.costs.values())
    power = min(power for power, cost in fit.costs.items() if cost <= bound)
    return most if power == max(fit.costs) or 2 ** (power + 1) > most else 2**power


def due(rows: int, requests: int, age: int, recent: int, choice: Choice) -> bool:
    """Whether to run now what waits: it is full, or waits long enough, or nobody else is expected.

    `age`: how long the oldest has waited. `recent`: how many were in flight at the last start: clients that wait for
    their answers come back in the number in which they were answered.
    """
    return rows >= choice.size or age >= choice.wait_ns or requests >= recent


def take(waiting: Iterable[tuple[int, object]], size: int, *, most: int = 4096) -> list[tuple[int, int]]:
    """(position, rows) of what goes into the next batch; `waiting` is (rows left, shape) of each, the first one first.

    A batch holds one shape, that of the first. Small requests go whole; a large one fills what they leave, so that
    neither waits for all of the other: while others are there it is given half of the batch.
    """
    taken: list[tuple[int, int]] = []
    large: list[tuple[int, int]] = []
    left, shape, first = size, None, True
    for position, (rows, kind) in enumerate(waiting):
        if first:
            shape, first = kind, False
        elif kind != shape:
            continue
        if position >= most:
            break
        if rows * SHARE > size:
            if not large:
                part = min(rows, size // SHARE or 1, left)
                left -= part
                taken.append((position, part))
                large.append((len(taken) - 1, rows - part))
            elif len(large) < SHARE:
                taken.append((position, 0))
                large.append((len(taken) - 1, rows))
        elif rows <= left:
            taken.append((position, rows))
            left -= rows
        else:
            break
        if not left:
            break
    return _filled(taken, large, left)


def _filled(taken: list[tuple[int, int]], large: Sequence[tuple[int, int]], left: int) -> list[tuple[int, int]]:
    """Large requests take what is left, in their order."""
    for at, rest in large:
        more = min(rest, left)
        taken[at] = (taken[at][0], taken[at][1] + more)
        left -= more
    return [each for each in taken if each[1]]
