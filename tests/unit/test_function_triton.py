"""Models of Triton's Python backend as functions: what they are told, what they may answer, and what can't be had."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onejob.core.artifact import Json
from onejob.core.tensor import TensorSpec
from onejob.engines.function import pb_utils
from onejob.engines.function.code import Code, load
from onejob.engines.triton import server
from onejob.errors import BadRequestError, InferenceError, OverloadedError, UnavailableError
from onejob.serve import pbtxt
from onejob.serve.triton_model import complete, is_one

HEAD = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

"""
DOUBLE = (
    HEAD
    + """
class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        config = json.loads(args["model_config"])
        self.dtype = pb_utils.triton_string_to_numpy(pb_utils.get_output_config_by_name(config, "y")["data_type"])
        self.sizes = []

    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            self.sizes.append(len(x))
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", (2 * x).astype(self.dtype))]))
        return answers

    def finalize(self):
        open("finalized", "w").close()
"""
)
CONFIG = """
max_batch_size: 4
input [{ name: "x" data_type: TYPE_FP32 dims: [ 3 ] }]
output [{ name: "y" data_type: TYPE_FP64 dims: [ 3 ] }]
parameters { key: "factor" value: { string_value: "2" } }
"""


def opened(folder: Path, code: str, config: str = CONFIG) -> Code:
    place = folder / "models" / "double" / "1"
    place.mkdir(parents=True)
    (place / "model.py").write_text(code)
    told = {"name": "double", "version": "1", "config": complete(pbtxt.parse(config), "double")}
    return load(place.parent, "1/model.py", triton=told)


def execute(body: str, *, config: str = "") -> str:
    lines = "\n".join("        " + line for line in body.strip().splitlines())
    return f"{HEAD}\nclass TritonPythonModel:\n{config}\n    def execute(self, requests):\n{lines}\n"


def test_it_runs_as_it_is_and_is_told_what_triton_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = opened(tmp_path, DOUBLE)
    assert code.inputs == (TensorSpec("x", "FP32", (-1, 3)),)
    assert code.outputs == (TensorSpec("y", "FP64", (-1, 3)),)
    assert (code.joins, code.picky) == (True, True)
    x = np.arange(30, dtype=np.float32).reshape(10, 3)
    found = code.infer({"x": x})["y"]
    assert found.dtype == np.float64
    assert found.tolist() == (2.0 * x).tolist()
    model = code._call.__self__._model  # type: ignore[attr-defined]
    assert model.sizes == [4, 4, 2], "never more rows than max_batch_size"
    args = model.args
    config = json.loads(args.pop("model_config"))
    assert config["parameters"] == {"factor": {"string_value": "2"}}
    assert (config["max_batch_size"], config["input"][0]["dims"], config["backend"]) == (4, [3], "python")
    folder = Path(args.pop("model_repository"))
    assert (folder / args["model_version"] / "model.py").is_file()
    assert args == {
        "model_instance_kind": "CPU",
        "model_instance_name": "double_0_0",
        "model_instance_device_id": "0",
        "model_version": "1",
        "model_name": "double",
    }
    code.close()
    assert (tmp_path / "finalized").exists()


def test_without_max_batch_size_each_request_is_a_call_as_it_came(tmp_path: Path) -> None:
    code = opened(tmp_path, DOUBLE, CONFIG.replace("max_batch_size: 4", "").replace("[ 3 ]", "[ -1 ]"))
    assert code.inputs == (TensorSpec("x", "FP32", (-1,)),)
    assert not code.joins
    assert code.infer({"x": np.array([1, 2, 3, 4, 5], np.float32)})["y"].tolist() == [2, 4, 6, 8, 10]


def test_reshape_is_what_the_model_sees(tmp_path: Path) -> None:
    config = """
max_batch_size: 2
input [{ name: "x" data_type: TYPE_FP32 dims: [ 1 ] reshape: { shape: [ ] } }]
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] reshape: { shape: [ ] } }
"""
    code = opened(
        tmp_path,
        execute(
            """
(request,) = requests
x = request.inputs()[0].as_numpy()
assert x.ndim == 1, x.shape
return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x + 1)])]
"""
        ),
        config,
    )
    assert code.infer({"x": np.array([[1], [2], [3]], np.float32)})["y"].tolist() == [[2], [3], [4]]


