"""Runs a user's Python function in a process of its own, so that it can neither block the replica nor take it along.

What it takes and gives is in the file (code.py). A call is one message and its answer (channel.py). The child is
started again when it dies, and a call that it had is an error; those that wait for its return are not.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onejob.core.artifact import Json
from onejob.core.ports import Support
from onejob.core.tensor import DATATYPES, TensorSpec
from onejob.engines import Arrays
from onejob.engines.function.channel import ARRAYS, FAILED, Channel
from onejob.engines.function.code import FILE
from onejob.engines.kept import Kept, ended, environment
from onejob.errors import InferenceError, from_json

WAIT_SECONDS = 10.0
"""How long a call waits for a child that is being started again."""


class NotAskedError(Exception):
    """The child had gone before it was asked: another one may be."""


class Link:
    """A child, and this end of the channel to it."""

    lost = "ended"

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel, signature: Mapping[str, Json]) -> None:
        self.process = process
        self.inputs = _specs(signature["inputs"])
        self.outputs = _specs(signature["outputs"])
        self.joins, self.picky = bool(signature["joins"]), bool(signature["picky"])
        self.example: Arrays | None = None
        self._pidfd = os.pidfd_open(process.pid)
        self.descriptors = (self._pidfd,)
        self._channel = channel
        self._lock = threading.Lock()
        self._calls = 0
        self._ended = False
        self.useful = False

    def ask(self, arrays: Arrays) -> Any:
        """The answer; NotAskedError, or EOFError when the child ended before it answered."""
        with self._lock:
            if self._ended:
                raise NotAskedError
            self._calls += 1
            try:
                self._channel.send(self._calls, arrays)
            except ConnectionError:
                raise NotAskedError from None
            while True:
                kind, call, found = self._channel.receive()
                if call == self._calls:
                    break
            self.useful = True
        if kind == ARRAYS:
            return found
        raise from_json(found)

    def ask_to_end(self) -> None:
        self._channel.shutdown()

    def release(self) -> None:
        self._ended = True
        self._channel.shutdown()  # whoever waits for an answer comes back, also where a grandchild holds the other end
        with self._lock:
            self._channel.close()
            os.close(self._pidfd)


class FunctionModel:
    """A user's model; `infer` may be called from several threads, and they take turns."""

    octets = True
    """BYTES elements are bytes to it, whatever they are: an image as well as text."""

    def __init__(self, start: Callable[[Callable[[subprocess.Popen[bytes]], None]], Link], place: str) -> None:
        self._kept = Kept(start, place)
        self._place = place
        link = self._kept.first()
        self.inputs, self.outputs = link.inputs, link.outputs
        self.joins, self.picky, self.example = link.joins, link.picky, link.example
        self.precision = "as written"
        self._dtypes = {spec.name: np.dtype(DATATYPES[spec.datatype]) for spec in self.inputs}

    def infer(self, arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
        self._check(arrays)
        while True:
            link = self._kept.get(WAIT_SECONDS)
            if (link.inputs, link.outputs) != (self.inputs, self.outputs):
                raise InferenceError("its inputs or outputs are others than when it was opened", place=self._place)
            try:
                found: dict[str, np.ndarray[Any, Any]] = link.ask(arrays)
                return found
            except NotAskedError:
                self._kept.end_of(link)
            except (EOFError, ConnectionError):
                why = self._kept.end_of(link)
                raise InferenceError(f"{why} before it had answered", place=self._place) from None
            except (OSError, TypeError, ValueError) as error:
                raise InferenceError(f"it can't be asked: {error}", place=self._place) from error

    def dead(self) -> str:
        """Why its process isn't there; empty while it is."""
        return self._kept.dead()

    def kill(self, why: str = "") -> None:
        """End its process now, whatever it does; another one takes its place."""
        self._kept.kill(why)

    def close(self) -> None:
        """End the process, after the user's `close`; what it had in memory is free then."""
        self._kept.close()

    def _check(self, arrays: Arrays) -> None:
        if arrays.keys() != self._dtypes.keys():
            wanted = ", ".join(self._dtypes)
            raise InferenceError(f"the inputs are {wanted}, not {', '.join(arrays)}", place=self._place)
        for spec in self.inputs:
            array = arrays[spec.name]
            sizes = zip(array.shape, spec.shape, strict=False)
            if (
                array.dtype != self._dtypes[spec.name]
                or array.ndim != len(spec.shape)
                or any(wanted not in (-1, size) for size, wanted in sizes)
            ):
                raise InferenceError(
                    f"input {spec.name!r} is {array.dtype} {list(array.shape)}, not {spec.datatype} {list(spec.shape)}",
                    place=self._place,
                )


def open_model(folder: Path, meta: Mapping[str, Json], threads: int = 1) -> FunctionModel:
    """Start a process for `model.py` in an artifact's folder, or the file that the option `file` names.

    InferenceError if the file is missing, is no model, or raises while it is loaded.
    """
    file = str((meta.get("options") or {}).get("file", FILE))
    order = {"folder": str(folder.resolve()), "file": file, "threads": threads, "path": [p for p in sys.path if p]}
    order["triton"] = meta.get("python_backend")
    return FunctionModel(lambda adopt: _start(order, adopt), str(folder / file))


def supported() -> Support:
    """Whether this machine has what a function's process needs."""
    if hasattr(os, "memfd_create") and hasattr(os, "pidfd_open"):
        return Support("function", "engine", True, f"Python {platform.python_version()}")
    return Support("function", "engine", False, "needs memfd_create and pidfd_open", "Use Linux 5.3 or newer.")


def _start(order: Mapping[str, Json], adopt: Callable[[subprocess.Popen[bytes]], None]) -> Link:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(here)
    try:
        with there:
            process = _spawn({**order, "socket": there.fileno(), "parent": os.getpid()})
        adopt(process)
        kind, _, words = _hear(channel, process, order["file"])
        if kind == FAILED:
            raise from_json(words)
        link = Link(process, channel, words)
        if words["example"]:
            _, _, arrays = _hear(channel, process, order["file"])
            link.example = {name: array.copy() for name, array in arrays.items()}
        return link
    except BaseException:
        channel.close()
        raise


def _spawn(order: Mapping[str, Json]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "onejob.engines.function.child", json.dumps(order)],
        stdin=subprocess.DEVNULL,
        pass_fds=[order["socket"]],
        env=environment(int(order["threads"])),
    )


def _hear(channel: Channel, process: subprocess.Popen[bytes], place: str) -> tuple[int, int, Any]:
    try:
        return channel.receive()
    except (EOFError, ConnectionError):
        raise InferenceError(f"its process {ended(process.wait())} while it was loaded", place=place) from None


def _specs(table: Json) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(one["name"], one["datatype"], tuple(one["shape"])) for one in table)
