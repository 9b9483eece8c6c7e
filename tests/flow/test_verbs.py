"""Every verb, used for real on one small job that has been run and is served: as text for a person, and as JSON."""

from __future__ import annotations

import json
import shlex
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Project, make_project

from onejob.cli import VERBS
from onejob.core.artifact import short
from onejob.errors import OnejobError
from onejob.loop import commands

ROW = {"carrier": "AA", "distance": 800, "hour": 12}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The job has run twice (the second time cached), and its endpoint is up."""
    project = make_project(tmp_path_factory.mktemp("it's a folder"), stages="all")
    first = project.cli("run")
    assert first.returncode == 0, first.stderr
    assert "run 1 is done" in first.stdout
    assert "onejob show 1\n" in first.stdout, "a command stands alone on its line"
    assert "run 1  train: done in " in first.stderr
    yield project
    project.cli("stop", "tiny", "--now")
    assert not project.processes()


@pytest.fixture(scope="module")
def request_id(tiny: Project) -> str:
    """The id of a request that the endpoint has answered, and that is in its journal."""
    url = tiny.json("show", "tiny")["endpoint"]["url"]
    body = json.dumps({"instances": [ROW, ROW]}).encode()
    with urllib.request.urlopen(f"{url}/v1/models/tiny:predict", data=body, timeout=30) as reply:
        assert len(json.loads(reply.read())["predictions"]) == 2
        return str(reply.headers["x-request-id"])


def text(project: Project, *args: str) -> str:
    done = project.cli(*args)
    assert done.returncode == 0, f"{args}: {done.stdout}\n{done.stderr}"
    return done.stdout


def test_an_endpoint_shows_its_model_its_candidates_and_its_traffic(tiny: Project, request_id: str) -> None:
    shown = text(tiny, "show", "tiny")
    assert "scores.auc" in shown, "how good the model is"
    assert "onnxruntime-fp32" in shown
    assert "chosen" in shown
    assert "onnxruntime-fp32: the same outputs as the checkpoint" in shown, "why it was taken"
    assert "the checkpoint itself: auc" in shown
    assert "/v1/models/tiny:predict" in shown
    for word in ("requests", "errors", "latency"):
        assert word in shown
    view = tiny.json("show", "tiny")
    assert [e["step"] for e in view["executions"]] == ["train", "optimize.choose"]
    assert view["details"]["requests"] >= 1


def test_everything_that_has_a_name_can_be_shown(tiny: Project, request_id: str) -> None:
    engine = tiny.json("show", "tiny/engine@champion")["artifacts"][0]["digest"]
    execution = tiny.json("show", "1/train")["executions"][0]["id"]
    names = {
        "1": "run",
        "1/train": "step",
        "tiny/engine@champion": "artifact",
        "tiny/engine": "artifact",
        engine: "artifact",
        short(engine): "artifact",
        execution: "step",
        "tiny": "endpoint",
        request_id: "request",
        "job.toml": "run",
        str(tiny.folder / "job.toml"): "run",
    }
    with commands.open(tiny.home) as session:
        assert {name: commands.show(session, name).kind for name in names if name != "job.toml"} == {
            name: kind for name, kind in names.items() if name != "job.toml"
        }
    assert "train: train loss by step" in text(tiny, "show", "1/train"), "a plot"
    assert "status     200" in text(tiny, "show", request_id)


def test_an_answer_is_traced_to_the_source_files(tiny: Project, request_id: str) -> None:
    nodes = tiny.json("trace", request_id)["nodes"]
    kinds = [node["kind"] for node in nodes]
    assert kinds[:4] == ["request", "endpoint", "engine", "execution"]
    assert {"dataset", "checkpoint", "candidate", "source", "file"} <= set(kinds)
    file = next(node for node in nodes if node["kind"] == "file")
    assert (file["name"], file["detail"]) == ("rows.csv", str(tiny.folder / "rows.csv"))
    drawn = text(tiny, "trace", request_id)
    assert request_id in drawn
    assert "rows.csv" in drawn
    assert text(tiny, "trace", "tiny").splitlines()[2].startswith("endpoint")


REFS = ("1", "1/train", "tiny/engine@champion", "tiny/dataset@latest", "EXECUTION", "tiny", "REQUEST", "job.toml")
SAID_SOMETHING = {("logs", ref) for ref in ("1", "1/train", "EXECUTION", "tiny", "REQUEST", "job.toml")}
VERBS_OF_REFS = ("show", "trace", "logs", "why", "verify")


@pytest.mark.parametrize("verb", VERBS_OF_REFS)
def test_each_verb_takes_each_kind_of_name_or_says_why_not(
    verb: str, tiny: Project, request_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that exists is called a bug of ours: a result, or an error of the tree with a cure."""
    monkeypatch.chdir(tiny.folder)
    with commands.open(tiny.home) as session:
        made = session.ledger.list_steps(1)[1].execution
        for ref in REFS:
            name = {"EXECUTION": str(made), "REQUEST": request_id}.get(ref, ref)
            if (verb, ref) == ("why", "REQUEST"):
                with pytest.raises(OnejobError, match="a request has no key"):
                    commands.why(session, name)
                continue
            found: Any = getattr(commands, verb)(session, name)
            assert list(found) if (verb, ref) in SAID_SOMETHING else found is not None


