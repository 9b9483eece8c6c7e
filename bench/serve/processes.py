"""A server's processes: started on the cores that they may use, counted together, and ended.

CPU time is that of the whole tree, from the kernel's clock ticks; with children that have ended, as long as their
parent has waited for them. Groups of processes are scheduled as groups here (autogroup), so plain nice values would
not keep neighbours out: `boost` raises the groups themselves, where this process may.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TICK = 1 / os.sysconf("SC_CLK_TCK")
STOP_SECONDS = 30


class FailedError(Exception):
    """A server or the load didn't do what was to be measured; says what it told."""


@dataclass(frozen=True)
class Memory:
    """Of a tree of processes, in MiB."""

    rss: float
    """As `ps` adds it up: what several share counts for each."""
    own: float
    """What they hold that is no file's (anonymous and shared memory), each page once: what grows if something leaks."""


class Tree:
    """A process that was started, and all that it has started."""

    def __init__(self, argv: Sequence[str], cores: str, log: Path, env: Mapping[str, str] | None = None) -> None:
        self.begun = time.perf_counter()
        self.log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                ["taskset", "-c", cores, *argv],
                env=None if env is None else {**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=log.parent,
                start_new_session=True,
            )

    def pids(self) -> list[int]:
        """All that live, the root first."""
        children: dict[int, list[int]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            fields = "".join(_lines(str(path))).rpartition(")")[2].split()
            if fields:
                children.setdefault(int(fields[1]), []).append(int(path.parent.name))
        found = [self._process.pid]
        for pid in found:  # it grows: children of children
            found += children.get(pid, [])
        return found

    def cpu(self) -> float:
        """Seconds of CPU time until now."""
        return sum(map(_cpu, self.pids()))

    def memory(self) -> Memory:
        lines = [line for pid in self.pids() for line in _lines(f"/proc/{pid}/smaps_rollup")]
        sizes = [(line.split()[0], int(line.split()[1])) for line in lines if line.endswith(" kB")]
        own = sum(size for word, size in sizes if word in ("Pss_Anon:", "Pss_Shmem:"))
        return Memory(sum(size for word, size in sizes if word == "Rss:") / 1024, own / 1024)

    def check(self) -> None:
        """FailedError with the end of its log if it has ended."""
        if self._process.poll() is not None:
            raise FailedError(f"{self._process.args!r} ended with {self._process.returncode}\n{self.told()}")

    def told(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:]

    def boost(self) -> bool:
        """Put all of it before its neighbours; False where that is not allowed."""
        done = [boost(pid) for pid in self.pids()]
        return all(done)

    def pause(self) -> None:
        """Let it use no CPU until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """End all of it, and wait; by force what doesn't end."""
        pids = self.pids()
        self.resume()
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._signal(signal.SIGKILL, pids)
        self._process.wait()

    def _signal(self, which: signal.Signals, pids: Sequence[int] = ()) -> None:
        for pid in pids or self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, which)


def boost(pid: int | None = None) -> bool:
    """Put a process's group before its neighbours'; False where that is not allowed."""
    try:
        Path(f"/proc/{pid or 'self'}/autogroup").write_text("-20")
    except OSError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _cpu(pid: int) -> float:
    fields = "".join(_lines(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) * TICK


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []  # it has ended since
