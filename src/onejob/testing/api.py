"""A replica without process or socket: an `Api` with models that are plain functions, clients on transports that keep
what is written, and answers taken apart strictly.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onejob.core.tensor import TensorSpec
from onejob.serve.journal import RequestLog
from onejob.serve.model import ServedModel
from onejob.serve.policy import Limits
from onejob.serve.protocols.http import Connection, Room
from onejob.serve.protocols.http_api import Api
from onejob.serve.registry import Registry
from onejob.serve.router import Router
from onejob.serve.service import Identity, Service
from onejob.testing.hostile import MODELS

HIGH_WATER = 64 << 10
Arrays = Mapping[str, np.ndarray[Any, Any]]


class Function:
    """A model that is a plain function of its arrays."""

    precision = "fp32"

    def __init__(self, work: Callable[[Arrays], dict[str, Any]], inputs: Sequence[TensorSpec], outputs: Any) -> None:
        self._work = work
        self.inputs = tuple(inputs)
        self.outputs: tuple[TensorSpec, ...] = tuple(outputs)

    def infer(self, arrays: Arrays) -> dict[str, Any]:
        with np.errstate(all="ignore"):
            return self._work(arrays)

    def close(self) -> None:
        pass


def functions() -> dict[str, Function]:
    """The models that hostile.py's requests are for."""
    specs = {
        model: [TensorSpec(name, datatype, (-1, width)) for name, datatype, width in inputs]
        for model, inputs in MODELS.items()
    }
    outputs = {
        model: [TensorSpec(f"{spec.name}_out", spec.datatype, spec.shape) for spec in specs[model]] for model in specs
    }
    return {
        "m": Function(lambda given: {"y": given["x"] * 2 + 1}, specs["m"], [TensorSpec("y", "FP32", (-1, 2))]),
        "t": Function(lambda given: {"text_out": given["text"]}, specs["t"], outputs["t"]),
        "k": Function(lambda given: {f"{name}_out": array for name, array in given.items()}, specs["k"], outputs["k"]),
    }


class Transport(asyncio.Transport):
    """Keeps what is written; tells its protocol to pause as a socket's would whose client doesn't read."""

    def __init__(self, *, read: bool = True) -> None:
        super().__init__()
        self.protocol: Any = None
        self.sent = bytearray()
        self.closed = self.ended = self.paused = False
        self.read = read
        """Whether the client reads."""

    def write(self, data: Any) -> None:
        assert not self.ended, "written after the end"
        if self.closed:
            return
        self.sent += data
        if not self.read and len(self.sent) > HIGH_WATER:
            self.protocol.pause_writing()

    def write_eof(self) -> None:
        self.ended = True

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        assert not self.paused
        self.paused = True

    def resume_reading(self) -> None:
        assert self.paused
        self.paused = False


class Replica:
    """An `Api` and its connections; needs a running loop."""

    def __init__(self, folder: Path, *, limits: Limits | None = None, models: Mapping[str, Any] | None = None) -> None:
        self.log = RequestLog(folder / "requests")
        self.registry = Registry("d1", "1:1.0", 1)
        self.services: dict[str, Service] = {}
        limits = limits or Limits(rows=8, queue=10_000)
        for name, model in (models or functions()).items():
            identity = Identity(name, "d1", 1, {"engine": "onnxruntime"}, None, "1:1.0")
            self.services[name] = Service(ServedModel(model), identity, limits, self.log, folder / "metrics")
            self.registry.put(name, {"1": Router(self.services[name])})
        self.api = Api(self.registry)
        self.connections: set[Connection] = set()
        self.room = Room()

    def client(self, *, quick: bool = True, read: bool = True) -> Client:
        return Client(self, quick=quick, read=read)

    def close(self) -> None:
        for service in self.services.values():
            service.close()


class Client:
    """One connection. With `quick` off, no request takes the short way."""

    def __init__(self, replica: Replica, *, quick: bool = True, read: bool = True) -> None:
        self.quick = quick
        self.transport = Transport(read=read)
        self.connection = Connection(replica.api, replica.connections, room=replica.room)
        self.transport.protocol = self.connection
        self.connection.connection_made(self.transport)

    async def send(self, pieces: Sequence[bytes]) -> None:
        """Piece after piece, as fast as the server reads."""
        for piece in pieces:
            while self.transport.paused and not self.transport.closed:
                await asyncio.sleep(0)
            if self.transport.closed:
                return
            if not self.quick:
                self.connection.lane = None
            self.connection.data_received(piece)

    async def settle(self, seconds: float = 10.0) -> None:
        """Wait until all that is under way is answered."""
        end = asyncio.get_running_loop().time() + seconds
        rounds = 0
        while self.connection.exchanges and not all(e is self.connection._current for e in self.connection.exchanges):
            rounds += 1
            await asyncio.sleep(0 if rounds < 50 else 0.001)
            is_late = rounds > 1000 and asyncio.get_running_loop().time() > end  # not if the machine was held up
            assert not is_late, f"unanswered: {[e.url for e in self.connection.exchanges]}"

    def leave(self) -> None:
        """Go away, as a socket does."""
        if not self.transport.closed:
            self.connection.eof_received()
        self.transport.closed = True
        self.connection.connection_lost(None)
        self.transport.protocol = None

    def answers(self) -> list[Answer]:
        return take_apart(bytes(self.transport.sent))


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def plain(self) -> tuple[int, dict[str, str], bytes]:
        """Without the request's id, which is its own, and without counts."""
        made = self.headers.get("x-request-id", "")
        rest = {name: value for name, value in self.headers.items() if name != "x-request-id"}
        if self.body.startswith(b'{"model_stats"') or rest["content-type"].startswith("text/plain"):
            return self.status, {**rest, "content-length": ""}, b""
        return self.status, rest, self.body.replace(made.encode("latin-1"), b"ID") if len(made) == 26 else self.body


def take_apart(sent: bytes) -> list[Answer]:
    """Answers on the wire, `100 Continue` left out; AssertionError unless all is as HTTP wants it, to the last byte."""
    found: list[Answer] = []
    while sent:
        head, end, rest = sent.partition(b"\r\n\r\n")
        assert end, f"half an answer: {sent[:200]!r}"
        line, *fields = head.decode("latin-1").split("\r\n")
        assert re.fullmatch(r"HTTP/1\.1 [1-5][0-9][0-9] [A-Za-z -]+", line), line
        status = int(line.split()[1])
        if status == 100:
            assert not fields
            sent = rest
            continue
        headers: dict[str, str] = {}
        for field in fields:
            assert re.fullmatch(r"[A-Za-z-]+: [ -~]*", field), field
            name, value = field.split(": ", 1)
            assert name.lower() not in headers, f"{name} twice"
            headers[name.lower()] = value
        if headers.get("transfer-encoding") == "chunked":
            body, rest = _chunks(rest)
        else:
            length = int(headers["content-length"])
            assert len(rest) >= length, "an answer is cut short"
            body, rest = rest[:length], rest[length:]
        found.append(Answer(status, headers, body))
        sent = rest
    return found


def _chunks(rest: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        size, end, rest = rest.partition(b"\r\n")
        assert end
        assert re.fullmatch(rb"[0-9a-f]+", size), size
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        body, rest = body + rest[:length], rest[length + 2 :]
        if not length:
            return body, rest
