"""When a connection that is free sends its next request: at once, at its share of a rate, or when a request is due.

A pace is told of connections that become free, of answers and of failures, and keeps the tally. It knows no socket: a
connection is what has `send(due)`. All times are nanoseconds of one monotonic clock. What is due before `begin` is
warm-up: it is sent, and not counted.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Protocol

from onejob.serve.bench.histogram import Histogram

FOREVER = 1 << 62
"""A moment that never comes."""
TIMEOUT, LATE = "timeout", "the answer came too late"


class Sender(Protocol):
    """A connection that is free."""

    def send(self, due: int) -> None: ...


class Tally:
    """What one process has measured in a turn."""

    __slots__ = (
        "arrived",
        "errors",
        "late",
        "latencies",
        "latency",
        "lates",
        "received",
        "reconnects",
        "samples",
        "sent",
        "service",
        "services",
        "unfinished",
    )

    def __init__(self) -> None:
        self.latency, self.service, self.late = Histogram(), Histogram(), Histogram()
        self.latencies: list[int] = []
        self.services: list[int] = []
        self.lates: list[int] = []
        self.errors: Counter[str] = Counter()
        self.samples: dict[str, str] = {}
        self.unfinished = 0
        self.restart()

    def restart(self) -> None:
        """Forget what was counted whenever it happened: the warm-up is over."""
        self.arrived = self.sent = self.received = self.reconnects = 0

    def flush(self) -> None:
        """Into the histograms, many at once: that costs a tenth of one by one."""
        for values, histogram in (
            (self.latencies, self.latency),
            (self.services, self.service),
            (self.lates, self.late),
        ):
            if values:
                histogram.record(values)
                values.clear()


class Pace:
    """What all have in common; by itself a closed loop: whoever has an answer asks again at once."""

    def __init__(
        self, tally: Tally, clock: Callable[[], int], arm: Callable[[int], object] = lambda moment: None
    ) -> None:
        self.tally = tally
        self.clock = clock
        self.arm = arm
        """Has `ring` called at a moment; the newest moment counts."""
        self.timeout = FOREVER
        """How old a request may become."""
        self.start_at = self.begin = FOREVER
        self.end = 0
        """When no more requests are sent."""
        self.left = FOREVER
        """Counted requests that may still be sent."""
        self.over_at = 0
        """When a connection last became free with nothing left to send."""

    def start(self, at: int, warmup: int, length: int, requests: int | None) -> None:
        """Begin at a moment; connections that are free are told of next, by `ready`."""
        self.start_at, self.begin = at, at + warmup
        self.end = at + warmup + length
        self.left = FOREVER if requests is None else requests

    def ready(self, connection: Sender, now: int) -> None:
        """A connection is free."""
        if now >= self.end or self.left <= 0:
            self.over_at = now
            return
        if now >= self.begin:
            self.left -= 1
        connection.send(now)

    def gone(self, connection: Sender) -> None:
        """A connection was lost; it is told of again once it is back."""

    def answered(self, connection: Sender, due: int, sent: int, now: int) -> None:
        """A good answer, and the connection is free again."""
        self.taken(due, sent, now)
        self.ready(connection, now)

    def taken(self, due: int, sent: int, now: int) -> None:
        """A good answer to a request; one that nobody waits for any more is none."""
        if now - due > self.timeout:
            self.failed(due, TIMEOUT, LATE)
            return
        self.tally.arrived += 1
        if due >= self.begin:
            self.tally.latencies.append(now - due)

    def failed(self, due: int, kind: str, sample: str = "") -> None:
        """A request that has no good answer, and never will."""
        if due >= self.begin:
            self.tally.errors[kind] += 1
            self.tally.samples.setdefault(kind, sample)

    def refused(self, kind: str, sample: str, now: int) -> None:
        """A connection couldn't be made: the request that it would have sent has failed."""
        if self.start_at <= now < self.end and self.left > 0:
            if now >= self.begin:
                self.left -= 1
            self.failed(now, kind, sample)

    def connected(self) -> None:
        """There is a connection (again)."""

    def ring(self) -> None:
        """Send what is due by the clock."""

    def sweep(self, now: int) -> None:
        """Give up what has waited too long."""

    @property
    def waiting(self) -> int:
        """Requests that are due and have no connection."""
        return 0

    def is_over(self, now: int) -> bool:
        """Whether no more requests will be sent, those that wait aside."""
        return now >= self.end or self.left <= 0

    def stop(self, now: int) -> None:
        """Send no more; what waits is given up."""
        self.end = min(self.end, now)
        self.tally.unfinished += self.waiting


