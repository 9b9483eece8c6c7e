"""Engines that throw, return nonsense, hang, leak, exit or crash, under load: all others are answered."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served_models import Endpoint, endpoint, save_affine, wait_for

from onejob.testing.sockets import memory_of

ODD = '''
"""y = 2 x + 1; but for some x, which ask for trouble."""
import ctypes
import os
import sys
import time

import numpy as np

from onejob.core.tensor import TensorSpec
from onejob.errors import InferenceError

HELD = []


class Encoding:
    inputs = (TensorSpec("x", "FP64", (-1,)),)
    features = outputs = ()
    served = (TensorSpec("y", "FP32", (-1, 2)),)

    def encode(self, columns):
        return {"x": np.array([[value] * 4 for value in columns["x"]], np.float32)}

    def decode(self, outputs):
        y = outputs["y"][:, :2]
        time.sleep(float(os.environ.get("ODD_SLEEP", "0")))
        asked = {round((float(value) - 1) / 2) for value in y[:, 0]}
        if -1 in asked:
            raise ValueError("boom")
        if -2 in asked:
            raise InferenceError("it says no", place="engine")
        if -3 in asked:
            return {"y": np.concatenate([y, y])}
        if -4 in asked:
            return {"z": y}
        if -5 in asked:
            return {"y": y.astype(str).tolist()}
        if -6 in asked:
            return None
        if -7 in asked:
            return {"y": np.array(5.0)}
        if -8 in asked:
            return {"y": np.where(y < 0, np.nan, y)}
        if -9 in asked:
            sys.exit("enough")
        if -10 in asked:
            return {"y": y.astype(np.float64)}
        if -11 in asked:
            return {"y": np.concatenate([y, y], axis=1)}
        if -12 in asked:
            return {"y": np.array([["text"] * 2] * len(y), dtype=object)}
        if -13 in asked:
            raise BadError()
        if -20 in asked:
            time.sleep(3)
        if -30 in asked:
            ctypes.string_at(0)
        if -31 in asked:
            os._exit(3)
        if -32 in asked:
            time.sleep(3600)
        if -40 in asked:
            HELD.append(bytearray(os.urandom(1 << 20) * 16))
        return {"y": y}


class BadError(Exception):
    def __str__(self):
        raise RuntimeError("not even that")


def load(data):
    return Encoding()
'''


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[Endpoint]:
    package = tmp_path / "project" / "odd"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "encode.py").write_text(ODD)
    engine = save_affine(tmp_path / "engine")
    (engine / "encoding.json").write_text("{}")
    with endpoint(tmp_path / "endpoint") as made:
        yield made


def serve(made: Endpoint, **options: Any) -> None:
    root = made.folder.parent
    meta = {"engine": "onnxruntime", "family": "odd"}
    made.want(root / "engine", meta=meta, project=str(root / "project"), grace=5, **{"timeout": 20.0, **options})
    made.start().ready()


def call(made: Endpoint, method: str, path: str, body: bytes | None = None, limit: float = 30) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", made.port, timeout=limit)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")
    finally:
        connection.close()


def ask(made: Endpoint, x: float) -> tuple[int, Any]:
    return call(made, "POST", "/v1/models/affine:predict", json.dumps({"instances": [{"x": x}]}).encode())


def is_ready(made: Endpoint) -> bool:
    """As a prober sees it, that waits a second."""
    try:
        return call(made, "GET", "/v2/health/ready", limit=1)[0] == 200
    except TimeoutError:
        return False


class Others:
    """Clients that ask for nothing odd, without pause."""

    def __init__(self, made: Endpoint, amount: int = 4) -> None:
        self._made = made
        self.answered = 0
        self.wrong: list[Any] = []
        self.lost: list[Exception] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(amount)]

    def __enter__(self) -> Others:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(40)
        assert not any(thread.is_alive() for thread in self._threads)

    def more(self, amount: int = 50) -> None:
        wanted = self.answered + amount
        wait_for(lambda: self.answered >= wanted)

    def _run(self, number: int) -> None:
        while not self._over.is_set():
            try:
                status, told = ask(self._made, number + 0.5)
            except (OSError, http.client.HTTPException) as error:
                self.lost.append(error)
                continue
            y = 2 * (number + 0.5) + 1
            if (status, told) != (200, {"predictions": [{"y": [y, y]}]}):
                self.wrong.append((status, told))
            self.answered += 1


def test_what_goes_wrong_is_told_to_who_asked_for_it_and_to_nobody_else(odd: Endpoint) -> None:
    serve(odd)
    (pid,) = odd.pids
    with Others(odd) as others:
        for x, status, words in (
            (-1, 500, "boom"),
            (-2, 500, "it says no"),
            (-3, 500, "for 1 rows"),
            (-4, 500, "no output 'y'"),
            (-5, 500, "not FP32 as declared"),
            (-6, 500, "NoneType"),
            (-7, 500, "has shape []"),
            (-8, 200, [None, None]),
            (-9, 500, "SystemExit: enough"),
            (-10, 200, [-19, -19]),
            (-11, 500, "has shape [1, 4], not [-1, 2] as declared"),
            (-12, 500, "not FP32 as declared"),
            (-13, 500, "BadError"),
        ):
            for _ in range(3):
                got, told = ask(odd, x)
                assert got == status, (x, told)
                if status == 200:
                    assert told == {"predictions": [{"y": words}]}
                else:
                    assert words in told["error"], (x, told)
                assert call(odd, "GET", "/v2/health/ready")[0] == 200, "it is what was asked, not the engine"
        others.more()
    assert (others.wrong, others.lost) == ([], [])
    assert odd.pids == [pid]


@pytest.mark.parametrize("sleep", ["0", "0.002"], ids=["on the loop", "on a thread"])
def test_an_engine_that_is_slow_for_once_is_not_ready_meanwhile(
    odd: Endpoint, monkeypatch: pytest.MonkeyPatch, sleep: str
) -> None:
    monkeypatch.setenv("ODD_SLEEP", sleep)
    serve(odd)
    assert [ask(odd, 3)[0] for _ in range(20)] == [200] * 20
    slow = threading.Thread(target=ask, args=(odd, -20))
    slow.start()
    wait_for(lambda: not is_ready(odd), 4)
    assert call(odd, "GET", "/v2/health/live")[0] == 200
    slow.join(20)
    wait_for(lambda: is_ready(odd), 4)
    assert ask(odd, 3)[0] == 200


@pytest.mark.parametrize("x", [-30, -31])
def test_a_crash_takes_one_replica_and_what_it_had(odd: Endpoint, x: int) -> None:
    serve(odd, replicas=2)
    before = set(odd.pids)
    with Others(odd) as others:
        others.more()
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(odd, x)
        odd.wait(lambda state: sum(one["ready"] for one in state["replicas"]) == 2 and set(odd.pids) != before)
        others.more()
    assert others.wrong == []
    assert len(others.lost) <= 4, "what was under way with it, at most one for each client"
    assert len(before & set(odd.pids)) == 1


@pytest.mark.parametrize("sleep", ["0", "0.002"], ids=["on the loop", "on a thread"])
def test_an_engine_that_hangs_is_replaced(odd: Endpoint, monkeypatch: pytest.MonkeyPatch, sleep: str) -> None:
    """On a thread, who asked is told; where the loop itself hangs, that connection is lost with its replica."""
    monkeypatch.setenv("ODD_SLEEP", sleep)
    serve(odd, timeout=1.5, replicas=2)
    before = set(odd.pids)
    told: list[Any] = []

    def hang() -> None:
        try:
            told.append(ask(odd, -32)[0])
        except (OSError, http.client.HTTPException):
            told.append("lost")

    hung = threading.Thread(target=hang)
    hung.start()
    time.sleep(0.3)
    with Others(odd) as others:  # on new connections: they come to the other replica
        odd.wait(lambda state: sum(one["ready"] for one in state["replicas"]) == 2 and set(odd.pids) != before)
        others.more()
    hung.join(20)
    assert told[0] == 504 or (told == ["lost"] and sleep == "0")  # on a busy machine all may be on threads
    assert len(before & set(odd.pids)) == 1
    assert {status for status, _ in others.wrong} <= {504}, "who came to the one that hangs is told in time"
    assert others.lost == []


def test_an_engine_that_leaks_is_replaced_in_time_and_no_request_fails(odd: Endpoint) -> None:
    serve(odd, memory=300 << 20)
    (pid,) = odd.pids
    log = odd.folder / "log"
    with Others(odd) as others:
        end = time.monotonic() + 60
        while odd.pids == [pid]:
            assert time.monotonic() < end, (memory_of(pid), log.read_text()[-2000:])
            if memory_of(pid) < 330:
                assert ask(odd, -40)[0] == 200
            time.sleep(0.02)
        odd.ready()
        others.more()
        wait_for(lambda: memory_of(pid) == 0)
    assert (others.wrong, others.lost) == ([], [])
    assert "more than the 300 MiB it may: replicas are replaced" in log.read_text()
    state = odd.state
    assert (state["generation"], state["error"], state["failed_generation"]) == (1, None, None)


def test_if_the_successors_cannot_start_the_old_ones_go_on(odd: Endpoint) -> None:
    serve(odd, memory=300 << 20)
    (pid,) = odd.pids
    (odd.folder.parent / "engine" / "model.onnx").rename(odd.folder.parent / "gone")
    log = odd.folder / "log"
    with Others(odd) as others:
        while memory_of(pid) < 330:
            assert ask(odd, -40)[0] == 200
        wait_for(lambda: "generation 1 is given up" in log.read_text(), 40)
        others.more()
    assert (others.wrong, others.lost) == ([], [])
    state = odd.state
    assert odd.pids == [pid]
    assert (state["state"], state["error"], state["failed_generation"]) == ("ready", None, None)
