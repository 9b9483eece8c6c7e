"""kill -9 at every state: the next `onejob run` ends with the same digests, no orphan process, no half artifact."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import Project, make_project

from onejob.core.artifact import digest_file
from onejob.core.faults import MARK, VARIABLE
from onejob.testing.faults import POINTS

PARTS = ("local", "shim", "step", "task", "loop", "ingest", "blobs", "claim", "data")
RUN_POINTS = sorted(point for point in POINTS if point.split(".")[0] in PARTS)
COMMITS = [f"{part}.before_commit:{n}" for part in ("runs", "executions") for n in (1, 2)]
COMMITS += ["catalog.before_commit:1"]
TRAIN_POINTS = ["train.step:3", "train.step:7", "checkpoint.after_shard:2", "checkpoint.before_manifest:2"]
OPTIMIZE_POINTS = {
    "export.written": "optimize.export",
    "openvino.written": "optimize.export",
    "int8.quantised": "optimize.openvino-fp32",
    "choose.measured": "optimize.onnxruntime-int8",
    "choose.copied": "optimize.choose",
}
"""Point -> the step from which a forced run begins: the one that the point before it has killed."""
SERVE_POINTS = sorted(point for point in POINTS if point.split(".")[0] in ("endpoint", "endpoints", "host", "replica"))
NOT_AT_START = (
    "host.before_switch",
    "host.retire",
    "replica.draining",
    "replica.before_log",
    "host.before_settle",
    "host.after_settle",
    "replica.before_settle",
    "host.before_open",
    "host.before_use",
    "replica.before_use",
)
"""Points of a change of version, of models and of traffic: tests/flow/test_serve_host.py, test_rollout.py and
test_serve_repository.py pass them."""


def kill_at(project: Project, point: str, *args: str) -> None:
    """Run the job with a fault point armed; somebody must have died there."""
    mark = project.home.parent / "reached"
    done = project.cli("run", "job.toml", *args, env={VARIABLE: point, MARK: str(mark)})
    assert mark.exists(), f"{point} was never passed: {done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digests of uninterrupted runs: of the data job, and of the training job with two ranks."""
    data = make_project(tmp_path_factory.mktemp("truth"), stages="data")
    data.steps()
    train = make_project(tmp_path_factory.mktemp("truth-train"), stages="train", processes=2)
    train.steps()
    return {"data": data.digests()["dataset"], "checkpoint": train.digests()["checkpoint"]}


def assert_whole(project: Project) -> None:
    """Nothing is left of what was killed: no process, no half blob; every blob is what its name says."""
    deadline = time.monotonic() + 10
    while project.processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert project.processes() == []
    blobs = [path for path in (project.home / "blobs").rglob("*") if path.is_file() and path.name != ".lock"]
    assert blobs
    assert [path for path in blobs if digest_file(path) != path.name] == []
    done = project.cli("verify", "tiny/dataset@latest")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("point", [*RUN_POINTS, *COMMITS])
def test_killed_at_a_fault_point_the_next_run_ends_the_same(tmp_path, truth, point):
    project = make_project(tmp_path)
    kill_at(project, point)
    project.steps()
    assert project.digests()["dataset"] == truth["data"]
    assert_whole(project)


@pytest.mark.parametrize("point", TRAIN_POINTS)
def test_ranks_killed_in_training_resume_to_the_same_bytes(tmp_path, truth, point):
    project = make_project(tmp_path, stages="train", processes=2)
    kill_at(project, point)
    project.steps()
    assert project.digests()["checkpoint"] == truth["checkpoint"]
    assert_whole(project)


# ---- serving and optimizing: copies of one home ------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, dict[str, str]]:
    """A whole job that was run to its end, with its endpoint stopped; and its digests."""
    project = make_project(tmp_path_factory.mktemp("served"), stages="all")
    job = (project.folder / "job.toml").read_text()
    project.write(
        "job.toml", job.replace('["onnxruntime-fp32"]', '["onnxruntime-fp32", "onnxruntime-int8", "openvino-fp32"]')
    )
    project.steps()
    project.cli("stop", "tiny")
    shutil.rmtree(project.home / "endpoints" / "tiny")
    return project, project.digests()