class Paced(Pace):
    """A closed loop that isn't faster than its rate: each connection asks once an interval, later if it must wait."""

    def __init__(
        self,
        tally: Tally,
        clock: Callable[[], int],
        arm: Callable[[int], object],
        interval: int,
        first: Iterator[int],
    ) -> None:
        super().__init__(tally, clock, arm)
        self._interval = interval
        self._first = first
        """When each connection begins, after the start: spread over the interval."""
        self._next: dict[Sender, int] = {}
        self._resting: list[tuple[int, int, Sender]] = []
        self._number = count()

    def ready(self, connection: Sender, now: int) -> None:
        if now >= self.end or self.left <= 0:
            self.over_at = now
            return
        at = self._next.get(connection)
        if at is None:
            at = self._next[connection] = self.start_at + next(self._first)
        if at <= now:
            self._ask(connection, now)
            return
        heapq.heappush(self._resting, (at, next(self._number), connection))
        if self._resting[0][2] is connection:
            self.arm(at)

    def gone(self, connection: Sender) -> None:
        self._resting = [entry for entry in self._resting if entry[2] is not connection]
        heapq.heapify(self._resting)

    def ring(self) -> None:
        now, resting = self.clock(), self._resting
        while resting and resting[0][0] <= now:
            self.ready(heapq.heappop(resting)[2], now)
        self.arm(resting[0][0] if resting else FOREVER)

    def _ask(self, connection: Sender, now: int) -> None:
        if now >= self.begin:
            self.left -= 1
        self._next[connection] = now + self._interval
        connection.send(now)


class Open(Pace):
    """Requests are due by the clock; one that finds no free connection waits, and its wait is part of its latency."""

    def __init__(
        self, tally: Tally, clock: Callable[[], int], arm: Callable[[int], object], times: Iterator[int]
    ) -> None:
        super().__init__(tally, clock, arm)
        self._times = times
        """When requests are due, after the start."""
        self._due = FOREVER
        self._idle: deque[Sender] = deque()
        self._waiting: deque[int] = deque()
        self._down: tuple[str, str] | None = None
        """Why there is no connection at all, and none can be made."""
        self._connected = 0

    def start(self, at: int, warmup: int, length: int, requests: int | None) -> None:
        super().start(at, warmup, length, requests)
        self._due = self._following()
        self.arm(self._due)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def ready(self, connection: Sender, now: int) -> None:
        if self._waiting:
            connection.send(self._waiting.popleft())
            return
        self._idle.append(connection)
        self.over_at = now

    def gone(self, connection: Sender) -> None:
        self._connected -= 1
        if connection in self._idle:
            self._idle.remove(connection)

    def connected(self) -> None:
        self._connected += 1
        self._down = None

    def taken(self, due: int, sent: int, now: int) -> None:
        if now - due > self.timeout:
            self.failed(due, TIMEOUT, LATE)
            return
        tally = self.tally
        tally.arrived += 1
        if due >= self.begin:
            tally.latencies.append(now - due)
            tally.services.append(now - sent)

    def refused(self, kind: str, sample: str, now: int) -> None:
        if self._connected <= 0:
            self._down = (kind, sample)
            while self._waiting:
                self.failed(self._waiting.popleft(), kind, sample)

    def ring(self) -> None:
        now, due, idle = self.clock(), self._due, self._idle
        while due <= now:
            if idle:
                if due >= self.begin:
                    self.tally.lates.append(self.clock() - due)
                idle.popleft().send(due)
            elif self._down is not None:
                self.failed(due, *self._down)
            else:
                self._waiting.append(due)
            due = self._following()
        self._due = due
        self.arm(due)

    def sweep(self, now: int) -> None:
        waiting = self._waiting
        while waiting and now - waiting[0] > self.timeout:
            self.failed(waiting.popleft(), TIMEOUT, "no connection was free in time")

    def is_over(self, now: int) -> bool:
        return self._due == FOREVER and not self._waiting and (now >= self.end or self.left <= 0)

    def stop(self, now: int) -> None:
        super().stop(now)
        self._waiting.clear()
        self._due, self.left = FOREVER, 0

    def _following(self) -> int:
        """When the next request is due; FOREVER after the last."""
        after = next(self._times, None)
        if after is None or self.start_at + after >= self.end or self.left <= 0:
            return FOREVER
        due = self.start_at + after
        if due >= self.begin:
            self.left -= 1
        return due