def test_a_model_may_complete_its_configuration(tmp_path: Path) -> None:
    completes = """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "y", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        return config
"""
    body = """
texts = requests[0].inputs()[0].as_numpy()
return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("y", np.char.upper(texts.astype(bytes)))])]
"""
    code = opened(tmp_path, execute(body, config=completes), "")
    assert code.inputs == (TensorSpec("x", "BYTES", (-1, 1)),)
    assert code.infer({"x": np.array([[b"ab"], [b"c"]], object)})["y"].tolist() == [[b"AB"], [b"C"]]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("INVALID_ARG", BadRequestError),
        ("UNAVAILABLE", OverloadedError),
        ("INTERNAL", InferenceError),
        (None, InferenceError),
    ],
)
def test_an_error_comes_in_the_models_words(tmp_path: Path, code: str | None, kind: type[Exception]) -> None:
    told = f", pb_utils.TritonError.{code}" if code else ""
    body = f'return [pb_utils.InferenceResponse([], pb_utils.TritonError("no such word"{told}))]'
    made = opened(tmp_path, execute(body))
    with pytest.raises(InferenceError) as error:
        made.infer({"x": np.zeros((1, 3), np.float32)})
    assert type(error.value) is kind
    assert str(error.value) == "no such word"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return None", "execute gave a NoneType for 1 request"),
        ("return []", "execute gave 0 responses for 1 request"),
        ("return [None]", "execute gave no InferenceResponse"),
        ("return [pb_utils.InferenceResponse([])]", "the response lacks the output 'y'"),
        ('return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros((1, 4)))])]', "has shape"),
        (
            'return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros((1, 3), complex))])]',
            "which Triton hasn't",
        ),
        ("requests[0].get_response_sender()", "decoupled answers aren't there yet"),
        ("pb_utils.InferenceRequest(model_name='other', inputs=[]).exec()", "can't ask another one here: 'other'"),
    ],
)
def test_an_answer_that_is_none_is_told_apart(tmp_path: Path, body: str, says: str) -> None:
    made = opened(tmp_path, execute(body))
    with pytest.raises((InferenceError, pb_utils.TritonModelException), match=says):
        made.infer({"x": np.zeros((1, 3), np.float32)})


def test_a_coroutine_is_waited_for(tmp_path: Path) -> None:
    text = execute('return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.ones((1, 3)))])]')
    made = opened(tmp_path, text.replace("def execute", "async def execute"))
    assert made.infer({"x": np.zeros((1, 3), np.float32)})["y"].tolist() == [[1, 1, 1]]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("", "there is no input in it"),
        ('input { name: "x" data_type: TYPE_FP32 dims: [1] }', "there is no output in it"),
        (CONFIG.replace("TYPE_FP32", "TYPE_FP31"), "'x' has the data_type 'TYPE_FP31'"),
        (CONFIG.replace("[ 3 ]", "[ 3, -2 ]"), "'x' has the dims"),
        (CONFIG + "model_transaction_policy { decoupled: true }", "a stream of answers isn't there yet"),
        (CONFIG + "sequence_batching { }", "sequences aren't there yet"),
        (
            CONFIG + 'parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "env.tar.gz" } }',
            "a packed environment isn't unpacked here. Install what it needs",
        ),
    ],
)
def test_what_a_configuration_can_not_have(tmp_path: Path, config: str, says: str) -> None:
    with pytest.raises(InferenceError, match=says):
        opened(tmp_path, DOUBLE, config)


