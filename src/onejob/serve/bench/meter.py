"""What a server on this machine costs: the CPU time of whoever listens at a port, and of all processes below.

That is the figure which neighbours on the same cores disturb least. The kernel counts it in hundredths of a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from onejob.machines import processes
from onejob.machines.processes import PROC, TICKS
from onejob.serve.bench.target import Address

LISTENING = "0A"


@dataclass(frozen=True, slots=True)
class Reading:
    """The processes of a server at a moment."""

    cpu: Mapping[int, float]
    """Seconds of CPU time of each process since it began, by its pid."""
    memory: int
    """Resident bytes, shared pages counted in each."""

    def since(self, earlier: Reading) -> float | None:
        """Seconds of CPU time since then; None if a process has ended meanwhile: what it took last is not known."""
        if earlier.cpu.keys() - self.cpu.keys():
            return None
        return sum(spent - earlier.cpu.get(pid, 0.0) for pid, spent in self.cpu.items())


def read(address: Address) -> Reading | None:
    """The processes behind an address now; None where they can't be seen: another machine, or another user's."""
    holders = _holders(address)
    if not holders or os.getpid() in holders:
        return None
    below = [process.pid for pid in holders for process in processes.descendants(pid)]
    cpu: dict[int, float] = {}
    memory = 0
    for pid in {*holders, *below}:
        if (found := _spent(pid)) is not None:
            cpu[pid] = found
            process = processes.read(pid)
            memory += process.rss if process else 0
    return Reading(cpu, memory)


def _spent(pid: int) -> float | None:
    try:
        text = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _holders(address: Address) -> set[int]:
    """The processes that have the listening socket open."""
    inodes = set(_unix(address.socket) if address.socket else _tcp(address.port) if address.local else ())
    if not inodes:
        return set()
    wanted = {f"socket:[{inode}]" for inode in inodes}
    return {int(name) for name in os.listdir(PROC) if name.isdigit() and wanted & set(_links(name))}


def _tcp(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        for fields in _table(table):
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _unix(path: str) -> Iterator[str]:
    for fields in _table("unix"):
        if len(fields) > 7 and fields[7] == path and fields[3] == "00010000":  # accepts connections
            yield fields[6]


def _table(name: str) -> list[list[str]]:
    try:
        return [line.split() for line in (PROC / "net" / name).read_text().splitlines()[1:]]
    except OSError:
        return []


def _links(pid: str) -> Iterator[str]:
    folder = PROC / pid / "fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        try:
            yield os.readlink(folder / name)
        except OSError:
            continue
