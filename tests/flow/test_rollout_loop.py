"""A promoted engine that goes back while it is tried: its host goes back by itself, and the loop follows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from conftest import Project, make_project
from served_models import wait_for

from onejob.loop.commands.run import up
from onejob.loop.factory import open_session
from onejob.serve.folder import read_json

REST = """
[serve]
rollout = { canary = 0.5, hold = "1h" }

[monitor]
gate = { promote = "better", margin = 0.0 }
"""
PATIENCE = 120.0


def state(project: Project) -> dict[str, Any]:
    return read_json(project.home / "endpoints" / "tiny" / "state.json") or {}


def ready(project: Project) -> list[int]:
    return [replica["pid"] for replica in state(project)["replicas"] if replica["ready"]]


def test_the_endpoint_is_ready_again_with_what_served_all_the_time(tmp_path: Path) -> None:
    project = make_project(tmp_path, stages="train")
    job = (project.folder / "job.toml").read_text()
    try:
        project.write("job.toml", job + REST)
        first = project.json("run", "job.toml")["endpoint"]["digest"]
        project.write("job.toml", job.replace("epochs = 2", "epochs = 3"))
        other = str(project.json("run", "job.toml")["run"])
        command = [sys.executable, "-m", "onejob", "promote", other, "tiny", "--json"]
        env = {**os.environ, "ONEJOB_HOME": str(project.home)}
        promote = subprocess.Popen(command, env=env, cwd=project.folder, stdout=subprocess.PIPE)
        try:
            wait_for(lambda: bool(state(project).get("rollout")), PATIENCE)
            assert promote.poll() is None, "it waits for the end of the trial"
            (first_replica,) = ready(project)
            os.kill(first_replica, signal.SIGKILL)
            wait_for(lambda: ready(project) not in ([], [first_replica]), PATIENCE)
            os.kill(*ready(project), signal.SIGKILL)
            told = json.loads(promote.communicate(timeout=PATIENCE)[0])
        finally:
            promote.kill()
        assert promote.returncode == 9
        assert "generation 2 was tried and went back: 2 replicas ended" in told["error"]["message"]
        with open_session(project.home) as session:
            deadline = time.monotonic() + PATIENCE
            while (endpoint := session.ledger.get_endpoint("tiny")) is None or endpoint.state != "ready":
                assert time.monotonic() < deadline, endpoint
                up(session, passes=1)
            assert (endpoint.artifact, endpoint.generation) == (first, 3)
            (promotion,) = session.ledger.list_promotions("tiny")
            assert promotion.state == "rolled_back"
            assert "it failed: generation 2 was tried and went back" in promotion.reason
            session.release()
        assert (state(project)["digest"], state(project)["error"]) == (first, None)
    finally:
        project.cli("stop", "tiny", "--now")
