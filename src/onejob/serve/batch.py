"""Dynamic batching: requests that arrive together run together, and nobody waits for company that will not come.

`decide` is the whole policy, a pure function. A batch starts when the engine is free and one of these holds: it is
full; its oldest request has waited `wait_ns`; or as many requests wait as were in flight at the last start. The
last rule is what keeps a lone client from paying the wait: requests of closed-loop clients come back in the number
in which they were answered.

`Batcher` is the asyncio edge, shared by all protocols of a replica. Quick models run on the loop's own thread,
where a hop to another thread would cost more than the inference; as soon as a batch takes longer than `INLINE_NS`,
batches run on one worker thread, so that health and decoding go on while the engine computes. A hang is seen in
both cases: by `stuck_ns` here, by the missing beats at the host if the loop itself hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from onejob.errors import DeadlineError, InferenceError, OnejobError, OverloadedError

Arrays = Mapping[str, np.ndarray[Any, Any]]
INLINE_NS = 1_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a batch and the queue; times in nanoseconds."""

    rows: int = 64
    wait_ns: int = 2_000_000
    queue: int = 1024
    timeout_ns: int = 30_000_000_000


@dataclass(eq=False, slots=True)
class Item:
    """One request on its way through the engine; `done` is called once, on the loop's thread."""

    arrays: Arrays
    rows: int
    done: Callable[[Item], None]
    received: int
    """When its first byte was handled, in the clock's nanoseconds."""
    deadline: int
    signature: tuple[tuple[int, ...], ...] = ()
    """Shapes without the batch dimension: only equal ones can run together."""
    queued: int = 0
    started: int = 0
    finished: int = 0
    settled: bool = False
    asked: Any = None
    """What its service wants to know of it when it is done."""
    outputs: Arrays | None = None
    error: Exception | None = None

    def settle(self, outputs: Arrays | None, error: Exception | None, now: int) -> None:
        if self.settled:
            return  # cancelled, or past its deadline, while the engine had it
        self.settled, self.outputs, self.error, self.finished = True, outputs, error, now
        self.done(self)


def decide(waiting: Sequence[tuple[int, int]], age: int, recent: int, limits: Limits) -> int | None:
    """How many of the waiting requests to run now as one batch, or None to wait for more.

    `waiting`: (rows, group) of each, oldest first; a batch holds a run of one group. `age`: how long the oldest has
    waited. `recent`: requests in flight at the last start. A request bigger than a batch runs alone, in pieces.
    """
    rows, taken = 0, 0
    for amount, group in waiting:
        if taken and (rows + amount > limits.rows or group != waiting[0][1]):
            return taken  # full, or the next can't join
        rows, taken = rows + amount, taken + 1
        if rows >= limits.rows:
            return taken
    if not taken:
        return None
    return taken if age >= limits.wait_ns or taken >= recent else None