WARM = 'model_warmup [{ batch_size: 2 inputs { key: "x" value: { data_type: TYPE_FP32 dims: [ 3 ] %s } } }]'


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("zero_data: true", [[0, 0, 0], [0, 0, 0]]),
        ('input_data_file: "raw"', [[0, 1, 2], [3, 4, 5]]),
        ("random_data: true", None),
    ],
)
def test_its_warm_up_is_what_it_is_asked_with(tmp_path: Path, how: str, found: Any) -> None:
    folder = tmp_path / "models" / "double" / "warmup"
    folder.mkdir(parents=True)
    (folder / "raw").write_bytes(np.arange(6, dtype=np.float32).tobytes())
    made = opened(tmp_path, DOUBLE, CONFIG + WARM % how)
    assert made.example is not None
    assert made.example["x"].shape == (2, 3)
    assert made.example["x"].dtype == np.float32
    assert found is None or made.example["x"].tolist() == found
    assert not made.picky, "it says what it takes: then it must answer"


@pytest.mark.parametrize(
    ("warm", "says"),
    [
        (WARM.replace('"x"', '"z"') % "zero_data: true", "model_warmup lacks the input 'x'"),
        (WARM % 'input_data_file: "none"', "input_data_file 'none': .*No such file"),
        (WARM.replace("[ 3 ]", "[ 4 ]") % "zero_data: true", r"input 'x' has shape \[2, 4\], not \[-1, 3\]"),
    ],
)
def test_a_warm_up_that_is_none_is_named(tmp_path: Path, warm: str, says: str) -> None:
    with pytest.raises(InferenceError, match=says):
        opened(tmp_path, DOUBLE, CONFIG + warm)


def test_without_batches_each_input_of_a_warm_up_has_its_own_size(tmp_path: Path) -> None:
    tensor = 'name: "%s" data_type: TYPE_FP32 dims: [ -1 ]'
    sample = 'inputs { key: "%s" value { data_type: TYPE_FP32 dims: [ %d ] zero_data: true } }'
    config = f"input [ {{ {tensor % 'a'} }}, {{ {tensor % 'b'} }} ] output {{ {tensor % 'y'} }}"
    warm = f"model_warmup {{ {sample % ('a', 3)} {sample % ('b', 5)} }}"
    made = opened(tmp_path, execute("raise ValueError"), f"{config} {warm}")
    assert made.example is not None
    assert {name: array.shape for name, array in made.example.items()} == {"a": (3,), "b": (5,)}


