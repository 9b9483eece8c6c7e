"""What is sent and what must come back: one row for the model, in the v2 protocol's words, in JSON or as bytes.

An answer's numbers are compared with the engine's own before anything is measured: a server that answers quickly and
wrongly would be no peer. Servers without the protocol get the same numbers in the JSON that they take.
"""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from serve.models import Model
from serve.processes import FailedError, Tree

HEAD = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class Message:
    """A POST: where to, and what."""

    path: str
    headers: dict[str, str]
    body: bytes


def row(model: Model) -> np.ndarray[Any, Any]:
    """One row of `x`, the same in every run, with as many digits as measured data have."""
    return np.random.default_rng(7).standard_normal((1, *model.shape)).round(6).astype(np.float32)


def binary(path: str, x: np.ndarray[Any, Any]) -> Message:
    """The tensor as bytes after the JSON, and so the answer."""
    entry = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "parameters": {"binary_data_size": x.nbytes}}
    outputs = [{"name": "y", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": [entry], "outputs": outputs}, separators=(",", ":")).encode()
    return Message(path, {"Content-Type": "application/octet-stream", HEAD: str(len(head))}, head + x.tobytes())


def v2(path: str, x: np.ndarray[Any, Any]) -> Message:
    """All in JSON."""
    data = [float(str(value)) for value in x.ravel()]
    return _json(path, {"inputs": [{"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": data}]})


def nested(path: str, x: np.ndarray[Any, Any]) -> Message:
    """JSON for servers that take an argument `x`, as lists of lists."""
    return _json(path, {"x": np.vectorize(lambda value: float(str(value)), otypes=[object])(x).tolist()})


def expected(folder: Path, model: Model) -> np.ndarray[Any, Any]:
    """What the engine itself answers."""
    session = onnxruntime.InferenceSession(str(model.file(folder)), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["y"], {"x": row(model)})[0])


def ask(port: int, message: Message, timeout: float = 30) -> np.ndarray[Any, Any]:
    """The numbers of one answer; OSError or HTTPException if there is none, ValueError if it tells of an error."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("POST", message.path, message.body, message.headers)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise ValueError(f"{answer.status} {body[:500]!r}")
    length = answer.getheader(HEAD)
    if length is not None:
        return np.frombuffer(body[int(length) :], np.float32)
    return _numbers(json.loads(body))


def first_answer(port: int, message: Message, tree: Tree, patience: float = 120) -> float:
    """Seconds from a server's start to its first answer, asked again and again."""
    while time.perf_counter() - tree.begun < patience:
        try:
            ask(port, message)
        except (OSError, http.client.HTTPException, ValueError):
            tree.check()
            time.sleep(0.005)
        else:
            return time.perf_counter() - tree.begun
    raise FailedError(f"no answer within {patience:.0f} s\n{tree.told()}")


def _json(path: str, value: object) -> Message:
    return Message(path, {"Content-Type": "application/json"}, json.dumps(value, separators=(",", ":")).encode())


def _numbers(answer: Any) -> np.ndarray[Any, Any]:
    if isinstance(answer, dict):
        answer = answer["outputs"][0]["data"] if "outputs" in answer else next(iter(answer.values()))
    return np.asarray(answer, np.float32).ravel()
