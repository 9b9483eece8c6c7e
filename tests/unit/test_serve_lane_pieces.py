"""The short way of requests as real clients send them: the head first and the body after it, answers packed."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_serve_lane import Client, Server, play, request, values_of
from test_serve_lane import shape as shape_of
from test_serve_text_lane import message

from onejob.serve.protocols import http
from onejob.serve.protocols.lane import LONGEST_WAIT, Lane
from onejob.serve.protocols.text_lane import TextLane

Make = Callable[[float, float], bytes]


def binary(first: float, second: float, **more: Any) -> bytes:
    return request(first, second, **more)


def text(first: float, second: float) -> bytes:
    return message([first, second])


def head_of(data: bytes) -> int:
    return data.index(b"\r\n\r\n") + 4


def send(client: Client, data: bytes, *cuts: int) -> None:
    client.transport.sent = b""
    for start, stop in zip((0, *cuts), (*cuts, len(data)), strict=True):
        client.connection.data_received(data[start:stop])


@pytest.mark.parametrize("make", [binary, text])
@pytest.mark.parametrize("cuts", [(0,), (0, 1), (3,), (0, 5, 9), (-1,)])
def test_a_body_that_comes_after_its_head_takes_the_short_way(tmp_path: Path, make: Make, cuts: tuple[int]) -> None:
    async def work(server: Server) -> None:
        client, other = server.client(), server.client()
        first, data, alone = make(1, 2), make(3, 4), make(3, 4)
        at = [head_of(data) + cut if cut >= 0 else len(data) + cut for cut in cuts]
        send(client, first, *at)
        (long,) = await client.answers(1)
        assert isinstance(client.connection.lane, Lane | TextLane), "learnt of a request that came in pieces"
        client.connection._parser = None  # what is parsed from here on fails
        for _ in range(2):
            send(client, data, *at)
            (short,) = await client.answers(1)
            assert client.connection.idle
        (plain,) = await other.ask(alone)
        assert sorted(long[1]) == sorted(short[1])
        assert shape_of(short)[2] == shape_of(plain)[2]

    play(tmp_path, work)


@pytest.mark.parametrize("make", [binary, text])
def test_answers_belong_to_what_came_in_pieces(tmp_path: Path, make: Make) -> None:
    async def work(server: Server) -> None:
        clients = [server.client() for _ in range(4)]
        for client in clients:
            send(client, make(0, 0), head_of(make(0, 0)))
            await client.answers(1)
        server.engine.sizes.clear()
        sent = [make(number, 10 + number) for number in range(4)]
        for client, data in zip(clients, sent, strict=True):  # all heads, then all bodies
            client.transport.sent = b""
            client.connection.data_received(data[: head_of(data)])
        for client, data in zip(clients, sent, strict=True):
            assert not client.connection.idle
            client.connection.data_received(data[head_of(data) :])
        found = [(await client.answers(1))[0] for client in clients]
        assert server.engine.sizes == [4]
        for number, answer in enumerate(found):
            if make is binary:
                assert values_of(answer) == [2 * number, 20 + 2 * number]
            else:
                assert f'"data":[{2.0 * number},{20.0 + 2 * number}]'.encode() in answer[2]

    play(tmp_path, work)


def test_what_begins_alike_and_goes_on_otherwise_is_told_what_is_wrong(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        client = server.client()
        await client.ask(binary(1, 2))
        data = binary(1, 2)
        at = head_of(data)
        send(client, data.replace(b'"FP32"', b'"FP64"'), at)
        (wrong,) = await client.answers(1)
        assert wrong[0] == 400
        send(client, binary(3, 4) + binary(5, 6), at)  # a body, and another request with it
        assert [values_of(answer) for answer in await client.answers(2)] == [[6, 8], [10, 12]]
        send(client, data[:at])
        assert client.transport.sent == b""
        client.connection.data_received(b"{" * (len(data) - at))
        (wrong,) = await client.answers(1)
        assert wrong[0] == 400
        send(client, b"\r\n\r\n" + data, len(data))  # empty lines before a request are nothing
        assert values_of((await client.answers(1))[0]) == [2, 4]
        send(client, b"GET /v2/health/live HTTP/1.1\r\n\r\n")
        assert (await client.answers(1))[0][2] == b'{"live":true}'

    play(tmp_path, work)


def test_empty_lines_before_a_request_are_no_head_to_learn(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        client = server.client()
        data = b"\r\n\r\n" + binary(1, 2)
        send(client, data, len(data) - 4)
        await client.answers(1)
        assert client.connection.lane is None
        send(client, b"\r\n\r\nGET /v2/health/live HTTP/1.1\r\n\r\n")
        assert (await client.answers(1))[0][2] == b'{"live":true}'

    play(tmp_path, work)


def test_a_text_without_a_body_is_not_waited_for(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        client = server.client()
        await client.ask(text(1, 2))
        data = text(1, 2)
        length = str(len(data) - head_of(data)).encode()
        (empty,) = await client.ask(data[: head_of(data)].replace(b"Length: " + length, b"Length: 0"))
        assert empty[0] == 400

    play(tmp_path, work)


@pytest.mark.parametrize("make", [binary, text])
def test_half_a_request_is_a_request_that_has_begun(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(server: Server) -> None:
        client = server.client()
        await client.ask(make(1, 2))
        data = make(1, 2)
        client.transport.sent = b""
        send(client, data[: head_of(data)])
        connection = client.connection
        assert not connection.idle
        assert not connection.stalls(connection.last + http.SLOW_SECONDS - 1)
        assert connection.stalls(connection.last + http.SLOW_SECONDS + 1)
        assert connection.eof_received() is False
        assert connection.idle, "nobody waits for its answer"

        client = server.client()
        await client.ask(make(1, 2))
        send(client, make(3, 4))
        client.connection.draining = True
        client.connection.data_received(data[: head_of(data)])
        (answer,) = await client.answers(1)
        assert "connection" not in answer[1], "another request is on its way"
        client.transport.sent = b""
        client.connection.data_received(data[head_of(data) :])
        (answer,) = await client.answers(1)
        assert answer[1]["connection"] == "close"

    play(tmp_path, work)


def test_a_long_request_is_not_kept_back(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        client = server.client()
        values = np.arange(LONGEST_WAIT, dtype=np.float32)
        data = request(*values, rows=LONGEST_WAIT // 2)
        await client.ask(data)
        assert isinstance(client.connection.lane, Lane)
        send(client, data, 1 << 15)
        assert len(values_of((await client.answers(1))[0])) == LONGEST_WAIT

    play(tmp_path, work, rows=LONGEST_WAIT)


@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize("kind", ["binary", "text"])
@pytest.mark.parametrize(
    ("accepted", "packs"),
    [("gzip, deflate", "gzip"), ("identity", ""), ("br", ""), ("deflate;q=1, gzip;q=0", "deflate")],
)
def test_who_likes_packed_answers_gets_them_the_short_way_too(
    tmp_path: Path, rows: int, kind: str, accepted: str, packs: str
) -> None:
    """An answer below a kilobyte is sent as it is."""
    extra = f"Accept-Encoding: {accepted}\r\n"

    def make(value: float) -> bytes:
        if kind == "binary":
            return request(*[value] * 2 * rows, rows=rows, extra=extra)
        return message([value] * 2 * rows, rows=rows).replace(b"Host: h\r\n", b"Host: h\r\n" + extra.encode())

    async def work(server: Server) -> None:
        client = server.client()
        (long,) = await client.ask(make(1.25))
        lane = client.connection.lane
        assert isinstance(lane, Lane if kind == "binary" else TextLane)
        client.connection._parser = None
        (short,) = await client.ask(make(1.25))
        told = packs if rows > 1 else ""
        for answer in (long, short):
            assert answer[0] == 200
            assert answer[1].get("content-encoding", "") == told
        bodies = []
        for _, headers, body in (long, short):
            whole = gzip.decompress(body) if told == "gzip" else zlib.decompress(body) if told else body
            assert len(whole) > len(body) or not told
            bodies.append(whole.replace(headers["x-request-id"].encode(), b"ID"))
        assert bodies[0] == bodies[1]
        assert sorted(long[1]) == sorted(short[1])

    play(tmp_path, work, rows=400)
