"""What no client can make a replica do, whatever it sends: grow, recurse, work for nobody, or wait for ever."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_serve_http import CHUNKED, GET, POST, Keeper, Scene, Transport, in_loop

from onejob.core.tensor import TensorSpec
from onejob.serve.policy import Limits
from onejob.serve.protocols import http, http_api, lane, lanes
from onejob.serve.protocols.compression import MOST, compress
from onejob.serve.protocols.exchange import Exchange
from onejob.serve.protocols.http import Connection, Room
from onejob.serve.protocols.plan import Plans
from onejob.serve.router import Router
from onejob.testing.api import Function, Replica, functions
from onejob.testing.hostile import ask, infer


class Slow(Transport):
    """A client whose reading the test decides."""

    unread = 0

    def get_write_buffer_size(self) -> int:
        return self.unread


class Answering(Keeper):
    """Answers at once."""

    def handle(self, exchange: Exchange) -> None:
        super().handle(exchange)
        exchange.reply(200, b"x" * 100)


def test_requests_in_flight_are_bounded_though_they_came_in_one_piece() -> None:
    def work() -> None:
        scene = Scene()
        scene.feed(GET * 100)
        waiting, done = scene.handler.exchanges, 0
        assert len(waiting) == http.MAX_IN_FLIGHT
        while done < 100:
            waiting[done].reply(200, b"")
            done += 1
            assert len(waiting) == min(100, done + http.MAX_IN_FLIGHT)
        assert scene.statuses == [200] * 100
        assert not scene.transport.paused

    in_loop(work)


def test_nothing_is_done_for_a_client_that_does_not_read() -> None:
    def work() -> None:
        scene = Scene(Answering())
        scene.connection.pause_writing()
        scene.feed(GET * 5000)
        assert scene.handler.exchanges == []
        scene.connection.resume_writing()
        assert scene.statuses == [200] * 5000

    in_loop(work)


def test_a_client_that_stops_reading_in_the_middle_gets_the_rest_later() -> None:
    def work() -> None:
        scene = Scene(Answering())
        write = scene.transport.write

        def full(data: bytes) -> None:
            write(data)
            scene.connection.pause_writing()

        scene.transport.write = full  # type: ignore[method-assign]
        scene.feed(GET * 10 + b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        for answered in range(1, 12):
            assert scene.statuses == [200] * answered
            scene.connection.resume_writing()
        assert scene.transport.ended

    in_loop(work)


@pytest.mark.parametrize("request_bytes", [GET, POST, CHUNKED])
def test_any_number_of_upgrades_in_a_row_is_ignored(request_bytes: bytes) -> None:
    def work() -> None:
        scene = Scene(Answering())
        scene.feed(request_bytes.replace(b"\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n", 1) * 2000)
        assert scene.statuses == [200] * 2000

    in_loop(work)


@pytest.mark.parametrize(
    ("line", "version", "ends"),
    [(b"Upgrade", 1, False), (b"close, Upgrade", 1, True), (b"Upgrade", 0, True), (b"keep-alive, Upgrade", 0, False)],
)
def test_an_upgrade_changes_nothing_about_keeping_the_connection(line: bytes, version: int, ends: bool) -> None:
    def work() -> None:
        scene = Scene(Answering())
        scene.feed(b"GET / HTTP/1.%d\r\nConnection: %b\r\nUpgrade: h2c\r\n\r\n" % (version, line))
        assert scene.statuses == [200]
        assert scene.transport.ended is ends

    in_loop(work)


def test_trailers_are_no_headers() -> None:
    def work() -> None:
        scene = Scene()
        scene.feed(CHUNKED[:-2] + b"Content-Encoding: gzip\r\nX-Request-Id: theirs\r\n\r\n")
        (exchange,) = scene.handler.exchanges
        assert exchange.body == b"abc"
        assert exchange.headers.keys() == {b"transfer-encoding"}

    in_loop(work)


def test_a_body_in_tiny_chunks_costs_what_it_holds() -> None:
    def work() -> None:
        scene = Scene(max_body=1 << 20)
        scene.feed(b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunks = b"2\r\nab\r\n" * 1000
        tracemalloc.start()
        try:
            for _ in range(100):
                scene.feed(chunks)
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held < 400_000
        scene.feed(b"0\r\n\r\n")
        assert scene.handler.exchanges[0].body == b"ab" * 100_000

    in_loop(work)


def test_all_bodies_together_are_bounded_and_small_ones_always_welcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SMALL_BODY", 10)
    room, handler, connections = Room(100), Keeper(), set[Connection]()

    def client() -> Scene:
        scene = Scene(handler)
        scene.connection = Connection(handler, connections, max_body=1000, room=room)
        scene.connection.connection_made(scene.transport)
        return scene

    def post(size: int) -> bytes:
        return b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size

    def work() -> None:
        first, second, third, small = client(), client(), client(), client()
        first.feed(post(60))
        second.feed(post(40)[:-1])
        assert room.left == 1
        third.feed(post(20))
        assert third.statuses == [503]
        assert b"Retry-After: 1\r\n" in third.transport.sent
        assert room.left == 1
        small.feed(post(10))
        assert room.left == -9
        handler.exchanges[-1].reply(200, b"")
        assert small.statuses == [200]
        second.connection.connection_lost(None)
        assert room.left == 40
        handler.exchanges[0].reply(200, b"")
        assert room.left == 100
        half = client()
        half.feed(post(40)[:-1])
        half.connection.eof_received()
        gone = client()
        gone.feed(post(30))
        gone.connection.connection_lost(None)
        assert room.left == 100

    in_loop(work)


def scene_with(transport: Transport) -> Scene:
    scene = Scene()
    scene.transport = transport
    scene.connection.connection_made(transport)
    return scene


def test_whoever_keeps_a_request_unfinished_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(http.time, "monotonic", lambda: now[0])

    def work() -> None:
        scene = scene_with(Slow())
        now[0] += 1000
        assert not scene.connection.stalls(now[0]), "it is idle: that is judged by another measure"
        scene.feed(POST[:10])
        now[0] += http.SLOW_SECONDS - 1
        assert not scene.connection.stalls(now[0])
        scene.feed(POST[10:11])
        now[0] += 2
        assert scene.connection.stalls(now[0]), "one byte a minute is no progress"
        scene = scene_with(Slow())
        scene.feed(b"POST / HTTP/1.1\r\nContent-Length: 900\r\n\r\n")
        now[0] += http.SLOW_SECONDS + 1
        assert scene.connection.stalls(now[0])

    in_loop(work)


def test_a_slow_body_is_welcome_as_long_as_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(http.time, "monotonic", lambda: now[0])

    def work() -> None:
        scene = scene_with(Slow())
        scene.connection = Connection(scene.handler, set(), max_body=1 << 30)
        scene.connection.connection_made(scene.transport)
        scene.feed(b"POST / HTTP/1.1\r\nContent-Length: 10000000\r\n\r\n")
        for _ in range(20):
            now[0] += 30
            scene.feed(b"x" * (http.LEAST_RATE * 35))
            assert not scene.connection.stalls(now[0])

    in_loop(work)


def test_a_pause_of_ours_is_not_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(http.time, "monotonic", lambda: now[0])

    def work() -> None:
        scene = scene_with(Slow())
        scene.feed(GET * http.MAX_IN_FLIGHT + POST[:10])
        now[0] += 500
        assert not scene.connection.stalls(now[0])
        scene.handler.exchanges[0].reply(200, b"")
        now[0] += 1
        assert not scene.connection.stalls(now[0])

    in_loop(work)


def test_who_reads_an_answer_slowly_is_kept_and_who_does_not_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(http.time, "monotonic", lambda: now[0])

    def work() -> None:
        transport = Slow()
        scene = scene_with(transport)
        scene.feed(GET)
        transport.unread = 1000
        scene.connection.pause_writing()
        for left in range(1000, 900, -10):
            transport.unread = left
            assert not scene.connection.stalls(now[0])
            now[0] += http.SLOW_SECONDS - 1
        now[0] += 2
        assert scene.connection.stalls(now[0])

    in_loop(work)


def test_a_flood_of_one_client_lets_others_in_between() -> None:
    """What one client has asked doesn't keep others waiting for more than it is allowed in flight."""

    async def run() -> None:
        handled: list[Exchange] = []

        class Later(Keeper):
            def handle(self, exchange: Exchange) -> None:
                handled.append(exchange)
                asyncio.get_running_loop().call_soon(exchange.reply, 200, b"")

        greedy, modest = Scene(Later()), Scene(Later())
        greedy.feed(GET * 1000)
        modest.feed(GET)
        assert len(handled) == http.MAX_IN_FLIGHT + 1
        for _ in range(2):
            await asyncio.sleep(0)
        assert modest.statuses == [200]
        assert len(greedy.statuses) < 200
        while len(greedy.statuses) < 1000:
            await asyncio.sleep(0)

    asyncio.run(run())


