"""An endpoint of a model repository, changed while it runs by NVIDIA's own client: versions, load, unload, bad ones."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from served_models import Endpoint, endpoint, save_affine, wait_for
from tritonclient.utils import InferenceServerException

from onejob.serve.changes import NEW_SECONDS, Changes
from onejob.serve.repository import MODELS, scan, told
from onejob.testing.faults import armed

X = np.arange(8, dtype=np.float32).reshape(2, 4)


class Repository:
    """A repository's folder, and the endpoint that serves it."""

    def __init__(self, root: Path, made: Endpoint) -> None:
        self.folder = root / "repository"
        self.endpoint = made

    def model(self, name: str, scale: float, version: int = 1, config: str = "") -> None:
        save_affine(self.folder / name / str(version), scale=scale)
        if config:
            (self.folder / name / "config.pbtxt").write_text(config)

    def serve(self, generation: int = 1, **options: Any) -> None:
        models = [told(version, self.endpoint.folder) for version in scan(self.folder)]
        self.endpoint.want(self.folder, generation=generation, digest="repo" + str(generation), name="many", **options)
        path = self.endpoint.folder / "desired.json"
        desired = json.loads(path.read_text())
        path.with_name(".desired").write_text(json.dumps({**desired, "models": models, "repository": str(self.folder)}))
        path.with_name(".desired").replace(path)

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        made = triton.InferenceServerClient(f"127.0.0.1:{self.endpoint.port}", network_timeout=60)
        yield made
        made.close()

    def ask(self, name: str, version: str = "") -> float:
        """What a model makes of 1."""
        with self.client() as client:
            return ask(client, name, version)


def ask(client: Any, name: str, version: str = "") -> float:
    given = triton.InferInput("x", [1, 4], "FP32")
    given.set_data_from_numpy(np.ones((1, 4), np.float32))
    return float(client.infer(name, [given], model_version=version).as_numpy("y")[0, 0])


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with endpoint(tmp_path / "endpoint") as made:
        yield Repository(tmp_path, made)


def test_models_and_versions_are_asked_by_name(repository: Repository) -> None:
    repository.model("one", 2)
    repository.model("two", 3)
    repository.model("two", 4, version=2)
    repository.model("two", 5, version=10, config="version_policy: { all { } }")
    repository.serve()
    repository.endpoint.start().ready()
    assert repository.ask("one") == 3
    assert repository.ask("two") == 6, "the newest answers, by number: 10 is more than 2"
    assert [repository.ask("two", version) for version in ("1", "2", "10")] == [4, 5, 6]
    with repository.client() as client:
        assert client.get_model_metadata("two")["versions"] == ["1", "2", "10"]
        assert client.is_model_ready("two", "2")
        assert not client.is_model_ready("two", "3")
        index = {(m["name"], m["version"]): m["state"] for m in client.get_model_repository_index()}
        assert index == dict.fromkeys((("one", "1"), ("two", "1"), ("two", "2"), ("two", "10")), "READY")
        with pytest.raises(InferenceServerException, match="unknown model: 'nope' is not found"):
            ask(client, "nope")
        with pytest.raises(InferenceServerException, match="'two' version 3 is not found"):
            ask(client, "two", "3")
        stats = client.get_inference_statistics("two")["model_stats"]
        assert [(one["version"], one["inference_count"]) for one in stats] == [("1", 1), ("2", 1), ("10", 2)]
        assert stats[0]["batching"]["size"] == 8
        text = client._get("metrics", {}, {}).read().decode()
    assert 'nv_inference_request_success{model="two",version="10"} 2' in text


@pytest.mark.parametrize("replicas", [1, 3])
def test_load_and_unload_change_every_replica_and_no_request_fails(repository: Repository, replicas: int) -> None:
    repository.model("one", 2)
    repository.serve(replicas=replicas)
    repository.endpoint.start().ready()
    wrong: list[Any] = []
    answers: set[float] = set()
    over = threading.Event()

    def keep_asking() -> None:
        with repository.client() as client:
            while not over.is_set():
                try:
                    answers.add(ask(client, "one"))
                except Exception as error:  # what the test counts
                    wrong.append(error)

    asking = [threading.Thread(target=keep_asking) for _ in range(3)]
    for thread in asking:
        thread.start()
    try:
        with repository.client() as client:
            repository.model("two", 7)
            client.load_model("two")
            assert {repository.ask("two") for _ in range(12)} == {8}
            repository.model("one", 20, version=2)
            client.load_model("one")
            assert {repository.ask("one") for _ in range(12)} == {21}
            assert client.get_model_metadata("one")["versions"] == ["2"]
            client.unload_model("two")
            with pytest.raises(InferenceServerException, match="unknown model"):
                ask(client, "two")
            assert not client.is_model_ready("two")
            states = {m["name"]: (m["state"], m.get("reason")) for m in client.get_model_repository_index()}
            assert states == {"one": ("READY", None), "two": ("UNAVAILABLE", "unloaded")}
            client.load_model("two")
            assert repository.ask("two") == 8
            assert client.is_server_ready()
    finally:
        over.set()
        for thread in asking:
            thread.join(30)
    assert wrong == []
    assert answers == {3, 21}


