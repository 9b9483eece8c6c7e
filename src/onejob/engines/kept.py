"""A process that is kept running, for engines that compute in another one: started again when it ends, ever later.

A thread starts the process and waits for its end, so that nobody need ask for it to be there again; and being its
parent it must live as long as the process (PR_SET_PDEATHSIG is about the thread that started a process).
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from onejob.errors import InferenceError, OnejobError
from onejob.machines import processes

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0
STEADY_SECONDS = 10.0
"""One that has run so long, or has answered, is started again at once."""
CLOSE_SECONDS = 3.0
"""How long it may take to end when it is asked to."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

logger = logging.getLogger(__name__)


class Running(Protocol):
    """A process that is ready."""

    process: subprocess.Popen[bytes]
    lost: str
    """What to say of it when another than itself has ended."""

    @property
    def descriptors(self) -> Sequence[int]:
        """pidfds of the processes that it can't do without, itself included."""

    @property
    def useful(self) -> bool:
        """Whether it has answered anything."""

    def ask_to_end(self) -> None: ...

    def release(self) -> None:
        """It has ended: whoever waits for it must learn so; close what belongs to it."""


R = TypeVar("R", bound=Running)
Start = Callable[[Callable[[subprocess.Popen[bytes]], None]], R]
"""Starts the process, hands it to its argument, and comes back when it is ready; raises when it ends before."""


class Kept(Generic[R]):
    """One process at a time. Every method may be called from any thread."""

    def __init__(self, start: Start[R], place: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._start = start
        self._place = place
        self._clock = clock
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        """The one that is starting or running."""
        self._running: R | None = None
        self._why = "it is being started"
        """Why nothing is running."""
        self._error: OnejobError | None = None
        """Why it could not be started."""
        self._again_at = 0.0
        self._killed_for = ""
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._keep, name=f"keeps {place}", daemon=True)
        self._thread.start()

    def first(self) -> R:
        """The process, once it is ready; if it can't be started, its error, and everything is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._running or self._error or self._closed)
            running, error = self._running, self._error
        if running is not None:
            return running
        self.close()
        raise error or InferenceError("the model is closed", place=self._place)

    def get(self, wait: float) -> R:
        """The process; InferenceError if it isn't there within so many seconds, or can't be."""
        deadline = self._clock() + wait
        with self._changed:
            while self._running is None:
                if self._closed:
                    raise InferenceError("the model is closed", place=self._place)
                left = deadline - self._clock()
                if left <= 0 or self._again_at > deadline:
                    raise InferenceError(self._state(), place=self._place)
                self._changed.wait(left)
            return self._running

    def end_of(self, running: R) -> str:
        """How a process ended that has just been heard of no more; one that lives on is killed."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._running is not running, CLOSE_SECONDS):
                running.process.kill()
                self._changed.wait_for(lambda: self._running is not running, CLOSE_SECONDS)
            return "the model was closed" if self._closed else self._why

    def dead(self) -> str:
        """Why it doesn't run; empty while it does."""
        with self._changed:
            if self._closed:
                return "the model is closed"
            return "" if self._running is not None else self._state()

    def kill(self, why: str = "") -> None:
        """End it now, whatever it does; another one takes its place."""
        with self._changed:
            if self._process is not None and self._process.poll() is None:
                self._killed_for = why
                self._process.kill()

    def close(self) -> None:
        """Ask it to end, and have it ended within `CLOSE_SECONDS`; doing it twice is doing it once."""
        with self._changed:
            self._closed = True
            if self._running is None and self._process is not None:
                self._process.kill()  # it is starting, and hears nothing yet
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
            self._changed.notify_all()
        self._thread.join(2 * CLOSE_SECONDS)

    def _state(self) -> str:
        pause = self._again_at - self._clock()
        return f"{self._why}; it is started again in {pause:.1f} s" if pause > 0 else self._why

    # ---- the thread

    def _keep(self) -> None:
        futile = 0
        """Starts in a row that came to nothing."""
        while not self._closed:
            killed = processes.killed_for_memory()
            try:
                running = self._start(self._adopt)
            except Exception as error:
                self._fail(error)
                futile += 1
            else:
                began = self._clock()
                self._watch(running, killed)
                futile = 0 if running.useful or self._clock() - began > STEADY_SECONDS else futile + 1
            self._rest(pause(futile))
        with self._changed:
            os.close(self._wake)
            self._wake = -1

    def _adopt(self, process: subprocess.Popen[bytes]) -> None:
        with self._changed:
            self._process, self._killed_for = process, ""
            if self._closed:
                process.kill()

    def _fail(self, error: Exception) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        why = error if isinstance(error, OnejobError) else InferenceError(f"it can't be started: {error}")
        with self._changed:
            self._process, self._error, self._why = None, why, str(why)
            self._changed.notify_all()
        if not self._closed:
            logger.warning("%s: %s", self._place, why)

    def _watch(self, running: R, killed: int) -> None:
        with self._changed:
            self._running, self._error, self._again_at = running, None, 0.0
            self._changed.notify_all()
        poller = select.poll()
        for descriptor in (*running.descriptors, self._wake):
            poller.register(descriptor, select.POLLIN)
        poller.poll()
        process = running.process
        if self._closed:
            running.ask_to_end()
            try:
                process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                logger.warning("%s: it didn't end when asked, and is killed", self._place)
        broke = process.poll() is None  # not itself, but another that it can't do without
        process.kill()
        code = process.wait()
        why = running.lost if broke else ended(code)
        if code == -signal.SIGKILL and processes.killed_for_memory() > killed:
            why += " while the machine was out of memory"
        with self._changed:
            self._why = f"its process {why}{f' ({self._killed_for})' if self._killed_for else ''}"
            self._process = self._running = None
            self._changed.notify_all()
        if not self._closed:
            logger.warning("%s: %s", self._place, self._why)
        running.release()

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._again_at = self._clock() + seconds
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed, seconds)


def environment(threads: int) -> dict[str, str]:
    """What numerical libraries read when they are imported; what the user has set stays."""
    return {
        **dict.fromkeys(THREADS, str(threads)),
        **os.environ,
        "PYTHONUNBUFFERED": "1",  # what is printed is in the log at once
        "PYTHONDONTWRITEBYTECODE": "1",  # an artifact's folder stays as it is
    }


def pause(futile: int) -> float:
    """Seconds before the next start, after so many in a row that came to nothing."""
    return min(FIRST_PAUSE * 2.0 ** (futile - 1), LONGEST_PAUSE) if futile else 0.0


def ended(code: int) -> str:
    """A return code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
