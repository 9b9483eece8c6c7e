"""The whole small job with a ledger on PostgreSQL, which the home's config.toml names."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from conftest import make_project

from onejob.testing.postgres import PostgresServer


def test_the_whole_job_on_postgresql(tmp_path: Path) -> None:
    project = make_project(tmp_path, stages="all")
    project.home.mkdir()
    with PostgresServer() as server:
        (project.home / "config.toml").write_text(f"ledger = {json.dumps(server.database('onejob'))}\n")
        try:
            steps = project.steps()
            assert {step["state"] for step in steps.values()} == {"done"}
            assert not (project.home / "ledger.db").exists(), "it is on PostgreSQL"
            assert all(step["cached"] for step in project.steps().values())
            [endpoint] = project.json("ps")["endpoints"]
            body = json.dumps({"instances": [{"carrier": "AA", "distance": 800, "hour": 12}]}).encode()
            with urllib.request.urlopen(f"{endpoint['url']}/v1/models/tiny:predict", data=body, timeout=30) as reply:
                request = reply.headers["x-request-id"]
            assert "rows.csv" in [node["name"] for node in project.json("trace", request)["nodes"]]
            assert not project.json("verify", "tiny")["damaged"]
            assert project.json("gc", "--dry-run")["blobs"] == 0
            saved = project.json("backup", str(tmp_path / "b.tar"))
            other = tmp_path / "other"
            other.mkdir()
            (other / "config.toml").write_text(f"ledger = {json.dumps(server.database('other'))}\n")
            assert project.json("restore", str(tmp_path / "b.tar"), "--home", str(other)) == saved
            assert not project.json("verify", "tiny/engine@champion", "--home", str(other))["damaged"]
            ledger = next(s for s in project.json("doctor")["supports"] if s["kind"] == "store")
            assert ledger["name"] == "postgresql"
        finally:
            project.cli("stop", "tiny", "--now")
        assert not project.processes()
