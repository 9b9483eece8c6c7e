"""The short way of a request in JSON: the same answers as the long way, whatever the numbers look like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_serve_lane import Client, Server, play

from onejob.monitor.requests import find_request
from onejob.serve.protocols.text_lane import Skeleton, TextLane


def message(data: Any, *, rows: int = 1, text: str | None = None, **more: Any) -> bytes:
    tensor = {"name": "x", "shape": [rows, 2], "datatype": "FP32", "data": data}
    body = (text or json.dumps({"inputs": [tensor], **more})).encode()
    return f"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def shape(answer: tuple[int, dict[str, str], bytes]) -> Any:
    """An answer without what belongs to its request alone."""
    status, headers, body = answer
    name = headers["x-request-id"]
    told = json.loads(body)
    if status == 200:
        assert told["parameters"]["request_id"] == name
    return status, sorted(headers), body.replace(name.encode(), b"ID")


async def both_ways(server: Server, data: bytes) -> tuple[Any, Any]:
    """The answers to the same bytes by the short way and by the long way."""
    short, long = server.client(), server.client()
    await short.ask(message([1, 2]))
    assert isinstance(short.connection.lane, TextLane)
    (one,) = await short.ask(data)
    (other,) = await long.ask(data[:1] + data[1:])
    return shape(one), shape(other)


@pytest.mark.parametrize(
    "data",
    [
        [3, 4],
        [0.1, -2.5e-3],
        [[7, 8.25]],
        [1e38, 12345678.9],
        [1e39, 0],  # too large for FP32
        [None, 1],  # not known: the careful way
        [True, 1],
        ["1", 2],
        [1],
        [1, 2, 3],
        [],
        [[1], [2]],
        {"a": 1},
        "text",
    ],
)
def test_both_ways_say_the_same(tmp_path: Path, data: Any) -> None:
    async def work(server: Server) -> None:
        one, other = await both_ways(server, message(data))
        assert one == other

    play(tmp_path, work)


@pytest.mark.parametrize(
    "text",
    [
        '{"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}], "inputs": []}',
        '{"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}], "data": [[3, 4]]}',
        '{"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2], "data": [3, 4]}]}',
        '{"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]} ',
        '{"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]]}',
        '{"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2}, {"a": [3]}]}',
        '{"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2], "b": [3]}]}',
        '{"inputs": [{"data": [1, 2], "name": "x", "shape": [1, 2], "datatype": "FP32"}]}',
        '{"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}], "id": "mine"}',
    ],
)
def test_messages_that_are_nearly_alike_are_not_taken_for_alike(tmp_path: Path, text: str) -> None:
    async def work(server: Server) -> None:
        for _ in range(2):  # what the first of them taught must not mislead the second
            one, other = await both_ways(server, message([], text=text))
            assert one == other
        one, other = await both_ways(server, message([5, 6]))
        assert one == other
        assert one[0] == 200

    play(tmp_path, work)


def test_lengths_differ_and_the_lane_is_the_same(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        client = server.client()
        await client.ask(message([1, 2]))
        lane = client.connection.lane
        for values in ([100, 20000], [0.25, 1], [123456, 7]):
            (answer,) = await client.ask(message(values))
            assert json.loads(answer[2])["outputs"][0]["data"] == [2 * value for value in values]
            assert client.connection.lane is lane
        (wrong,) = await client.ask(message([1, 2]).replace(b"Content-Length: ", b"Content-Length: 0"))
        assert wrong[0] in (200, 400)

    play(tmp_path, work)


def test_a_batch_is_answered_at_once_and_each_gets_its_rows(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        clients = [server.client() for _ in range(5)]
        rows = [1, 2, 1, 3, 1]
        for client, count in zip(clients, rows, strict=True):
            await client.ask(message([0.0] * 2 * count, rows=count))
        server.engine.sizes.clear()
        for number, (client, count) in enumerate(zip(clients, rows, strict=True)):
            client.transport.sent = b""
            client.connection.data_received(message([number + 0.5] * 2 * count, rows=count))
        found = [(await client.answers(1))[0] for client in clients]
        assert server.engine.sizes == [8]
        for number, (answer, count) in enumerate(zip(found, rows, strict=True)):
            (output,) = json.loads(answer[2])["outputs"]
            assert (output["shape"], output["data"]) == ([count, 2], [2 * number + 1.0] * 2 * count)
        server.log.flush()
        server.log.close()
        for answer in found:
            assert find_request(tmp_path, answer[1]["x-request-id"])

    server = play(tmp_path, work)
    assert server.service.counters.get("success") == 10


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(-(10**6), 10**6)),
        min_size=2,
        max_size=2,
    )
)
def test_any_numbers_come_back_as_by_the_long_way(tmp_path: Path, values: list[float]) -> None:
    async def work(server: Server) -> None:
        one, other = await both_ways(server, message([abs(value) for value in values]))
        assert one == other

    play(tmp_path, work)


def test_what_is_not_a_number_is_null_in_both(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        odd = np.float32([[np.inf, np.nan]])
        server.engine.infer = lambda arrays: {"y": odd.repeat(len(arrays["x"]), 0)}  # type: ignore[method-assign]
        one, other = await both_ways(server, message([0, 1]))
        assert one == other
        assert b'"data":[null,null]' in one[2]

    play(tmp_path, work)


def test_a_skeleton_is_only_made_where_the_place_of_the_numbers_is_clear() -> None:
    head = b"POST /a HTTP/1.1\r\nContent-Length: 30\r\n\r\n"
    assert Skeleton.of(head, b'{"data":[1,2],"more":["data"]}') is None
    assert Skeleton.of(head, b'{"data":"text"}') is None
    assert Skeleton.of(b"POST /a HTTP/1.1\r\n\r\n", b'{"data":[1]}') is None
    found = Skeleton.of(b"POST /a HTTP/1.1\r\ncontent-length:12\r\nA: b\r\n\r\n", b'{"data":[1]}')
    assert found is not None
    assert found.numbers(b"POST /a HTTP/1.1\r\ncontent-length:14\r\nA: b\r\n\r\n" + b'{"data":[1,2]}') == b"[1,2]"
    assert found.numbers(b"POST /a HTTP/1.1\r\ncontent-length:15\r\nA: b\r\n\r\n" + b'{"data":[1,2]}') is None


def test_clients_of_this_way_and_of_the_long_one_share_a_batch(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        short, long = server.client(), server.client()
        await short.ask(message([0, 0]))
        server.engine.sizes.clear()
        for client, data in ((short, message([1, 2])), (long, message([3, 4], id="mine"))):
            client.transport.sent = b""
            client.connection.data_received(data)
        found: list[Any] = [json.loads((await client.answers(1))[0][2]) for client in (short, long)]
        assert server.engine.sizes == [2]
        assert [one["outputs"][0]["data"] for one in found] == [[2, 4], [6, 8]]
        assert found[1]["id"] == "mine"
        gone: Client = server.client()
        gone.connection.lane = short.connection.lane
        gone.connection.data_received(message([1, 2]))
        gone.connection.connection_lost(None)

    server = play(tmp_path, work)
    assert server.service.counters.get("failure.CANCELED") == 1
