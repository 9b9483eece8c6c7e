"""A replica as its host sees it: a child process, and the socket on which it says how it is."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from onejob.core.artifact import Json, canonical
from onejob.errors import OnejobError, from_json

SEND_SECONDS = 5.0
WELL_SECONDS = 1.0
"""A replica whose event loop hasn't said anything for so long is not well: its engine hangs, or it is stopped."""


class Child:
    """One replica process."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._rest = b""
        self.control = control
        self.started = time.time()
        self.started_mono = time.monotonic()
        self.heard = self.started_mono
        self.ready_since: float | None = None
        self.unready = ""
        """Why it said that it isn't ready any more."""
        self.error: OnejobError | None = None
        """Why it could not start."""
        self.faulty = ""
        """What it says is wrong with the engine that it tries."""
        self.revision = 0
        """Of the models that it serves, where it serves a repository."""
        self.inbox: list[Mapping[str, Json]] = []
        """What it has said about models."""
        self.tallies: Mapping[str, Json] | None = None
        """How the requests of both engines went, while it tries one."""

    @classmethod
    def start(cls, folder: Path, told: Mapping[str, Json], listener: socket.socket) -> Child:
        """Start a replica that inherits the listening socket, and tell it what to serve."""
        ours, theirs = socket.socketpair()
        fds = (listener.fileno(), theirs.fileno())
        command = [sys.executable, "-m", "onejob.serve.replica", str(fds[0]), str(fds[1])]
        with theirs:
            # each thread of glibc's would keep memory of its own, and little of that comes back
            env = {"MALLOC_ARENA_MAX": "2", **os.environ}
            process = subprocess.Popen([*command, str(os.getpid())], pass_fds=fds, stdin=subprocess.DEVNULL, env=env)
        ours.sendall(canonical({"folder": str(folder), **told}) + b"\n")
        ours.setblocking(False)
        return cls(process, ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ready(self) -> bool:
        return self.ready_since is not None and not self.unready and not self.ended()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def how_ended(self) -> str:
        code = self._process.returncode
        return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"

    def hear(self) -> bool:
        """Read what it has said; False when it has hung up."""
        while True:
            try:
                piece = self.control.recv(1 << 16)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not piece:
                return False
            self.heard = time.monotonic()
            self._rest += piece
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def send(self, message: Json) -> None:
        """Tell it something; it is gone if it can't hear."""
        data = canonical(message) + b"\n"
        with contextlib.suppress(OSError):
            self.control.setblocking(True)
            self.control.settimeout(SEND_SECONDS)
            try:
                self.control.sendall(data)
            finally:
                self.control.setblocking(False)

    def give(self, sock: socket.socket) -> bool:
        """Hand it a connection; False if it can't take it."""
        try:
            socket.send_fds(self.control, [canonical({"take": 1}) + b"\n"], [sock.fileno()])
        except OSError:
            return False
        return True

    def is_well(self, now: float) -> bool:
        """Whether it is ready and its event loop runs."""
        return self.ready and now - self.heard < WELL_SECONDS

    def excuse(self, seconds: float) -> None:
        """So long nobody could have heard it."""
        self.heard += seconds
        self.started_mono += seconds

    def drain(self, grace: float) -> None:
        """Ask it to take no new connections, finish within `grace`, and end."""
        try:
            self.control.sendall(canonical({"drain": grace}) + b"\n")
        except OSError:
            self.terminate()

    def settle(self, word: str, grace: float) -> None:
        """Tell it which of its two engines goes on."""
        with contextlib.suppress(OSError):  # it ends: its successor is told what goes on
            self.control.sendall(canonical({"settle": word, "grace": grace}) + b"\n")

    def terminate(self) -> None:
        if not self.ended():
            self._process.terminate()

    def kill(self) -> None:
        if not self.ended():
            self._process.kill()

    def _take(self, message: Mapping[str, Json]) -> None:
        if message.get("tallies"):
            self.tallies = message["tallies"]
        if message.get("ready"):
            self.ready_since = time.monotonic()
        elif "unready" in message:
            self.unready = str(message["unready"]) or "not ready"
        elif "faulty" in message:
            self.faulty = str(message["faulty"]) or "the new engine fails"
        elif any(word in message for word in ("ask", "opened", "used")):
            self.inbox.append(message)
        elif "error" in message:
            self.error = from_json(message["error"])