def test_text_that_it_is_warmed_up_with(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "double" / "warmup"
    folder.mkdir(parents=True)
    data = pb_utils.serialize_byte_tensor(np.array([b"{}", b""], object))
    assert isinstance(data, bytes)
    (folder / "texts").write_bytes(data)
    config = """
max_batch_size: 4
input { name: "x" data_type: TYPE_STRING dims: 1 }
output { name: "y" data_type: TYPE_STRING dims: 1 }
model_warmup { batch_size: 2 inputs { key: "x" value { data_type: TYPE_STRING dims: 1 input_data_file: "texts" } } }
"""
    made = opened(tmp_path, execute("raise ValueError"), config)
    assert made.example is not None
    assert made.example["x"].tolist() == [[b"{}"], [b""]]


def test_which_files_are_such_models(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    for text, wanted in (
        (DOUBLE, True),
        ("from mine import TritonPythonModel\n", True),
        ("# class TritonPythonModel:\ndef infer(x): ...\n", False),
        ('"""Was a\n  class TritonPythonModel once."""\n', False),
    ):
        path.write_text(text)
        assert is_one(path) is wanted, text
    assert not is_one(tmp_path / "model.onnx")


def tritons() -> Any:
    """The module of a real Triton; it is plain Python, but for what its process adds."""
    try:
        program = server.find()
    except UnavailableError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    path = next(program.resolve().parent.parent.rglob("triton_python_backend_utils.py"))
    spec = importlib.util.spec_from_file_location("real_backend_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_utilities_are_tritons() -> None:
    theirs = tritons()
    public = {name for name in vars(theirs) if not name.startswith("_")} - {"json", "struct", "np"}
    assert public <= set(vars(pb_utils)), "all that it has is here"
    for name in theirs.TRITON_STRING_TO_NUMPY:
        assert np.dtype(pb_utils.triton_string_to_numpy(name)) == np.dtype(theirs.triton_string_to_numpy(name))
    for number in range(16):
        assert pb_utils.triton_to_numpy_type(number) == theirs.triton_to_numpy_type(number)
    for dtype in (np.bool_, np.uint8, np.int64, np.float16, np.float32, np.float64, np.object_, np.bytes_):
        assert pb_utils.numpy_to_triton_type(dtype) == theirs.numpy_to_triton_type(dtype)
    for values in (np.array([b"a", "ü", b""], object), np.array([b"ab", b"c"]), np.zeros(0, object), np.zeros(2)):
        assert pb_utils.serialize_byte_tensor(values) == theirs.serialize_byte_tensor(values)
    data = pb_utils.serialize_byte_tensor(np.array([b"a", b"", b"ccc"], object))
    assert pb_utils.deserialize_bytes_tensor(data).tolist() == theirs.deserialize_bytes_tensor(data).tolist()
    config = {
        "input": [{"name": "x", "dims": [1]}],
        "output": [{"name": "y"}],
        "model_transaction_policy": {"decoupled": True},
    }
    for name in ("x", "y", "z"):
        assert pb_utils.get_input_config_by_name(config, name) == theirs.get_input_config_by_name(config, name)
        assert pb_utils.get_output_config_by_name(config, name) == theirs.get_output_config_by_name(config, name)
    for told in (config, {}):
        used = theirs.using_decoupled_model_transaction_policy(told)
        assert pb_utils.using_decoupled_model_transaction_policy(told) == used
    for name in ("TRITONSERVER_REQUEST_FLAG_SEQUENCE_START", "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END"):
        assert getattr(pb_utils, name) == getattr(theirs, name)


KNOWN: Json = {"name": "x", "data_type": "TYPE_FP32", "dims": [4]}


@pytest.mark.parametrize(
    "steps",
    [
        [("add_input", KNOWN), ("add_output", KNOWN), ("set_max_batch_size", 8), ("set_dynamic_batching",)],
        [("add_input", KNOWN), ("add_input", KNOWN)],
        [("add_input", KNOWN), ("add_input", {**KNOWN, "dims": [5]})],
        [("add_output", KNOWN), ("add_output", {**KNOWN, "data_type": "TYPE_FP64"})],
        [("add_input", {**KNOWN, "optional": True})],
        [("add_output", {**KNOWN, "optional": True})],
        [("add_input", {"name": "x", "dims": [1]})],
        [("add_input", {"data_type": "TYPE_FP32", "dims": [1]})],
        [("set_max_batch_size", 8), ("set_max_batch_size", 4)],
        [("set_model_transaction_policy", {"decoupled": False})],
        [("set_model_transaction_policy", {"other": False})],
    ],
)
def test_a_configuration_is_completed_as_by_triton(steps: list[tuple[Any, ...]]) -> None:
    base: Json = {"name": "m", "max_batch_size": 0, "input": [], "output": []}

    def done(kind: Any) -> Json:
        config = kind(json.dumps(base))
        try:
            for name, *args in steps:
                getattr(config, name)(*json.loads(json.dumps(args)))
        except (ValueError, KeyError):
            return "refused"
        return config.as_dict()

    assert done(pb_utils.ModelConfig) == done(tritons().ModelConfig)


def test_a_tensor_of_another_framework(tmp_path: Path) -> None:
    values = np.arange(4, dtype=np.float32)
    assert pb_utils.Tensor.from_dlpack("x", values).as_numpy().tolist() == [0, 1, 2, 3]
    again = pb_utils.Tensor.from_dlpack("x", pb_utils.Tensor("x", values).to_dlpack())
    assert again.as_numpy().tolist() == [0, 1, 2, 3]
    assert np.from_dlpack(pb_utils.Tensor("x", values)).tolist() == [0, 1, 2, 3]
    assert pb_utils.Tensor("x", values).triton_dtype() == 11