def test_what_cannot_be_loaded_changes_nothing(repository: Repository) -> None:
    repository.model("one", 2)
    repository.serve(replicas=2)
    repository.endpoint.start().ready()
    (repository.folder / "bad" / "1").mkdir(parents=True)
    (repository.folder / "bad" / "1" / "model.onnx").write_bytes(b"no graph")
    (repository.folder / "empty").mkdir()
    with repository.client() as client:
        for name, why in (("bad", "can't load it"), ("empty", "no version"), ("nope", "no model of this name")):
            with pytest.raises(InferenceServerException, match=why) as error:
                client.load_model(name)
            assert error.value.status() == "400"
            told = f"load failed for model '{name}': version 1 is at UNAVAILABLE state: "
            assert error.value.message().startswith(told) == (name == "bad")
        (repository.folder / "one" / "1" / "model.onnx").write_bytes(b"swapped for something else")
        assert repository.ask("one") == 3, "what is served is a copy"
        with pytest.raises(InferenceServerException, match="can't load it"):
            client.load_model("one")
        assert {repository.ask("one") for _ in range(6)} == {3}
        assert client.is_server_ready()
        with pytest.raises(InferenceServerException, match="no such model is loaded"):
            client.unload_model("nope")


def test_files_that_are_links_are_models_too(repository: Repository) -> None:
    """As clusters mount them."""
    repository.model("one", 2)
    repository.model("two", 3)
    for name in ("one", "two"):
        file = repository.folder / name / "1" / "model.onnx"
        file.rename(repository.folder.parent / name)
        file.symlink_to(repository.folder.parent / name)
    shutil.move(repository.folder / "two", repository.folder.parent / "later")
    repository.serve()
    repository.endpoint.start().ready()
    assert repository.ask("one") == 3
    shutil.move(repository.folder.parent / "later", repository.folder / "two")
    with repository.client() as client:
        client.load_model("two")
    assert repository.ask("two") == 4


def test_a_model_comes_with_the_request(repository: Repository, tmp_path: Path) -> None:
    repository.model("one", 2)
    repository.serve()
    repository.endpoint.start().ready()
    data = (save_affine(tmp_path / "new", scale=9) / "model.onnx").read_bytes()
    with repository.client() as client:
        config = json.dumps({"max_batch_size": 4, "backend": "onnxruntime"})
        client.load_model("sent", config=config, files={"file:1/model.onnx": data})
        assert repository.ask("sent") == 10
        assert client.get_model_config("sent")["max_batch_size"] == 4
        for name in ("file:../model.onnx", "file:/etc/x", "file:model.onnx"):
            with pytest.raises(InferenceServerException, match=r"VERSION/FILE is wanted|must stay within"):
                client.load_model("sent", config=config, files={name: data})
        assert repository.ask("sent") == 10
    assert not list((repository.endpoint.folder / "uploads").glob("*"))


def test_a_model_is_loaded_right_after_it_was_unloaded_again_and_again(repository: Repository) -> None:
    repository.model("one", 2)
    repository.model("two", 3)
    repository.serve(replicas=2)
    repository.endpoint.start().ready()
    wrong: list[Any] = []

    def keep_changing(name: str) -> None:
        try:
            with repository.client() as client:
                for _ in range(25):
                    client.unload_model(name)
                    client.load_model(name)
        except Exception as error:
            wrong.append(error)

    changing = [threading.Thread(target=keep_changing, args=(name,)) for name in ("one", "two")]
    for thread in changing:
        thread.start()
    for thread in changing:
        thread.join(60)
    assert wrong == []
    assert (repository.ask("one"), repository.ask("two")) == (3, 4)


