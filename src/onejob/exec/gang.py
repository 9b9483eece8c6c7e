"""The ranks of a task as processes: start them, hear them, end them, and leave nothing of them behind.

Belongs to the shim, which is single-threaded and a child subreaper: whatever a rank starts, however it detaches itself,
stays below the shim and becomes its child when its parent ends. So "no child left" means that nothing is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from onejob.exec.decide import KILLED_CODE, Order
from onejob.exec.folder import MARKER
from onejob.exec.log import Log, RankOutput
from onejob.exec.redact import Redactor
from onejob.machines import processes

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PIECE = 64 << 10
PATIENCE = 10.0
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """From now on orphans below this process become its children, not init's."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class Gang:
    """The processes of one task."""

    def __init__(self, order: Order, work: Path, marker: str, log: Log, environ: Mapping[str, str]) -> None:
        self.order, self.work, self.marker, self.log = order, work, marker, log
        self.environ = environ
        self.pids: dict[int, int] = {}
        """Of the ranks that run: pid -> rank."""
        self.statuses: dict[int, int] = {}
        """Of the ranks that have ended: rank -> wait status."""
        self.selector = selectors.DefaultSelector()
        wake, self.wakeup = socket.socketpair()
        for end in (wake, self.wakeup):
            end.setblocking(False)
        self.selector.register(wake, selectors.EVENT_READ)
        # a signal writes a byte here, so that `wait` returns at once
        signal.set_wakeup_fd(self.wakeup.fileno(), warn_on_full_buffer=False)

    def start(self) -> None:
        """Start every rank; OSError says which command can't be started (those before it run)."""
        store = _listen() if self.order.processes > 1 else None
        redactor = Redactor({name: self.environ.get(name, "") for name in self.order.secrets})
        try:
            for rank in range(self.order.processes):
                self._start_rank(rank, store, redactor)
        finally:
            if store:
                store.close()  # rank 0 alone holds it: when it dies, its companions are refused and not left waiting

    def wait(self, timeout: float) -> dict[int, int]:
        """Copy output into the log until something ends or time is up; {rank: wait status} of ranks that ended."""
        for key, _ in self.selector.select(timeout):
            if isinstance(key.data, RankOutput):
                self._copy(key.fd, key.data)
            else:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, PIECE)
        return self._reap()

    def terminate(self) -> None:
        """Ask the ranks to end; their own children are theirs to end."""
        for pid in self.pids:
            os.kill(pid, signal.SIGTERM)  # not reaped yet, so the pid is still theirs

    def kill(self) -> None:
        """End everything below us, and everything that carries our marker, at once."""
        for process in [*processes.descendants(os.getpid()), *processes.marked(MARKER, self.marker)]:
            processes.send(process.pid, process.start, signal.SIGKILL)

    def clear(self, deadline: float, clock: Callable[[], float]) -> int:
        """End what the ranks left behind: asked at once, killed at the deadline. Gives how many had to be killed."""
        asked: set[tuple[int, float]] = set()
        killed: set[tuple[int, float]] = set()
        give_up = max(deadline, clock()) + PATIENCE
        while left := processes.descendants(os.getpid()):
            if clock() >= give_up:
                self.log.note(f"could not end {', '.join(str(process.pid) for process in left)}: held by the kernel")
                break
            if clock() >= deadline:
                killed |= {(process.pid, process.start) for process in left}
                self.kill()
            for process in left:
                if (process.pid, process.start) not in asked:
                    asked.add((process.pid, process.start))
                    processes.send(process.pid, process.start, signal.SIGTERM)
            self.wait(0.02)
        self._reap()  # what is left are zombies; in many containers nobody else would take them away
        return len(killed)

    def close(self) -> None:
        """Take the last of the output out of the pipes."""
        for key in list(self.selector.get_map().values()):
            if isinstance(key.data, RankOutput):
                while self._copy(key.fd, key.data):
                    pass
                key.data.end()
        self.selector.close()

    def memory(self) -> int:
        """Bytes held by everything that the task started."""
        assert self.order.memory is not None
        return processes.memory(processes.descendants(os.getpid()), self.order.memory)

    def _start_rank(self, rank: int, store: socket.socket | None, redactor: Redactor) -> None:
        environ = {**self.environ, **rank_environ(self.order, rank, self.marker, store)}
        passed: tuple[int, ...] = ()
        if store and rank == 0:
            passed = (store.fileno(),)
            environ["ONEJOB_STORE_FD"] = str(store.fileno())
        reader, writer = os.pipe()
        try:
            process = subprocess.Popen(
                self.order.argv,
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                env=environ,
                cwd=self.work,
                pass_fds=passed,
                preexec_fn=_die_with(os.getpid()),
            )
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        process.returncode = 0  # `_reap` waits for it, not Popen
        self.pids[process.pid] = rank
        os.set_blocking(reader, False)
        prefix = f"[rank {rank}] ".encode() if self.order.processes > 1 else b""
        self.selector.register(reader, selectors.EVENT_READ, RankOutput(self.log, redactor, prefix))

    def _copy(self, descriptor: int, output: RankOutput) -> bool:
        try:
            data = os.read(descriptor, PIECE)
        except BlockingIOError:
            return False
        if data:
            output.feed(data)
            return True
        output.end()
        self.selector.unregister(descriptor)
        os.close(descriptor)
        return False

    def _reap(self) -> dict[int, int]:
        ended = {}
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if (rank := self.pids.pop(pid, None)) is not None:
                    ended[rank] = status
        self.statuses |= ended
        return ended


def rank_environ(order: Order, rank: int, marker: str, store: socket.socket | None) -> dict[str, str]:
    """What a rank is told through its environment."""
    environ = {
        MARKER: marker,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(order.processes),
        "LOCAL_WORLD_SIZE": str(order.processes),
        "MASTER_ADDR": "127.0.0.1",
        "ONEJOB_SECRETS": ",".join(order.secrets),
        # no GPU that it didn't ask for; in the order in which nvidia-smi counts them
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, order.gpu_ids)),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    return environ | ({"MASTER_PORT": str(store.getsockname()[1])} if store else {})


def _listen() -> socket.socket:
    """The gang's meeting place, opened before any rank starts: nobody can take the port in between."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    return listener


def _die_with(parent: int) -> Callable[[], None]:
    def prepare() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we could ask
            os._exit(KILLED_CODE)

    return prepare
