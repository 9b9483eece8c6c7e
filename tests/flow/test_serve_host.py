"""The host on its bad days: killed replicas, rolling under load, a version that fails, a taken port, a full disk."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from served_models import Askers, Endpoint, alive, endpoint, save_affine, wait_for

from onejob.core.artifact import digest_file
from onejob.monitor.collect import summary_of
from onejob.serve.host import BEAT_LIMIT

BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}]}).encode()


class Load:
    """Clients on kept-alive connections that ask without pause; what they got, and what failed."""

    def __init__(self, port: int, clients: int = 4) -> None:
        self.answers: Counter[tuple[int, float, str]] = Counter()
        self.failures: list[tuple[int, str]] = []
        """(the client's port, what went wrong)."""
        self.ports: set[int] = set()
        self._port = port
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(20)

    @property
    def count(self) -> int:
        return sum(self.answers.values())

    def more(self, count: int = 50) -> None:
        """Wait for so many more answers."""
        wanted = self.count + count
        wait_for(lambda: self.count >= wanted)

    def _ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        own = 0
        while not self._stop.is_set():
            try:
                if connection.sock is None:
                    connection.connect()
                own = connection.sock.getsockname()[1]
                self.ports.add(own)
                connection.request("POST", "/v2/models/affine/infer", BODY)
                answer = connection.getresponse()
                value = json.loads(answer.read())["outputs"][0]["data"][0]
                with self._lock:
                    self.answers[answer.status, value, answer.headers["x-onejob-engine"]] += 1
            except Exception as error:
                self.failures.append((own, repr(error)))
                connection.close()
        connection.close()


def replica_of(endpoint: Endpoint, client_port: int) -> int | None:
    """The replica that holds a client's connection, from /proc."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    for row in rows:
        local, remote = (int(address.rpartition(":")[2], 16) for address in (row[1], row[2]))
        if (local, remote) == (endpoint.port, client_port):
            for pid in endpoint.pids:
                links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
                if f"socket:[{row[9]}]" in links:
                    return pid
    return None


def ask(port: int, path: str = "/v2/models/affine/infer", body: bytes | None = BODY) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET" if body is None else "POST", path, body)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, data


def test_a_killed_replica_takes_only_its_own_requests_and_is_started_again(tmp_path: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        made.want(save_affine(tmp_path / "engine"), replicas=2)
        made.start().ready()
        with Load(made.port, clients=8) as load:
            load.more()
            old = made.pids
            by_replica = {port: replica_of(made, port) for port in load.ports}
            victim = next(pid for pid in by_replica.values() if pid)
            theirs = {port for port, pid in by_replica.items() if pid == victim}
            os.kill(victim, signal.SIGKILL)
            made.wait(lambda state: victim not in made.pids and len(made.pids) == 2)
            made.ready()
            load.more()
        assert {port for port, _ in load.failures} <= theirs
        assert len(load.failures) <= len(theirs)
        assert len(set(made.pids) & set(old)) == 1
        assert set(load.answers) == {(200, 3.0, "ab" * 32)}
        counted = load.count + len(load.failures)
        wait_for(lambda: load.count * 0.5 < summary_of(made.folder)["requests"] <= counted)


def test_counts_of_ended_replicas_stay(tmp_path: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        made.want(save_affine(tmp_path / "engine"))
        made.start().ready()
        for _ in range(5):
            assert ask(made.port)[0] == 200
        wait_for(lambda: summary_of(made.folder)["requests"] == 5)
        os.kill(made.pids[0], signal.SIGKILL)
        wait_for(lambda: (made.folder / "metrics" / "retired.json").exists())
        made.ready()
        assert ask(made.port)[0] == 200
        text = ask(made.port, "/metrics", None)[1].decode()
        assert 'nv_inference_request_success{model="affine",version="1"} 6\n' in text
        assert made.stop() == 0
        assert summary_of(made.folder)["requests"] == 6


def test_a_new_generation_takes_over_under_load_without_a_failed_request(tmp_path: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        made.want(save_affine(tmp_path / "one", scale=2), replicas=2, digest="d1")
        made.start().ready()
        port, old = made.port, made.pids
        with Load(port, clients=4) as load:
            load.more()
            for generation in (2, 3):
                made.want(
                    save_affine(tmp_path / str(generation), scale=generation * 10),
                    generation=generation,
                    digest="d2",
                    replicas=2,
                )
                made.ready(generation)
                load.more()
            wait_for(lambda: not any(alive(pid) for pid in old))
            load.more()
        assert load.failures == []
        assert {(status, value) for status, value, _ in load.answers} == {(200, 3.0), (200, 21.0), (200, 31.0)}
        assert made.port == port


def test_a_generation_that_fails_leaves_the_old_one_serving_and_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model.onnx").write_bytes(b"no graph")
    with endpoint(tmp_path / "ep") as made:
        made.want(save_affine(tmp_path / "engine"))
        made.start().ready()
        with Load(made.port, clients=2) as load:
            load.more()
            made.want(broken, generation=2)
            state = made.wait(lambda state: state["error"] is not None)
            load.more()
            assert (state["state"], state["generation"], state["failed_generation"]) == ("ready", 1, 2)
            assert "model.onnx" in state["error"]["place"] + state["error"]["message"]
            made.want(save_affine(tmp_path / "third", scale=5), generation=3)
            made.ready(3)
            load.more()
        assert made.state["error"] is None
        assert load.failures == []
        assert (200, 6.0, "ab" * 32) in load.answers


def test_a_first_generation_that_fails_is_told(tmp_path: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        made.want(tmp_path / "nothing here")
        made.start()
        state = made.wait(lambda state: state["state"] == "failed")
        assert state["error"]["error"] == "InferenceError"
        made.want(save_affine(tmp_path / "engine"), generation=2)
        made.ready(2)


def test_replicas_that_die_at_their_start_are_given_up(tmp_path: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        made.want(save_affine(tmp_path / "engine"))
        made.start(ONEJOB_FAULT="replica.before_warm_up")
        state = made.wait(lambda state: state["state"] == "failed")
        assert "die or hang at their start" in state["error"]["message"]
        assert made.process is not None
        assert made.process.poll() is None


def test_a_port_in_use_names_its_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, endpoint(tmp_path / "ep") as made:
        port = taken.getsockname()[1]
        made.want(save_affine(tmp_path / "engine"), port=port)
        made.start()
        assert made.process is not None
        assert made.process.wait(20) == 7
        state = made.state
        assert (state["state"], state["error"]["error"]) == ("failed", "PortInUseError")
        assert f"port {port} on 127.0.0.1 is in use by process {os.getpid()}" in state["error"]["message"]


def test_a_taken_port_for_a_new_generation_leaves_the_old_one_serving(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, endpoint(tmp_path / "ep") as made:
        made.want(save_affine(tmp_path / "engine"))
        made.start().ready()
        made.want(tmp_path / "engine", generation=2, port=taken.getsockname()[1])
        made.wait(lambda state: state["error"] is not None and state["state"] == "ready")
        assert ask(made.port)[0] == 200
        with socket.create_server(("127.0.0.1", 0)) as free:
            other = free.getsockname()[1]
        made.want(tmp_path / "engine", generation=3, port=other)
        made.ready(3)
        assert made.port == other
        assert ask(other)[0] == 200


def test_host_and_replica_load_no_more_than_they_need(tmp_path: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        made.want(save_affine(tmp_path / "engine"))
        made.start().ready()
        assert made.process is not None
        host, replica = (Path(f"/proc/{pid}/maps").read_text() for pid in (made.process.pid, made.pids[0]))
    assert not [name for name in ("numpy", "onnxruntime", "pydantic", "uvloop") if name in host]
    assert not [name for name in ("torch", "polars", "openvino") if name in replica]
    assert "onnxruntime" in replica


def test_few_files_are_no_reason_to_turn_connections_away(tmp_path: Path) -> None:
    """The limit that a shell sets is often 1024; what the system allows is more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with endpoint(tmp_path / "ep") as made:
        made.want(save_affine(tmp_path / "engine"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 64), hard))
        try:
            made.start().ready()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        socks = [made.connect() for _ in range(200)]
        for sock in socks:
            sock.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        for sock in socks:
            sock.close()


