"""An endpoint of two tiny models, in processes of its own, that anything may be done to: `m` is y = 2 x + 1, `t` gives
text back (the models of `onejob.testing.hostile`).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onejob.serve.repository import scan, told
from onejob.testing.sockets import memory_of


class Endpoint:
    """A host and its replicas."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def state(self) -> dict[str, Any]:
        path = self.folder / "state.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def port(self) -> int:
        return int(self.state["port"])

    @property
    def pids(self) -> list[int]:
        """Of replicas that are ready."""
        return [one["pid"] for one in self.state.get("replicas", ()) if one["ready"]]

    @property
    def memory(self) -> float:
        return sum(memory_of(pid) for pid in self.pids)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def start(self, replicas: int) -> None:
        with (self.folder / "log").open("ab") as log:
            command = [sys.executable, "-m", "onejob.serve.host", str(self.folder)]
            self.process = subprocess.Popen(command, stderr=log)
        while len(self.pids) < replicas:
            time.sleep(0.02)
            if self.process.poll() is not None:
                raise RuntimeError(self.log()[-2000:])

    def stop(self) -> int:
        """End it as a supervisor does; its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def endpoint(replicas: int = 1, **options: Any) -> Iterator[Endpoint]:
    with tempfile.TemporaryDirectory(prefix="onejob-bench-") as name:
        root = Path(name)
        _save(root / "repository" / "m" / "1", _affine())
        _save(root / "repository" / "t" / "1", _echo())
        made = Endpoint(root / "endpoint")
        made.folder.mkdir()
        models = [told(version, made.folder) for version in scan(root / "repository")]
        engine = {"digest": "ab" * 32, "execution": None, "meta": {}, "dir": str(root / "repository")}
        desired = {"name": "tiny", "generation": 1, "host": "127.0.0.1", "port": 0, "engine": engine, "models": models}
        desired |= {"repository": str(root / "repository")}
        desired["options"] = {"replicas": replicas, "threads": 1, "grace": 10, "queue": 4096, **options}
        (made.folder / "desired.json").write_text(json.dumps(desired))
        made.start(replicas)
        try:
            yield made
        finally:
            if made.process is not None and made.process.poll() is None:
                made.stop()


def _affine() -> onnx.GraphProto:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in ("x", "y"))
    constants = [numpy_helper.from_array(np.array(value, np.float32), name) for name, value in (("a", 2.0), ("b", 1.0))]
    nodes = [helper.make_node("Mul", ["x", "a"], ["ax"]), helper.make_node("Add", ["ax", "b"], ["y"])]
    return helper.make_graph(nodes, "affine", [x], [y], constants)


def _echo() -> onnx.GraphProto:
    text, out = (helper.make_tensor_value_info(name, TensorProto.STRING, ["n", 1]) for name in ("text", "text_out"))
    return helper.make_graph([helper.make_node("Identity", ["text"], ["text_out"])], "echo", [text], [out])


def _save(folder: Path, graph: onnx.GraphProto) -> None:
    folder.mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
