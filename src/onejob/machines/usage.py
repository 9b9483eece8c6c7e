"""How busy this machine is, as Triton's `nv_cpu_…` metrics have it: the whole machine, not a container's share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from onejob.machines.inventory import PROC

LEAST_SECONDS = 0.5
"""Between two looks at the counters of CPU time: they tick a hundred times a second."""


@dataclass(frozen=True, slots=True)
class Usage:
    cpu: float
    """The share of all CPUs' time that was used since the look before, 0 to 1."""
    memory: int
    """Bytes that the machine has."""
    used: int
    """Bytes of it that can't be had without swapping."""


class Meter:
    """Tells the use of the CPUs between two looks; may be read from any thread."""

    def __init__(self, proc: Path = PROC, clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._clock = clock
        self._lock = threading.Lock()
        self._looked, (self._idle, self._all) = clock(), _cpu_time(proc)
        self._cpu = 0.0

    def read(self) -> Usage:
        with self._lock:
            now = self._clock()
            if now - self._looked >= LEAST_SECONDS:
                idle, total = _cpu_time(self._proc)
                passed = total - self._all
                self._cpu = min(max(1 - (idle - self._idle) / passed, 0.0), 1.0) if passed > 0 else 0.0
                self._looked, self._idle, self._all = now, idle, total
            memory, free = _memory(self._proc)
            return Usage(self._cpu, memory, memory - free)


def _cpu_time(proc: Path) -> tuple[int, int]:
    """Idle time of all CPUs, and all their time, in ticks; nothing where the system doesn't tell."""
    line = _read(proc / "stat").partition("\n")[0].split()
    if line[:1] != ["cpu"]:
        return 0, 0
    user, nice, system, idle, waiting, *more = (int(ticks) for ticks in line[1:9])  # guests are within user
    return idle + waiting, user + nice + system + idle + waiting + sum(more)


def _memory(proc: Path) -> tuple[int, int]:
    """Bytes that there are, and bytes that can still be had."""
    found = dict(line.partition(":")[::2] for line in _read(proc / "meminfo").splitlines())
    total, free = (int(found.get(name, "0").split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return total, free


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
