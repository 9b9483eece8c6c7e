"""Dynamic batching: requests that arrive together run together, and nobody waits for company that will not come.

`Batcher` is the asyncio edge of `policy`, shared by all protocols of a replica: one a model. Quick models run on the
loop's own thread, where a hop to another thread would cost more than the inference; as soon as a batch takes longer
than `INLINE_NS`, batches run on one worker thread, so that health and decoding go on while the engine computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain

from onejob.errors import DeadlineError, InferenceError, OnejobError, OverloadedError
from onejob.serve.item import Item
from onejob.serve.policy import Choice, Fit, Limits, choose, due, take
from onejob.serve.rows import Arrays, check_rows, join, split

logger = logging.getLogger(__name__)

INLINE_NS = 1_000_000
LEAST_URGENT = 64
"""Less urgent than that are all the same."""
EXPLORE = 64
RELEARN = 32
"""So many batches between two looks at what size and wait are best."""


Piece = tuple[Item, int, int]
"""A request's rows from (second) until (third), which run in a batch."""


class Batcher:
    """The queue in front of one engine. All methods belong to the loop's thread."""

    def __init__(
        self,
        infer: Callable[[Arrays], Arrays],
        limits: Limits,
        *,
        batchable: bool = True,
        inline: bool = False,
        apart: bool = False,
        fit: Fit | None = None,
        on_batch: Callable[[Sequence[Piece], int, int], None] = lambda pieces, rows, ns: None,
        on_quick: Callable[[list[Item], Arrays, Arrays], None] | None = None,
        on_failure: Callable[[Exception], None] = lambda error: None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.fit = fit or Fit()
        self.choice = choose(self.fit, limits) if fit else Choice(limits.rows, limits.wait_ns)
        self._infer = infer
        self._limits = limits
        self._batchable = batchable
        self._on_batch = on_batch
        self._on_quick = on_quick
        self._on_failure = on_failure
        self._clock = clock
        self._waiting: dict[int, deque[Item]] = {}
        """By priority; the deques are in the order of arrival."""
        self._count = self._rows = self._bytes = 0
        """Requests that wait; their rows that no batch has; their bytes."""
        self._huge: Item | None = None
        """One that waits and is larger than the queue: it had found it empty."""
        self._recent = 1
        self._measured = 0
        self._running: list[Piece] = []
        self._joined: Arrays = {}
        self._busy_since = 0
        self._tick_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._apart = apart
        """Whether batches never run on the loop's thread: the engine is another process, for which one waits."""
        self._thread: ThreadPoolExecutor | None = None if inline and not apart else self._make_thread()

    @property
    def pending(self) -> int:
        """Requests that wait or run."""
        return self._count + sum(stop == item.rows for item, _, stop in self._running)

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return self._count

    @property
    def waiting(self) -> int:
        """Rows that wait."""
        return self._rows

    @property
    def inline(self) -> bool:
        return self._thread is None

    def submit(self, item: Item) -> None:
        """Queue a request; OverloadedError when too much waits already."""
        rows, size, level, most = item.rows, item.size, item.priority, self._limits.queue
        if self._count:
            if self._rows + rows > most and (rows > most or self._others() + rows > most):
                raise OverloadedError(f"{self._rows} rows wait already, of at most {most}", place="queue")
            if self._bytes + size > self._limits.queue_bytes:
                raise OverloadedError(f"{self._bytes >> 20} MiB of requests wait already", place="queue")
        item.queued = self._clock()
        if level > LEAST_URGENT:
            level = LEAST_URGENT
        queue = self._waiting.get(level)
        if queue is None:
            self._waiting[level] = queue = deque()
            self._waiting = dict(sorted(self._waiting.items()))
        queue.append(item)
        if rows > most:
            self._huge = item
        self._count += 1
        self._rows += rows
        self._bytes += size
        # the decision is put off to the end of the loop's round, so that all that has arrived is seen together
        if not self._tick_due and not self._running:
            self._tick_due = True
            self._loop.call_soon(self._tick)

    def _others(self) -> int:
        """Rows that wait, without those of a request that is larger than the queue: it keeps nobody out."""
        return self._rows - (self._huge.rows - self._huge.begun if self._huge is not None else 0)

    def cancel(self, item: Item) -> None:
        """Forget a request whose client has gone; if it runs already, its answer is dropped."""
        item.settled = True
        self._prune()

    def expire(self) -> None:
        """Answer what is past its deadline, whether it waits or the engine holds it; called now and then."""
        now = self._clock()
        late = [item for queue in self._waiting.values() for item in queue if now >= item.deadline]
        late += [item for item, *_ in self._running if now >= item.deadline]
        for item in late:
            self._expire(item, now)
        if late:
            self._prune()

    def stuck_ns(self) -> int:
        """For how long the engine has been computing the present batch; 0 when idle."""
        return self._clock() - self._busy_since if self._busy_since else 0

    def excuse(self, ns: int) -> None:
        """So long the engine could not compute."""
        if self._busy_since:
            self._busy_since += ns

    def overdue(self, least_ns: int, times: float) -> bool:
        """Whether the present batch takes much longer than it should: so many times, and so long at least."""
        if not self._busy_since:
            return False
        rows = sum(stop - start for _, start, stop in self._running)
        return self.stuck_ns() > max(least_ns, times * self.fit.predict(rows))

    def close(self) -> None:
        """Let go of the worker thread, without waiting for an engine that hangs."""
        if self._timer:
            self._timer.cancel()
        if self._thread:
            self._thread.shutdown(wait=False)

    def _make_thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="engine")

    def _expire(self, item: Item, now: int) -> None:
        late = (now - item.received) / 1e9
        item.settle(None, DeadlineError(f"no answer after {late:.1f} s", place="request"), now)

    def _prune(self) -> None:
        """Forget what was settled while it waited."""
        for queue in self._waiting.values():
            for item in [item for item in queue if item.settled]:
                queue.remove(item)
                self._leave(item)

    def _leave(self, item: Item) -> None:
        self._count -= 1
        self._rows -= item.rows - item.begun
        if item is self._huge:
            self._huge = None
        self._bytes -= item.size

    def _poke(self) -> None:
        if not self._tick_due and not self._running:
            self._tick_due = True
            self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._tick_due = False
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._running or not self._count:
            return
        now = self._clock()
        oldest = min(queue[0].queued for queue in self._waiting.values() if queue)
        age, wait = now - oldest, self.choice.wait_ns
        if not due(self._rows, self._count, age, self._recent, self.choice):
            self._timer = self._loop.call_later((wait - age) / 1e9 + 1e-5, self._tick)
            return
        self._recent = self._count
        pieces = self._next(now, self._size())
        if pieces:
            self._start(pieces, now)
        elif self._count:
            self._poke()

    def _size(self) -> int:
        """Most rows of the next batch; now and then twice the best, to learn whether it still is."""
        size = self.choice.size
        return size if self._measured % EXPLORE else min(2 * size, self._limits.rows)

    def _next(self, now: int, size: int) -> list[Piece]:
        """What runs now, taken out of the queue; what is past its deadline is answered, and not computed."""
        queues = [queue for queue in self._waiting.values() if queue]
        items = queues[0] if len(queues) == 1 else list(chain.from_iterable(queues))
        shape = items[0].signature
        if not self._batchable:
            taken = [(0, items[0].rows)]
        elif self._rows <= size and _are_plain(items, shape, now):
            return self._take_all(queues, items)
        else:
            taken = take(((item.rows - item.begun, item.signature) for item in items), size)
        pieces: list[Piece] = []
        ended = 0
        for item, rows in [(items[at], rows) for at, rows in taken]:
            start, stop = item.begun, item.begun + rows
            self._rows -= rows
            item.begun = stop
            ended += stop == item.rows
            if item.deadline > now:
                pieces.append((item, start, stop))
            else:
                self._expire(item, now)
        self._take_out(queues, ended)
        return pieces

    def _take_all(self, queues: Sequence[deque[Item]], items: Sequence[Item]) -> list[Piece]:
        """All that waits: the usual case, so nothing is reckoned one by one."""
        pieces: list[Piece] = [(item, 0, item.rows) for item in items]
        for item in items:
            item.begun = item.rows
        for queue in queues:
            queue.clear()
        self._count = self._rows = self._bytes = 0
        self._huge = None
        return pieces

    def _take_out(self, queues: Sequence[deque[Item]], ended: int) -> None:
        """Out of the queues with the `ended` requests that the engine has been given whole."""
        for queue in queues:
            while queue and queue[0].begun == queue[0].rows:
                self._leave(queue.popleft())
                ended -= 1
        if ended:  # some stand behind others that must wait
            for queue in queues:
                for item in [item for item in queue if item.begun == item.rows]:
                    queue.remove(item)
                    self._leave(item)
        for queue in queues:
            if queue and queue[0].settled:  # expired in the middle of its rows
                self._prune()

    def _start(self, pieces: list[Piece], now: int) -> None:
        self._running, self._busy_since = pieces, now
        for item, start, _ in pieces:
            if not start:
                item.started = now
        if self._thread is None:
            self._finish(pieces, self._compute(pieces))
            return
        future = self._thread.submit(self._compute, pieces)
        future.add_done_callback(lambda done: self._hand_back(pieces, done))

    def _hand_back(self, pieces: list[Piece], done: Future[Arrays | list[Arrays | Exception]]) -> None:
        error = done.exception()
        failed: list[Arrays | Exception] = [InferenceError(words(error), place="engine")] * len(pieces) if error else []
        with contextlib.suppress(RuntimeError):  # the loop was closed while a hung engine came back: nobody waits
            self._loop.call_soon_threadsafe(self._finish, pieces, failed or done.result())

    def _compute(self, pieces: list[Piece]) -> Arrays | list[Arrays | Exception]:
        """The outputs of the whole batch; or each piece's own. If a batch of several fails, each runs alone, so that
        only the culprit fails."""
        try:
            cuts = [None if stop - start == item.rows else (start, stop) for item, start, stop in pieces]
            self._joined = join([item.arrays for item, _, _ in pieces], cuts if any(cuts) else None)
            outputs = self._infer(self._joined)
            check_rows(outputs, sum([stop - start for _, start, stop in pieces]), self._batchable)
            return outputs
        except (Exception, SystemExit) as error:
            error.__traceback__ = None  # its frames know the pieces, which come to know it
            if len(pieces) == 1:
                return [error if isinstance(error, OnejobError) else InferenceError(words(error), place="engine")]
        found: list[Arrays | Exception] = []
        for piece in pieces:
            alone = self._compute([piece])
            found += alone if isinstance(alone, list) else [alone]
        return found

    def _finish(self, pieces: list[Piece], answers: Arrays | list[Arrays | Exception]) -> None:
        now = self._clock()
        took, rows = now - self._busy_since, sum([stop - start for _, start, stop in pieces])
        self._running, self._busy_since = [], 0
        if isinstance(answers, list):
            self._settle(pieces, answers, now)
        elif self._on_quick is not None and _are_quick(pieces):
            self._answer_quick([item for item, _, _ in pieces], answers, now)
        else:
            self._settle(pieces, split(answers, [stop - start for _, start, stop in pieces]), now)
        self._joined = {}
        self._learn(rows, took)
        self._choose_thread(took)
        self._on_batch(pieces, rows, took)
        if self._count:
            self._poke()

    def _answer_quick(self, items: list[Item], outputs: Arrays, now: int) -> None:
        """Have the whole batch answered at once. Whatever goes wrong in that, nobody may be left waiting."""
        assert self._on_quick is not None
        for item in items:
            item.settled = True
        items[0].finished = now
        try:
            self._on_quick(items, self._joined, outputs)
        except Exception as error:
            logger.exception("a batch was not answered")
            for item in items:
                item.settled = False
                self._settle_one(item, None, InferenceError(f"internal error: {error}", place="answer"), now)

    def _settle_one(self, item: Item, outputs: Arrays | None, error: Exception | None, now: int) -> None:
        try:
            item.settle(outputs, error, now)
        except Exception:
            logger.exception("a request was not answered")

    def _choose_thread(self, took: int) -> None:
        """Where the next batches run: on the loop's thread while they are quick, else on a worker; one slow batch, held
        up by a neighbour perhaps, decides nothing."""
        usual = self.fit.predict(self.choice.size)
        if self._thread is None:
            if took > INLINE_NS and usual > INLINE_NS:
                self._thread = self._make_thread()
        elif usual < INLINE_NS / 2 and not self._apart:
            self._thread.shutdown(wait=False)
            self._thread = None

    def _settle(self, pieces: Sequence[Piece], answers: Sequence[Arrays | Exception], now: int) -> None:
        for (item, _, stop), answer in zip(pieces, answers, strict=True):
            if isinstance(answer, Exception):
                self._settle_one(item, None, answer, now)
                self._on_failure(answer)
            elif stop < item.rows:
                item.parts = item.parts or []
                item.parts.append(answer)
            elif item.parts:
                self._settle_one(item, join([*item.parts, answer]), None, now)
            else:
                self._settle_one(item, answer, None, now)
        if any(item.settled and item.begun < item.rows for item, *_ in pieces):
            self._prune()

    def _learn(self, rows: int, took: int) -> None:
        self.fit.add(rows, took)
        self._measured += 1
        if self._measured % RELEARN == 0 or self._measured < RELEARN:
            self.choice = choose(self.fit, self._limits)


def words(error: BaseException) -> str:
    """What an engine's error says, and its kind where it says nothing or isn't meant to be caught."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return text if text and isinstance(error, Exception) else f"{type(error).__name__}: {text}".rstrip(": ")


def _are_plain(items: Iterable[Item], shape: Hashable, now: int) -> bool:
    """Whether all have one shape, and none was begun or is past its deadline."""
    for item in items:  # noqa: SIM110 - a generator would cost as much again, for each request
        if item.signature != shape or item.begun or item.deadline <= now:
            return False
    return True


def _are_quick(pieces: Iterable[Piece]) -> bool:
    for item, start, stop in pieces:  # noqa: SIM110
        if not item.quick or item.settled or stop - start != item.rows:
            return False
    return True
