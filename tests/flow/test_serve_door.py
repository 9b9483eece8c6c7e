"""While no replica can answer, the door does: probes hear the truth within a second, others wait, or are told."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_models import Endpoint, endpoint, save_affine, wait_for

from onejob.serve.doorman import MOST, PATIENCE


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Endpoint]:
    with endpoint(tmp_path / "endpoint") as made:
        made.want(save_affine(tmp_path / "engine"))
        yield made.start().ready()


def get(made: Endpoint, path: str, timeout: float = 10) -> tuple[int, Any, float]:
    """(status, answer, seconds)."""
    begun = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", made.port, timeout=timeout)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()), time.monotonic() - begun
    finally:
        connection.close()


def infer(made: Endpoint, timeout: float = 30) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", made.port, timeout=timeout)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    try:
        connection.request("POST", "/v2/models/affine/infer", json.dumps({"inputs": [tensor]}))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def first(condition: Callable[[], bool], limit: float) -> float:
    begun = time.monotonic()
    wait_for(condition, limit)
    return time.monotonic() - begun


def test_a_replica_that_is_stopped_is_not_ready_within_a_second_or_so(served: Endpoint) -> None:
    (pid,) = served.pids
    assert get(served, "/v2/health/ready")[0] == 200
    os.kill(pid, signal.SIGSTOP)
    try:
        took = first(lambda: get(served, "/v2/health/ready", 3)[0] == 503, 5)
        status, answer, _ = get(served, "/v2/health/ready")
        assert (status, answer["error"]) == (503, "not ready: the engine hangs")
        assert get(served, "/v2/models/affine/ready")[0] == 503
        assert get(served, "/v2/health/live")[:2] == (200, {"live": True}), "the host is alive, and says so"
        assert took < 2.5
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: get(served, "/v2/health/ready")[0] == 200)
    assert infer(served)[0] == 200


def test_who_asks_meanwhile_is_answered_when_a_replica_is_well_again(served: Endpoint) -> None:
    (pid,) = served.pids
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: get(served, "/v2/health/ready", 3)[0] == 503)
    answers: list[int] = []
    asking = [threading.Thread(target=lambda: answers.append(infer(served)[0])) for _ in range(20)]
    for thread in asking:
        thread.start()
    time.sleep(1)
    assert answers == []
    os.kill(pid, signal.SIGCONT)
    for thread in asking:
        thread.join(20)
    assert answers == [200] * 20


def test_who_has_waited_long_enough_is_told(served: Endpoint) -> None:
    (pid,) = served.pids
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: get(served, "/v2/health/ready", 3)[0] == 503)
        begun = time.monotonic()
        status, answer = infer(served)
        assert (status, answer["error"]) == (503, "not ready: the engine hangs")
        assert PATIENCE - 1 < time.monotonic() - begun < PATIENCE + 4
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_replica_that_hangs_for_long_is_replaced(served: Endpoint) -> None:
    (pid,) = served.pids
    os.kill(pid, signal.SIGSTOP)
    served.wait(lambda state: [r for r in state["replicas"] if r["ready"] and r["pid"] != pid], 40)
    assert infer(served)[0] == 200
    assert get(served, "/v2/health/ready")[0] == 200


def test_kill_9_under_load_loses_no_more_than_what_was_under_way(served: Endpoint) -> None:
    """Requests on the dead replica's connections fail, each once; everybody else waits for the next replica."""
    (pid,) = served.pids
    over = threading.Event()
    lost: list[Exception] = []
    bad: list[Any] = []
    counts = [0] * 8

    def keep_asking(number: int) -> None:
        body = json.dumps(
            {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": np.full(4, number).tolist()}]}
        )
        while not over.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
            try:
                while not over.is_set():
                    connection.request("POST", "/v2/models/affine/infer", body)
                    answer = connection.getresponse()
                    told = json.loads(answer.read())
                    if answer.status != 200 or told["outputs"][0]["data"] != [2.0 * number + 1] * 4:
                        bad.append((answer.status, told))
                    counts[number] += 1
            except (OSError, http.client.HTTPException) as error:
                lost.append(error)
            finally:
                connection.close()

    asking = [threading.Thread(target=keep_asking, args=(number,)) for number in range(8)]
    for thread in asking:
        thread.start()
    time.sleep(1)
    os.kill(pid, signal.SIGKILL)
    begun = time.monotonic()
    served.wait(lambda state: [r for r in state["replicas"] if r["ready"] and r["pid"] != pid], 20)
    recovered = time.monotonic() - begun
    before = list(counts)
    time.sleep(1)
    over.set()
    for thread in asking:
        thread.join(30)
    assert bad == []
    assert len(lost) <= 8, "one for each connection at most"
    assert all(after > earlier for after, earlier in zip(counts, before, strict=True))
    assert recovered < 10


def ticks(pid: int) -> int:
    """CPU time of a process, in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_who_has_half_asked_costs_nothing_and_is_answered_in_the_end(served: Endpoint) -> None:
    (pid,) = served.pids
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}).encode()
    asked = (
        b"POST /v2/models/affine/infer HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: get(served, "/v2/health/ready", 3)[0] == 503)
        socks = [served.connect() for _ in range(20)]
        for at, sock in enumerate(socks):
            sock.sendall(asked[: 5 + at * 8])
        assert served.process is not None
        before = ticks(served.process.pid)
        time.sleep(2)
        assert ticks(served.process.pid) - before < 60
        assert get(served, "/v2/health/ready")[0] == 503, "probes are answered meanwhile"
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: get(served, "/v2/health/ready")[0] == 200)
    for at, sock in enumerate(socks):
        sock.sendall(asked[5 + at * 8 :])
        answer = b"".join(iter(lambda sock=sock: sock.recv(1 << 16), b""))  # type: ignore[misc]
        assert answer.startswith(b"HTTP/1.1 200"), answer
        sock.close()


def test_more_visitors_than_may_wait_keep_the_host_from_nothing(served: Endpoint) -> None:
    (pid,) = served.pids
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: get(served, "/v2/health/ready", 3)[0] == 503)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        socks = [served.connect() for _ in range(min(MOST + 50, most - 100))]
        assert served.process is not None
        time.sleep(0.5)
        before = ticks(served.process.pid)
        time.sleep(2)
        assert ticks(served.process.pid) - before < 60
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: infer(served)[0] == 200)
    for sock in socks:
        sock.close()