class Batcher:
    """The queue in front of one engine. All methods belong to the loop's thread."""

    def __init__(
        self,
        infer: Callable[[Arrays], Arrays],
        limits: Limits,
        *,
        batchable: bool = True,
        inline: bool = False,
        on_batch: Callable[[int, int], None] = lambda rows, ns: None,
        on_failure: Callable[[Exception], None] = lambda error: None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._infer = infer
        self._limits = limits
        self._batchable = batchable
        self._on_batch = on_batch
        self._on_failure = on_failure
        self._clock = clock
        self._waiting: deque[Item] = deque()
        self._rows = 0
        self._recent = 1
        self._running: list[Item] = []
        self._busy_since = 0
        self._tick_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._thread: ThreadPoolExecutor | None = None if inline else self._make_thread()

    @property
    def pending(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + len(self._running)

    @property
    def inline(self) -> bool:
        return self._thread is None

    def submit(self, item: Item) -> None:
        """Queue a request; OverloadedError when too many rows wait already."""
        if self._rows + item.rows > self._limits.queue and self._waiting:
            raise OverloadedError(f"{self._rows} rows wait already, of at most {self._limits.queue}", place="queue")
        item.queued = self._clock()
        self._waiting.append(item)
        self._rows += item.rows
        self._poke()

    def cancel(self, item: Item) -> None:
        """Forget a request whose client has gone; if it runs already, its answer is dropped."""
        item.settled = True
        self._prune()

    def expire(self) -> None:
        """Answer what is past its deadline, whether it waits or the engine holds it; called now and then."""
        now = self._clock()
        for item in [*self._running, *self._waiting]:
            if now >= item.deadline:
                late = (now - item.received) / 1e9
                item.settle(None, DeadlineError(f"no answer after {late:.1f} s", place="request"), now)
        self._prune()

    def stuck_ns(self) -> int:
        """For how long the engine has been computing the present batch; 0 when idle."""
        return self._clock() - self._busy_since if self._busy_since else 0

    def close(self) -> None:
        """Let go of the worker thread, without waiting for an engine that hangs."""
        if self._timer:
            self._timer.cancel()
        if self._thread:
            self._thread.shutdown(wait=False)

    def _make_thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="engine")

    def _prune(self) -> None:
        while self._waiting and self._waiting[0].settled:
            self._rows -= self._waiting.popleft().rows

    def _poke(self) -> None:
        # the decision is put off to the end of the loop's round, so that all that has arrived is seen together
        if not self._tick_due and not self._running:
            self._tick_due = True
            self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._tick_due = False
        if self._timer:
            self._timer.cancel()
            self._timer = None
        self._prune()
        if self._running or not self._waiting:
            return
        age = self._clock() - self._waiting[0].queued
        count = decide(self._window(), age, self._recent, self._limits)
        if count is None:
            self._timer = self._loop.call_later((self._limits.wait_ns - age) / 1e9 + 1e-5, self._tick)
            return
        self._recent = len(self._waiting)
        batch = [self._waiting.popleft() for _ in range(count)]
        self._rows -= sum(item.rows for item in batch)
        batch = [item for item in batch if not item.settled]
        if batch:
            self._start(batch)
        else:
            self._poke()

    def _window(self) -> list[tuple[int, int]]:
        """(rows, group) of as many of the waiting as can matter to one batch."""
        window: list[tuple[int, int]] = []
        rows, group, last = 0, 0, self._waiting[0].signature
        for item in self._waiting:
            if item.signature != last or (window and not self._batchable):
                group, last = group + 1, item.signature
            window.append((item.rows, group))
            rows += item.rows
            if rows > self._limits.rows or group:
                break
        return window

    def _start(self, batch: list[Item]) -> None:
        self._running = batch
        self._busy_since = now = self._clock()
        for item in batch:
            item.started = now
        if self._thread is None:
            self._finish(batch, self._compute(batch))
            return
        future = self._thread.submit(self._compute, batch)
        future.add_done_callback(lambda done: self._hand_back(batch, done))

    def _hand_back(self, batch: list[Item], done: Future[list[Arrays | Exception]]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed while a hung engine came back: nobody waits
            self._loop.call_soon_threadsafe(self._finish, batch, done.result())

    def _compute(self, batch: list[Item]) -> list[Arrays | Exception]:
        """The answer of each request. If a batch of several fails, each runs alone, so that only the culprit fails."""
        try:
            return split(self._infer_pieces(join([item.arrays for item in batch])), [item.rows for item in batch])
        except Exception as error:
            if len(batch) == 1:
                return [error if isinstance(error, OnejobError) else InferenceError(str(error), place="engine")]
        return [self._compute([item])[0] for item in batch]

    def _infer_pieces(self, arrays: Arrays) -> Arrays:
        rows = len(next(iter(arrays.values()))) if self._batchable else 1
        most = self._limits.rows
        if rows <= most:
            return self._infer(arrays)
        pieces = [
            self._infer({name: array[start : start + most] for name, array in arrays.items()})
            for start in range(0, rows, most)
        ]
        return join(pieces)

    def _finish(self, batch: list[Item], answers: list[Arrays | Exception]) -> None:
        now = self._clock()
        took = now - self._busy_since
        self._running, self._busy_since = [], 0
        self._on_batch(sum(item.rows for item in batch), took)
        if self._thread is None and took > INLINE_NS:
            self._thread = self._make_thread()
        for item, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                item.settle(None, answer, now)
                self._on_failure(answer)
            else:
                item.settle(answer, None, now)
        if self._waiting:
            self._poke()


def join(parts: Sequence[Arrays]) -> Arrays:
    """Several requests' arrays as one batch."""
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def split(outputs: Arrays, rows: Sequence[int]) -> list[Arrays | Exception]:
    """A batch's outputs as each request's own; InferenceError if an output doesn't have the batch's rows."""
    if len(rows) == 1:
        return [outputs]
    for name, array in outputs.items():
        if array.ndim == 0 or len(array) != sum(rows):
            raise InferenceError(f"output {name!r} has shape {list(array.shape)} for {sum(rows)} rows", place="engine")
    parts: list[Arrays | Exception] = []
    start = 0
    for amount in rows:
        parts.append({name: array[start : start + amount] for name, array in outputs.items()})
        start += amount
    return parts
