"""An endpoint's folder: where its files lie, and how they are replaced. The host and the replicas share it; see
docs/serve.md.

    desired.json          what should be served (written by the loop)
    state.json            what is (written by the host)
    host.lock             held by the one host of this folder
    rollout.json          what serves, or was gone back to (written by the host)
    versions.json         the number of each engine that came to be served: the version of its model
    models.json           the models of a repository, with what was loaded and unloaded since
    models/<digest>/      their files
    port.json             the port, so that it stays when the host is started again
    requests/*.jsonl      a line for each request that was answered
    metrics/*.json        counters: see core/counters.py
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

from onejob.core.artifact import Json, canonical
from onejob.errors import ConflictError, NotFoundError, StorageFullError

DESIRED = "desired.json"
STATE = "state.json"
LOCK = "host.lock"
PORT = "port.json"
ROLLOUT = "rollout.json"
VERSIONS = "versions.json"
SHADOW = "shadow"
"""Where the answers to copies are captured."""
REQUESTS = "requests"
METRICS = "metrics"


def read_json(path: Path) -> dict[str, Json] | None:
    """A JSON object, or None if the file isn't there or holds something else."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def replace_json(path: Path, value: Json) -> None:
    """Write aside, then rename; without fsync, for what is soon written again (core.context.write_json has it)."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(canonical(value))
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def take_lock(folder: Path) -> int:
    """The lock of the folder's one host, held until the process ends; ConflictError if another has it."""
    try:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise StorageFullError("no space left", place=str(folder)) from None
        raise NotFoundError(f"is no endpoint's folder: {error.strerror}", place=str(folder)) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        pid = (read_json(folder / STATE) or {}).get("pid")
        raise ConflictError(
            f"is served already, by process {pid}", place=str(folder), cure="Stop that one first."
        ) from None
    return file
