"""Runs tasks on this machine: a shim for each, detached from the supervisor that started it.

A handle is the task's folder and what its shim said in `started.json`, so every process can go on with a task that
another one started. Nothing about tasks is remembered here but the pids of our own children, which must be reaped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from onejob.core.artifact import Json
from onejob.core.context import write_json
from onejob.core.faults import reach
from onejob.core.ports import Status, Support, Task
from onejob.errors import ConflictError, OnejobError, RankError, StorageFullError, UnavailableError
from onejob.exec import folder
from onejob.machines import inventory, processes

START_LIMIT = 60.0
"""Seconds that a shim may take to say that it is there; it takes 0.1 where nothing else runs."""
FOREIGN_BEAT_LIMIT = 60.0
"""A task on another machine whose shim hasn't touched its folder for this long is gone (it does so every 5 s)."""
SWEEPS = 200


class LocalExecutor:
    """The `Executor` of this machine."""

    def __init__(
        self,
        cpus: float | None = None,
        gpus: Sequence[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`cpus` and `gpus` (indices) say how much of the machine tasks may hold; None: all that it has."""
        self.cpus, self.gpus, self.clock, self.sleep = cpus, gpus, clock, sleep
        self._children: set[int] = set()

    def submit(self, task: Task) -> Json:
        """Start the task, unless it is started already; gives its handle once its shim is there."""
        try:
            task.work.mkdir(parents=True, exist_ok=True)
            _check_same(task)
            if folder.read(task.work, folder.STARTED) is None:
                write_json(task.work / folder.SHIM, _order(task))
                reach("local.before_shim")
                self._children.add(child := _spawn_shim(task))
                reach("local.after_shim")
                return self._wait_for_start(task, child)
        except OSError as error:
            raise _no_start(task, error) from error
        return _started_handle(task)

    def poll(self, handles: Sequence[Json]) -> list[Status]:
        """How each task stands. A task whose shim was killed is `gone`, and so is everything that it had started."""
        self._reap()
        return [status(handle) for handle in handles]

    def cancel(self, handle: Json, *, now: bool = False) -> None:
        """Ask the shim to end the task (`now`: kill it); if the shim is gone, end what is left ourselves."""
        if now and _sight(handle):
            processes.send(handle["pid"], handle["start"], signal.SIGKILL)
            sweep(handle)
            return
        if _sight(handle) is False:
            sweep(handle)
            return
        if _sight(handle) is None:
            raise UnavailableError(
                f"the task runs on {handle['host']!r}, which can't be reached from {socket.gethostname()!r}",
                place=str(handle["dir"]),
                cure="Stop it there.",
            )
        processes.send(handle["pid"], handle["start"], signal.SIGTERM)
        processes.send(handle["pid"], handle["start"], signal.SIGCONT)

    def capacity(self) -> Mapping[str, Json]:
        machine = inventory.machine()
        gpus = [gpu.index for gpu in machine.gpus] if self.gpus is None else list(self.gpus)
        return {"cpus": self.cpus or machine.cpus, "gpus": gpus, "memory": machine.memory}

    def adopt(self, work: Path) -> Json | None:
        """The handle of the task that was started in this folder, whoever did; None if none was."""
        return adopt(work)

    def revoke(self, work: Path) -> bool:
        """Make sure that the task in this folder never starts; False if it has."""
        return revoke(work)

    def supported(self) -> Support:
        """Whether tasks can run here."""
        if sys.platform == "linux" and Path("/proc/self/stat").exists():
            return Support("local", "executor", True, f"{inventory.machine().cpus:g} CPUs")
        return Support(
            "local", "executor", False, "needs Linux with /proc", "Use a Linux machine or a Linux container."
        )

    def _wait_for_start(self, task: Task, child: int) -> Json:
        give_up, pause = self.clock() + START_LIMIT, 0.002
        while True:
            ended = self._ended(child)  # asked before we look: what it has left is there by then
            if folder.read(task.work, folder.STARTED):
                return _started_handle(task)
            if ended is not None or self.clock() >= give_up:
                break
            self.sleep(pause)
            pause = min(pause * 1.5, 0.05)
        if not revoke(task.work):
            return _started_handle(task)
        if ended is None:
            raise RankError(f"its shim did not start within {START_LIMIT:g} s", place=str(task.work))
        if os.WIFSIGNALED(ended):
            raise RankError("its shim was killed before it started", place=str(task.work))
        raise UnavailableError(
            f"the shim did not start: {_last_words(task.work) or 'it said nothing'}",
            place=str(task.work),
            cure=f"See that `{sys.executable} -m onejob.exec.shim` finds the package onejob.",
        )

    def _reap(self) -> None:
        for child in tuple(self._children):
            self._ended(child)

    def _ended(self, child: int) -> int | None:
        """The wait status of a child that has ended, and is reaped by this; None while it runs."""
        try:
            pid, ended = os.waitpid(child, os.WNOHANG)
        except ChildProcessError:
            pid, ended = child, 0  # reaped by somebody else in this process
        if pid == 0:
            return None
        self._children.discard(child)
        return ended


def adopt(work: Path) -> Json | None:
    """The handle of the task that was started in this folder; None if none was, or if it was revoked."""
    started = folder.read(work, folder.STARTED)
    return None if started is None or "revoked" in started else {"dir": str(work.absolute()), **started}


def revoke(work: Path) -> bool:
    """Give up on a task that seems not to have started: True if it never will, False if it has.

    A supervisor that is slow, and not dead as was thought, may be about to start it: so the folder is made if need be.
    """
    work.mkdir(parents=True, exist_ok=True)
    folder.claim_start(work, {"revoked": True, "time": time.time()})
    return "revoked" in folder.read(work, folder.STARTED)


def status(handle: Json) -> Status:
    """How a task stands, seen from any process; ends what a killed shim has left."""
    work = Path(handle["dir"])
    if ended := _exit_status(work):
        return ended
    if _sight(handle) is not False:
        return Status("running")
    if ended := _exit_status(work):  # it ended between the two looks
        return ended
    sweep(handle)
    return Status("gone", reason=_last_words(work) or "its shim was killed, or the machine was restarted")


def sweep(handle: Json) -> None:
    """Kill what a dead shim has left: everything in its session, and everything that carries its marker."""
    if handle["boot"] != processes.boot():
        return
    for _ in range(SWEEPS):
        left = _left_behind(handle)
        if not left:
            return
        for process in left:
            processes.send(process.pid, process.start, signal.SIGKILL)
        time.sleep(0.005)  # the kernel needs a moment to take them away


def _left_behind(handle: Json) -> list[processes.Process]:
    left = processes.marked(folder.MARKER, handle["marker"])
    leader = processes.read(handle["pid"])
    if leader and not processes.same_start(leader.start, handle["start"]):
        return left  # the pid was given to a stranger, so a session of that number is the stranger's
    return left + [p for p in processes.everything() if p.session == handle["pid"] and not p.ended]


def _sight(handle: Json) -> bool | None:
    """Whether a task's shim is alive: True, False, or None where it runs on another machine and is heard of."""
    if handle["boot"] == processes.boot():
        return processes.alive(handle["pid"], handle["start"])
    if handle["host"] == socket.gethostname():
        return False  # this machine was restarted since
    return None if _heard_of(Path(handle["dir"])) else False


def _heard_of(work: Path) -> bool:
    """Whether a shim elsewhere has touched its folder lately, by the clock of the disk that we share."""
    probe = work / f".now.{os.getpid()}"
    try:
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now - (work / folder.STARTED).stat().st_mtime < FOREIGN_BEAT_LIMIT
    except FileNotFoundError:
        return False


def _exit_status(work: Path) -> Status | None:
    ended = folder.read(work, folder.EXIT)
    if ended is None:
        return None
    return Status("exited", code=ended["code"], reason=ended["reason"], rank=ended["rank"], cause=ended["cause"])


def _order(task: Task) -> dict[str, Json]:
    return {
        "id": task.id,
        "argv": list(task.argv),
        "processes": task.processes,
        "gpu_ids": list(task.gpu_ids),
        "memory": task.memory,
        "timeout": task.timeout,
        "grace": task.grace,
        "arrive": task.arrive,
        "secrets": list(task.secrets),
    }


def _started_handle(task: Task) -> Json:
    handle = adopt(task.work)
    if handle is None:
        raise ConflictError("the task was given up before it started", place=str(task.work))
    return handle


def _no_start(task: Task, error: OSError) -> OnejobError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFullError("no space left for the task's folder", place=str(task.work), cure="Free some space.")
    cure = "See that the folder is writable, and that this user may start more processes."
    return UnavailableError(f"can't start the task: {error.strerror or error}", place=str(task.work), cure=cure)


def _check_same(task: Task) -> None:
    known = folder.read(task.work, folder.SHIM)
    if known is not None and known["id"] != task.id:
        raise ConflictError(
            f"the folder belongs to task {known['id']!r}, not to {task.id!r}",
            place=str(task.work),
            cure="Give every task a folder of its own.",
        )


def _spawn_shim(task: Task) -> int:
    """Start the shim in a session of its own, so that no signal meant for the supervisor reaches it."""
    environ = {**os.environ, **task.env}
    errors = os.fspath(task.work / folder.SHIM_ERRORS)
    writing = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        sys.executable,
        # -P: a module in the supervisor's current folder must not stand in for one of Python's own
        [sys.executable, "-P", "-m", "onejob.exec.shim", os.fspath(task.work)],
        environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, errors, writing, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD],
    )


def _last_words(work: Path) -> str:
    """The last line of what a shim that broke had to say."""
    with contextlib.suppress(OSError):
        lines = (work / folder.SHIM_ERRORS).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
    return ""
