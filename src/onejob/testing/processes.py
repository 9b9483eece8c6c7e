"""For tests that start real processes: wait without guessing how long, and prove that nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from onejob.machines import processes

TRACE = "ONEJOB_TEST_TRACE"
PATIENCE = 60.0
T = TypeVar("T")


def wait_until(condition: Callable[[], T | None], what: str, seconds: float = PATIENCE) -> T:
    """The condition's first true value; fails, naming what was waited for, if none comes in a long time."""
    give_up = time.monotonic() + seconds
    while True:
        if value := condition():
            return value
        assert time.monotonic() < give_up, f"waited {seconds:g} s in vain: {what}"
        time.sleep(0.01)


def python(code: str) -> tuple[str, ...]:
    """The command that runs this Python code."""
    return (sys.executable, "-c", textwrap.dedent(code))


@contextmanager
def no_orphans() -> Iterator[str]:
    """Fails if a process that was started inside still lives at the end, however it detached itself; ends it too.

    Everything started inside inherits a variable with a value of its own, which is given.
    """
    before, value = os.environ.get(TRACE), uuid.uuid4().hex
    os.environ[TRACE] = value
    try:
        yield value
        # a shim may live for a moment after it has left its exit.json
        wait_until(lambda: not living(value), "processes were left behind", seconds=10.0)
    finally:
        os.environ.pop(TRACE)
        if before is not None:
            os.environ[TRACE] = before
        for process in living(value):
            processes.send(process.pid, process.start, signal.SIGKILL)


def living(value: str) -> list[processes.Process]:
    """Living processes that carry this trace, ourselves not counted."""
    return [process for process in processes.marked(TRACE, value) if process.pid != os.getpid()]
