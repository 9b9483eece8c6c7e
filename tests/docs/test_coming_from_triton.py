"""docs/serve-triton.md: the model that it rewrites runs, its probes are answered, its commands and metrics exist."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from onejob.cli import main
from onejob.engines.function.code import load
from onejob.serve.protocols.paths import parse_path

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "serve-triton.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def _as_it_was() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.mark.usefixtures("_as_it_was")
@pytest.mark.parametrize("block", [0, 1], ids=["as it is", "a function"])
def test_a_python_model_as_it_is_and_as_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    weight = np.arange(640, dtype=np.float32).reshape(64, 10)
    (tmp_path / "1").mkdir()
    np.save(tmp_path / "1" / "weight.npy", weight)
    (tmp_path / "1" / "model.py").write_text(blocks("python")[block])
    monkeypatch.chdir(tmp_path / "1")
    tensors = {"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [64]}]}
    tensors["output"] = [{"name": "y", "data_type": "TYPE_FP32", "dims": [10]}]
    model = load(
        tmp_path, "1/model.py", triton={"name": "m", "version": "1", "config": {"max_batch_size": 8, **tensors}}
    )
    x = np.ones((3, 64), np.float32)
    np.testing.assert_array_equal(model.infer({"x": x})["y"], x @ weight)


def test_probes_ask_what_is_answered() -> None:
    (manifest,) = blocks("yaml")
    probes = dict(re.findall(r"(\w+)Probe: { httpGet: { path: (\S+),", manifest))
    assert set(probes) == {"startup", "liveness", "readiness"}
    assert all(parse_path(path.encode()) is not None for path in probes.values())


def test_commands_have_the_options_that_it_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    (manifest,) = blocks("yaml")
    asked = set(re.findall(r"--[a-z-]+", re.sub(r".*&& exec", "", blocks("sh")[0]))) | set(
        re.findall(r"--[a-z]+", manifest)
    )
    assert asked - {"--model-repository"} <= known
    assert {"--replicas", "--threads"} <= known


def test_metrics_that_it_names_are_told() -> None:
    """Other pages list all of them, which is checked there."""
    listed = "".join(page.read_text() for page in DOCS.glob("*.md") if page.name != "serve-triton.md")
    section = PAGE[PAGE.index("**Metrics**") : PAGE.index("[All metrics]")]
    named = set(re.findall(r"\b(?:nv|onejob)_[a-z_]+[a-z]\b", section)) - {"nv_gpu"}
    assert len(named) >= 5
    assert {name for name in named if name.removesuffix("_bucket") not in listed} == set()
