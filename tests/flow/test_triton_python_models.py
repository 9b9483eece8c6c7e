"""A repository of Triton's Python backend, served as it is: the same answers and errors as by a real Triton."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Project
from test_triton_engine import program, running  # noqa: F401 - a fixture

ADD_SUB = '''
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Every request is answered alone, with two outputs."""

    def initialize(self, args):
        self.config = json.loads(args["model_config"])
        self.types = {
            name: pb_utils.triton_string_to_numpy(pb_utils.get_output_config_by_name(self.config, name)["data_type"])
            for name in ("OUTPUT0", "OUTPUT1")
        }

    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            tensors = [
                pb_utils.Tensor("OUTPUT0", (a + b).astype(self.types["OUTPUT0"])),
                pb_utils.Tensor("OUTPUT1", (a - b).astype(self.types["OUTPUT1"])),
            ]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses
'''
ADD_SUB_CONFIG = """
name: "add_sub"
backend: "python"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 4 ] } ]
dynamic_batching { }
instance_group [{ kind: KIND_CPU }]
"""
WORDS = '''
import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """JSON in, a word of a table that all versions share out; other text is an error, each kind in another way."""

    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "question", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "answer", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(4)
        return config

    def initialize(self, args):
        here = os.path.join(args["model_repository"], args["model_version"])
        with open(os.path.join(args["model_repository"], "words", "table.json")) as file:
            self.table = json.load(file)
        with open(os.path.join(here, "mark.txt")) as file:
            self.mark = file.read()
        pb_utils.Logger.log_info("the words are there")

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "question").as_numpy()
        found = []
        for text in texts.reshape(-1):
            asked = json.loads(text)
            if asked["word"] == "refuse":
                error = pb_utils.TritonError("that word isn't for you", pb_utils.TritonError.INVALID_ARG)
                return pb_utils.InferenceResponse(output_tensors=[], error=error)
            if asked["word"] == "busy":
                return pb_utils.InferenceResponse([], pb_utils.TritonError("later", pb_utils.TritonError.UNAVAILABLE))
            if asked["word"] == "broken":
                return pb_utils.InferenceResponse([], pb_utils.TritonError("it is broken"))
            found.append((self.table[asked["word"]] + self.mark).encode())
        return pb_utils.InferenceResponse([pb_utils.Tensor("answer", np.array(found, object).reshape(texts.shape))])
