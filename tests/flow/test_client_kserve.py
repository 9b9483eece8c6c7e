"""KServe's own Python client, unmodified, in an environment of its own, asks an endpoint in both protocols."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from client_models import NUMBERS, program, served_repository

Told = dict[str, Any]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What it was told: kserve_asks.py."""
    python = program("kserve", "bin/python")
    with served_repository(tmp_path_factory.mktemp("kserve")) as made:
        asks = Path(__file__).with_name("kserve_asks.py")
        command = [str(python), str(asks), f"http://127.0.0.1:{made.port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answers: Told = json.loads(done.stdout)
    return answers


def test_it_knows_whether_a_model_is_ready(told: Told) -> None:
    assert told["model ready"] is True
    assert told["other ready"] is False
    assert told["v1 ready"] is True


def test_it_knows_whether_the_server_is(told: Told) -> None:
    assert told["live"] is True
    assert told["ready"] is True
    assert told["v1 live"] is True


@pytest.mark.parametrize("binary", [True, False])
def test_every_datatype_there_and_back(told: Told, binary: bool) -> None:
    expected = {"BOOL", "BYTES", *NUMBERS} - (set() if binary else {"FP16"})  # it has no JSON form for that
    assert told[f"datatypes, binary {binary}"] == sorted(expected)


def test_an_inference_with_its_id(told: Told) -> None:
    identifier, model, _, values = told["infer"]
    assert (identifier, model) == ("k-1", "affine")
    assert values == [[1, 4, 7, 10], [13, 16, 19, 22]]
    assert told["headers"]["x-request-id"] == "k-1"
    assert len(told["headers"]["x-onejob-engine"]) == 64


def test_errors_are_told_in_words(told: Told) -> None:
    assert told["unknown model"][0] == "HTTPStatusError"
    assert "Request for unknown model: 'nope' is not found, '404 Not Found'" in told["unknown model"][1]
    assert "unexpected shape for input 'x'" in told["bad shape"][1]
    assert "'400 Bad Request'" in told["v1 bad"][1]


def test_plain_records(told: Told) -> None:
    assert told["v1 predict"] == {"predictions": [{"y": [1, 4, 7, 10]}, {"y": [13, 16, 19, 22]}]}