def test_json_is_one_document_whatever_comes(tiny: Project, tmp_path: Path) -> None:
    wrong = {
        "show": ["nothing"],
        "trace": ["nothing"],
        "logs": ["nothing"],
        "why": ["nothing"],
        "verify": ["nothing"],
        "stop": ["nothing"],
        "diff": ["1", "nothing"],
        "check": ["nothing.toml"],
        "run": ["nothing.toml"],
        "init": [str(tmp_path), "--from", "nothing.csv"],
        "demo": ["nothing"],
        "restore": ["nothing.tar"],
        "backup": [str(tmp_path / "nowhere" / "b.tar")],
    }
    assert set(wrong) == {v for verbs in VERBS.values() for v in verbs} - {"up", "ps", "doctor", "gc"}
    for verb, args in wrong.items():
        done = tiny.cli(verb, *args, "--json")
        error = json.loads(done.stdout)["error"]
        assert done.returncode == error["exit_code"] not in (0, 70), (verb, error)
        assert error["message"], verb
    for verb in ("ps", "doctor", "gc"):
        assert tiny.json(verb)
    assert tiny.json("check")["steps"]


def test_a_name_that_is_nearly_right_gets_the_right_one(tiny: Project) -> None:
    for typed, meant in {"tinny": "tiny", "tiny/engine@champoin": "tiny/engine@champion"}.items():
        done = tiny.cli("show", typed)
        assert done.returncode == 3
        assert meant in done.stderr
    assert "train" in tiny.cli("show", "1/trian").stderr
    assert tiny.cli("show", "").returncode == 2, "an empty name is no folder"
    assert "rows.csv" in tiny.cli("init", "new", "--from", "row.csv").stderr


def test_why_names_what_changed_and_is_brief_where_nothing_did(tiny: Project) -> None:
    same = text(tiny, "why", "job.toml")
    assert "train would be cached: the same key as in run 1" in same
    assert "compared with" not in same
    helper = (tiny.folder / "helper.py").read_text()
    tiny.write("helper.py", helper.replace("FACTOR = 1.0", "FACTOR = 1.5"))
    assert "data would run: helper.py changed (constant FACTOR)" in text(tiny, "why", "job.toml")
    tiny.write("helper.py", helper + "\n# a comment\n")
    assert "data would be cached" in text(tiny, "why", "job.toml")
    tiny.write("helper.py", helper)
    assert "option epochs 2 -> 3" in text(tiny, "check", "--set", "train.epochs=3")


