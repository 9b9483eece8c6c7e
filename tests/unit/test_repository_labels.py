"""Labels of a repository's model: what its config.pbtxt names, and nothing outside its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from onejob.core.artifact import Json
from onejob.errors import DataError
from onejob.serve.repository import versions_of

CONFIG = """
output [
  { name: "scores" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" },
  { name: "other" data_type: TYPE_FP32 dims: [ 2 ] }
]
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "animals"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(b"graph")
    (tmp_path / "secret.txt").write_text("secret")
    return folder


def test_labels_are_part_of_the_artifact(model: Path) -> None:
    bare, _ = versions_of(model)[0].artifact()
    (model / "config.pbtxt").write_text(CONFIG)
    (model / "labels.txt").write_text("ant\nbee\n")
    artifact, files = versions_of(model)[0].artifact()
    assert artifact.meta["labels"] == {"scores": ["ant", "bee"]}
    assert list(files) == ["model.onnx"]
    assert artifact.digest != bare.digest


@pytest.mark.parametrize("name", ["none.txt", "../secret.txt", "/etc/hostname", "1"])
def test_a_file_that_is_not_there_is_named(model: Path, name: str) -> None:
    (model / "config.pbtxt").write_text(CONFIG.replace("labels.txt", name))
    with pytest.raises(DataError, match="label_filename of output 'scores'"):
        versions_of(model)


@pytest.mark.parametrize("output", ["x", ["x", None], {"name": "y"}, {"label_filename": 5}, 7])
def test_a_config_of_another_shape_has_no_labels(model: Path, output: Json) -> None:
    (version,) = versions_of(model, {"output": output})
    assert version.labels == {}
