"""Bad input at a real endpoint: nobody else notices, nothing crashes, hangs or grows, every answer is its client's."""

from __future__ import annotations

import gzip
import http.client
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from onnx import TensorProto, helper
from served_models import Endpoint, endpoint, save, save_affine, wait_for

from onejob.serve.repository import scan, told
from onejob.testing.api import take_apart
from onejob.testing.corpus import MESSAGES, STREAMS, UNFINISHED
from onejob.testing.hostile import MODELS, Stream, ask, infer, streams
from onejob.testing.sockets import Neighbour, connect, exchange, memory_of, read_answer

STATUSES = {200, 400, 404, 405, 413, 431, 503, 504, 505}


def save_echo(folder: Path) -> None:
    """`t` of hostile.py: the same text back."""
    folder.mkdir(parents=True)
    text, out = (helper.make_tensor_value_info(name, TensorProto.STRING, ["n", 1]) for name in ("text", "text_out"))
    save(helper.make_graph([helper.make_node("Identity", ["text"], ["text_out"])], "echo", [text], [out]), folder)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    root = tmp_path_factory.mktemp("hostile")
    save_affine(root / "repository" / "m" / "1", width=2)
    save_echo(root / "repository" / "t" / "1")
    with endpoint(root / "endpoint") as made:
        models = [told(version, made.folder) for version in scan(root / "repository")]
        made.want(root / "repository", models=models, repository=str(root / "repository"), queue=4096)
        yield made.start().ready()


@pytest.fixture
def port(served: Endpoint) -> Iterator[int]:
    """With neighbours, who must be answered all the time, by the same replica, with not much more memory at the end."""
    (pid,) = served.pids
    exchange(served.port, [STREAMS[0].data])
    log, memory = served.folder / "log", memory_of(pid)
    before = log.stat().st_size
    neighbours = [Neighbour(served.port, number + 5).start() for number in range(4)]
    yield served.port
    for neighbour in neighbours:
        neighbour.stop()
    assert [neighbour.wrong for neighbour in neighbours] == [[]] * 4
    assert all(neighbour.asked > 0 for neighbour in neighbours)
    assert served.pids == [pid], "it was replaced"
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    connection.request("GET", "/v2/health/ready")
    assert connection.getresponse().status == 200
    connection.close()
    said = log.read_text()[before:]
    assert "Traceback" not in said
    assert "Error" not in said
    wait_for(lambda: memory_of(pid) < memory + 30)


def test_the_fixed_collection(port: int) -> None:
    for case in (*MESSAGES, *STREAMS):
        answers = take_apart(exchange(port, [case.data]))
        assert [answer.status for answer in answers] == list(case.statuses), case.name


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(stream=streams(frozenset(MODELS) - {"k"}))
def test_whatever_comes(port: int, stream: Stream) -> None:
    answers = take_apart(exchange(port, stream.pieces))
    assert stream.requests is None or len(answers) == stream.requests
    assert {answer.status for answer in answers} <= STATUSES


def test_clients_that_leave_in_the_middle(port: int) -> None:
    """Of a request, or of its answer; with a goodbye, or without."""
    body, length = infer("m", {"x": np.ones(20_000, "<f4")})
    whole = ask(b"/v2/models/m/infer", body, length)
    for turn in range(300):
        sock = connect(port)
        sock.sendall(whole if turn % 3 == 0 else UNFINISHED[turn % len(UNFINISHED)])
        if turn % 2:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close resets
        if turn % 21 == 0:
            sock.recv(10)
        sock.close()


def test_many_slow_clients_at_once(port: int) -> None:
    data = MESSAGES[0].data
    socks = [connect(port) for _ in range(300)]
    for at in range(0, 60, 3):
        for number, sock in enumerate(socks):
            sock.sendall(UNFINISHED[4][at : at + 3] if number % 2 else data[at : at + 3])
        time.sleep(0.02)
    for number, sock in enumerate(socks):
        if number % 2 == 0:
            sock.sendall(data[60:])
            assert read_answer(sock).status == 200
        sock.close()


def test_bombs(port: int) -> None:
    bomb = gzip.compress(bytes(200 << 20), 9)
    data = [ask(b"/v2/models/m/infer", bomb, None, b"Content-Encoding: gzip\r\n")] * 3
    assert [answer.status for answer in take_apart(exchange(port, data))] == [413] * 3


def test_the_largest_bodies(port: int) -> None:
    """As many bytes as a body may have: numbers, text, JSON, and what is nothing."""
    text = struct.pack("<I", 1000) + b"x" * 1000
    many, length = infer("t", {"text": [text[4:]] * 60_000})
    texts = ask(b"/v2/models/t/infer", many, length)
    numbers = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[3,2],"data":[' + b"1," * (30 << 20) + b"1]}]}"
    assert [a.status for a in take_apart(exchange(port, [ask(b"/v2/models/m/infer", numbers)]))] == [400]
    assert [a.status for a in take_apart(exchange(port, [ask(b"/v2/models/m/infer", bytes(64 << 20))]))] == [400]
    assert [a.status for a in take_apart(exchange(port, [ask(b"/v2/models/m/infer", bytes((64 << 20) + 1))]))] == [413]
    answers = take_apart(exchange(port, [texts]))
    assert [answer.status for answer in answers] == [200]
    assert answers[0].body.endswith(text * 1000)


def test_one_that_floods_and_does_not_read(port: int) -> None:
    socks = [connect(port) for _ in range(5)]
    for sock in socks:
        sock.setblocking(False)
        try:
            while True:
                sock.send(b"GET /metrics HTTP/1.1\r\n\r\n" * 1000)
        except BlockingIOError:
            pass
    begun = time.monotonic()
    with connect(port) as other:
        other.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert read_answer(other).status == 200
    assert time.monotonic() - begun < 5
    for sock in socks:
        sock.close()