def copy_of(project: Project, root: Path) -> Project:
    """The same folder, so that nothing in it has changed, with a home of its own in which every step is cached."""
    home = root / "home"
    shutil.copytree(project.home, home)
    return Project(project.folder, home)


def assert_answers(project: Project) -> None:
    endpoint = project.json("show", "tiny")["endpoint"]
    assert endpoint["state"] == "ready"
    row = {"carrier": "AA", "distance": 500, "hour": 17}
    asked = urllib.request.Request(
        f"{endpoint['url']}/v1/models/tiny:predict",
        json.dumps({"instances": [row]}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=10) as answer:
        assert answer.status == 200


def assert_stops_whole(project: Project) -> None:
    stopped = project.cli("stop", "tiny")
    assert stopped.returncode == 0, stopped.stderr
    assert_whole(project)


def test_killed_at_each_point_of_serving_the_next_run_serves(tmp_path, served):
    """One home for all points: each kill meets what the one before it has left, after a stop."""
    project = copy_of(served[0], tmp_path)
    try:
        for point in (point for point in SERVE_POINTS if point not in NOT_AT_START):
            die_serving(project, point, tmp_path / point)
            steps = project.steps()
            assert all(step["cached"] for step in steps.values())
            assert_answers(project)
            assert_stops_whole(project)
    finally:
        project.cli("stop", "tiny", "--now")


def die_serving(project: Project, point: str, mark: Path) -> None:
    """Run until somebody has died at the point; then everybody does: whoever is started again would die too."""
    first = start(project, "run", "job.toml", env={VARIABLE: point, MARK: str(mark)})
    wait_for(mark.exists)
    first.kill()
    first.communicate()

    def dead() -> bool:
        for pid in pids(project, "onejob.serve.host"):
            os.kill(pid, signal.SIGKILL)
        return not project.processes()

    wait_for(dead)


def test_host_and_replica_killed_while_they_serve_are_brought_back(tmp_path, served):
    project = copy_of(served[0], tmp_path)
    up = None
    try:
        project.steps()
        kill_process(project, "onejob.serve.host")
        project.steps()  # the next run brings it back
        assert_answers(project)
        up = start(project, "up")
        before = kill_process(project, "onejob.serve.host")
        wait_for(lambda: pids(project, "onejob.serve.host") - before and ready(project))
        assert_answers(project)
        before = kill_process(project, "onejob.serve.replica")
        wait_for(lambda: pids(project, "onejob.serve.replica", "") - before and ready(project))
        assert_answers(project)
    finally:
        if up is not None:
            up.terminate()
            out, _ = up.communicate(timeout=30)
        project.cli("stop", "tiny")
    assert up.returncode == 0, out
    assert_whole(project)


def pids(project: Project, module: str, place: str | None = None) -> set[int]:
    """Process ids of this home's hosts, or of replicas, which are children of its host."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            ours = str(project.home) in line or parent in (pids(project, "onejob.serve.host") if place == "" else ())
            if f" -m {module} " in line and ours:
                found.add(int(entry.name))
    return found


def kill_process(project: Project, module: str) -> set[int]:
    found = pids(project, module, "" if module.endswith("replica") else None)
    assert found, f"no {module} runs"
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return found


def ready(project: Project) -> bool:
    endpoint = project.json("show", "tiny")["endpoint"]
    return endpoint["state"] == "ready" and endpoint["ready"] > 0


def test_killed_at_each_point_of_optimizing_the_candidates_are_the_same(tmp_path, served):
    """Each run goes past the point at which the one before it died, and dies at the next."""
    whole, digests = served
    project = copy_of(whole, tmp_path)
    try:
        for point, step in OPTIMIZE_POINTS.items():
            mark = tmp_path / point
            project.cli("run", "job.toml", "--from", step, env={VARIABLE: point, MARK: str(mark)})
            assert mark.exists(), f"{point} was never passed"
        steps = project.steps("--from", "optimize.choose")
    finally:
        project.cli("stop", "tiny")
    assert not steps["optimize.choose"]["cached"]
    assert candidates(project) == candidates(whole)
    assert project.digests()["checkpoint"] == digests["checkpoint"]
    assert_whole(project)


def candidates(project: Project) -> dict[str, list[str]]:
    """What each step of [optimize] left but the choice, which depends on what was measured."""
    shown = project.json("show", "job.toml")["executions"]
    return {
        made["step"]: sorted(made["outputs"].values())
        for made in shown
        if made["step"].startswith("optimize.") and made["step"] != "optimize.choose"
    }


# ---- other deaths ------------------------------------------------------------------------------------------------


def start(project: Project, *args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "onejob", *args],
        cwd=project.folder,
        env={**os.environ, "ONEJOB_HOME": str(project.home), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(what, seconds: float = 60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def slow_training(root: Path) -> Project:
    """A job whose training takes long enough to be killed in the middle."""
    project = make_project(root, stages="train")
    job = (project.folder / "job.toml").read_text()
    project.write("job.toml", job.replace("epochs = 2", "epochs = 400"))
    return project


def metric_lines(project: Project) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in (project.home / "work").glob("*/metrics.jsonl"))


def test_the_supervisor_is_killed_and_the_next_run_adopts_its_training(tmp_path):
    project = slow_training(tmp_path)
    first = start(project, "run", "job.toml")
    wait_for(lambda: metric_lines(project) > 20)
    first.kill()
    first.communicate()
    assert project.processes(), "training goes on without its supervisor"
    steps = project.steps()
    assert steps["train"]["state"] == "done"
    executions = [path.name for path in (project.home / "work").iterdir() if (path / "metrics.jsonl").exists()]
    assert len(executions) == 1, "it was adopted, not started again"
    assert project.processes() == []


def test_sigterm_in_training_saves_and_the_next_run_resumes(tmp_path):
    project = slow_training(tmp_path)
    first = start(project, "run", "job.toml")
    wait_for(lambda: metric_lines(project) > 20)
    first.send_signal(signal.SIGTERM)
    out, _ = first.communicate(timeout=30)
    assert first.returncode == 10, out
    assert project.processes() == []
    assert list((project.home / "scratch").glob("*/**/*.json")), "a checkpoint was saved"
    shown = project.steps()["train"]
    assert shown["state"] == "done"
    measured = project.json("show", "tiny/checkpoint@latest")["executions"][0]["measured"]
    assert measured["resumed_from"] > 0


def test_disk_full_while_a_blob_is_written(tmp_path):
    project = make_project(tmp_path)
    project.home.mkdir()
    small = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(project.home)], capture_output=True, check=False
    )
    if small.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {small.stderr.decode()}")
    try:
        project.write("rows.csv", (project.folder / "rows.csv").read_text() * 1)
        filler = project.home / "filler"
        ledger = project.cli("ps")
        assert ledger.returncode == 0, ledger.stderr
        free = shutil.disk_usage(project.home).free
        filler.write_bytes(b"x" * max(0, free - 60_000))
        failed = project.cli("run", "job.toml")
        assert failed.returncode != 0
        assert "space" in failed.stderr.lower(), failed.stderr
        filler.unlink()
        project.steps()
        assert_whole(project)
    finally:
        subprocess.run(["umount", "-l", str(project.home)], check=False)


def test_a_flipped_byte_is_found_named_and_mended_by_running_again(tmp_path):
    project = make_project(tmp_path)
    project.steps()
    before = project.digests()["dataset"]
    shard = next(
        f
        for f in project.json("show", "tiny/dataset@latest")["artifacts"][0]["files"]
        if f["path"].startswith("train/")
    )
    blob = project.home / "blobs" / shard["digest"][:2] / shard["digest"]
    blob.chmod(0o644)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    done = project.cli("verify", "tiny/dataset@latest")
    assert done.returncode == 6
    assert shard["path"] in done.stdout + done.stderr
    project.json("run", "job.toml", "--force")
    assert project.digests()["dataset"] == before
    assert_whole(project)
