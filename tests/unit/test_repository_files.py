"""Which file of a version is the model, and what runs it: as Triton's configuration says, else by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from onejob.errors import DataError
from onejob.serve.repository import Version, is_model, scan

TRITONS = "class TritonPythonModel:\n    pass\n"
FUNCTION = "def infer(x):\n    return x\n"


def version(folder: Path, config: str, **files: str) -> Version:
    """A model `m` with these files in its version 1."""
    inside = folder / "models" / "m" / "1"
    inside.mkdir(parents=True)
    for name, text in files.items():
        (inside / name.replace("_", ".")).write_text(text)
    if config:
        (inside.parent / "config.pbtxt").write_text(config)
    (found,) = scan(folder / "models")
    return found


@pytest.mark.parametrize(
    ("config", "files", "file", "engine"),
    [
        ("", {"model_onnx": "", "model_py": FUNCTION}, "model.onnx", "onnxruntime"),
        ('backend: "python"', {"model_onnx": "", "model_py": FUNCTION}, "model.py", "function"),
        ('backend: "onnxruntime"', {"model_onnx": "", "model_py": ""}, "model.onnx", "onnxruntime"),
        ('platform: "onnxruntime_onnx"', {"model_onnx": "", "model_xml": ""}, "model.onnx", "onnxruntime"),
        ('backend: "openvino"', {"model_onnx": "", "model_xml": "", "model_bin": ""}, "model.xml", "openvino"),
        ('backend: "openvino"', {"model_onnx": ""}, "model.onnx", "openvino"),
        ('backend: "tensorrt"', {"model_plan": "", "model_onnx": ""}, "model.onnx", "onnxruntime"),
        ('default_model_filename: "net.onnx"', {"net_onnx": "", "model_onnx": ""}, "net.onnx", "onnxruntime"),
        ('backend: "openvino" default_model_filename: "net.onnx"', {"net_onnx": ""}, "net.onnx", "openvino"),
        ('backend: "python" default_model_filename: "mine.py"', {"mine_py": FUNCTION}, "mine.py", "function"),
    ],
)
def test_the_file_that_is_the_model(tmp_path: Path, config: str, files: dict[str, str], file: str, engine: str) -> None:
    found = version(tmp_path, config, **files)
    assert (found.file, found.engine) == (file, engine)


@pytest.mark.parametrize(
    ("config", "files", "says"),
    [
        ("", {"model_plan": ""}, r"It should have model\.onnx or model\.xml or model\.py"),
        ('backend: "python"', {"model_onnx": ""}, r"Its configuration wants model\.py"),
        ('default_model_filename: "net.onnx"', {"model_onnx": ""}, r"Its configuration wants net\.onnx"),
        ('default_model_filename: "../1/model.onnx"', {"model_onnx": ""}, "Its configuration wants"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, config: str, files: dict[str, str], says: str) -> None:
    with pytest.raises(DataError, match=says):
        version(tmp_path, config, **files)


def test_a_file_of_another_name_is_laid_where_its_engine_looks(tmp_path: Path) -> None:
    found = version(
        tmp_path, 'default_model_filename: "net.xml"', net_xml="x", net_bin="b", model_xml="y", labels_txt="l"
    )
    artifact, files = found.artifact()
    assert [entry.path for entry in artifact.files] == ["labels.txt", "model.bin", "model.xml"]
    assert (files["model.xml"].read_text(), files["model.bin"].read_text()) == ("x", "b")


def test_a_python_backends_model_keeps_its_folders_and_what_its_versions_share(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "m"
    for number in ("1", "2"):
        (folder / number).mkdir(parents=True)
        (folder / number / "model.py").write_text(TRITONS)
        (folder / number / "weight.bin").write_text(number)
    (folder / "words").mkdir()
    (folder / "words" / "table.json").write_text("{}")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("")
    (folder / "config.pbtxt").write_text('backend: "python"\nmax_batch_size: 4\n')
    (found,) = scan(tmp_path / "models")
    artifact, files = found.artifact()
    assert [entry.path for entry in artifact.files] == ["2/model.py", "2/weight.bin", "words/table.json"]
    assert files["2/weight.bin"].read_text() == "2"
    assert artifact.meta["options"] == {"file": "2/model.py"}
    told = artifact.meta["python_backend"]
    assert (told["name"], told["version"], told["config"]["max_batch_size"]) == ("m", "2", 4)


def test_the_folder_of_one_model_is_no_repository(tmp_path: Path) -> None:
    version(tmp_path, "", model_onnx="")
    assert not is_model(tmp_path / "models")
    assert is_model(tmp_path / "models" / "m")
    (only,) = scan(tmp_path / "models" / "m")
    assert (only.name, only.version) == ("m", "1")
