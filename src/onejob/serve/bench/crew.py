"""The processes of a load, and their master: gives them turns, adds up what they measured, reads what the server cost.

Each turn begins at one moment of the machine's clock for all. Ctrl-C ends the turn that goes on, and what it has
measured so far is kept.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import IO

from onejob.core.artifact import Json
from onejob.errors import StepError
from onejob.serve.bench import meter
from onejob.serve.bench.histogram import Histogram
from onejob.serve.bench.outcome import Outcome, Tick, in_ms
from onejob.serve.bench.schedule import Turn
from onejob.serve.bench.target import Target

HEAD_START = 0.05
"""Seconds between the order to go and the moment."""
LAST_WORDS = 5.0
"""Seconds that processes have to say what they measured, after they were stopped."""
SHORTEST = 0.1
"""Seconds of a stretch that is worth a point of a plot."""
READY, TICKED, ENDED = "ready", "tick", "end"
OnTick = Callable[[Sequence[Tick]], object]


class Crew:
    """Started processes; a context manager that leaves none behind."""

    def __init__(self, targets: Sequence[Target], processes: int = 1, cpus: Sequence[int] = ()) -> None:
        self.interrupted = False
        """A person has stopped it."""
        self._targets = targets
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._give_up = 0.0
        self._hands = [Hand(cpus[number % len(cpus)] if cpus else None) for number in range(processes)]
        for hand in self._hands:
            self._selector.register(hand.out, selectors.EVENT_READ, hand)
        for number, target in enumerate(targets):
            self._tell(
                do="target",
                number=number,
                address=target.address.to_json(),
                requests=[base64.b64encode(request).decode() for request in target.requests],
                until_eof=target.until_eof,
            )

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hand in self._hands:
            hand.end()
        self._selector.close()
        os.close(self._wake)
        os.close(self._waker)

    def take(self, turn: Turn, *, timeout: float, seed: int, on_tick: OnTick) -> Outcome:
        """Carry out one turn; `on_tick` is called with all stretches so far whenever one more is known."""
        course = _Course(turn, self._targets[turn.target], len(self._hands), on_tick)
        with self._stoppable():
            for part, hand in enumerate(self._hands):
                hand.tell(
                    do="turn",
                    target=turn.target,
                    load=turn.load.to_json(),
                    warmup=turn.warmup,
                    seconds=turn.seconds,
                    requests=turn.requests,
                    timeout=timeout,
                    part=part,
                    parts=len(self._hands),
                    seed=seed,
                )
            while course.ready < len(self._hands) and self._listen(course, 1.0):
                pass
            if not self.interrupted:
                at = time.monotonic_ns() + round(HEAD_START * 1e9)
                self._tell(do="go", at=at)
                course.begin(at)
            while course.ended < len(self._hands) and self._listen(course, course.wait()):
                pass
        return course.outcome()

    def _listen(self, course: _Course, seconds: float) -> bool:
        """Hear what the processes say; False once a person has stopped it and they have said their last."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                os.read(self._wake, 64)
                if self.interrupted:
                    raise KeyboardInterrupt  # asked twice
                self.interrupted, self._give_up = True, time.monotonic() + LAST_WORDS
                self._tell(do="stop")
                continue
            for message in key.data.hear():
                course.take(message)
        course.read_meter()
        return not self.interrupted or (course.ended < len(self._hands) and time.monotonic() < self._give_up)

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Ctrl-C wakes the master up in the place of ending it, wherever it is: nothing that was said is lost."""
        before = signal.getsignal(signal.SIGINT)
        if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
            yield
            return
        signal.signal(signal.SIGINT, lambda *_: os.write(self._waker, b"!"))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _tell(self, **order: Json) -> None:
        for hand in self._hands:
            hand.tell(**order)


class Hand:
    """One process of the load."""

    def __init__(self, cpu: int | None) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "onejob.serve.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            process_group=0,  # Ctrl-C is the master's; in the same session, so that the scheduler groups them alike
        )
        if cpu is not None:
            os.sched_setaffinity(self._process.pid, {cpu})
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self.out = self._process.stdin, self._process.stdout
        self._rest = b""

    def tell(self, **order: Json) -> None:
        """Give an order."""
        try:
            self._in.write(json.dumps(order, separators=(",", ":")).encode() + b"\n")
            self._in.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def hear(self) -> Iterator[Mapping[str, Json]]:
        """What it has said since; StepError if it has ended."""
        data = os.read(self.out.fileno(), 1 << 20)
        if not data:
            raise self._ended()
        *lines, self._rest = (self._rest + data).split(b"\n")
        yield from map(json.loads, lines)

    def end(self) -> None:
        """End the process: it does so by itself when it hears nobody any more."""
        with contextlib.suppress(BrokenPipeError):
            self._in.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.out.close()
        self._errors.close()

    def _ended(self) -> StepError:
        code = self._process.wait()
        self._errors.seek(0)
        words = self._errors.read()[-2000:].decode(errors="replace").strip().splitlines()
        return StepError(
            f"a process of the load ended with {code}: {words[-1] if words else 'it said nothing'}", place="bench"
        )


class _Course:
    """What the processes have said of one turn, and what the server cost meanwhile."""

    def __init__(self, turn: Turn, target: Target, processes: int, on_tick: OnTick) -> None:
        self.ready = self.ended = 0
        self._turn, self._target, self._processes, self._on_tick = turn, target, processes, on_tick
        self._ticks: list[Tick] = []
        self._half: dict[int, list[Mapping[str, Json]]] = {}
        """By number: stretches that some processes have told of."""
        self._ends: list[Mapping[str, Json]] = []
        self._moments: list[float] = []
        """When the server's processes are still to be read."""
        self._readings: list[meter.Reading | None] = []

    def begin(self, at: int) -> None:
        begin = at / 1e9 + self._turn.warmup
        self._moments = [begin] if self._turn.seconds is None else [begin, begin + self._turn.seconds]

    def wait(self) -> float:
        """Seconds until there is something to read."""
        return max(self._moments[0] - time.monotonic(), 0.0) if self._moments else 1.0

    def read_meter(self) -> None:
        """Read it if it is time."""
        if self._moments and time.monotonic() >= self._moments[0]:
            self._moments.pop(0)
            self._readings.append(meter.read(self._target.address))

    def take(self, message: Mapping[str, Json]) -> None:
        """A line from one of the processes."""
        if message["say"] == READY:
            self.ready += 1
        elif message["say"] == ENDED:
            self.ended += 1
            self._ends.append(message)
            if len(self._readings) == 1 and self.ended == self._processes:
                self._moments = []
                self._readings.append(meter.read(self._target.address))
        elif message["say"] == TICKED:
            self._tick(message)

    def outcome(self) -> Outcome:
        """All that was said, added up."""
        made = Outcome(self._turn.load, processes=self._processes)
        for end in self._ends:
            made.seconds = max(made.seconds, end["seconds"])
            for name in ("latency", "service", "late"):
                getattr(made, name).add(Histogram.from_json(end[name]))
            made.arrived += end["arrived"]
            made.errors.update(end["errors"])
            made.samples = {**end["samples"], **made.samples}
            made.unfinished += end["unfinished"]
            made.sent_bytes += end["sent"]
            made.received_bytes += end["received"]
            made.reconnects += end["reconnects"]
            made.cpu += end["cpu"]
        made.ticks = self._ticks
        before, after = self._readings if len(self._readings) == 2 else (None, None)
        if before and after:
            made.server_cpu = after.since(before)  # None is kept: a part of it is not known
            answers = sum(count for kind, count in made.errors.items() if kind.startswith("status "))
            made.server_arrived = made.arrived + answers
            made.server_processes, made.server_memory = len(after.cpu), after.memory
        return made

    def _tick(self, message: Mapping[str, Json]) -> None:
        told = self._half.setdefault(message["number"], [])
        told.append(message)
        if len(told) < self._processes:
            return
        del self._half[message["number"]]
        latency = Histogram()
        for part in told:
            latency.add(Histogram.from_json(part["latency"]))
        length = max(part["length"] for part in told)
        if length >= SHORTEST:
            arrived, errors = (sum(part[name] for part in told) for name in ("arrived", "errors"))
            p50, p99 = (in_ms(latency.quantile(share)) for share in (0.5, 0.99))
            self._ticks.append(Tick(message["seconds"], length, arrived, errors, p50, p99))
            self._on_tick(self._ticks)
