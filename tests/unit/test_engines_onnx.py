"""ONNX Runtime and OpenVINO behind one port: the same answers, the same refusals."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onejob.core.tensor import TensorSpec
from onejob.engines import MODULES, open_model
from onejob.engines import onnxruntime as of_onnxruntime
from onejob.engines import openvino as of_openvino
from onejob.errors import InferenceError, UnavailableError

ENGINES = ["onnxruntime", "openvino"]
WEIGHT = np.arange(6, dtype=np.float32).reshape(3, 2) / 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """codes int64 [n, 1] + numbers float32 [n, 3] -> y = numbers @ WEIGHT + codes; in a folder with a bad name."""
    batch = "batch"
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["numbers", "w"], ["product"]),
            helper.make_node("Cast", ["codes"], ["floats"], to=TensorProto.FLOAT),
            helper.make_node("Add", ["product", "floats"], ["y"]),
        ],
        "g",
        [
            helper.make_tensor_value_info("codes", TensorProto.INT64, [batch, 1]),
            helper.make_tensor_value_info("numbers", TensorProto.FLOAT, [batch, 3]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 2])],
        [numpy_helper.from_array(WEIGHT, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    folder = tmp_path / "a 'quoted' folder"
    folder.mkdir()
    onnx.save(model, folder / "model.onnx")
    return folder


def rows(n: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(n)
    return {
        "codes": chance.integers(0, 5, (n, 1)),
        "numbers": chance.normal(size=(n, 3)).astype(np.float32),
    }


def expected(arrays: dict[str, np.ndarray]) -> np.ndarray:
    return arrays["numbers"] @ WEIGHT + arrays["codes"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_answers_batches_of_any_size(engine: str, folder: Path) -> None:
    model = open_model(folder, {"engine": engine, "precision": "fp32"}, threads=1)
    assert model.inputs == (TensorSpec("codes", "INT64", (-1, 1)), TensorSpec("numbers", "FP32", (-1, 3)))
    assert model.outputs == (TensorSpec("y", "FP32", (-1, 2)),)
    assert model.precision == "fp32"
    kept = {}
    for n in (1, 5, 64, 1):
        arrays = rows(n)
        kept[n] = model.infer(arrays)["y"]
        np.testing.assert_allclose(kept[n], expected(arrays), atol=1e-5)
    np.testing.assert_allclose(kept[5], expected(rows(5)), atol=1e-5, err_msg="a later call changed an earlier answer")
    model.close()
    with pytest.raises(InferenceError, match="the model is closed"):
        model.infer(rows(1))


@pytest.mark.parametrize("engine", ENGINES)
def test_slices_and_reversed_arrays_are_taken_as_they_read(engine: str, folder: Path) -> None:
    arrays = {name: values[::-2] for name, values in rows(9).items()}
    got = open_model(folder, {"engine": engine}).infer(arrays)["y"]
    np.testing.assert_allclose(got, expected(arrays), atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("wrong", ["missing", "more", "shape", "type"])
def test_arrays_that_do_not_fit_are_refused_in_the_engines_words(engine: str, wrong: str, folder: Path) -> None:
    model = open_model(folder, {"engine": engine})
    good = rows(2)
    model.infer(good)  # so that there is an earlier batch that a missing input could be taken from
    bad = {
        "missing": {"numbers": good["numbers"]},
        "more": {**good, "other": good["numbers"]},
        "shape": {**good, "numbers": good["numbers"][:, :2]},
        "type": {**good, "numbers": good["numbers"].astype(np.float64)},
    }[wrong]
    with pytest.raises(InferenceError, match=r"model\.onnx: ") as caught:
        model.infer(bad)
    assert "\n" not in str(caught.value)
    np.testing.assert_allclose(model.infer(good)["y"], expected(good), atol=1e-5, err_msg="it goes on afterwards")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_missing_and_a_damaged_file_are_told_apart(engine: str, folder: Path) -> None:
    path = folder / "model.onnx"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InferenceError, match=r"model\.onnx: .* can't load it: .*onejob verify"):
        open_model(folder, {"engine": engine})
    path.unlink()
    with pytest.raises(InferenceError, match=r"model\.onnx: there is no such file"):
        open_model(folder, {"engine": engine})


@pytest.mark.parametrize("engine", ENGINES)
def test_a_type_that_cannot_be_served_is_named(engine: str, tmp_path: Path) -> None:
    kind = TensorProto.BFLOAT16
    ends = [helper.make_tensor_value_info(name, kind, ["n", 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(InferenceError, match=r"tensor 'x' is .*bf.*16.*, which can't be served"):
        open_model(tmp_path, {"engine": engine})


def test_openvino_opens_its_own_format(folder: Path, tmp_path: Path) -> None:
    of_openvino.ov.save_model(of_openvino.ov.convert_model(folder / "model.onnx"), tmp_path / "model.xml", False)
    assert not (tmp_path / "model.onnx").exists()
    model = open_model(tmp_path, {"engine": "openvino"})
    assert {spec.name for spec in model.inputs} == {"codes", "numbers"}
    np.testing.assert_allclose(model.infer(rows(3))["y"], expected(rows(3)), atol=1e-5)


class Bf16:
    """An OpenVINO that takes bf16 whatever it is asked for, and says so when it is asked."""

    asked: ClassVar[dict[str, object]] = {}

    def Core(self) -> Bf16:  # noqa: N802 - OpenVINO's name
        return self

    def compile_model(self, path: str, device: str, options: dict[str, object]) -> Bf16:
        self.asked.update(options)
        return self

    def get_property(self, name: str) -> Bf16:
        assert name == "INFERENCE_PRECISION_HINT"
        return self

    def get_type_name(self) -> str:
        return "bf16"


def test_openvino_is_asked_for_f32_and_refused_when_it_takes_another(folder: Path, monkeypatch) -> None:
    assert of_openvino.open_model(folder, {"precision": "fp32"}).precision == "fp32"
    monkeypatch.setattr(of_openvino, "ov", Bf16())
    with pytest.raises(UnavailableError, match="asked for f32 and computes in bf16"):
        of_openvino.open_model(folder, {"precision": "fp32"}, 2)
    assert Bf16.asked["INFERENCE_PRECISION_HINT"] == "f32"
    assert Bf16.asked["INFERENCE_NUM_THREADS"] == 2


@pytest.mark.parametrize("module", [of_onnxruntime, of_openvino])
def test_an_engine_that_is_not_installed_says_so_with_the_cure(module, monkeypatch, tmp_path: Path) -> None:
    here = module.supported()
    assert here.available
    assert here.kind == "engine"
    assert any(character.isdigit() for character in here.detail), "a version"
    monkeypatch.setattr(module, "ort" if module is of_onnxruntime else "ov", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    missing = module.supported()
    assert not missing.available
    assert missing.name == here.name
    assert "pip install" in missing.cure
    with pytest.raises(UnavailableError, match=r"is not installed.*pip install"):
        module.open_model(tmp_path, {}, 1)


def test_an_engine_that_nobody_knows_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"no engine is called 'tensorflow'.*onnxruntime"):
        open_model(tmp_path, {"engine": "tensorflow"})
    assert set(ENGINES) < set(MODULES)
