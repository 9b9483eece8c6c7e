"""Every verb, used for real on one small job that has been run and is served: as text for a person, and as JSON."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from conftest import Project, make_project

from onejob.cli import VERBS, main
from onejob.core.artifact import short
from onejob.errors import OnejobError
from onejob.loop import commands

ROW = {"carrier": "AA", "distance": 800, "hour": 12}


def use(project: Project, *args: str) -> tuple[int, str, str]:
    """A command line in this process, which is quicker: exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(project.folder),
        mock.patch.dict(os.environ, ONEJOB_HOME=str(project.home)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        main(args)
    return int(end.value.code or 0), out.getvalue(), err.getvalue()


def text(project: Project, *args: str) -> str:
    code, out, err = use(project, *args)
    assert code == 0, f"{args}: {out}\n{err}"
    return out


def as_json(project: Project, *args: str) -> Any:
    return json.loads(text(project, *args, "--json"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The job was added and carried out by `onejob up` while its log was followed, then run again; it is served."""
    project = make_project(tmp_path_factory.mktemp("it's a folder"), stages="all")
    assert "onejob up" in text(project, "run", "--detach").splitlines(), "what is still to be done"
    up = [sys.executable, "-m", "onejob", "up", "--home", str(project.home)]
    with subprocess.Popen(up, cwd=project.folder, stderr=subprocess.PIPE) as loop:
        followed = text(project, "logs", "-f", "1")
        loop.terminate()
        err = loop.communicate(timeout=60)[1].decode()
    assert loop.returncode == 0, err
    assert "run 1  train: done in " in err
    assert "train | epoch 2/2" in followed, "also of a step that started after `logs -f` did"
    again = project.cli("run")
    assert "run 2 is done" in again.stdout
    assert "onejob show 2" in again.stdout.splitlines(), "a command stands alone on its line"
    assert "train: cached" in again.stderr
    yield project
    project.cli("stop", "tiny", "--now")
    assert not project.processes()


@pytest.fixture(scope="module")
def request_id(tiny: Project) -> str:
    """The id of a request that the endpoint has answered, and that is in its journal."""
    url = as_json(tiny, "show", "tiny")["endpoint"]["url"]
    body = json.dumps({"instances": [ROW, ROW]}).encode()
    with urllib.request.urlopen(f"{url}/v1/models/tiny:predict", data=body, timeout=30) as reply:
        assert len(json.loads(reply.read())["predictions"]) == 2
        name = str(reply.headers["x-request-id"])
    deadline = time.monotonic() + 30  # journal and counters are written now and then, not with each answer
    while use(tiny, "show", name)[0] != 0 or not as_json(tiny, "show", "tiny")["details"]["requests"]:
        assert time.monotonic() < deadline, "the answer was never counted"
        time.sleep(0.2)
    return name


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
    view = as_json(tiny, "show", "tiny")
    assert [e["step"] for e in view["executions"]] == ["train", "optimize.choose"]
    assert view["details"]["requests"] >= 1


def test_everything_that_has_a_name_can_be_shown(tiny: Project, request_id: str) -> None:
    engine = as_json(tiny, "show", "tiny/engine@champion")["artifacts"][0]["digest"]
    execution = as_json(tiny, "show", "1/train")["executions"][0]["id"]
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
    nodes = as_json(tiny, "trace", request_id)["nodes"]
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
    """What exists gives a result, or an error that says why there is none."""
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
        "label": ["nothing", "nothing.csv"],
        "bench": ["nothing"],
        "serve": ["nothing"],
        "signal": ["nothing"],
        "promote": ["nothing"],
        "rollback": ["nothing"],
        "restore": ["nothing.tar"],
        "backup": [str(tmp_path / "nowhere" / "b.tar")],
    }
    assert set(wrong) == {v for verbs in VERBS.values() for v in verbs} - {"up", "ps", "doctor", "gc"}
    for verb, args in wrong.items():
        code, out, _ = use(tiny, verb, *args, "--json")
        error = json.loads(out)["error"]
        assert code == error["exit_code"] not in (0, 70), (verb, error)
        assert error["message"], verb
    for verb in ("ps", "doctor", "gc"):
        assert as_json(tiny, verb)
    assert as_json(tiny, "check")["steps"]


def test_a_name_that_is_nearly_right_gets_the_right_one(tiny: Project) -> None:
    for typed, meant in {"tinny": "tiny", "tiny/engine@champoin": "tiny/engine@champion"}.items():
        code, _, err = use(tiny, "show", typed)
        assert code == 3
        assert meant in err
    assert "train" in use(tiny, "show", "1/trian")[2]
    assert use(tiny, "show", "")[0] == 2, "an empty name is no folder"
    assert "rows.csv" in use(tiny, "init", "new", "--from", "row.csv")[2]


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


def test_damage_is_named_and_cured_as_it_says_and_two_runs_differ_where_they_were_told_to(tiny: Project) -> None:
    file = next(f for f in as_json(tiny, "show", "1/data")["artifacts"][0]["files"] if f["size"] > 1000)
    blob = tiny.home / "blobs" / file["digest"][:2] / file["digest"]
    blob.chmod(0o644)
    whole = blob.read_bytes()
    blob.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    code, out, _ = use(tiny, "verify", "tiny/dataset", "--json")
    view = json.loads(out)
    assert code == 6
    assert [(d["problem"], d["path"], d["where"]) for d in view["damaged"]] == [("damaged", file["path"], str(blob))]
    assert "--force" in view["damaged"][0]["cure"]

    home = str(tiny.home)
    said = text(tiny, "run", "--force", "--set", "train.epochs=3", "--home", home)
    command = next(line for line in said.splitlines() if line.startswith("onejob show"))
    assert shlex.split(command)[-2:] == ["--home", home], "advice names the home that was named"
    assert "sound" in text(tiny, "verify", "tiny/dataset")

    run = shlex.split(command)[2]
    assert "it was forced" in text(tiny, "why", f"{run}/data")
    changes = {change["component"]: change for change in as_json(tiny, "diff", "1", run)["changes"]}
    assert (changes["train.options.epochs"]["old"], changes["train.options.epochs"]["new"]) == (2, 3)
    assert "train.options.epochs" in text(tiny, "diff", "1", run)
    assert "inputs" not in text(tiny, "diff", "1/data", f"{run}/data")


def test_gc_frees_what_only_ended_runs_left_and_nothing_that_is_named(tiny: Project) -> None:
    assert "nothing to free" in text(tiny, "gc", "--dry-run"), "all of it is young"
    with commands.open(tiny.home) as session:
        told = commands.gc(session, True, grace=0, keep_runs=1)
        freed = commands.gc(session, grace=0, keep_runs=1)
        assert (freed.blobs, freed.artifacts) == (told.blobs, told.artifacts)
        assert freed.folders > 0
    assert "sound" in text(tiny, "verify", "tiny")
    assert as_json(tiny, "check")["steps"][0]["verdict"] == "cached"


def test_an_endpoint_is_measured_by_its_name(tiny: Project) -> None:
    found = as_json(tiny, "bench", "tiny", "--requests", "50", "--warmup", "0", "--batch", "3")
    (target,), (result,) = found["targets"], found["results"]
    assert (target["name"], target["model"]) == ("tiny", "tiny")
    assert (result["requests"], result["errors"]) == (50, 0)
    assert result["server"]["processes"] >= 2, "the host and a replica, by the port that they hold"
    code, _, err = use(tiny, "bench", "1")
    assert code == 2
    assert "it is a run, not an endpoint" in err


def test_doctor_and_ps_tell_of_this_home(tiny: Project) -> None:
    facts = as_json(tiny, "doctor")
    assert facts["home"] == str(tiny.home)
    assert {"onnxruntime", "function", "tabular", "local", "polars", "torch"} <= {s["name"] for s in facts["supports"]}
    assert "tiny" in text(tiny, "ps", "-a")
    assert len(as_json(tiny, "ps", "-a")["runs"]) >= len(as_json(tiny, "ps")["runs"])


def test_what_was_stopped_here_serves_from_a_backup_in_another_home(tiny: Project, tmp_path: Path) -> None:
    """The last test of this file: it ends what the others use."""
    file, home = tmp_path / "b.tar", tmp_path / "other home"
    saved = as_json(tiny, "backup", str(file))
    assert "is stopped" in text(tiny, "stop", "job.toml")
    assert "it had stopped already" in text(tiny, "stop", "tiny")
    assert "an artifact can't be stopped" in use(tiny, "stop", "tiny/engine@champion")[2]
    assert as_json(tiny, "stop", "1")["state"] == "done"

    assert as_json(tiny, "restore", str(file), "--home", str(home)) == saved
    assert "sound" in text(tiny, "verify", "tiny", "--home", str(home))
    with commands.open(home) as session:
        for _ in range(240):
            commands.up(session, passes=1)
            [endpoint] = commands.ps(session, all=True).endpoints
            if endpoint.state == "ready":
                break
        assert endpoint.state == "ready"
        with urllib.request.urlopen(f"{endpoint.url}/v2/health/ready", timeout=30) as reply:
            assert reply.status == 200
        assert commands.stop(session, "tiny").state == "stopped"
