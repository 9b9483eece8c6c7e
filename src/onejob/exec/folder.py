"""The work folder as the supervisor and the shim share it: who may start the task, and how it ended.

    shim.json      what to run (written by the supervisor; no secret is in it)
    started.json   {"pid", "start", "host", "boot", "session", "marker", "time"}, or {"revoked": true}
    arrived/<n>    rank n has reached its entry function
    log            what the ranks printed
    exit.json      {"code", "cause", "reason", "rank", "time"}: the last thing that the shim writes
    shim.err       what the shim itself had to say, if it broke

`started.json` is made once and never changed: whoever makes it first, a shim or a supervisor that gives the task up,
has won, however many of them try at the same time.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from onejob.core.artifact import Json, canonical

SHIM = "shim.json"
STARTED = "started.json"
ARRIVED = "arrived"
LOG = "log"
EXIT = "exit.json"
SHIM_ERRORS = "shim.err"

MARKER = "ONEJOB_TASK"
"""Environment variable that every process of a task carries: `<task id>:<nonce>`."""


def claim_start(work: Path, value: Json) -> bool:
    """Make `started.json`, whole and durable, unless it is there already; says whether we made it."""
    aside = work / f".{STARTED}.{os.getpid()}"
    with aside.open("wb") as file:
        file.write(canonical(value))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(aside, work / STARTED)  # unlike rename, link never replaces
    except FileExistsError:
        return False
    finally:
        aside.unlink()
    return True


def read(work: Path, name: str) -> Json:
    """The JSON in one of the folder's files; None if it isn't there (they appear whole, by link or rename)."""
    try:
        return json.loads((work / name).read_bytes())
    except FileNotFoundError:
        return None