def test_copies_that_nobody_serves_are_removed_in_the_end(tmp_path: Path) -> None:
    folder = tmp_path / MODELS
    for name in ("served", "gone", "new"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model.onnx").touch()
    model = {"name": "one", "version": "1", "engine": {"digest": "served"}, "options": {}}
    for name in ("served", "gone"):
        os.utime(folder / name, (0, 0))
    changes = Changes(tmp_path)
    changes.begin({"engine": {"digest": "base"}, "models": [model]})
    changes.tend([], False, 1000.0)
    assert {path.name for path in folder.iterdir()} == {"served", "new"}
    os.utime(folder / "new", (0, 0))
    changes.tend([], False, 1000.0 + NEW_SECONDS - 1)
    assert (folder / "new").exists()
    changes.tend([], False, 1000.0 + NEW_SECONDS + 1)
    assert {path.name for path in folder.iterdir()} == {"served"}


def test_whatever_is_asked_of_a_repository_is_told_what_is_wrong_with_it(repository: Repository) -> None:
    repository.model("one", 2)
    repository.serve()
    repository.endpoint.start().ready()
    inside = [path for path in repository.endpoint.folder.rglob("*") if path.is_dir()]
    names = (
        "",
        ".",
        "..",
        "%2e%2e",
        "%00",
        "a%00b",
        "n" * 300,
        "%ff",
        "a%2fb",
        "..%2f..%2fetc",
        "nope",
        "{}",
        "%F0%9F%8D%B5" * 60,
    )
    files = {"parameters": {"config": "{}", "file:1/model.onnx": "aGk="}}
    bodies: tuple[Any, ...] = (
        *({}, [], None, 5, {"parameters": []}, {"parameters": "x"}, {"parameters": {"config": 5}}, files),
        *({"parameters": {"config": "{"}}, {"parameters": {"config": "[]"}}, {"parameters": {"other": "x"}}),
        *(
            {"parameters": {"config": "{}", f"file:{path}": "aGk="}}
            for path in ("", "/", "/etc/x", "../x", "1/../../x", "1", "1/", "1/\0", "1/" + "n" * 300, "1/a/" * 900)
        ),
        {"parameters": {"config": "{}", "file:1/model.onnx": "not base64"}},
        {"parameters": {"config": "{}", "file:1/a": "aGk=", "file:1/a/b": "aGk="}},
        {"parameters": {"config": json.dumps({"max_batch_size": "x"}), "file:1/model.onnx": "aGk="}},
    )
    for verb in ("load", "unload"):
        for name in names:
            for body in bodies if name in ("nope", "..", "n" * 300) else ({}, files):
                connection = http.client.HTTPConnection("127.0.0.1", repository.endpoint.port, timeout=30)
                connection.request("POST", f"/v2/repository/models/{name}/{verb}", json.dumps(body))
                answer = connection.getresponse()
                told = json.loads(answer.read())
                assert answer.status in (400, 404), (verb, name, body, told)
                assert told["error"]
                connection.close()
    assert repository.ask("one") == 3
    after = [path for path in repository.endpoint.folder.rglob("*") if path.is_dir() and path.name != "uploads"]
    assert {path for path in after if path.parent.name != "models"} <= set(inside)
    assert "Traceback" not in (repository.endpoint.folder / "log").read_text()


def test_what_was_loaded_outlives_replicas_and_the_host(repository: Repository) -> None:
    repository.model("one", 2)
    repository.model("two", 3)
    repository.serve(replicas=2)
    made = repository.endpoint.start().ready()
    repository.model("three", 4)
    with repository.client() as client:
        client.load_model("three")
        client.unload_model("two")
    old = made.pids
    os.kill(old[0], signal.SIGKILL)
    made.wait(lambda state: len([r for r in state["replicas"] if r["ready"] and r["pid"] != old[0]]) == 2)
    assert {repository.ask("three") for _ in range(12)} == {5}
    made.stop()
    made.start().ready()
    assert repository.ask("three") == 5
    with repository.client() as client:
        assert {m["name"]: m["state"] for m in client.get_model_repository_index()} == {
            "one": "READY",
            "three": "READY",
            "two": "UNAVAILABLE",
        }
    shutil.rmtree(repository.folder / "three")
    repository.serve(generation=2)  # the repository as it is now: changes before are forgotten
    made.ready(2)
    wait_for(lambda: repository.ask("two") == 4)
    with repository.client() as client:
        assert not client.is_model_ready("three")


def test_a_replica_that_dies_while_all_load_leaves_no_mixture(repository: Repository, tmp_path: Path) -> None:
    repository.model("one", 2)
    repository.serve(replicas=3)
    made = repository.endpoint.start(**armed("replica.before_use"), ONEJOB_FAULT_MARK=str(tmp_path / "mark")).ready()
    repository.model("one", 20, version=2)
    with repository.client() as client, contextlib.suppress(Exception):  # the one that was asked may be it
        client.load_model("one")
    made.wait(lambda state: len(state["replicas"]) == 3 and all(r["ready"] for r in state["replicas"]))
    wait_for(lambda: {repository.ask("one") for _ in range(10)} == {21})
