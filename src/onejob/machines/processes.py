"""Processes of this machine, read from /proc: who they are, what is below them, and signals that hit no stranger.

A process is its pid *and* its start time: the kernel hands a pid out again, but not with the same start. The start is
counted in seconds since the machine was booted, so a clock that jumps doesn't touch it. Standard library only: the
shim imports this and must start fast.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
ENDED = frozenset("ZXx")  # zombie, dead: nothing runs any more


@dataclass(frozen=True, slots=True)
class Process:
    """A process as it was a moment ago."""

    pid: int
    parent: int
    session: int
    start: float
    """Seconds since boot."""
    state: str
    """One letter, as in proc(5): R, S, D, T, Z …"""
    rss: int
    """Resident bytes, shared pages included."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED


def read(pid: int) -> Process | None:
    """The process with this pid now, zombies included; None if there is none."""
    try:
        text = (PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return parse_stat(text)


def parse_stat(text: bytes) -> Process:
    """A line of /proc/<pid>/stat; the command's name in it may hold spaces and brackets."""
    pid = int(text[: text.index(b" ")])
    fields = text[text.rindex(b")") + 2 :].split()
    return Process(
        pid=pid,
        state=fields[0].decode(),
        parent=int(fields[1]),
        session=int(fields[3]),
        start=int(fields[19]) / TICKS,
        rss=int(fields[21]) * PAGE,
    )


def everything() -> Iterator[Process]:
    """Every process that can be seen from here."""
    for name in os.listdir(PROC):
        if name.isdigit() and (process := read(int(name))):
            yield process


def start_of(pid: int) -> float | None:
    """When a process started, in seconds since boot; None if there is no such process."""
    process = read(pid)
    return process.start if process else None


def alive(pid: int, start: float) -> bool:
    """Whether exactly this process still runs: not ended, not a zombie, not another one with the same pid."""
    process = read(pid)
    return process is not None and not process.ended and same_start(process.start, start)


def same_start(one: float, other: float) -> bool:
    """Whether two start times are the same tick; they may have travelled through text."""
    return abs(one - other) < 0.5 / TICKS


def boot() -> str:
    """Names what pids mean here: this boot of this kernel, and this pid namespace (a container has its own)."""
    try:
        kernel = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel}/{os.readlink(PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def marked(name: str, value: str) -> list[Process]:
    """Living processes that were started with `name=value` in their environment."""
    wanted = f"{name}={value}".encode()
    found = []
    for process in everything():
        if not process.ended and wanted in environ(process.pid):
            found.append(process)
    return found


def environ(pid: int) -> list[bytes]:
    """The environment that a process was started with; empty for those of other users and for zombies."""
    try:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def descendants(pid: int) -> list[Process]:
    """All processes below this one, zombies left out."""
    children: dict[int, list[Process]] = {}
    for process in everything():
        children.setdefault(process.parent, []).append(process)
    found, below = [], [pid]
    while below:
        for process in children.get(below.pop(), []):
            below.append(process.pid)
            if not process.ended:
                found.append(process)
    return found


def memory(processes: list[Process], limit: int) -> int:
    """Bytes that these processes hold together; exact (shared pages counted once) where it may be above `limit`.

    Adding up resident sizes counts a page as often as it is shared, and is cheap: below the limit that is enough.
    """
    rough = sum(process.rss for process in processes)
    return rough if rough <= limit else sum(_proportional(process) for process in processes)


def killed_for_memory() -> int:
    """How many processes the kernel has killed for want of memory since boot."""
    try:
        lines = (PROC / "vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _proportional(process: Process) -> int:
    try:
        lines = (PROC / str(process.pid) / "smaps_rollup").read_bytes().splitlines()
    except OSError:
        return 0  # it ended meanwhile
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(b"Pss:"))


def send(pid: int, start: float, number: signal.Signals) -> bool:
    """Signal exactly this process; False when it isn't there any more (a reused pid gets nothing)."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return _send_without_descriptor(pid, start, number)
    try:
        # the descriptor holds on to one process, so what is true of it now stays true
        if not alive(pid, start):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def _send_without_descriptor(pid: int, start: float, number: signal.Signals) -> bool:
    if not alive(pid, start):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
