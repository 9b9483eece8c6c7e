"""Finds and starts a tritonserver for one model, and watches more of it than it does itself.

Triton says that it is ready while the process of a Python model is dead, and goes on saying so: here such a server
counts as ended. What it leaves in /dev/shm when it is killed is named after us, and removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import onejob
from onejob.core.artifact import Json
from onejob.engines import tether
from onejob.engines.kept import ended, environment
from onejob.engines.triton.client import Client
from onejob.errors import InferenceError, UnavailableError
from onejob.machines import processes

PROGRAM = "tritonserver"
STUB = b"triton_python_backend_stub"
SHARED = Path("/dev/shm")
PREFIX = "onejob_triton_"
LOOK_SECONDS = 0.03
CURE = (
    "`python -m onejob.engines.triton.wheel` installs one (without a GPU, with the Python backend only); or put "
    "NVIDIA's own on PATH."
)
QUIET = (
    "--model-control-mode=explicit",
    "--exit-on-error=false",
    "--exit-timeout-secs=2",
    "--allow-grpc=false",
    "--allow-metrics=false",
    "--http-address=127.0.0.1",
    "--reuse-http-port=true",
    "--http-thread-count=2",
    "--log-info=false",
)


class Server:
    """A Triton that has loaded its model."""

    lost = "lost the process of its Python model"

    def __init__(self, process: subprocess.Popen[bytes], client: Client, reserved: socket.socket, shared: str) -> None:
        self.process = process
        self.client = client
        self._reserved = reserved
        self.lock = threading.Lock()
        """Whose turn it is to use the client."""
        self.useful = False
        self._shared = shared
        self._stubs = [one for one in processes.descendants(process.pid) if _is_stub(one.pid)]
        self._pidfds = [os.pidfd_open(pid) for pid in (process.pid, *(stub.pid for stub in self._stubs))]

    @property
    def descriptors(self) -> Sequence[int]:
        return self._pidfds

    def ask_to_end(self) -> None:
        if self.lock.acquire(blocking=False):  # it would wait for the connection's end
            self.client.close()
            self.lock.release()
        self.process.terminate()

    def release(self) -> None:
        for stub in self._stubs:
            processes.send(stub.pid, stub.start, signal.SIGKILL)
        for pidfd in self._pidfds:
            os.close(pidfd)
        remove_shared(self._shared)
        self._reserved.close()
        with self.lock:
            self.client.close()


def find(named: str = "") -> Path:
    """The server's program: as named, on PATH, or in this Python's environment; UnavailableError if there is none."""
    beside = Path(sys.executable).parent / PROGRAM
    found = shutil.which(named or PROGRAM) or (str(beside) if not named and os.access(beside, os.X_OK) else None)
    if found is None:
        missing = f"{named} is no program" if named else f"there is no {PROGRAM} on PATH"
        raise UnavailableError(missing, place="engine triton", cure=CURE)
    return Path(found)


def backends(program: Path) -> list[str]:
    """The backends that lie where a Triton's lie, beside its bin folder."""
    folder = program.resolve().parent.parent / "backends"
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def start(
    program: Path,
    repository: Path,
    name: str,
    options: Sequence[str],
    threads: int,
    adopt: Callable[[subprocess.Popen[bytes]], None],
) -> Server:
    """Start a server for one model of a repository, and wait until it is there; InferenceError if it can't be."""
    remove_orphans()
    shared, reserved = mine(f"{os.urandom(3).hex()}_"), reserve()
    port = reserved.getsockname()[1]
    command = [
        *(sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), str(program)),
        f"--model-repository={repository}",
        f"--load-model={name}",
        f"--http-port={port}",
        f"--backend-config=python,shm-region-prefix-name={shared}",
        *QUIET,
        *options,
    ]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, env=environment(threads))
    client = Client(port)
    try:
        adopt(process)
        wait(process, client, name)
        return Server(process, client, reserved, shared)
    except BaseException:
        client.close()
        reserved.close()
        process.kill()
        process.wait()
        remove_shared(shared)
        raise


def wait(process: subprocess.Popen[bytes], client: Client, name: str) -> None:
    """Until the model is ready; InferenceError, with Triton's reason, when it never will be."""
    while True:
        if process.poll() is not None:
            raise InferenceError(f"its process {ended(process.returncode)} while it was started", place="Triton")
        with contextlib.suppress(OSError):  # it listens as soon as all that it loads at the start is there, or failed
            _check(client.ask("POST", "/v2/repository/index", {}) or [], name)
            return
        time.sleep(LOOK_SECONDS)


def packages(path: Sequence[str]) -> list[str]:
    """Where Triton's Python finds what it lacks: of a path for modules what isn't Python's own; and where onejob is."""
    library = os.path.dirname(os.__file__)
    ours = [entry for entry in path if os.path.isdir(entry) and (library not in entry or "site-packages" in entry)]
    return list(dict.fromkeys([*ours, str(Path(onejob.__file__).parents[1])]))


def reserve() -> socket.socket:
    """A port that nobody else can take while the socket is open; the server shares it, since it asks to."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.bind(("127.0.0.1", 0))
    return one


# ---- what it leaves, in /dev/shm and among temporary files


def mine(unique: str = "") -> str:
    """Begins the names of what belongs to servers that this process has started."""
    me = processes.read(os.getpid())
    assert me is not None
    return f"{PREFIX}{_namespace()}_{me.pid}_{round(me.start * processes.TICKS)}_{unique}"


def make_folder() -> Path:
    """A temporary folder; if nobody is left to remove it, another process does."""
    return Path(tempfile.mkdtemp(prefix=mine()))


def remove_shared(prefix: str) -> None:
    for path in SHARED.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)


def remove_orphans() -> None:
    """Remove what is ours, and left by a process that has ended."""
    for place in (SHARED, Path(tempfile.gettempdir())):
        for path in place.glob(f"{PREFIX}{_namespace()}_*"):
            pid, start = path.name.removeprefix(PREFIX).split("_")[1:3]
            if processes.alive(int(pid), int(start) / processes.TICKS):
                continue
            with contextlib.suppress(OSError):  # somebody else's, or somebody else was quicker
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _namespace() -> str:
    """The pid namespace: containers may share /dev/shm, and not their pids."""
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _is_stub(pid: int) -> bool:
    try:
        return STUB in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _check(index: Sequence[Mapping[str, Json]], name: str) -> None:
    """InferenceError if the model isn't there, with Triton's reason."""
    models = [model for model in index if model["name"] == name]
    if any(model.get("state") == "READY" for model in models):
        return
    reason = next((str(model["reason"]) for model in models if model.get("reason")), "it can't read the model")
    words, _, _ = reason.partition("\nAt:")  # a traceback
    raise InferenceError(" ".join(words.split()), place="Triton", cure="The log has more.")
