"""`onejob serve --foreground`: the main process of a container or a service; it ends with the endpoint, and ends it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Project
from served_models import Askers, alive, save_affine, wait_for

SLOW = """import time
time.sleep(30)

def infer(inputs):
    return inputs
"""


class Foreground:
    """The command, running."""

    def __init__(self, folder: Path) -> None:
        self.project = Project(folder, folder / "home")
        self.process: subprocess.Popen[str] | None = None

    def start(self, *args: str) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "onejob", "serve", *args, "--foreground"],
            cwd=self.project.folder,
            env={**os.environ, "ONEJOB_HOME": str(self.project.home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.process

    def listed(self) -> dict[str, Any]:
        listed = json.loads(self.project.cli("ps", "--json", "--all").stdout)["endpoints"]
        return listed[0] if listed else {}

    def state(self) -> dict[str, Any]:
        (path,) = self.project.home.glob("endpoints/*/state.json")
        told: dict[str, Any] = json.loads(path.read_text())
        return told

    def wait_ready(self) -> int:
        """Until it says so; gives its port."""
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert " is ready http://127.0.0.1:" in line
        return int(line.rsplit(":", 1)[1])


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Foreground]:
    made = Foreground(tmp_path)
    shutil.copyfile(save_affine(tmp_path / "engine") / "model.onnx", tmp_path / "affine.onnx")
    yield made
    if made.process is not None:
        if made.process.poll() is None:
            made.process.kill()
        made.process.communicate()
    made.project.cli("stop", "affine", "--now")
    made.project.cli("stop", "slow", "--now")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_endpoint_and_no_request_fails(here: Foreground, number: signal.Signals) -> None:
    process = here.start("affine.onnx", "--replicas", "2")
    port = here.wait_ready()
    pids = [replica["pid"] for replica in here.state()["replicas"]]
    with Askers(port, clients=8) as askers:
        askers.wait(20)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert askers.failed == []
    assert process.returncode == 0, err
    assert "endpoint affine is stopped" in out
    assert "onejob stop" not in out, "nobody needs to be told"
    assert not any(alive(pid) for pid in pids)
    assert here.listed()["state"] == "stopped"


def test_a_host_that_is_killed_is_followed_by_another(here: Foreground) -> None:
    process = here.start("affine.onnx")
    port = here.wait_ready()
    killed = here.state()["pid"]
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: here.listed()["state"] == "ready" and here.state()["pid"] != killed)
    assert here.listed()["url"].endswith(f":{port}")
    assert process.poll() is None


def test_who_stops_the_endpoint_ends_the_command(here: Foreground) -> None:
    process = here.start("affine.onnx")
    here.wait_ready()
    assert here.project.cli("stop", "affine").returncode == 0
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert "somebody has stopped it" in out


def test_a_signal_before_it_answers_leaves_nothing_behind(here: Foreground) -> None:
    here.project.write("slow.py", SLOW)
    process = here.start("slow.py")
    wait_for(lambda: here.listed().get("state") == "starting")
    wait_for(lambda: len(list(here.project.home.glob("endpoints/*/state.json"))) == 1)
    begun = time.monotonic()
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 10
    assert "was stopped before it answered" in err
    assert time.monotonic() - begun < 20
    assert here.listed()["state"] == "stopped"


def test_json_is_one_document_though_it_stays(here: Foreground) -> None:
    process = here.start("affine.onnx", "--json")
    wait_for(lambda: here.listed().get("state") == "ready")
    process.terminate()
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert json.loads(out)["endpoint"]["state"] == "ready"