# ---- what is learnt of requests


def play(folder: Path, work: Callable[[Replica], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        replica = Replica(folder, **options)
        await work(replica)
        replica.close()

    asyncio.run(run())


async def hear(replica: Replica, *requests: bytes) -> list[tuple[int, bytes]]:
    client = replica.client()
    for each in requests:
        await client.send([each])
        await client.settle()
    client.leave()
    return [(answer.status, answer.body) for answer in client.answers()]


@pytest.mark.parametrize("binary", [True, False])
def test_long_requests_and_paths_are_not_remembered(tmp_path: Path, binary: bool) -> None:
    async def work(replica: Replica) -> None:
        api = replica.api
        x = {"x": np.array([1, 2], "<f4")}
        for number in range(5):
            padding = b"X-Padding: %d%b\r\n" % (number, b"x" * lanes.LONGEST_LANE)
            body, length = infer("m", x, binary=binary)
            assert (await hear(replica, ask(b"/v2/models/m/infer", body, length, padding)))[0][0] == 200
            body, length = infer("m", x, binary=binary, parameters={"own": "y" * lanes.LONGEST_LANE})
            assert (await hear(replica, ask(b"/v2/models/m/infer", body, length)))[0][0] == 200
            path = b"/%d" % number + b"z" * http_api.LONGEST_PATH
            assert (await hear(replica, b"GET %b HTTP/1.1\r\n\r\n" % path))[0][0] == 404
        assert len(api._lanes) == 0
        assert len(api._paths) == 1
        body, length = infer("m", x, binary=binary)
        await hear(replica, ask(b"/v2/models/m/infer", body, length))
        assert len(api._lanes) == 1, "short ones are"

    play(tmp_path, work)


def test_layouts_of_a_model_whose_tensors_vary_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "MAX_LAYOUTS", 10)
    spec = TensorSpec("x", "FP32", (-1, -1))
    models = {"m": Function(lambda given: {"y": given["x"]}, [spec], [TensorSpec("y", "FP32", (-1, -1))])}

    async def work(replica: Replica) -> None:
        for width in range(1, 50):
            x = np.arange(width, dtype="<f4")
            body, length = infer("m", {"x": np.repeat(x, 2)})
            body = body.replace(b"[%d, 2]" % width, b"[1, %d]" % (2 * width))
            length = len(body) - 8 * width
            answers = await hear(replica, *[ask(b"/v2/models/m/infer", body, length)] * 2)
            assert [status for status, _ in answers] == [200, 200]
            assert answers[1][1].endswith(np.repeat(x, 2).tobytes())
        assert 1 <= len(replica.services["m"].layouts) <= 10

    play(tmp_path, work, models=models)


def test_priorities_that_nobody_tells_apart_cost_nothing(tmp_path: Path) -> None:
    async def work(replica: Replica) -> None:
        for priority in (1, 2, 50, 64, 65, 1000, *range(10**6, 10**6 + 300), 2**64 - 1):
            body, length = infer("m", {"x": np.ones(2, "<f4")}, parameters={"priority": priority})
            assert (await hear(replica, ask(b"/v2/models/m/infer", body, length)))[0][0] == 200
        assert len(replica.services["m"].batcher._waiting) <= 64

    play(tmp_path, work, limits=Limits(rows=8, queue=100))


def test_the_rest_of_a_message_that_is_known_is_no_message(tmp_path: Path) -> None:
    async def work(replica: Replica) -> None:
        x = {"x": np.array([1, 2], "<f4")}
        body, length = infer("m", x, id="theirs")
        assert length is not None
        body = body.replace(b'{"id": "theirs", ', b'{"id":"theirs",')
        length = len(body) - 8
        rest = body.removeprefix(b'{"id":"theirs')
        heard = await hear(
            replica,
            ask(b"/v2/models/m/infer", body, length),
            ask(b"/v2/models/m/infer", rest, len(rest) - 8),
            ask(b"/v2/models/m/infer", body.replace(b"theirs", b"mine"), length - 2),
        )
        assert [status for status, _ in heard] == [200, 400, 200]
        assert [b"theirs" in answer for _, answer in heard] == [True, False, False]

    play(tmp_path, work)


# ---- large messages


LARGE = 200_000


def large(how: str) -> tuple[str, bytes]:
    """(model, request) that takes long to be read."""
    if how == "text":
        body, length = infer("t", {"text": [b"a"] * LARGE})
        return "t", ask(b"/v2/models/t/infer", body, length)
    body, _ = infer("m", {"x": np.ones(LARGE, "<f4")}, binary=False)
    if how == "JSON":
        return "m", ask(b"/v2/models/m/infer", body)
    packed = gzip.compress(body, 1)
    assert len(packed) < http_api.LARGE
    return "m", ask(b"/v2/models/m/infer", packed, None, b"Content-Encoding: gzip\r\n")


@pytest.mark.parametrize("how", ["text", "JSON", "packed"])
def test_the_loop_goes_on_while_a_large_message_is_read(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, threads = threading.Event(), set[str]()
    real = Plans.read

    def held(self: Plans, body: bytes, length: int | None) -> Any:
        threads.add(threading.current_thread().name)
        if len(body) > http_api.LARGE:
            gate.wait(10)
        return real(self, body, length)

    monkeypatch.setattr(Plans, "read", held)

    async def work(replica: Replica) -> None:
        model, data = large(how)
        slow, gone, other = replica.client(), replica.client(), replica.client()
        await slow.send([data + ask(b"/v2/models/m/infer", b"{")])
        await gone.send([data])
        body, length = infer("m", {"x": np.ones(2, "<f4")})
        await other.send([ask(b"/v2/models/m/infer", body, length)])
        await other.settle()
        assert [answer.status for answer in other.answers()] == [200]
        assert slow.answers() == []
        gone.leave()
        gate.set()
        await slow.settle()
        first, second = slow.answers()
        assert (first.status, second.status) == (200, 400)
        assert b'"shape":[%d,' % (LARGE if how == "text" else LARGE // 2) in first.body
        counters = replica.services[model].counters
        for _ in range(1000):
            if counters.get("failure.CANCELED"):
                break
            await asyncio.sleep(0.005)
        assert counters.get("failure.CANCELED") == 1
        assert "read_0" in threads

    play(tmp_path, work, limits=Limits(rows=LARGE, queue=2 * LARGE))


def test_what_was_read_for_an_engine_that_has_left_is_read_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, entered = threading.Event(), threading.Event()
    real = Plans.read

    def held(self: Plans, body: bytes, length: int | None) -> Any:
        entered.set()
        gate.wait(10)
        return real(self, body, length)

    monkeypatch.setattr(Plans, "read", held)

    async def work(replica: Replica) -> None:
        tripled = Function(lambda given: {"y": given["x"] * 3}, functions()["m"].inputs, functions()["m"].outputs)
        other = Replica(tmp_path / "other", limits=Limits(rows=LARGE, queue=2 * LARGE), models={"m": tripled})
        _, data = large("packed")
        client, lost = replica.client(), replica.client()
        await client.send([data])
        while not entered.is_set():
            await asyncio.sleep(0.001)
        replica.registry.put("m", {"1": Router(other.services["m"])})
        gate.set()
        await client.settle()
        (answer,) = client.answers()
        assert json.loads(answer.body)["outputs"][0]["data"][:2] == [3, 3]
        gate.clear()
        entered.clear()
        await lost.send([data])
        while not entered.is_set():
            await asyncio.sleep(0.001)
        replica.registry.remove("m", "unloaded")
        gate.set()
        await lost.settle()
        assert [answer.status for answer in lost.answers()] == [404]
        other.close()

    play(tmp_path, work, limits=Limits(rows=LARGE, queue=2 * LARGE))


@pytest.mark.parametrize(
    ("accepted", "wanted"),
    [
        (b"gzip, deflate", b"gzip"),
        (b"deflate", b"deflate"),
        (b"GZIP;q=0.5", b"gzip"),
        (b"gzip;q=0, deflate", b"deflate"),
        (b"gzip;q=0.000", b""),
        (b"br, gzipped", b""),
        (b"", b""),
    ],
)
def test_answers_are_compressed_as_the_client_says_and_not_too_large_ones(accepted: bytes, wanted: bytes) -> None:
    head = b"Content-Encoding: %b\r\n" % wanted if wanted else b""
    assert compress(b"a" * 5000, accepted)[1] == head
    assert compress(b"a" * 100, accepted) == (b"a" * 100, b"")
    assert compress(bytes(MOST + 1), accepted) == (bytes(MOST + 1), b"")
