"""How fast the candidates are: interleaved rounds, so that a busy machine slows all of them alike.

In each round every candidate is called `calls` times in a row, and the order of the candidates moves on by one from
round to round. What is compared later is the median of each round, candidate by candidate in the same round; the
figures that are shown are percentiles over all calls. CPU time stands beside wall time: a candidate that is fast only
because it uses more threads shows it there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Call = Callable[[int], object]
"""Answer the n-th batch; batches differ from call to call, as they do in service."""

WARM_UP = 20


@dataclass(frozen=True, slots=True)
class Clocks:
    """Nanoseconds of wall time and of this process's CPU time."""

    wall: Callable[[], int] = time.perf_counter_ns
    cpu: Callable[[], int] = time.process_time_ns


@dataclass(frozen=True, slots=True)
class Latency:
    """One candidate at one batch size, in milliseconds a call."""

    batch: int
    p50: float
    p90: float
    cpu: float
    """CPU time a call, all threads together."""
    calls: int
    rounds: tuple[float, ...] = field(repr=False)
    """The median of each round, in order; the n-th rounds of all candidates belong together."""


def measure(
    candidates: Mapping[str, Call], batch: int, *, rounds: int, calls: int, clocks: Clocks | None = None
) -> dict[str, Latency]:
    """Time every candidate at one batch size."""
    clocks = clocks or Clocks()
    names = list(candidates)
    for name in names:
        for n in range(WARM_UP):
            candidates[name](n)
    walls: dict[str, list[list[int]]] = {name: [] for name in names}
    cpus: dict[str, list[int]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in _rotated(names, turn):
            wall, cpu = _round(candidates[name], turn * calls, calls, clocks)
            walls[name].append(wall)
            cpus[name].append(cpu)
    return {name: _latency(batch, walls[name], cpus[name]) for name in names}


def _rotated(names: Sequence[str], turn: int) -> list[str]:
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def _round(call: Call, first: int, calls: int, clocks: Clocks) -> tuple[list[int], int]:
    """The wall time of every call, and the CPU time of all of them, in nanoseconds."""
    clock, taken = clocks.wall, []
    cpu = clocks.cpu()
    for n in range(first, first + calls):
        start = clock()
        call(n)
        taken.append(clock() - start)
    return taken, clocks.cpu() - cpu


def _latency(batch: int, walls: Sequence[Sequence[int]], cpus: Sequence[int]) -> Latency:
    every = sorted(taken for one in walls for taken in one)
    return Latency(
        batch=batch,
        p50=_ms(statistics.median(every)),
        p90=_ms(every[min(len(every) - 1, round(0.9 * (len(every) - 1)))]),
        cpu=_ms(sum(cpus) / len(every)),
        calls=len(every),
        rounds=tuple(_ms(statistics.median(one)) for one in walls),
    )


def _ms(nanoseconds: float) -> float:
    return round(nanoseconds / 1e6, 6)
