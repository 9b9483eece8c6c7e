"""Tiny models and endpoint folders for the serving tests: a host process on a free port, and what to ask it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onejob.testing.sockets import read_answer

DIGEST = "ab" * 32


def save_affine(folder: Path, *, scale: float = 2.0, width: int = 4) -> Path:
    """y = scale * x + 1, a batch of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", width])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", width])
    constants = [
        numpy_helper.from_array(np.array(scale, np.float32), "scale"),
        numpy_helper.from_array(np.array(1.0, np.float32), "one"),
    ]
    nodes = [helper.make_node("Mul", ["x", "scale"], ["m"]), helper.make_node("Add", ["m", "one"], ["y"])]
    save(helper.make_graph(nodes, "affine", [x], [y], constants), folder)
    return folder


def save_texts(folder: Path) -> Path:
    """Text in, the same text and a looked-up number out (row 9 of the table is out of range for `index` >= 3)."""
    folder.mkdir(parents=True, exist_ok=True)
    text = helper.make_tensor_value_info("text", TensorProto.STRING, ["n", 1])
    index = helper.make_tensor_value_info("index", TensorProto.INT64, ["n", 1])
    outputs = [
        helper.make_tensor_value_info("echo", TensorProto.STRING, ["n", 1]),
        helper.make_tensor_value_info("looked_up", TensorProto.FLOAT, ["n", 1]),
    ]
    table = numpy_helper.from_array(np.array([10.0, 20.0, 30.0], np.float32), "table")
    nodes = [
        helper.make_node("Identity", ["text"], ["echo"]),
        helper.make_node("Gather", ["table", "index"], ["looked_up"]),
    ]
    save(helper.make_graph(nodes, "texts", [text, index], outputs, [table]), folder)
    return folder


def save(graph: onnx.GraphProto, folder: Path) -> None:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (folder / "model.onnx").write_bytes(model.SerializeToString())


class Endpoint:
    """A host process and its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def want(
        self, engine: Path, *, generation: int = 1, digest: str = DIGEST, meta: Any = None, **options: Any
    ) -> None:
        files = {"files": options.pop("files")} if "files" in options else {}
        repository = {name: options.pop(name) for name in ("models", "repository") if name in options}
        desired = {
            "name": options.pop("name", "affine"),
            "generation": generation,
            "host": options.pop("host", "127.0.0.1"),
            "port": options.pop("port", 0),
            "project": options.pop("project", None),
            "options": {"replicas": 1, "grace": 5, "batch": {"max": 8, "wait_ms": 2}, **options},
            "engine": {
                "digest": digest,
                "execution": "e1",
                "meta": meta or {"engine": "onnxruntime"},
                "dir": str(engine),
                **files,
            },
            **repository,
        }
        aside = self.folder / ".desired"
        aside.write_text(json.dumps(desired))
        aside.replace(self.folder / "desired.json")

    def start(self, **env: str) -> Endpoint:
        command = [sys.executable, "-m", "onejob.serve.host", str(self.folder)]
        log = (self.folder / "log").open("ab")
        with log:
            self.process = subprocess.Popen(command, stderr=log, env={**os.environ, **env})
        return self

    @property
    def state(self) -> dict[str, Any]:
        path = self.folder / "state.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def port(self) -> int:
        return int(self.state["port"])

    @property
    def pids(self) -> list[int]:
        return [replica["pid"] for replica in self.state["replicas"]]

    def wait(self, until: Callable[[dict[str, Any]], bool], seconds: float = 30) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            state = self.state
            if state and until(state):
                return state
            time.sleep(0.02)
        raise AssertionError(f"never came: {self.state}\n{(self.folder / 'log').read_text()[-3000:]}")

    def ready(self, generation: int = 1) -> Endpoint:
        self.wait(
            lambda state: (
                self.process is not None
                and state["pid"] == self.process.pid
                and state["state"] == "ready"
                and state["generation"] == generation
                and state["replicas"]
                and all(r["ready"] for r in state["replicas"])
            )
        )
        return self

    def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)


@contextlib.contextmanager
def endpoint(folder: Path) -> Iterator[Endpoint]:
    made = Endpoint(folder)
    try:
        yield made
    finally:
        if made.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                made.process.send_signal(signal.SIGTERM)
                made.process.wait(10)
            if made.process.poll() is None:
                made.process.kill()
                made.process.wait(10)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie doesn't)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never came"
        time.sleep(0.02)


class Askers:
    """Clients that ask until their connections are refused, as those of an endpoint that is being stopped are."""

    def __init__(self, port: int, *, clients: int, keeps: bool = True, model: str = "affine") -> None:
        """Each keeps its connection until an answer says `close`; or makes one for each request."""
        self.failed: list[str] = []
        self._port, self._keeps, self._path = port, keeps, f"/v2/models/{model}/infer".encode()
        self._answered = [0] * clients
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(clients)]

    def __enter__(self) -> Askers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive(), "a client still waits"

    def wait(self, least: int) -> None:
        """Until each has so many answers."""
        wait_for(lambda: min(self._answered) > least)

    def _ask(self, number: int) -> None:
        while True:
            try:
                sock = socket.create_connection(("127.0.0.1", self._port), timeout=20)
            except OSError:
                return
            with sock:
                if not self._ask_until_told(sock, number):
                    return

    def _ask_until_told(self, sock: socket.socket, number: int) -> bool:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}
        body = json.dumps({"inputs": [tensor]}).encode()
        request = b"POST %b HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (self._path, len(body), body)
        while True:
            try:
                sock.sendall(request)
                answer = read_answer(sock)
                assert answer.status == 200
            except Exception as error:
                self.failed.append(repr(error))
                return False
            self._answered[number] += 1
            if not self._keeps or answer.headers.get("connection") == "close":
                return True
