"""What capture costs: two endpoints of the same model, one with [monitor] and one without, asked by turns.

    python bench/capture.py [--pairs 15] [--requests 2000]

The model has the shape of the flights' (6 categories, 12 numbers) and the family's own encoding; its graph is small, so
that the request's path and not the engine is what is measured. The endpoints are asked by turns, a hundred requests
each, so that what else the machine does meets both alike; a few thousand such requests are a pair, which gives one
ratio. CPU time is that of all threads of a replica, from the kernel, until capture has written all; requests/s are
those of one client with four connections, which shares the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
from machine import describe
from onnx import TensorProto, helper, numpy_helper

from onejob.families.tabular.encode import Category, Encoding, Label, Number
from onejob.monitor.collect import counted

CATEGORIES, NUMBERS, CONNECTIONS = 6, 12, 4
COLUMNS = {"label": "late", "time": "departs", "id": "flight_id"}
SLICE = 100
SETTLE = 1.2
"""Seconds after a pair in which capture writes what it has: more than two flushes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument(
        "--requests", type=int, default=4000, help="in each pair; a quarter where a request has many rows"
    )
    options = parser.parse_args()
    print(f"{describe()}, nanoarrow {version('nanoarrow')}")
    kinds: dict[str, Callable[[str], bytes]] = {
        "1 record a request, JSON": lambda name: predict(name, 1),
        "1 record, without time and key": lambda name: predict(name, 1, told=False),
        "16 records a request, JSON": lambda name: predict(name, 16),
        "64 rows a request, binary": lambda name: infer(name, 64),
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        engine = model(Path(folder) / "engine")
        plain = stack.enter_context(endpoint(Path(folder) / "plain", engine, {}))
        capturing = stack.enter_context(endpoint(Path(folder) / "capturing", engine, {"capture": {"reserve": 1}}))
        for title, message in kinds.items():
            rows = 1 if title.startswith("1 ") else int(title.split()[0])
            compare(
                title,
                plain,
                capturing,
                message("model"),
                options.pairs,
                options.requests if rows == 1 else options.requests // 4,
            )
        told = counted(Path(folder) / "capturing")
        print({name: count for name, count in told.items() if name.startswith("capture") or name == "rows"})


def compare(title: str, plain: Endpoint, capturing: Endpoint, message: bytes, pairs: int, requests: int) -> None:
    """Print the medians of both, and of the ratios of the pairs with their middle half."""
    both = (plain, capturing)
    cpu: list[list[float]] = []
    rate: list[list[float]] = []
    for turn in range(-1, pairs):  # the first warms up
        took, before = dict.fromkeys(both, 0.0), [one.cpu() for one in both]
        for _ in range(requests // SLICE):
            for one in both if turn % 2 else both[::-1]:
                took[one] += one.ask(message, SLICE)
        time.sleep(SETTLE)
        if turn >= 0:
            asked = requests // SLICE * SLICE
            cpu.append([(one.cpu() - was) / asked * 1e6 for one, was in zip(both, before, strict=True)])
            rate.append([asked / took[one] for one in both])
    print(f"{title} ({pairs} pairs of {requests} requests)")
    for name, measured, form in (("CPU us/request", cpu, ".1f"), ("requests/s", rate, ".0f")):
        without, with_ = (statistics.median(side) for side in zip(*measured, strict=True))
        low, middle, high = statistics.quantiles([b / a for a, b in measured], n=4)
        ratio = f"ratio {middle:.3f} ({low:.3f} to {high:.3f})"
        print(f"  {name:15} without {without:{form}}, with {with_:{form}}, {ratio}", flush=True)


class Endpoint:
    """A running endpoint with one replica."""

    def __init__(self, folder: Path) -> None:
        state = json.loads((folder / "state.json").read_bytes())
        self._pid = state["replicas"][0]["pid"]
        self._socks = [socket.create_connection(("127.0.0.1", state["port"])) for _ in range(CONNECTIONS)]

    def ask(self, message: bytes, requests: int) -> float:
        """Seconds that so many requests take."""
        begun = time.perf_counter()
        for _ in range(requests // CONNECTIONS):
            for sock in self._socks:
                sock.sendall(message)
            for sock in self._socks:
                _read_answer(sock)
        return time.perf_counter() - begun

    def cpu(self) -> float:
        """Seconds that all threads of the replica have run, from the kernel's nanoseconds."""
        tasks = Path(f"/proc/{self._pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def _read_answer(sock: socket.socket) -> None:
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(1 << 20)
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), data[:500]
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += sock.recv(1 << 20)


@contextmanager
def endpoint(folder: Path, engine: Path, monitor: dict[str, object]) -> Iterator[Endpoint]:
    """A host and its replica, until they are stopped."""
    folder.mkdir()
    meta = {"engine": "onnxruntime", "family": "onejob.families.tabular", "columns": COLUMNS}
    options = {"replicas": 1, "monitor": monitor, "batch": {"max": 64, "wait_ms": 2}}
    served = {"digest": "ab" * 32, "execution": None, "meta": meta, "dir": str(engine)}
    desired = {"name": "model", "generation": 1, "host": "127.0.0.1", "port": 0, "options": options, "engine": served}
    (folder / "desired.json").write_text(json.dumps(desired))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "onejob.serve.host", str(folder)], stderr=log)
    try:
        while not (folder / "state.json").exists() or b'"ready":true' not in (folder / "state.json").read_bytes():
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        yield Endpoint(folder)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def model(folder: Path) -> Path:
    """One layer over the encoded columns, and the encoding."""
    folder.mkdir()
    categories = tuple(Category(f"c{n}", tuple(f"v{v:03d}" for v in range(100))) for n in range(CATEGORIES))
    numbers = tuple(Number(f"n{n}", 10.0, 3.0, nulls=n % 2 == 0) for n in range(NUMBERS))
    encoding = Encoding(Label("late", "binary"), categories, numbers)
    (folder / "encoding.json").write_text(json.dumps(encoding.to_json()))
    width = encoding.features[1].shape[1] + CATEGORIES
    inputs = [
        helper.make_tensor_value_info("categories", TensorProto.INT64, ["n", CATEGORIES]),
        helper.make_tensor_value_info("numbers", TensorProto.FLOAT, ["n", width - CATEGORIES]),
    ]
    weights = numpy_helper.from_array(np.full((width, 1), 0.01, np.float32), "w")
    nodes = [
        helper.make_node("Cast", ["categories"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Concat", ["floats", "numbers"], ["all"], axis=1),
        helper.make_node("MatMul", ["all", "w"], ["logit"]),
    ]
    output = helper.make_tensor_value_info("logit", TensorProto.FLOAT, ["n", 1])
    graph = helper.make_graph(nodes, "model", inputs, [output], [weights])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(made, str(folder / "model.onnx"))
    return folder


def predict(name: str, rows: int, *, told: bool = True) -> bytes:
    """A v1 request."""
    columns = {f"c{n}": f"v{n:03d}" for n in range(CATEGORIES)} | {f"n{n}": 7.5 + n for n in range(NUMBERS)}
    extra = {"departs": "2013-03-01T08:15:00-05:00", "flight_id": "UA1545-EWR-2013-03-01"} if told else {}
    body = json.dumps({"instances": [{**columns, **extra}] * rows}).encode()
    return _post(f"/v1/models/{name}:predict", body)


def infer(name: str, rows: int) -> bytes:
    """A v2 request with binary tensors."""
    parts = [(f"c{n}", "BYTES", b"\4\0\0\0v001" * rows) for n in range(CATEGORIES)]
    parts += [(f"n{n}", "FP64", np.full(rows, 7.5 + n).tobytes()) for n in range(NUMBERS)]
    parts += [("flight_id", "INT64", np.arange(rows).tobytes()), ("departs", "INT64", np.arange(rows).tobytes())]
    entries = [
        {"name": one, "datatype": kind, "shape": [rows, 1], "parameters": {"binary_data_size": len(data)}}
        for one, kind, data in parts
    ]
    head = json.dumps({"inputs": entries, "parameters": {"binary_data_output": True}}).encode()
    length = f"Inference-Header-Content-Length: {len(head)}\r\n"
    return _post(f"/v2/models/{name}/infer", head + b"".join(data for _, _, data in parts), length)


def _post(path: str, body: bytes, headers: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
