"""Paces on a simulated server and clock: what a stall of known length does to each kind of loop, to the nanosecond."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from onejob.serve.bench.outcome import Outcome
from onejob.serve.bench.pace import FOREVER, Open, Pace, Paced, Tally
from onejob.serve.bench.schedule import OPEN, PACED, Load, arrivals

MS = 1_000_000
SECOND = 1000 * MS


class World:
    """A server that takes a time for each answer, and is deaf during its stall; connections; a clock that is set."""

    def __init__(self, *, takes: int = MS, stall: tuple[int, int] = (0, 0)) -> None:
        self.now = 0
        self.takes, self.stall = takes, stall
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.alarm = FOREVER
        self.sent: list[int] = []
        self.tally = Tally()
        self._number = count()

    def clock(self) -> int:
        return self.now

    def arm(self, moment: int) -> None:
        self.alarm = moment

    def at(self, moment: int, call: Callable[[], None]) -> None:
        heapq.heappush(self.events, (moment, next(self._number), call))

    def answer_at(self) -> int:
        begin, end = self.stall
        return (end if begin <= self.now < end else self.now) + self.takes

    def run(self, pace: Pace, connections: int, *, seconds: float, warmup: float = 0.0, requests: int | None = None):
        pace.start(0, int(warmup * SECOND), int(seconds * SECOND), requests)
        for _ in range(connections):
            pace.connected()
            pace.ready(Connection(self, pace), self.now)
        while self.events or self.alarm < FOREVER:
            if self.alarm <= (self.events[0][0] if self.events else FOREVER):
                self.now, self.alarm = max(self.alarm, self.now), FOREVER
                pace.ring()
            else:
                self.now, _, call = heapq.heappop(self.events)
                call()
        assert pace.is_over(max(self.now, pace.end))
        self.tally.flush()
        return self.tally


class Connection:
    def __init__(self, world: World, pace: Pace) -> None:
        self.world, self.pace = world, pace

    def send(self, due: int) -> None:
        world, sent = self.world, self.world.now
        world.sent.append(sent)
        world.at(world.answer_at(), lambda: self.pace.answered(self, due, sent, world.now))


def open_loop(world: World, rate: float, warmup: float, seconds: float) -> Open:
    load = Load(OPEN, 1, rate, arrivals="even")
    chunks = arrivals(load, warmup, seconds)
    due = (round(moment * 1e9) for chunk in chunks for moment in chunk.tolist())
    return Open(world.tally, world.clock, world.arm, due)


def ms(histogram: Any, share: float) -> float:
    return histogram.quantile(share) / MS


STALL = (5 * SECOND, 6 * SECOND)
"""Of ten seconds: a tenth of all requests are due in it, and wait from 1 s down to nothing."""


@pytest.mark.parametrize("connections", [1, 128])
def test_an_open_loop_counts_from_when_requests_were_due(connections: int) -> None:
    world = World(stall=STALL)
    tally = world.run(open_loop(world, 100.0, 0, 10), connections, seconds=10)
    assert tally.latency.total == 1000, "every request that was due"
    assert ms(tally.latency, 0.5) == pytest.approx(1.0, rel=0.002)
    if connections == 128:  # all were sent when they were due: 1001, 991, ... ms
        assert ms(tally.latency, 0.9) == pytest.approx(1.0, rel=0.002)
        assert ms(tally.latency, 0.99) == pytest.approx(901.0, rel=0.002)
        assert ms(tally.latency, 0.95) == pytest.approx(501.0, rel=0.002)
    else:  # they wait in line: the last of them has 100 before it, 1 ms each
        assert ms(tally.latency, 0.99) == pytest.approx(1001 - 10 * 9, rel=0.002)
    assert tally.latency.highest == 1001 * MS


def test_how_long_it_took_from_sending_is_told_apart() -> None:
    """One connection: while it waits nothing is sent, so all but one request look quick. That is the omission."""
    world = World(stall=STALL)
    tally = world.run(open_loop(world, 100.0, 0, 10), 1, seconds=10)
    assert ms(tally.service, 0.999) == pytest.approx(1.0, rel=0.002)
    assert tally.service.highest == 1001 * MS


def test_a_paced_loop_is_corrected_by_its_interval() -> None:
    world = World(stall=STALL)
    interval = 10 * MS
    pace = Paced(world.tally, world.clock, world.arm, interval, iter([0]))
    tally = world.run(pace, 1, seconds=10)
    assert tally.latency.total == 901, "what was due in the stall was never sent"
    assert ms(tally.latency, 0.99) == pytest.approx(1.0, rel=0.002)
    outcome = Outcome(Load(PACED, 1, 100.0), latency=tally.latency)
    assert outcome.corrected.total == pytest.approx(1000, abs=1)
    assert outcome.quantile_ms("p99") == pytest.approx(901, rel=0.002)
    assert outcome.quantile_ms("p95") == pytest.approx(501, rel=0.002)
    assert outcome.quantile_ms("max") == 1001


def test_a_paced_loop_keeps_its_rate_over_all_connections() -> None:
    world = World()
    pace = Paced(world.tally, world.clock, world.arm, 20 * MS, iter([0, 5 * MS, 10 * MS, 15 * MS]))
    tally = world.run(pace, 4, seconds=2, warmup=0.5)
    assert tally.latency.total == 400
    gaps = {b - a for a, b in zip(world.sent, world.sent[1:], strict=False)}
    assert gaps == {5 * MS}


def test_a_closed_loop_asks_as_soon_as_it_is_answered_and_the_warmup_is_not_counted() -> None:
    world = World(takes=2 * MS)
    tally = world.run(Pace(world.tally, world.clock), 3, seconds=1, warmup=0.5)
    assert len(world.sent) == 3 * 750
    assert tally.latency.total == 3 * 500
    assert tally.latency.quantile(1.0) == 2 * MS


@pytest.mark.parametrize("kind", ["closed", "paced", "open"])
def test_so_many_requests_are_counted_and_no_more(kind: str) -> None:
    world = World()
    pace = {
        "closed": lambda: Pace(world.tally, world.clock),
        "paced": lambda: Paced(world.tally, world.clock, world.arm, 10 * MS, iter([0, 5 * MS])),
        "open": lambda: open_loop(world, 100.0, 0.1, 100),
    }[kind]()
    tally = world.run(pace, 2, seconds=100, warmup=0.1, requests=50)
    assert tally.latency.total == 50
    assert pace.over_at < 2 * SECOND, "it is known when the last was answered"


def test_overload_ends_in_timeouts_not_in_memory() -> None:
    """Twice of what can be answered: the queue holds what is younger than the time-out, the rest has failed."""
    world = World(takes=20 * MS)
    pace = open_loop(world, 100.0, 0, 10)
    longest = 0

    def sweep() -> None:
        nonlocal longest
        pace.sweep(world.now)
        longest = max(longest, pace.waiting)
        if world.now < 12 * SECOND:
            world.at(world.now + 100 * MS, sweep)

    world.at(0, sweep)
    pace.timeout = SECOND
    tally = world.run(pace, 1, seconds=10)
    assert tally.latency.total + tally.errors["timeout"] == 1000
    assert tally.errors["timeout"] > 400
    assert longest <= 110
    assert tally.latency.highest <= SECOND, "an answer that comes later is none"


def test_without_any_connection_what_is_due_has_failed_until_there_is_one_again() -> None:
    world = World()
    pace = open_loop(world, 100.0, 0, 3)
    connection = Connection(world, pace)

    def lose() -> None:
        pace.gone(connection)
        pace.refused("connection refused", "nobody listens", world.now)

    def have() -> None:
        pace.connected()
        pace.ready(connection, world.now)

    pace.start(0, 0, 3 * SECOND, None)
    have()
    world.at(SECOND + MS * 5, lose)
    world.at(2 * SECOND + MS * 5, have)
    while world.events or world.alarm < FOREVER:
        if world.alarm <= (world.events[0][0] if world.events else FOREVER):
            world.now, world.alarm = world.alarm, FOREVER
            pace.ring()
        else:
            world.now, _, call = heapq.heappop(world.events)
            call()
    world.tally.flush()
    assert world.tally.errors == {"connection refused": 100}
    assert world.tally.samples == {"connection refused": "nobody listens"}
    assert world.tally.latency.total == 200


def test_a_closed_loop_counts_each_refusal_once_and_only_while_it_is_measured() -> None:
    world = World()
    pace = Pace(world.tally, world.clock)
    pace.refused("connection refused", "", 5)
    pace.start(10, 10, 100, None)
    for now in (15, 25, 115, 125):
        pace.refused("connection refused", "", now)
    assert world.tally.errors == {"connection refused": 2}


def test_stopping_gives_up_what_waits() -> None:
    world = World(takes=SECOND)
    pace = open_loop(world, 100.0, 0, 10)
    pace.start(0, 0, 10 * SECOND, None)
    pace.connected()
    pace.ready(Connection(world, pace), 0)
    world.now = SECOND
    pace.ring()
    pace.stop(world.now)
    assert pace.is_over(world.now)
    assert world.tally.unfinished == 100
    world.now = 2 * SECOND
    pace.ring()
    assert pace.waiting == 0
