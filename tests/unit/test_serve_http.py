"""HTTP framing on a fake transport: order, bounds, keep-alive, draining; and the routes' answers. No socket."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onejob.core.tensor import TensorSpec
from onejob.errors import InferenceError
from onejob.monitor.requests import recent
from onejob.serve.journal import RequestLog
from onejob.serve.model import ServedModel
from onejob.serve.policy import Limits
from onejob.serve.protocols import http
from onejob.serve.protocols.compression import TooLargeError, inflate
from onejob.serve.protocols.exchange import Exchange
from onejob.serve.protocols.http import Connection
from onejob.serve.protocols.http_api import Api
from onejob.serve.registry import Registry
from onejob.serve.router import Router
from onejob.serve.service import Identity, Service


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closed = self.ended = self.paused = False

    def write(self, data: Any) -> None:
        assert not self.ended
        self.sent += bytes(data)

    def write_eof(self) -> None:
        self.ended = True

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class Keeper:
    """Keeps exchanges, to be answered when the test likes."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []

    def handle(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)

    def head_of(self, exchange: Exchange) -> bytes:
        return b"x-test: 1\r\n"


class Scene:
    def __init__(self, handler: Any = None, max_body: int = 1000) -> None:
        self.handler = handler or Keeper()
        self.connections: set[Connection] = set()
        self.transport = Transport()
        self.connection = Connection(self.handler, self.connections, max_body=max_body)
        self.connection.connection_made(self.transport)

    def feed(self, data: bytes, step: int = 0) -> None:
        for start in range(0, len(data), step or len(data)):
            self.connection.data_received(data[start : start + (step or len(data))])

    @property
    def statuses(self) -> list[int]:
        return [int(part[:3]) for part in self.transport.sent.split(b"HTTP/1.1 ")[1:]]


def in_loop(work: Callable[[], None]) -> None:
    async def run() -> None:
        work()

    asyncio.run(run())


GET = b"GET /v2 HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"
CHUNKED = b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"


@pytest.mark.parametrize("step", [0, 1, 7])
def test_pipelined_requests_are_answered_in_order_though_ready_in_another(step: int) -> None:
    def work() -> None:
        scene = Scene()
        scene.feed(GET + POST + CHUNKED, step)
        first, second, third = scene.handler.exchanges
        assert (second.body, third.body) == (b"abc", b"abc")
        third.reply(203, b"3")
        second.reply(202, b"2")
        assert scene.statuses == []
        first.reply(200, b"1")
        assert scene.statuses == [200, 202, 203]
        assert scene.transport.sent.count(b"x-test: 1\r\n") == 3
        assert not scene.transport.ended

    in_loop(work)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\n\r\n", 405),
        (b"POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n" + b"x" * 2000, 413),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * (http.MAX_HEAD + 1) + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * (http.MAX_HEAD + 1), 431),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000, 431),
    ],
)
@pytest.mark.parametrize("step", [0, 1000])
def test_bad_streams_are_answered_and_closed(data: bytes, status: int, step: int) -> None:
    def work() -> None:
        scene = Scene()
        scene.feed(data, step)
        assert scene.statuses == [status]
        assert b"Connection: close" in scene.transport.sent
        assert scene.transport.ended
        assert scene.handler.exchanges == []
        scene.feed(GET)
        assert scene.statuses == [status]

    in_loop(work)


def test_a_bad_request_behind_a_good_one_waits_its_turn() -> None:
    def work() -> None:
        scene = Scene()
        scene.feed(GET + b"nonsense\r\n\r\n")
        assert scene.statuses == []
        scene.handler.exchanges[0].reply(200, b"")
        assert scene.statuses == [200, 400]
        assert scene.transport.ended

    in_loop(work)


