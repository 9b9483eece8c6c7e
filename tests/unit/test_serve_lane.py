"""The short way of a request that looks like the last one: answers, counts and log are those of the long way."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_serve_http import Doubler, Transport

from onejob.monitor.capture import read_traffic
from onejob.monitor.requests import find_request
from onejob.serve.capture import Capture, Rules, Signature
from onejob.serve.identify import Roles
from onejob.serve.journal import RequestLog
from onejob.serve.model import ServedModel
from onejob.serve.policy import Limits
from onejob.serve.protocols.http import Connection
from onejob.serve.protocols.http_api import Api
from onejob.serve.protocols.lane import Lane, Quick
from onejob.serve.registry import Registry
from onejob.serve.router import Router
from onejob.serve.service import Identity, Recorders, Service
from onejob.serve.spool import sealed_in


class Counting(Doubler):
    """Keeps the rows of its batches."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def infer(self, arrays: Any) -> dict[str, Any]:
        self.sizes.append(len(arrays["x"]))
        return super().infer(arrays)


class Server:
    """One engine behind an Api, and clients on fake transports."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.folder = folder
        self.engine = Counting()
        self.log = RequestLog(folder / "requests")
        self.service = self._service("d1", self.engine, limits)
        self.router = Router(self.service)
        self.registry = Registry("d1", "1:1.0", 1)
        self.registry.put("m", {"1": self.router})
        self.api = Api(self.registry)
        self.connections: set[Connection] = set()

    def _service(self, digest: str, engine: Any, limits: Any) -> Service:
        identity = Identity("m", digest, 1, {"engine": "onnxruntime"}, None, "1:1.0")
        return Service(
            ServedModel(engine), identity, Limits(**{"rows": 8, "queue": 8, **limits}), self.log, self.folder
        )

    def client(self) -> Client:
        return Client(self)


class Client:
    def __init__(self, server: Server) -> None:
        self.transport = Transport()
        self.connection = Connection(server.api, server.connections)
        self.connection.connection_made(self.transport)

    async def ask(self, data: bytes, answers: int = 1) -> list[tuple[int, dict[str, str], bytes]]:
        self.transport.sent = b""
        self.connection.data_received(data)
        return await self.answers(answers)

    async def answers(self, amount: int) -> list[tuple[int, dict[str, str], bytes]]:
        for turn in range(10_000):
            if len(found := parsed(self.transport.sent)) >= amount:
                return found
            await asyncio.sleep(0 if turn < 200 else 0.001)  # on a busy machine the engine moves to a thread
        raise AssertionError(f"no {amount} answers: {self.transport.sent!r}")


def parsed(sent: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    found = []
    while b"\r\n\r\n" in sent:
        head, _, rest = sent.partition(b"\r\n\r\n")
        line, *fields = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (field.split(": ", 1) for field in fields)}
        length = int(headers["content-length"])
        if len(rest) < length:
            break
        found.append((int(line.split()[1]), headers, rest[:length]))
        sent = rest[length:]
    return found


def request(*values: float, rows: int = 1, extra: str = "", **more: Any) -> bytes:
    data = np.array(values, "<f4").tobytes()
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, len(values) // rows]}
    tensor["parameters"] = {"binary_data_size": len(data)}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}, **more}).encode()
    lines = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {len(head) + len(data)}\r\n{extra}"
    return f"{lines}Inference-Header-Content-Length: {len(head)}\r\n\r\n".encode() + head + data


def values_of(answer: tuple[int, dict[str, str], bytes]) -> list[float]:
    status, headers, body = answer
    assert status == 200, body
    length = int(headers["inference-header-content-length"])
    told = json.loads(body[:length])
    assert told["parameters"]["request_id"] == headers["x-request-id"]
    (output,) = told["outputs"]
    assert output["parameters"]["binary_data_size"] == len(body) - length
    found: list[float] = np.frombuffer(body[length:], "<f4").reshape(output["shape"]).reshape(-1).tolist()
    return found


def play(folder: Path, work: Callable[[Server], Awaitable[None]], **limits: Any) -> Server:
    async def run() -> Server:
        server = Server(folder, **limits)
        await work(server)
        server.service.batcher.close()
        return server

    return asyncio.run(run())


def shape(answer: tuple[int, dict[str, str], bytes]) -> Any:
    """An answer without what belongs to its request alone."""
    status, headers, body = answer
    name = headers.pop("x-request-id")
    return status, list(headers), body.replace(name.encode(), b"ID")


def test_the_second_request_of_a_kind_takes_the_short_way_and_is_answered_alike(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        client = server.client()
        (long,) = await client.ask(request(1, 2))
        assert isinstance(client.connection.lane, Lane)
        (short,) = await client.ask(request(1, 2))
        assert long[1]["x-request-id"] != short[1]["x-request-id"]
        assert values_of(short) == [2, 4]
        assert shape(long) == shape(short)
        (other,) = await client.ask(request(5, 7))
        assert values_of(other) == [10, 14]

    server = play(tmp_path, work)
    assert server.service.counters.get("success") == 3
    assert server.service.counters.get("rows") == 3
    assert sum(server.service.counters.latency) == 3


def test_each_of_a_batch_gets_its_own_answer(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        clients = [server.client() for _ in range(6)]
        for client in clients:
            await client.ask(request(0, 0))
        assert len({id(client.connection.lane) for client in clients}) == 1, "what was learnt is shared"
        server.engine.sizes.clear()
        for number, client in enumerate(clients):
            client.transport.sent = b""
            client.connection.data_received(request(number, 10 * number))
        found = [(await client.answers(1))[0] for client in clients]
        assert server.engine.sizes == [6]
        assert [values_of(answer) for answer in found] == [[2.0 * n, 20.0 * n] for n in range(6)]
        assert len({answer[1]["x-request-id"] for answer in found}) == 6

    server = play(tmp_path, work)
    assert server.service.counters.values["success"] == 12
    assert server.service.counters.values["executions"] == 7


def test_requests_of_several_rows_and_of_other_kinds_share_a_batch(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        one, two, plain = server.client(), server.client(), server.client()
        await one.ask(request(0, 0))
        await two.ask(request(0, 0, 0, 0, rows=2))
        server.engine.sizes.clear()
        for client in (one, two, plain):
            client.transport.sent = b""
        one.connection.data_received(request(1, 2))
        two.connection.data_received(request(3, 4, 5, 6, rows=2))
        plain.connection.data_received(request(7, 8, id="mine"))  # the long way
        assert values_of((await one.answers(1))[0]) == [2, 4]
        assert values_of((await two.answers(1))[0]) == [6, 8, 10, 12]
        assert values_of((await plain.answers(1))[0]) == [14, 16]
        assert server.engine.sizes == [4]

    play(tmp_path, work)


@pytest.mark.parametrize("step", [1, 50, 400])
def test_a_request_that_comes_in_pieces_is_answered_all_the_same(tmp_path: Path, step: int) -> None:
    async def work(server: Server) -> None:
        client = server.client()
        await client.ask(request(1, 2))
        client.transport.sent = b""
        data = request(3, 4)
        for start in range(0, len(data), step):
            client.connection.data_received(data[start : start + step])
        assert values_of((await client.answers(1))[0]) == [6, 8]
        assert values_of((await client.ask(request(5, 6)))[0]) == [10, 12]

    play(tmp_path, work)


def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        client = server.client()
        await client.ask(request(1, 2))
        client.transport.sent = b""
        client.connection.data_received(request(3, 4))
        client.connection.data_received(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
        client.connection.data_received(request(5, 6))
        first, second, third = await client.answers(3)
        assert values_of(first) == [6, 8]
        assert second[2] == b'{"live":true}'
        assert values_of(third) == [10, 12]
        both = await client.ask(request(7, 8) + request(9, 10), answers=2)
        assert [values_of(answer) for answer in both] == [[14, 16], [18, 20]]

    play(tmp_path, work)


def test_whatever_differs_takes_the_long_way(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        client = server.client()
        await client.ask(request(1, 2))
        (named,) = await client.ask(request(1, 2, extra="x-request-id: mine\r\n"))
        assert named[1]["x-request-id"] == "mine"
        (wrong,) = await client.ask(request(1, 2).replace(b'"FP32"', b'"FP64"'))
        assert wrong[0] == 400
        (unknown,) = await client.ask(request(1, 2).replace(b"/m/", b"/n/"))
        assert unknown[0] == 404
        (short,) = await client.ask(request(1, 2).replace(b"Length: 8", b"Length: 8"))
        assert values_of(short) == [2, 4]

    play(tmp_path, work)


def test_when_another_engine_serves_the_short_way_leads_to_it(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        client = server.client()
        await client.ask(request(1, 2))
        (before,) = await client.ask(request(1, 2))
        new = server._service("d2", Doubler(), {})
        server.router.main = new
        for _ in range(2):
            (after,) = await client.ask(request(1, 2))
            assert after[1]["x-onejob-engine"] == "d2"
        assert before[1]["x-onejob-engine"] == "d1"
        assert new.counters.get("success") == 2
        new.batcher.close()

    play(tmp_path, work)


def test_a_failing_engine_a_full_queue_and_a_client_that_left(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        client, other = server.client(), server.client()
        await client.ask(request(1, 2))
        await other.ask(request(1, 2))
        (failed,) = await client.ask(request(-1, 2))
        assert failed[0] == 500
        assert failed[1]["x-request-id"]
        gone = server.client()
        gone.connection.lane = client.connection.lane
        gone.connection.data_received(request(1, 2))
        gone.connection.connection_lost(None)
        assert values_of((await client.ask(request(2, 2)))[0]) == [4, 4]
        clients = [server.client() for _ in range(12)]
        for each in clients:
            each.connection.lane = client.connection.lane
            each.connection.data_received(request(1, 1))
        statuses = [(await each.answers(1))[0][0] for each in clients]
        assert statuses.count(200) == 8
        assert statuses.count(503) == 4

    server = play(tmp_path, work)
    values = server.service.counters.values
    assert (values["failure.BACKEND"], values["failure.CANCELED"], values["failure.REJECTED"]) == (1, 1, 4)
    assert values["success"] == 11


def test_a_draining_connection_is_told_so(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        client = server.client()
        await client.ask(request(1, 2))
        client.transport.sent = b""
        client.connection.data_received(request(1, 2))
        client.connection.draining = True
        (answer,) = await client.answers(1)
        assert values_of(answer) == [2, 4]
        assert answer[1]["connection"] == "close"
        assert client.transport.ended

    play(tmp_path, work)


def test_each_request_of_a_batch_is_found_in_the_log(tmp_path: Path) -> None:
    names: list[str] = []

    async def work(server: Server) -> None:
        client = server.client()
        for _ in range(3):
            (answer,) = await client.ask(request(1, 2))
            names.append(answer[1]["x-request-id"])

    server = play(tmp_path, work)
    server.log.flush()
    server.log.close()
    for name in names:
        found = find_request(tmp_path, name)
        assert found is not None
        assert (found["id"], found["digest"], found["rows"], found["status"]) == (name, "d1", 1, 200)
        assert found["ms"] > 0


def test_an_urgent_request_goes_first_whichever_way_it_takes(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        clients = {name: server.client() for name in ("late", "plain", "urgent", "long")}
        given = {"late": {"priority": 3}, "plain": {}, "urgent": {"priority": 1}, "long": {"priority": 1}}
        asked = {
            name: request(
                1, 2, parameters={"binary_data_output": True, **more}, **({"id": "x"} if name == "long" else {})
            )
            for name, more in given.items()
        }
        for name in ("late", "plain", "urgent"):
            await clients[name].ask(asked[name])
        for name, client in clients.items():
            client.transport.sent = b""
            client.connection.data_received(asked[name])
        order: list[str] = []
        while len(order) < 4:
            await asyncio.sleep(0)
            order += [name for name, client in clients.items() if client.transport.sent and name not in order]
        assert [set(order[:2]), *order[2:]] == [{"urgent", "long"}, "plain", "late"]

    play(tmp_path, work, rows=1)


def test_with_capture_every_request_is_recorded_whichever_way_it_takes(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        signature = Signature(server.service.model.inputs, server.service.model.outputs, True, Roles())
        rules = Rules.of({"reserve": 0})
        capture = Capture(tmp_path, {"endpoint": "m", "engine": "d1"}, signature, rules)
        server.service.record(Recorders(capture))
        quick, other = server.client(), server.client()
        await quick.ask(request(1, 2))
        await quick.ask(request(3, 4))
        for client in (quick, other):
            client.transport.sent = b""
        quick.connection.data_received(request(5, 6))
        other.connection.data_received(request(7, 8, id="mine"))  # the batch holds both kinds
        names = [(await client.answers(1))[0][1]["x-request-id"] for client in (quick, other)]
        capture.flush()
        capture.seal()
        found = read_traffic(sealed_in(tmp_path / "capture"))
        assert [row.tolist() for row in found.inputs["x"]] == [[1, 2], [3, 4], [5, 6], [7, 8]]
        assert [row.tolist() for row in found.outputs["y"]] == [[2, 4], [6, 8], [10, 12], [14, 16]]
        assert found.request.tolist()[2:] == names

    play(tmp_path, work)


def test_what_goes_wrong_in_answering_leaves_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: Server) -> None:
        clients = [server.client() for _ in range(3)]
        for client in clients:
            await client.ask(request(1, 2))
        real, calls = Lane.answer, iter([True, False])

        def broken(self: Lane, items: Any, outputs: Any, ids: Any) -> None:
            if next(calls, False):
                real(self, items[:1], outputs, ids[:1])
                raise RuntimeError("in the middle of it")
            real(self, items, outputs, ids)

        monkeypatch.setattr(Lane, "answer", broken)
        for client in clients:
            client.transport.sent = b""
            client.connection.data_received(request(2, 3))
        found = [(await client.answers(1))[0] for client in clients]
        assert [answer[0] for answer in found] == [200, 500, 500]
        assert values_of((await clients[1].ask(request(4, 5)))[0]) == [8, 10]

    play(tmp_path, work)


def test_requests_leave_no_cycles_for_the_collector(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        client = server.client()
        for _ in range(5):
            await client.ask(request(1, 2))
        gc.collect()
        gc.disable()
        try:
            before = sum(type(each) is Quick for each in gc.get_objects())
            for _ in range(50):
                await client.ask(request(1, 2))
            after = sum(type(each) is Quick for each in gc.get_objects())
        finally:
            gc.enable()
        assert after - before <= 1

    play(tmp_path, work)
