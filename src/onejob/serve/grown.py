"""Replicas that use more memory than they may: an engine leaks, say. They are replaced before the kernel ends them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onejob.core.artifact import Json
from onejob.machines import processes
from onejob.serve.child import Child

EVERY = 2.0
"""Seconds between two looks."""
PAUSE = 60.0
"""After a replacement: one that needs more from the start is not replaced again and again."""
MIB = 1 << 20


class Scales:
    """Weighs replicas, with the processes of their engines, now and then."""

    def __init__(self) -> None:
        self._due = 0.0

    def why_too_heavy(self, replicas: Iterable[Child], options: Mapping[str, Json], now: float) -> str:
        """Why they must be replaced; empty if none uses more than it may, or it is not yet time to look."""
        limit = options.get("memory")
        if limit is None or now < self._due:
            return ""
        self._due = now + EVERY
        for replica in replicas:
            used = weight(replica.pid, int(limit)) if replica.ready else 0
            if used > limit:
                self._due = now + PAUSE
                return f"replica {replica.pid} uses {used // MIB} MiB, more than the {int(limit) // MIB} MiB it may"
        return ""


def weight(pid: int, limit: int) -> int:
    """Bytes that a process and those below it hold; exact only where it may be above `limit`."""
    root = processes.read(pid)
    return processes.memory([*([root] if root else []), *processes.descendants(pid)], limit)