def test_the_port_stays_when_the_host_is_started_again(tmp_path: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        made.want(save_affine(tmp_path / "engine"))
        made.start().ready()
        port = made.port
        assert made.stop() == 0
        assert made.state["state"] == "stopped"
        (made.folder / "state.json").unlink()
        made.start().ready()
        assert made.port == port


def test_one_host_a_folder(tmp_path: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        made.want(save_affine(tmp_path / "engine"))
        made.start().ready()
        second = Endpoint(made.folder).start()
        assert second.process is not None
        assert second.process.wait(20) == 7
        assert ask(made.port)[0] == 200


def test_a_killed_host_leaves_no_replica(tmp_path: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        made.want(save_affine(tmp_path / "engine"), replicas=2)
        made.start().ready()
        pids = made.pids
        assert made.process is not None
        made.process.kill()
        made.process.wait(10)
        wait_for(lambda: not any(alive(pid) for pid in pids))
        made.start().ready()
        assert ask(made.port)[0] == 200


@pytest.mark.parametrize("point", ["host.before_switch", "host.retire", "host.before_start"])
def test_a_host_killed_anywhere_starts_again(tmp_path: Path, point: str) -> None:
    with endpoint(tmp_path / "ep") as made:
        made.want(save_affine(tmp_path / "engine"))
        made.start(ONEJOB_FAULT=point)
        assert made.process is not None
        assert made.process.wait(20) == -signal.SIGKILL
        made.start().ready()
        assert ask(made.port)[0] == 200


def test_sigterm_answers_what_was_asked_and_ends(tmp_path: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        made.want(save_affine(tmp_path / "engine"))
        made.start().ready()
        pids = made.pids
        head = b"POST /v2/models/affine/infer HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(BODY)
        with made.connect() as sock, made.connect():  # the second one is idle, and must not hold things up
            sock.sendall(head + BODY[:10])
            time.sleep(0.1)  # for the replica to have seen the request's beginning
            assert made.process is not None
            made.process.send_signal(signal.SIGTERM)
            wait_for(lambda: refused(made))
            sock.sendall(BODY[10:])
            answer = sock.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"Connection: close" in answer
        assert made.process.wait(20) == 0
        assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("keeps", [True, False], ids=["kept alive", "a connection each"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_sigterm_under_load_fails_no_request(tmp_path: Path, replicas: int, keeps: bool) -> None:
    """Whatever was sent on a connection that was made is answered; then connections are refused."""
    with endpoint(tmp_path / "ep") as made:
        made.want(save_affine(tmp_path / "engine"), replicas=replicas)
        made.start().ready()
        with Askers(made.port, clients=12, keeps=keeps) as askers:
            askers.wait(20)
            assert made.stop() == 0
        assert askers.failed == []


def test_sigterm_of_a_replica_under_load_fails_no_request(tmp_path: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        made.want(save_affine(tmp_path / "engine"), replicas=2)
        made.start().ready()
        with Load(made.port, clients=6) as load:
            load.more()
            for pid in made.pids:
                os.kill(pid, signal.SIGTERM)
                wait_for(lambda pid=pid: not alive(pid))  # type: ignore[misc]
                made.ready()
                load.more()
        assert load.failures == []


def refused(made: Endpoint) -> bool:
    try:
        made.connect().close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_replica_that_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine never answers: the request gets 504, ready turns off, and the host starts another."""
    package = tmp_path / "project" / "hanging"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "encode.py").write_text(HANGING)
    engine = save_affine(tmp_path / "engine")
    (engine / "encoding.json").write_text("{}")
    with endpoint(tmp_path / "ep") as made:
        meta = {"engine": "onnxruntime", "family": "hanging"}
        made.want(engine, meta=meta, project=str(package.parent), timeout=1.0, grace=1)
        made.start().ready()
        old = made.pids
        path = "/v1/models/affine:predict"
        assert ask(made.port, path, b'{"instances": [{"x": 1}]}')[0] == 200
        stuck = threading.Thread(target=ask, args=(made.port, path, b'{"instances": [{"x": -7}]}'))
        stuck.start()
        time.sleep(0.3)
        assert ask(made.port, "/v2/health/live", None)[0] == 200  # answerable while the engine computes
        stuck.join(20)
        wait_for(lambda: made.pids != old and len(made.pids) == 1)
        made.ready()
        assert ask(made.port, path, b'{"instances": [{"x": 1}]}')[0] == 200


HANGING = """
import time
import numpy as np
from onejob.core.tensor import TensorSpec


class Encoding:
    inputs = (TensorSpec("x", "FP64", (-1,)),)
    features = outputs = ()
    served = (TensorSpec("y", "FP32", (-1,)),)

    def encode(self, columns):
        return {"x": np.array([[value] * 4 for value in columns["x"]], np.float32)}

    def decode(self, outputs):
        time.sleep(0.002)  # slow enough for a thread of its own
        if outputs["y"].min() < -10:
            time.sleep(3600)
        return {"y": outputs["y"][:, 0]}


def load(data):
    return Encoding()
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("a small tmpfs can't be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_stops_the_log_not_the_serving(tmp_path: Path, small_disk: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        (made.folder / "requests").symlink_to(small_disk)
        (small_disk / "filler").write_bytes(b"x" * 250_000)
        made.want(save_affine(tmp_path / "engine"))
        made.start().ready()
        with Load(made.port, clients=4) as load:
            load.more(300)
        assert load.failures == []

        def dropped() -> bool:
            text = ask(made.port, "/metrics", None)[1].decode()
            line = next(line for line in text.splitlines() if line.startswith("onejob_request_log_dropped_total "))
            return int(line.split()[-1]) > 0

        wait_for(dropped)
        (small_disk / "filler").unlink()
        answered = [ask(made.port) for _ in range(3)]
        assert [status for status, _ in answered] == [200] * 3
        request = json.loads(answered[0][1])["parameters"]["request_id"]
        wait_for(lambda: any(request in path.read_text() for path in small_disk.glob("*.jsonl")))


@pytest.mark.parametrize("all_of_it", [False, True], ids=["the host alone", "all, as a frozen container"])
def test_who_was_held_up_takes_nobody_for_silent(tmp_path: Path, all_of_it: bool) -> None:
    """Stopped for longer than a replica may be silent."""
    with endpoint(tmp_path / "ep") as made:
        made.want(save_affine(tmp_path / "engine"), replicas=2)
        made.start().ready()
        pids = made.pids
        assert made.process is not None
        held = [made.process.pid, *(pids if all_of_it else [])]
        with Load(made.port, clients=4) as load:
            for pid in held:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(BEAT_LIMIT + 1)
            for pid in held:
                os.kill(pid, signal.SIGCONT)
            load.more()
            time.sleep(1)
        assert load.failures == []
        assert made.pids == pids
        assert "is replaced" not in (made.folder / "log").read_text()


def test_a_replica_refuses_an_engine_whose_file_was_swapped(tmp_path: Path) -> None:
    """Those that serve go on; one that starts would answer with another model in the name of this one."""
    engine, other = save_affine(tmp_path / "engine"), save_affine(tmp_path / "other", scale=9.0)
    file = engine / "model.onnx"
    files = {"model.onnx": digest_file(file)}
    with endpoint(tmp_path / "ep") as made:
        made.want(engine, files=files)
        made.start().ready()
        (pid,) = made.pids
        file.rename(tmp_path / "kept")
        (other / "model.onnx").rename(file)
        assert json.loads(ask(made.port)[1])["outputs"][0]["data"][0] == 3
        os.kill(pid, signal.SIGKILL)
        log = made.folder / "log"
        wait_for(lambda: "somebody has changed it" in log.read_text())
        wait_for(lambda: b"somebody has changed it" in ask(made.port, "/v2/health/ready", None)[1])
        (tmp_path / "kept").rename(file)
        made.ready()
        assert json.loads(ask(made.port)[1])["outputs"][0]["data"][0] == 3
