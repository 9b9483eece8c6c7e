"""Fault points: named lines where a test may kill the process, to prove that dying there loses nothing.

Production code calls `reach("ingest.before_commit")`; it costs one comparison. `testing/faults.py` lists the names and
says how a test arms one. A point `name` may be armed for its n-th passing as `name:n`; a second variable may name a
file that the dying process leaves, so that a test knows that it was reached.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

VARIABLE = "ONEJOB_FAULT"
MARK = "ONEJOB_FAULT_MARK"
_armed = os.environ.get(VARIABLE, "")
_passed: Counter[str] = Counter()


def reach(point: str) -> None:
    """Die by SIGKILL here if the environment has armed this point."""
    if not _armed:
        return
    name, _, nth = _armed.partition(":")
    if name != point:
        return
    _passed[point] += 1
    if _passed[point] >= int(nth or 1):
        if mark := os.environ.get(MARK):
            os.close(os.open(mark, os.O_CREAT | os.O_WRONLY, 0o600))
        os.kill(os.getpid(), signal.SIGKILL)