'''
WHOLE = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Takes no batches: the first size is its own."""

    def execute(self, requests):
        answers = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("total", np.array([x.sum()], x.dtype))]))
        return answers

    def finalize(self):
        print("done")
'''
WHOLE_CONFIG = """
backend: "python"
max_batch_size: 0
input { name: "x" data_type: TYPE_INT64 dims: -1 }
output { name: "total" data_type: TYPE_INT64 dims: 1 }
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "models"
    write(made / "add_sub" / "1" / "model.py", ADD_SUB)
    write(made / "add_sub" / "config.pbtxt", ADD_SUB_CONFIG)
    for version, mark in ((1, "?"), (3, "!")):
        write(made / "words" / str(version) / "model.py", WORDS)
        write(made / "words" / str(version) / "mark.txt", mark)
    write(made / "words" / "words" / "table.json", json.dumps({"hello": "good day", "bye": "see you"}))
    write(made / "words" / "config.pbtxt", 'backend: "python"\nversion_policy: { all: { } }\n')
    write(made / "whole" / "1" / "model.py", WHOLE)
    write(made / "whole" / "config.pbtxt", WHOLE_CONFIG)
    return made


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture(scope="module")
def ours(repository: Path) -> Iterator[str]:
    project = Project(repository.parent, repository.parent / "home")
    done = project.cli("serve", "models", "--json")
    assert done.returncode == 0, done.stderr
    yield json.loads(done.stdout)["endpoint"]["url"]
    project.cli("stop", "models", "--now")


@pytest.fixture(scope="module")
def theirs(program: Path, repository: Path) -> Iterator[str]:  # noqa: F811
    with running(program, repository) as port:
        yield f"http://127.0.0.1:{port}"


def ask(url: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data), timeout=30) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def tensor(name: str, datatype: str, shape: list[int], data: list[Any]) -> Any:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def question(*words: str) -> Any:
    texts = [word if word.startswith("{") or not word else json.dumps({"word": word}) for word in words]
    return {"inputs": [tensor("question", "BYTES", [len(words), 1], texts)]}


def pair(rows: int) -> Any:
    numbers = [float(number) for number in range(4 * rows)]
    shape = [rows, 4]
    return {"inputs": [tensor("INPUT0", "FP32", shape, numbers), tensor("INPUT1", "FP32", shape, numbers[::-1])]}


ASKED = {
    "one row": ("/v2/models/add_sub/infer", pair(1)),
    "eight rows": ("/v2/models/add_sub/infer", pair(8)),
    "one output": ("/v2/models/add_sub/infer", {**pair(2), "outputs": [{"name": "OUTPUT1"}]}),
    "a named version": ("/v2/models/words/versions/1/infer", question("hello")),
    "the newest": ("/v2/models/words/infer", question("hello", "bye")),
    "an error of the request": ("/v2/models/words/infer", question("refuse")),
    "an error for later": ("/v2/models/words/infer", question("busy")),
    "an error of the model": ("/v2/models/words/infer", question("broken")),
    "no batch": ("/v2/models/whole/infer", {"inputs": [tensor("x", "INT64", [5], [1, 2, 3, 4, 5])]}),
    "a batch of nothing": ("/v2/models/whole/infer", {"inputs": [tensor("x", "INT64", [1], [7])]}),
}


@pytest.mark.parametrize("name", ASKED)
def test_it_answers_as_under_triton(ours: str, theirs: str, name: str) -> None:
    path, body = ASKED[name]
    (here, mine), (there, expected) = ask(ours, path, body), ask(theirs, path, body)
    assert here == there
    if here == 200:
        for key in ("model_name", "model_version", "outputs"):
            assert mine[key] == expected[key]
    else:
        assert mine["error"] in expected["error"]


def test_what_a_model_raises_fails_its_request_alone(ours: str, theirs: str) -> None:
    for url in (ours, theirs):
        assert ask(url, "/v2/models/words/infer", question("unknown"))[0] == 500
        assert ask(url, "/v2/models/words/infer", question("bye"))[0] == 200
    told = ask(ours, "/v2/models/words/infer", question("unknown"))[1]["error"]
    assert told.startswith("3/model.py:")
    assert told.endswith("KeyError: 'unknown'")


def test_a_model_that_can_not_take_made_up_input_is_ready(ours: str, theirs: str) -> None:
    """It reads JSON, and we would ask it with empty text."""
    for url in (ours, theirs):
        assert ask(url, "/v2/models/words/ready")[0] == 200
        assert ask(url, "/v2/models/words/infer", question(""))[0] == 500


def test_its_metadata_is_tritons(ours: str, theirs: str) -> None:
    for name in ("add_sub", "words", "whole"):
        mine, expected = (ask(url, f"/v2/models/{name}")[1] for url in (ours, theirs))
        for key in ("name", "versions", "inputs", "outputs"):
            assert mine[key] == expected[key], (name, key)


def test_the_folder_of_one_model_is_served_too(repository: Path, tmp_path: Path) -> None:
    project = Project(repository / "add_sub", tmp_path / "home")
    done = project.cli("serve", ".", "--json")
    assert done.returncode == 0, done.stderr
    endpoint = json.loads(done.stdout)["endpoint"]
    try:
        assert ask(endpoint["url"], "/v2/models/add_sub/infer", pair(2))[0] == 200
        assert ask(endpoint["url"], "/v2/repository/models/add_sub/load", {})[0] == 200
        assert ask(endpoint["url"], "/v2/models/add_sub/infer", pair(2))[0] == 200
    finally:
        project.cli("stop", endpoint["name"], "--now")


def test_a_triton_below_the_replica_runs_it_too(program: Path, repository: Path, tmp_path: Path) -> None:  # noqa: F811
    project = Project(repository, tmp_path / "home")
    done = project.cli("serve", "add_sub", "--engine", "triton", "--json")
    assert done.returncode == 0, done.stderr
    endpoint = json.loads(done.stdout)["endpoint"]
    try:
        status, answer = ask(endpoint["url"], "/v2/models/add_sub/infer", pair(2))
        assert status == 200
        assert answer["outputs"][0]["data"] == [7.0] * 8
    finally:
        project.cli("stop", endpoint["name"], "--now")
