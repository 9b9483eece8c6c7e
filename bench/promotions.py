"""Promotions and rollbacks under steady load: does any request fail, and does each answer name one of the two engines?

    python bench/promotions.py [--promotions 20] [--rollbacks 5] [--connections 8] [--canary 0.2] [--hold 2]
        [--max-slower 1.5]

One endpoint with two replicas serves a small affine model; each new engine multiplies by another number, so an answer
shows which engine computed it. A client asks without pause on kept-alive connections, each request under one of a
thousand keys, and checks every answer: its status, its value, and its x-onejob-engine, which must be that of the
engine that computed it and one of the two that may answer just then. A promotion is a canary that takes all after
`hold`; in the rollbacks some engines fail on every real request, others are slow. In the middle half of each `hold` a
key must stay with one engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from machine import describe
from onnx import TensorProto, helper, numpy_helper

from onejob.core.counters import BUCKETS, Counters, quantile

BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}]}).encode()
KEYS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--promotions", type=int, default=20)
    parser.add_argument("--rollbacks", type=int, default=5)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--canary", type=float, default=0.2)
    parser.add_argument("--hold", type=float, default=2.0)
    parser.add_argument("--max-slower", type=float, default=1.5)
    options = parser.parse_args()
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        endpoint = Endpoint(Path(folder))
        try:
            failed = asyncio.run(play(endpoint, options))
        finally:
            endpoint.stop()
    sys.exit(1 if failed else 0)


async def play(endpoint: Endpoint, options: argparse.Namespace) -> int:
    """Promote and roll back, while the client asks; gives how many requests failed or were wrong."""
    rollout = {"canary": options.canary, "hold": options.hold, "requests": 100, "max_slower": options.max_slower}
    endpoint.want("g1", affine(1.0), rollout)
    endpoint.start()
    await endpoint.until(lambda state: state["state"] == "ready" and all(r["ready"] for r in state["replicas"]))
    client = Client(endpoint.state["port"], options.connections)
    client.expect(g1=2.0)
    await client.begin()
    began = time.monotonic()
    kinds = ["promote"] * options.promotions
    for turn in range(options.rollbacks):  # spread among the promotions
        kinds.insert(
            (turn + 1) * (options.promotions // max(options.rollbacks, 1) + 1) - 1, ("fails", "slow")[turn % 2]
        )
    serving, scale, took = "g1", 1.0, Counter[str]()
    for turn, kind in enumerate(kinds):
        name, begun = f"g{turn + 2}", time.monotonic()
        graph, value = {"promote": (affine(turn + 2.0), turn + 3.0), "fails": (failing(), None), "slow": (slow(), 1.0)}[
            kind
        ]
        client.expect(**{serving: scale + 1.0}, **({name: value} if value is not None else {}))
        generation = endpoint.want(name, graph, rollout)
        await endpoint.until(lambda state, wanted=generation: (state["rollout"] or {}).get("generation") == wanted)
        if kind == "promote":
            await asyncio.sleep(options.hold / 4)  # what the replicas before had begun is answered
            client.watch_keys = True
            await asyncio.sleep(options.hold / 2)
            client.watch_keys = False
            await endpoint.until(lambda state, wanted=generation: state["generation"] == wanted)
            serving, scale = name, turn + 2.0
        else:
            await endpoint.until(lambda state, wanted=generation: state["failed_generation"] == wanted)
        client.by_key.clear()
        took[kind] += 1
        state = endpoint.state
        error = f": {state['error']['message']}" if kind != "promote" else ""
        print(f"  {name} {kind}, {time.monotonic() - begun:.1f} s{error}", flush=True)
        await asyncio.sleep(0.5)
    seconds = time.monotonic() - began
    await client.end()
    report(client, took, seconds)
    return client.failed + client.wrong + client.moved


def report(client: Client, took: Counter[str], seconds: float) -> None:
    answers = sum(client.answers.values())
    print(f"{took['promote']} promotions, {took['fails'] + took['slow']} rollbacks in {seconds:.0f} s")
    print(f"requests {answers}, {answers / seconds:.0f} a second; failed {client.failed}; {client.failures[:3]}")
    print(f"answers with another value or engine than they may have: {client.wrong}")
    print(f"keys that changed their engine within a trial: {client.moved}")
    latency = client.latency
    print("latency at the client, ms: " + ", ".join(f"p{q} {quantile(latency, q / 100):.2f}" for q in (50, 90, 99)))
    print(f"connections opened anew {client.connections}")
    print("answers by engine: " + ", ".join(f"{digest} {count}" for digest, count in client.answers.items()))


class Client:
    """Connections that ask without pause, and check what comes."""

    def __init__(self, port: int, connections: int) -> None:
        self.answers: Counter[str] = Counter()
        self.failed = self.wrong = self.moved = 0
        self.failures: list[str] = []
        self.connections = 0
        self.watch_keys = False
        self.by_key: dict[int, str] = {}
        self.latency = [0] * BUCKETS
        self._port = port
        self._count = connections
        self._expected: dict[str, float] = {}
        self._ending = False
        self._tasks: list[asyncio.Task[None]] = []

    def expect(self, **values: float) -> None:
        """The engines that may answer from now on, and what each answers."""
        self._expected = values

    async def begin(self) -> None:
        self._tasks = [asyncio.create_task(self._ask(start)) for start in range(self._count)]

    async def end(self) -> None:
        self._ending = True
        await asyncio.gather(*self._tasks)

    async def _ask(self, key: int) -> None:
        counters = Counters(latency=self.latency)
        reader = writer = None
        while not self._ending:
            key = (key + self._count) % KEYS
            try:
                if writer is None:
                    reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                    self.connections += 1
                assert reader is not None
                begun = time.perf_counter_ns()
                writer.write(
                    b"POST /v2/models/affine/infer HTTP/1.1\r\nx-request-key: %d\r\nContent-Length: %d\r\n\r\n%b"
                    % (key, len(BODY), BODY)
                )
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
                body = await reader.readexactly(length)
                counters.observe(time.perf_counter_ns() - begun)
                self._check(key, head, body)
                if b"Connection: close" in head:
                    writer.close()
                    writer = None
            except (OSError, asyncio.IncompleteReadError) as error:
                self.failed += 1
                self.failures.append(repr(error))
                writer = None
        if writer is not None:
            writer.close()

    def _check(self, key: int, head: bytes, body: bytes) -> None:
        if not head.startswith(b"HTTP/1.1 200"):
            self.failed += 1
            self.failures.append(body.decode())
            return
        digest = head.partition(b"x-onejob-engine: ")[2].partition(b"\r\n")[0].decode()
        self.answers[digest] += 1
        value = json.loads(body)["outputs"][0]["data"][0]
        if value != self._expected.get(digest):
            self.wrong += 1
            self.failures.append(f"{digest} answered {value}")
        if self.watch_keys:
            self.moved += self.by_key.setdefault(key, digest) != digest


class Endpoint:
    """A host of its own, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._generation = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def state(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self._folder / "state.json").read_bytes()))
        except OSError:
            return {"state": "", "replicas": []}

    def want(self, digest: str, graph: onnx.GraphProto, rollout: dict[str, Any]) -> int:
        """Say what to serve; gives the generation."""
        self._generation += 1
        engine = self._folder / "engines" / digest
        engine.mkdir(parents=True)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        (engine / "model.onnx").write_bytes(model.SerializeToString())
        desired = {
            "name": "affine",
            "generation": self._generation,
            "host": "127.0.0.1",
            "port": 0,
            "options": {"replicas": 2, "grace": 10, "rollout": rollout},
            "engine": {"digest": digest, "meta": {"engine": "onnxruntime"}, "dir": str(engine)},
        }
        aside = self._folder / ".desired"
        aside.write_text(json.dumps(desired))
        aside.replace(self._folder / "desired.json")
        return self._generation

    def start(self) -> None:
        with (self._folder / "log").open("wb") as log:
            command = [sys.executable, "-m", "onejob.serve.host", str(self._folder)]
            self._process = subprocess.Popen(command, stderr=log, env=dict(os.environ))

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(30)

    async def until(self, true: Any, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not true(self.state):
            if time.monotonic() > deadline:
                raise SystemExit(f"never came: {self.state}\n{(self._folder / 'log').read_text()[-2000:]}")
            await asyncio.sleep(0.05)


def affine(scale: float) -> onnx.GraphProto:
    """y = scale * x + 1."""
    constants = {"scale": np.float32(scale), "one": np.float32(1)}
    nodes = [helper.make_node("Mul", ["x", "scale"], ["m"]), helper.make_node("Add", ["m", "one"], ["y"])]
    return _graph(nodes, constants)


def failing() -> onnx.GraphProto:
    """Answers zeros, as in a warm-up, and fails on anything else."""
    nodes = [
        helper.make_node("Cast", ["x"], ["index"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "index"], ["y"]),
    ]
    return _graph(nodes, {"table": np.array([7.0], np.float32)})


def slow() -> onnx.GraphProto:
    """y = x, some milliseconds later."""
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Mul", ["large", "sum"], ["a"]),
        helper.make_node("MatMul", ["a", "a"], ["b"]),
        helper.make_node("MatMul", ["b", "b"], ["c"]),
        helper.make_node("ReduceMean", ["c"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["mean", "zero"], ["nothing"]),
        helper.make_node("Add", ["x", "nothing"], ["y"]),
    ]
    return _graph(nodes, {"large": np.full((600, 600), 1e-3, np.float32), "zero": np.float32(0)})


def _graph(nodes: list[onnx.NodeProto], constants: dict[str, Any]) -> onnx.GraphProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    return helper.make_graph(nodes, "graph", [x], [y], tensors)


if __name__ == "__main__":
    main()