def test_a_second_run_differs_where_it_was_told_to_and_its_logs_are_followed_to_the_end(tiny: Project) -> None:
    added = tiny.json("run", "--set", "train.epochs=3", "--detach")
    run = str(added["run"])
    up = subprocess.Popen(
        ["onejob", "up", "--home", str(tiny.home)], cwd=tiny.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        followed = text(tiny, "logs", "-f", run)
    finally:
        up.terminate()
        _, err = up.communicate(timeout=60)
    assert up.returncode == 0, err
    assert b"train: done" in err
    assert "train | epoch 3/3" in followed, "also of a step that started after `logs -f` did"
    assert tiny.json("show", run)["run"]["state"] in ("done", "running")
    text(tiny, "run", "--set", "train.epochs=3", "-q")
    changes = {change["component"]: change for change in tiny.json("diff", "1", run)["changes"]}
    assert (changes["train.options.epochs"]["old"], changes["train.options.epochs"]["new"]) == (2, 3)
    assert "train.options.epochs" in text(tiny, "diff", "1", run)
    assert "don't differ" in text(tiny, "diff", "1/data", f"{run}/data")


def test_damage_is_named_and_cured_as_it_says(tiny: Project) -> None:
    file = next(f for f in tiny.json("show", "1/data")["artifacts"][0]["files"] if f["path"].endswith(".arrow"))
    blob = tiny.home / "blobs" / file["digest"][:2] / file["digest"]
    blob.chmod(0o644)
    whole = blob.read_bytes()
    blob.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    done = tiny.cli("verify", "tiny/dataset", "--json")
    view = json.loads(done.stdout)
    assert done.returncode == 6
    assert [(d["problem"], d["path"], d["where"]) for d in view["damaged"]] == [("damaged", file["path"], str(blob))]
    assert "--force" in view["damaged"][0]["cure"]
    text(tiny, "run", "--force", "-q")
    assert "sound" in text(tiny, "verify", "tiny/dataset")


def test_a_backup_brings_all_to_another_home_and_serves_there(tiny: Project, tmp_path: Path) -> None:
    file, home = tmp_path / "b.tar", tmp_path / "other home"
    saved = tiny.json("backup", str(file))
    assert tiny.json("restore", str(file), "--home", str(home)) == saved
    assert "sound" in text(tiny, "verify", "tiny", "--home", str(home))
    with commands.open(home) as session:
        for _ in range(120):
            commands.up(session, passes=1)
            if commands.ps(session).endpoints[0].state == "ready":
                break
        [endpoint] = commands.ps(session).endpoints
        assert endpoint.state == "ready"
        with urllib.request.urlopen(f"{endpoint.url}/v2/health/ready", timeout=30) as reply:
            assert reply.status == 200
        assert commands.stop(session, "tiny").state == "stopped"


def test_gc_frees_what_only_ended_runs_left_and_nothing_that_is_named(tiny: Project) -> None:
    assert "nothing to free" in text(tiny, "gc", "--dry-run"), "all of it is young"
    with commands.open(tiny.home) as session:
        told = commands.gc(session, True, grace=0, keep_runs=1)
        freed = commands.gc(session, grace=0, keep_runs=1)
        assert (freed.blobs, freed.artifacts) == (told.blobs, told.artifacts)
        assert freed.folders > 0
    assert "sound" in text(tiny, "verify", "tiny")
    assert tiny.json("check")["steps"][0]["verdict"] == "cached"


def test_doctor_and_ps_tell_of_this_home(tiny: Project) -> None:
    facts = tiny.json("doctor")
    assert facts["home"] == str(tiny.home)
    assert {"onnxruntime", "tabular", "local", "polars", "torch"} <= {s["name"] for s in facts["supports"]}
    assert "tiny" in text(tiny, "ps", "-a")
    assert len(tiny.json("ps", "-a")["runs"]) >= len(tiny.json("ps")["runs"])


def test_hints_name_the_home_that_was_named(tiny: Project) -> None:
    home = str(tiny.home)
    said = text(tiny, "run", "--home", home, "--set", "train.epochs=3")
    command = next(line for line in said.splitlines() if line.startswith("onejob show"))
    assert shlex.split(command)[-2:] == ["--home", home]


def test_stop_ends_the_endpoint_and_twice_is_once(tiny: Project) -> None:
    """The last test of the file: it ends what the others use."""
    assert "is stopped" in text(tiny, "stop", "job.toml")
    assert "it had stopped already" in text(tiny, "stop", "tiny")
    assert "an artifact can't be stopped" in tiny.cli("stop", "tiny/engine@champion").stderr
    assert tiny.json("stop", "1")["state"] == "done"
    assert "no answers yet" in text(tiny, "show", "tiny") or "p50" in text(tiny, "show", "tiny")
