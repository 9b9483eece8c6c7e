"""`onejob serve`: a file, a folder of models, what a ref names; and what it says no to."""

from __future__ import annotations

import json
import os
import shutil
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Project
from served_models import save_affine

from onejob.engines.triton.engine import supported


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Project]:
    """A home without a job, with a model file and a repository beside it."""
    folder = tmp_path / "here"
    folder.mkdir()
    made = Project(folder, tmp_path / "home")
    shutil.copyfile(save_affine(tmp_path / "engine") / "model.onnx", folder / "affine.onnx")
    for name, version, scale in (("one", 1, 3.0), ("two", 1, 5.0), ("two", 2, 7.0)):
        save_affine(folder / "models" / name / str(version), scale=scale)
    yield made
    for endpoint in ("affine", "models", "again", "bare"):
        made.cli("stop", endpoint, "--now")


def url_of(project: Project, name: str) -> str:
    listed = json.loads(project.cli("ps", "--json").stdout)
    return next(str(one["url"]) for one in listed["endpoints"] if one["name"] == name)


def call(url: str, body: Any = None) -> tuple[Any, dict[str, str]]:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=20) as answer:
        text = answer.read()
        return (json.loads(text) if text else None), dict(answer.headers)


def ask(url: str, name: str) -> tuple[float, str]:
    """(what a model makes of 1, the request's id)."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}
    answer, headers = call(f"{url}/v2/models/{name}/infer", {"inputs": [tensor]})
    return float(answer["outputs"][0]["data"][0]), headers["x-request-id"]


def told(project: Project, *args: str) -> str:
    done = project.cli(*args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_file_is_served_known_like_any_endpoint_and_traced_to_the_file(place: Project) -> None:
    assert "endpoint affine is ready http://" in told(place, "serve", "affine.onnx", "--latency-ms", "20")
    url = url_of(place, "affine")
    value, request = ask(url, "affine")
    assert value == 3
    (place.folder / "affine.onnx").write_bytes(b"swapped under the server")
    assert ask(url, "affine")[0] == 3
    time.sleep(0.5)
    traced = told(place, "trace", request)
    assert "model.onnx" in traced
    assert str(place.folder / "affine.onnx") in traced
    assert "affine" in told(place, "show", "affine")
    stats, _ = call(f"{url}/v2/models/affine/stats")
    assert stats["model_stats"][0]["batching"]["goal_us"] == 20_000
    told(place, "gc")
    told(place, "stop", "affine")
    told(place, "run", "--help")
    save_affine(place.folder / "new", scale=9)
    shutil.copyfile(place.folder / "new" / "model.onnx", place.folder / "affine.onnx")
    told(place, "serve", "affine.onnx")
    assert ask(url_of(place, "affine"), "affine")[0] == 10


def test_a_folder_of_models_is_a_repository(place: Project) -> None:
    said = told(place, "serve", "models", "--replicas", "2")
    url = url_of(place, "models")
    assert f"curl -s -X POST {url}/v2/repository/index" in said
    assert f"{url}/v2/models/MODEL" in told(place, "show", "models")
    bench = place.cli("bench", "models", "--model", "two", "--requests", "20", "--warmup", "0s")
    assert bench.returncode == 0, bench.stderr
    assert "it has 2 models" in place.cli("bench", "models", "--requests", "20").stderr
    assert [ask(url, name)[0] for name in ("one", "two")] == [4, 8]
    save_affine(place.folder / "models" / "three" / "1", scale=20)
    call(f"{url}/v2/repository/models/three/load", {})
    value, request = ask(url, "three")
    assert value == 21
    call(f"{url}/v2/repository/models/one/unload", {})
    index, _ = call(f"{url}/v2/repository/index", {})
    assert {one["name"]: one["state"] for one in index} == {"one": "UNAVAILABLE", "three": "READY", "two": "READY"}
    _, request = ask(url, "two")
    time.sleep(0.5)
    os.utime(place.home)
    told(place, "gc")
    assert "two" in told(place, "trace", request) or "engine" in told(place, "trace", request)


def test_an_engine_is_served_at_another_endpoint(place: Project) -> None:
    told(place, "serve", "affine.onnx")
    told(place, "serve", "affine", "--name", "again")
    assert ask(url_of(place, "again"), "again")[0] == 3
    digest = json.loads(place.cli("show", "affine", "--json").stdout)
    assert digest
    folder = place.folder / "bare"
    folder.mkdir()
    shutil.copyfile(place.folder / "affine.onnx", folder / "model.onnx")
    assert "endpoint bare is ready" in told(place, "serve", "bare"), "a folder with a model in it is that model"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nope.onnx"], "there is no such file"),
        (["nope"], "nothing is called 'nope'"),
        (["notes.txt"], "no engine runs such a file"),
        (["empty"], "there is no model in it"),
        (["broken.onnx"], "can't load it"),
        (["affine.onnx", "--replicas", "0"], "--replicas"),
        (["affine.onnx", "--name", "a b"], "--name"),
        (["job"], "it is a job, not a model"),
    ],
)
def test_what_it_says_no_to(place: Project, args: list[str], says: str) -> None:
    (place.folder / "notes.txt").write_text("no model")
    (place.folder / "empty").mkdir()
    (place.folder / "job").mkdir()
    (place.folder / "job" / "job.toml").write_text("name = 'x'")
    (place.folder / "broken.onnx").write_bytes(b"no graph at all")
    done = place.cli("serve", *args)
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_triton_below_the_replica_runs_it(place: Project) -> None:
    if not supported().available:
        assert not os.environ.get("CI"), "the tests need Triton: python -m onejob.engines.triton.wheel"
        pytest.skip(supported().cure)
    told(place, "serve", "affine.onnx", "--engine", "triton")
    url = url_of(place, "affine")
    assert ask(url, "affine")[0] == 3
    assert ask(url, "affine")[0] == 3
