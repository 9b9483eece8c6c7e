"""The shim: one small process between a supervisor and the ranks of a task. `python -m onejob.exec.shim WORKDIR`

It outlives the supervisor that started it, and tells its story in files (exec/folder.py), so that any other supervisor
can go on. It runs in a session of its own; it takes the ranks along when it is killed (PR_SET_PDEATHSIG), and leaves
nothing running when it ends by itself (child subreaper). docs/design/processes.md says how each bad day ends.
Secrets reach it and the ranks through the environment only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType

from onejob.core.context import write_json
from onejob.core.faults import reach
from onejob.exec import decide, folder
from onejob.exec.decide import Order, Verdict
from onejob.exec.gang import Gang, become_subreaper
from onejob.exec.log import Log
from onejob.machines import processes

LONGEST_PAUSE = 0.5
MEMORY_EVERY = 0.25
WEIGHING_SHARE = 20
REPORT_EVERY = 10.0
BEAT_EVERY = 5.0
LEFTOVERS_GRACE = 1.0
"""Seconds for what the ranks leave behind to end by itself (multiprocessing's resource tracker tidies up in them)."""
EXIT_TRIES = 20


def main(argv: list[str]) -> int:
    work = Path(argv[0]).absolute()
    os.chdir("/")  # whatever folder the supervisor was in can be unmounted
    _close_inherited()
    with contextlib.suppress(PermissionError):  # it leads a session, or a shell's process group, already
        os.setsid()
    stop = _catch_stop()  # before anybody can know our pid
    become_subreaper()
    order = Order.from_json(folder.read(work, folder.SHIM))
    marker = f"{order.id}:{os.urandom(8).hex()}"
    reach("shim.before_started")
    if not folder.claim_start(work, _introduce(marker)):
        return 0  # another shim runs the task, or a supervisor has given it up
    reach("shim.after_started")
    log = Log(work / folder.LOG)
    gang = Gang(order, work, marker, log, dict(os.environ))
    verdict = Supervision(order, work, gang, log, stop).run()
    log.close()
    reach("shim.before_exit")
    _write_exit(work, verdict)
    reach("shim.after_exit")
    return 0


class Supervision:
    """From the start of the ranks to the last word on them."""

    def __init__(
        self,
        order: Order,
        work: Path,
        gang: Gang,
        log: Log,
        stop: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.order, self.work, self.gang, self.log, self.stop, self.clock = order, work, gang, log, stop, clock
        self.began = self.beaten = self.weighed = clock()
        self.reported = 0.0
        self.killed_before = processes.killed_for_memory()

    def run(self) -> Verdict:
        verdict = self._start()
        reach("shim.after_ranks")
        while self.gang.pids and verdict is None:
            ended = self.gang.wait(self._pause())
            verdict = self._failed(ended) or self._look()
        deadline = self.clock() + (self.order.grace if self.gang.pids else LEFTOVERS_GRACE)
        if self.gang.pids:
            assert verdict is not None
            self._end_ranks(deadline)
        if killed := self.gang.clear(deadline, self.clock):
            self.log.note(f"killed {killed} processes that were left behind")
        self.gang.close()
        codes = {rank: decide.exit_code(status) for rank, status in self.gang.statuses.items()}
        last = decide.at_the_end(verdict, codes)
        if last.reason:
            self.log.note(last.reason)
        return last

    def _start(self) -> Verdict | None:
        try:
            self.gang.start()
        except OSError as error:
            reason = f"could not start {self.order.argv[0]!r}: {error.strerror or error}"
            return Verdict(decide.NO_START_CODE, "start", reason, len(self.gang.pids))
        return None

    def _failed(self, ended: dict[int, int]) -> Verdict | None:
        verdict = decide.failed(ended, self.order.processes)
        if verdict and verdict.code == decide.KILLED_CODE and processes.killed_for_memory() > self.killed_before:
            return replace(verdict, reason=f"{verdict.reason} while the machine was out of memory")
        return verdict

    def _look(self) -> Verdict | None:
        """What time, memory, the supervisor and the ranks that haven't arrived have to say."""
        now = self.clock()
        if reason := self.stop():
            return Verdict(decide.STOPPED_CODE, "stopped", reason)
        missing = self._missing()
        self._report(missing, now - self.began)
        if verdict := decide.overdue(self.order, now - self.began, missing):
            return verdict
        if now - self.beaten >= BEAT_EVERY:
            self.beaten = now
            if not _beat(self.work):
                return Verdict(decide.STOPPED_CODE, "stopped", "its work folder was removed")
        if self.order.memory is not None and now - self.weighed >= MEMORY_EVERY:
            verdict = decide.too_big(self.order, self.gang.memory())
            # looking through /proc must stay below a twentieth of a core, on a machine with many processes too
            self.weighed = self.clock() + WEIGHING_SHARE * (self.clock() - now)
            return verdict
        return None

    def _missing(self) -> list[int]:
        """Ranks of a gang that run and haven't reached their entry function."""
        if self.order.processes == 1 or self.order.arrive is None:
            return []
        arrived = self.work / folder.ARRIVED
        return [rank for rank in sorted(self.gang.pids.values()) if not (arrived / str(rank)).exists()]

    def _report(self, missing: list[int], elapsed: float) -> None:
        if missing and elapsed - self.reported >= REPORT_EVERY:
            self.reported = elapsed
            self.log.note(f"waiting for {decide.ranks(missing)} (not arrived for {elapsed:.0f} s)")

    def _pause(self) -> float:
        limits = [self.order.timeout, self.order.arrive if self._missing() else None]
        deadlines = [self.began + limit for limit in limits if limit is not None]
        if self.order.memory is not None:
            deadlines.append(self.weighed + MEMORY_EVERY)
        return decide.next_pause(self.clock(), deadlines, LONGEST_PAUSE)

    def _end_ranks(self, deadline: float) -> None:
        self.gang.terminate()
        while self.gang.pids:
            if self.clock() >= deadline:
                self.gang.kill()
            self.gang.wait(decide.next_pause(self.clock(), [max(deadline, self.clock() + 0.02)], LONGEST_PAUSE))


def _close_inherited() -> None:
    """Close what the supervisor's files and sockets may have left open in us."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _catch_stop() -> Callable[[], str]:
    """SIGTERM, SIGINT and SIGHUP ask us to stop; gives a function that says why, or nothing yet."""
    reasons: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        reasons.append(f"was asked to stop ({signal.Signals(number).name})")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only so that it wakes us
    return lambda: reasons[0] if reasons else ""


def _introduce(marker: str) -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "start": processes.start_of(os.getpid()),
        "host": socket.gethostname(),
        "boot": processes.boot(),
        "marker": marker,
        "time": time.time(),
    }


def _beat(work: Path) -> bool:
    """Show observers on other machines, who can't see our pid, that we are there; False if the folder isn't."""
    try:
        os.utime(work / folder.STARTED)
    except FileNotFoundError:
        return False
    except OSError:
        pass  # a disk that is full or read-only for now says nothing about the task
    return True


def _write_exit(work: Path, verdict: Verdict) -> None:
    """The last word; a disk that is full may have room in a moment."""
    for attempt in range(EXIT_TRIES):
        try:
            write_json(work / folder.EXIT, {**asdict(verdict), "time": time.time()})
            return
        except FileNotFoundError:
            return  # the folder was removed: nobody wants to know
        except OSError:
            if attempt == EXIT_TRIES - 1:
                raise
            time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
