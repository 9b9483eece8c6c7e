"""An endpoint at a Unix socket, asked by curl: its file, hosts that die, the door, and addresses that change."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Project
from served_models import Endpoint, alive, endpoint, save_affine, wait_for

from onejob.errors import PortInUseError, UnavailableError
from onejob.serve.listener import bind, release

BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]})


@pytest.fixture
def at() -> Iterator[Path]:
    """The path of a socket: short, as the kernel wants it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "model.sock"


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Endpoint]:
    with endpoint(tmp_path / "endpoint") as made:
        yield made


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return save_affine(tmp_path / "engine")


def curl(at: Path, path: str, *more: str) -> tuple[int, Any]:
    """(status, answer)."""
    command = ["curl", "-sS", "--max-time", "20", "-w", "\n%{http_code}", "--unix-socket", str(at)]
    done = subprocess.run([*command, *more, f"http://localhost{path}"], capture_output=True, text=True, check=True)
    body, _, status = done.stdout.rpartition("\n")
    return int(status), json.loads(body) if body else None


def infer(at: Path) -> list[float]:
    status, answer = curl(at, "/v2/models/affine/infer", "-d", BODY)
    assert status == 200
    data: list[float] = answer["outputs"][0]["data"]
    return data


def test_curl_asks_replicas_at_a_socket(made: Endpoint, engine: Path, at: Path) -> None:
    made.want(engine, host=f"unix:{at}", replicas=2)
    made.start().ready()
    assert made.port == 0
    mode = at.stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    assert curl(at, "/v2/health/ready")[0] == 200
    assert {tuple(infer(at)) for _ in range(6)} == {(3, 5, 7, 9)}
    assert curl(at, "/v2/models/nope/infer", "-d", BODY)[0] == 404
    assert made.stop() == 0
    assert not at.exists()


def test_the_door_works_at_a_socket_too(made: Endpoint, engine: Path, at: Path) -> None:
    made.want(engine, host=f"unix:{at}")
    made.start().ready()
    (pid,) = made.pids
    os.kill(pid, signal.SIGSTOP)
    answers: list[list[float]] = []
    try:
        wait_for(lambda: curl(at, "/v2/health/ready") == (503, {"error": "not ready: the engine hangs"}))
        assert curl(at, "/v2/health/live")[0] == 200
        asking = [threading.Thread(target=lambda: answers.append(infer(at))) for _ in range(5)]
        for thread in asking:
            thread.start()
    finally:
        os.kill(pid, signal.SIGCONT)
    for thread in asking:
        thread.join(20)
    assert answers == [[3, 5, 7, 9]] * 5


def test_a_host_that_was_killed_leaves_no_file_once_it_is_stopped(tmp_path: Path, at: Path) -> None:
    project = Project(tmp_path, tmp_path / "home")
    shutil.copyfile(save_affine(tmp_path / "engine") / "model.onnx", tmp_path / "affine.onnx")
    assert project.cli("serve", "affine.onnx", "--host", f"unix:{at}").returncode == 0
    assert at.exists()
    assert project.cli("stop", "affine", "--now").returncode == 0
    assert not at.exists()


def test_the_file_of_a_host_that_was_killed_is_replaced(made: Endpoint, engine: Path, at: Path) -> None:
    made.want(engine, host=f"unix:{at}")
    made.start().ready()
    assert made.process is not None
    pids = made.pids
    made.process.kill()
    made.process.wait()
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert at.is_socket(), "nobody could remove it"
    made.start().ready()
    assert infer(at) == [3, 5, 7, 9]


def test_a_new_version_takes_over_at_the_same_socket(made: Endpoint, engine: Path, at: Path, tmp_path: Path) -> None:
    made.want(engine, host=f"unix:{at}")
    made.start().ready()
    inode = at.stat().st_ino
    made.want(save_affine(tmp_path / "other", scale=3), host=f"unix:{at}", generation=2, digest="cd" * 32)
    seen = set()
    while (4, 7, 10, 13) not in seen:
        seen.add(tuple(infer(at)))
    made.ready(2)
    assert seen <= {(3, 5, 7, 9), (4, 7, 10, 13)}
    assert at.stat().st_ino == inode


def test_an_endpoint_moves_between_sockets_and_ports(made: Endpoint, engine: Path, at: Path) -> None:
    made.want(engine)
    made.start().ready()
    port = made.port
    made.want(engine, host=f"unix:{at}", generation=2)
    made.ready(2)
    assert infer(at) == [3, 5, 7, 9]
    other = at.with_name("other.sock")
    made.want(engine, host=f"unix:{other}", generation=3)
    made.ready(3)
    assert infer(other) == [3, 5, 7, 9]
    assert not at.exists()
    made.want(engine, generation=4)
    made.ready(4)
    assert made.port == port, "the one that it had"
    assert not other.exists()


def test_what_is_in_the_way_is_named_and_left_alone(made: Endpoint, engine: Path, at: Path) -> None:
    at.write_text("precious")
    with pytest.raises(UnavailableError, match="is no socket"):
        bind(f"unix:{at}", 0)
    assert at.read_text() == "precious"
    at.unlink()
    with pytest.raises(UnavailableError, match=r"No such file or directory.*Make its folder first"):
        bind(f"unix:{at.parent / 'none' / 'model.sock'}", 0)
    listener = bind(f"unix:{at}", 0)
    with pytest.raises(PortInUseError, match=f"in use by process {os.getpid()}"):
        bind(f"unix:{at}", 0)
    made.want(engine, host=f"unix:{at}")
    made.start()
    made.wait(lambda state: state["state"] == "failed")
    assert f"in use by process {os.getpid()}" in made.state["error"]["message"]
    assert at.is_socket()
    release(listener)
    assert not at.exists()
    release(listener)


def test_a_file_that_somebody_put_in_its_place_stays(at: Path) -> None:
    listener = bind(f"unix:{at}", 0)
    at.unlink()
    other = bind(f"unix:{at}", 0)
    release(listener)
    assert at.is_socket()
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(at))
    release(other)


def test_onejob_serve_at_a_socket(tmp_path: Path, engine: Path, at: Path) -> None:
    project = Project(tmp_path, tmp_path / "home")
    done = project.cli("serve", str(engine / "model.onnx"), "--name", "affine", "--host", f"unix:{at}")
    try:
        assert done.returncode == 0, done.stderr
        url = "http+unix://" + str(at).replace("/", "%2F")
        assert f"endpoint affine is ready {url}" in done.stdout
        assert f"curl -s --unix-socket {at} http://localhost/v2/models/affine" in done.stdout + done.stderr
        assert infer(at) == [3, 5, 7, 9]
        assert project.json("ps")["endpoints"][0]["url"] == url
        assert url in project.cli("show", "affine").stdout
        bench = project.cli("bench", "affine", "--requests", "50", "--connections", "2", "--warmup", "0s")
        assert bench.returncode == 0, bench.stderr
        refused = project.cli("serve", str(engine / "model.onnx"), "--host", f"unix:{at}", "--port", "8000")
        assert "--port: a Unix socket has no port" in refused.stderr
    finally:
        project.cli("stop", "affine")
    assert not at.exists()