def test_keep_alive_as_each_version_has_it() -> None:
    def sent(data: bytes) -> tuple[bytes, bool]:
        scene = Scene()
        scene.feed(data)
        scene.handler.exchanges[0].reply(200, b"")
        return scene.transport.sent, scene.transport.ended

    def work() -> None:
        old = b"GET / HTTP/1.0\r\n"
        assert b"onnection" not in sent(GET)[0]
        assert sent(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")[1]
        assert sent(old + b"\r\n")[1]
        answer, ended = sent(old + b"Connection: keep-alive\r\n\r\n")
        assert b"Connection: keep-alive" in answer
        assert not ended
        answer, ended = sent(b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert not ended

    in_loop(work)


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("request_bytes", [POST, CHUNKED])
def test_an_upgrade_is_ignored(step: int, request_bytes: bytes) -> None:
    def work() -> None:
        scene = Scene()
        asking = request_bytes.replace(b"\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n", 1)
        scene.feed(asking + GET, step)
        assert [(e.method, e.body) for e in scene.handler.exchanges] == [(b"POST", b"abc"), (b"GET", b"")]

    in_loop(work)


def test_expect_continue_is_answered_when_its_turn_comes() -> None:
    def work() -> None:
        scene = Scene()
        head, body = POST.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n").split(b"\r\n\r\n")
        scene.feed(GET + head + b"\r\n\r\n")
        assert scene.statuses == []
        scene.handler.exchanges[0].reply(200, b"")
        assert scene.statuses == [200, 100]
        scene.feed(body)
        scene.handler.exchanges[1].reply(201, b"")
        assert scene.statuses == [200, 100, 201]

    in_loop(work)


def test_draining_lets_go_of_a_client_after_the_last_request_it_has_sent() -> None:
    def work() -> None:
        scene = Scene()
        scene.feed(GET + GET)
        scene.connection.draining = True
        scene.handler.exchanges[0].reply(200, b"")
        assert b"Connection: close" not in scene.transport.sent
        scene.handler.exchanges[1].reply(200, b"")
        assert scene.transport.sent.endswith(b"Connection: close\r\n\r\n")
        assert scene.transport.ended

    in_loop(work)


def test_a_client_that_goes_away_is_told_to_the_handler() -> None:
    def work() -> None:
        scene = Scene()
        gone: list[int] = []
        scene.feed(GET)
        scene.handler.exchanges[0].on_gone = lambda: gone.append(1)
        scene.connection.connection_lost(None)
        assert gone == [1]
        assert scene.connections == set()
        scene.handler.exchanges[0].reply(200, b"late")
        assert scene.transport.sent == b""

    in_loop(work)


def test_a_half_closed_client_still_gets_its_answers() -> None:
    def work() -> None:
        scene = Scene()
        scene.feed(GET)
        assert scene.connection.eof_received() is True
        scene.handler.exchanges[0].reply(200, b"")
        assert scene.statuses == [200]
        assert scene.transport.ended
        for cut in (1, 10, len(POST) - 1):
            scene = Scene()
            scene.feed(POST[:cut])
            assert scene.connection.eof_received() is False  # half a request: closed at once

    in_loop(work)


def test_reading_stops_for_a_client_with_too_much_in_flight_or_that_does_not_read() -> None:
    def work() -> None:
        scene = Scene()
        scene.feed(GET * http.MAX_IN_FLIGHT)
        assert scene.transport.paused
        scene.handler.exchanges[0].reply(200, b"")
        assert not scene.transport.paused
        scene.connection.pause_writing()
        assert scene.transport.paused
        scene.connection.resume_writing()
        assert not scene.transport.paused

    in_loop(work)


def test_inflate() -> None:
    data = b"a" * 1000
    raw = zlib.compressobj(wbits=-15)
    for packed, encoding in (
        (gzip.compress(data), b"gzip"),
        (zlib.compress(data), b"deflate"),
        (raw.compress(data) + raw.flush(), b"deflate"),
    ):
        assert inflate(packed, encoding, 1000) == data
        with pytest.raises(TooLargeError):
            inflate(packed, encoding, 999)
    for packed, encoding in ((gzip.compress(data)[:-5], b"gzip"), (b"zz", b"gzip"), (data, b"br")):
        with pytest.raises(ValueError):
            inflate(packed, encoding, 1000)


# ---- the routes


class Doubler:
    """y = 2 x; fails on negative numbers."""

    inputs = (TensorSpec("x", "FP32", (-1, 2)),)
    outputs = (TensorSpec("y", "FP32", (-1, 2)),)
    precision = "fp32"
    broken = False

    def infer(self, arrays: Any) -> dict[str, Any]:
        if self.broken or (arrays["x"] < 0).any():
            raise InferenceError("it can't", place="engine")
        return {"y": arrays["x"] * 2}

    def close(self) -> None:
        pass


class Server:
    """An Api on fake connections."""

    def __init__(self, folder: Path, *, max_body: int = 10_000) -> None:
        self.engine = Doubler()
        self.log = RequestLog(folder / "requests")
        identity = Identity("m", "d1", 1, {"engine": "onnxruntime"}, "e1", "1:1.0")
        limits = Limits(rows=8, queue=4)
        self.service = Service(ServedModel(self.engine), identity, limits, self.log, folder / "metrics")
        self.registry = Registry("d1", "1:1.0", 1)
        self.registry.put("m", {"1": Router(self.service)})
        self.api = Api(self.registry, max_body=max_body)
        self.max_body = max_body

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], bytes]:
        scene = Scene(self.api, self.max_body)
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        scene.feed(f"{method} {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode() + body)
        for turn in range(4000):  # some answers are made on another thread, which may be kept waiting
            if scene.transport.sent:
                break
            await asyncio.sleep(0 if turn < 200 else 0.005)
        head, _, answer = scene.transport.sent.partition(b"\r\n\r\n")
        first, *rest = head.decode().split("\r\n")
        return int(first.split()[1]), dict(line.split(": ", 1) for line in rest), answer


def serve(folder: Path, work: Callable[[Server], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        server = Server(folder, **options)
        await work(server)
        server.service.batcher.close()

    asyncio.run(run())


def message(values: list[Any], **more: Any) -> bytes:
    entry = {"name": "x", "datatype": "FP32", "shape": [len(values) // 2, 2], "data": values}
    return json.dumps({"inputs": [entry], **more}).encode()


def test_every_answer_names_its_request_and_engine(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        for method, path in (
            ("GET", "/v2/health/live"),
            ("POST", "/v2/models/m/infer"),
            ("GET", "/nowhere"),
            ("PUT", "/v2"),
        ):
            _, headers, _ = await server.ask(method, path)
            assert headers["x-onejob-engine"] == "d1"
            assert len(headers["x-request-id"]) == 26
        _, headers, _ = await server.ask("GET", "/v2", x_request_id="mine")
        assert headers["x-request-id"] == "mine"
        _, headers, _ = await server.ask("GET", "/v2", x_request_id="x" * 200)
        assert headers["x-request-id"] != "x" * 200

    serve(tmp_path, work)


def test_infer_answers_as_the_protocol_says(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        for path in ("/v2/models/m/infer", "/v2/models/m/versions/1/infer", "/v2/models/%6d/infer"):
            status, headers, body = await server.ask("POST", path, message([1, 2], id="abc"))
            assert status == 200
            assert headers["x-request-id"] == "abc"
            assert json.loads(body) == {
                "id": "abc",
                "model_name": "m",
                "model_version": "1",
                "parameters": {"engine": "d1", "request_id": "abc"},
                "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [2.0, 4.0]}],
            }
        status, headers, body = await server.ask(
            "POST", "/v2/models/m/infer", message([1, 2], parameters={"binary_data_output": True})
        )
        length = int(headers["Inference-Header-Content-Length"])
        assert np.frombuffer(body[length:], "<f4").tolist() == [2, 4]
        packed = gzip.compress(message([1, 2]))
        assert (await server.ask("POST", "/v2/models/m/infer", packed, content_encoding="gzip"))[0] == 200

    serve(tmp_path, work)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("GET", "/v2/models/nope", b"", 404, "Request for unknown model: 'nope' is not found"),
        ("POST", "/v2/models/nope/infer", b"{}", 404, "Request for unknown model: 'nope' is not found"),
        ("GET", "/v2/models/m/versions/7", b"", 404, "Request for unknown model: 'm' version 7 is not found"),
        ("POST", "/v1/models/nope:predict", b"{}", 404, "Request for unknown model: 'nope' is not found"),
        ("GET", "/elsewhere", b"", 404, "Not Found: /elsewhere"),
        ("GET", "/v2/models/m/infer", b"", 405, "Method Not Allowed"),
        ("POST", "/v2/models/m/infer", b"{", 400, "failed to parse the request JSON buffer"),
        ("POST", "/v2/models/m/infer", b"{}", 400, "attempt to access non-existing object member 'inputs'"),
        ("POST", "/v2/models/m/infer", message([-1, 2]), 500, "it can't"),
        ("POST", "/v2/repository/models/m/load", b"{}", 503, "load / unload is not allowed"),
        ("POST", "/v1/models/m:predict", b'{"instances": [[1]]}', 400, "shape [2] is wanted"),
    ],
)
def test_errors(tmp_path: Path, method: str, path: str, body: bytes, status: int, words: str) -> None:
    async def work(server: Server) -> None:
        got, _, answer = await server.ask(method, path, body)
        assert got == status
        assert words in json.loads(answer)["error"]

    serve(tmp_path, work)


def test_inflated_bodies_are_bounded(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        bomb = gzip.compress(b" " * 1_000_000)
        assert len(bomb) < server.max_body
        assert (await server.ask("POST", "/v2/models/m/infer", bomb, content_encoding="gzip"))[0] == 413

    serve(tmp_path, work)


def test_a_full_queue_is_told_with_when_to_come_back(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        asked = [server.ask("POST", "/v2/models/m/infer", message([1, 2] * rows)) for rows in (3, 3)]
        answers = await asyncio.gather(*asked)
        assert sorted(status for status, _, _ in answers) == [200, 503]
        refused = next(headers for status, headers, _ in answers if status == 503)
        assert refused["Retry-After"] == "1"
        assert server.service.counters.get("failure.REJECTED") == 1

    serve(tmp_path, work)


def test_ready_tells_the_truth_about_a_broken_engine_but_not_about_bad_input(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        for _ in range(9):
            assert (await server.ask("POST", "/v2/models/m/infer", message([-1, 2])))[0] == 500
        assert (await server.ask("GET", "/v2/health/ready"))[0] == 200
        server.engine.broken = True
        for _ in range(3):
            await server.ask("POST", "/v2/models/m/infer", message([1, 2]))
        for path in ("/v2/health/ready", "/v2/models/m/ready"):
            status, _, body = await server.ask("GET", path)
            assert status == 503
            assert "it can't" in json.loads(body)["error"]
        assert (await server.ask("GET", "/v2/health/live"))[0] == 200
        assert json.loads((await server.ask("POST", "/v2/repository/index"))[2])[0]["state"] == "UNAVAILABLE"

    serve(tmp_path, work)


def test_counts_statistics_metrics_and_the_log(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        await server.ask("POST", "/v2/models/m/infer", message([1, 2, 3, 4]), x_request_id="one")
        await server.ask("POST", "/v2/models/m/infer", b"{", x_request_id="two")
        metrics = (await server.ask("GET", "/metrics"))[2].decode()
        for line in (
            'nv_inference_request_success{model="m",version="1"} 1',
            'nv_inference_count{model="m",version="1"} 2',
            'nv_inference_request_failure{model="m",version="1",reason="REJECTED"} 1',
            'onejob_request_duration_seconds_count{model="m",version="1"} 2',
            'onejob_engine_info{model="m",version="1",engine="d1"} 1',
        ):
            assert line in metrics.split("\n")
        stats = json.loads((await server.ask("GET", "/v2/models/m/stats"))[2])["model_stats"][0]
        assert (stats["inference_count"], stats["execution_count"]) == (2, 1)
        assert stats["inference_stats"]["fail"]["count"] == 1
        assert stats["batch_stats"][0]["batch_size"] == 2
        server.log.flush()
        server.log.close()
        lines = recent(tmp_path)[::-1]
        assert [(line["id"], line["status"], line["rows"], line["digest"]) for line in lines] == [
            ("one", 200, 2, "d1"),
            ("two", 400, 0, "d1"),
        ]

    serve(tmp_path, work)


def test_a_cancelled_request_is_counted_and_not_computed(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        scene = Scene(server.api, 10_000)
        body = message([1, 2])
        scene.feed(b"POST /v2/models/m/infer HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        scene.connection.connection_lost(None)
        assert (await server.ask("POST", "/v2/models/m/infer", body))[0] == 200
        assert server.service.counters.get("failure.CANCELED") == 1
        assert server.service.counters.get("batch.1") == 1

    serve(tmp_path, work)
