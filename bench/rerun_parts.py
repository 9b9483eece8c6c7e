"""The stopwatch inside one `onejob` command, for rerun.py: `python rerun_parts.py FILE BEGAN run JOB ...`

Functions are wrapped with timers that don't count twice: a part's seconds are those in its functions, without those in
another part's functions that they call. BEGAN is when the parent began, by the clock that all processes share.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LEDGER = "onejob.store.ledger:SqlLedger"
PARTS = {
    "job file and plan": ["onejob.loop.commands.run:load_job", "onejob.loop.commands.run:plan_job"],
    "code, packages and sources for the keys": [
        "onejob.loop.commands.run:preflight",
        "onejob.loop.reconcile:key_of",
        "onejob.loop.results:source_artifact",
    ],
    "files of cached outputs looked for": ["onejob.loop.reconcile:missing_outputs"],
    "endpoint": ["onejob.loop.reconcile:want_serving"],
    "views": ["onejob.loop.commands.run:run_view"],
    "waiting between passes": ["time:sleep"],
}
"""Part -> functions whose time it is; all methods of the ledger are a part of their own."""


class Stopwatch:
    """Seconds by part; exactly one part runs at a time."""

    def __init__(self, part: str, began: float) -> None:
        self.seconds: dict[str, float] = {}
        self.stack = [part]
        self.mark = began

    def turn(self) -> float:
        """Book the time since the last turn."""
        now = time.perf_counter()
        self.seconds[self.stack[-1]] = self.seconds.get(self.stack[-1], 0.0) + now - self.mark
        self.mark = now
        return now

    def become(self, part: str) -> None:
        self.turn()
        self.stack[-1] = part

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.turn()
            self.stack.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.turn()
                self.stack.pop()

        return wrapped


def main(file: Path, began: float, command: Sequence[str]) -> None:
    watch = Stopwatch("start of the interpreter", began)
    watch.become("imports")
    cli = importlib.import_module("onejob.cli")
    importlib.import_module(f"onejob.cli.{command[0]}")
    for part, paths in PARTS.items():
        for path in paths:
            wrap(watch, part, path)
    wrap_ledger(watch)
    watch.become("the rest (command line, state machine, output)")
    try:
        cli.main(list(command))
    except SystemExit as end:
        if end.code:
            raise
    finally:
        last = watch.turn()
    file.write_text(json.dumps({**watch.seconds, "last": last}))


def wrap(watch: Stopwatch, part: str, path: str) -> None:
    """Put a timer around one function."""
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    setattr(found, name, watch.timed(part, getattr(found, name)))


def wrap_ledger(watch: Stopwatch) -> None:
    """Put a timer around opening the ledger and around everything that it does."""
    module, _, name = LEDGER.partition(":")
    ledger = getattr(importlib.import_module(module), name)
    for method in dir(ledger):
        if method == "__init__" or (not method.startswith("_") and callable(getattr(ledger, method))):
            setattr(ledger, method, watch.timed("ledger", getattr(ledger, method)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
