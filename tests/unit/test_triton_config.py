"""What Triton is told of a model: golden files, each read back by protobuf's own strict parser."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient
from google.protobuf import text_format

from onejob.core.tensor import TensorSpec
from onejob.engines.triton.client import from_bytes, to_bytes
from onejob.engines.triton.config import NATIVE, Batching, Config, config, quoted, text
from onejob.errors import UnavailableError

GOLDEN = Path(__file__).parents[1] / "golden" / "triton_repository"
X, Y = TensorSpec("x", "FP32", (-1, 64)), TensorSpec("y", "FP32", (-1, 10))
COLUMN, SCORE = TensorSpec("carrier", "BYTES", (-1,)), TensorSpec("score", "FP64", (-1, 1))
FIXED = TensorSpec("image", "UINT8", (3, -1, -1))
ONE = TensorSpec("threshold", "INT64", ())
ODD = TensorSpec('a "quoted"\\name\nü', "BOOL", (-1, 2))

CASES: dict[str, Config] = {
    "onnxruntime": config("mlp", "onnxruntime", (X,), (Y,), native=True, threads=4, batching=Batching()),
    "openvino": config("mlp", "openvino", (X,), (Y,), native=True, threads=2, batching=Batching()),
    "python": config("mlp", "pytorch", (X,), (Y,), native=True, batching=Batching(most=8, delay_us=500, instances=2)),
    "python-onnx": config("mlp", "onnxruntime", (X,), (Y,), native=False, batching=Batching(dynamic=False)),
    "columns": config("flights", "function", (COLUMN, X), (SCORE,), native=True, batching=Batching()),
    "no-batch": config("image", "function", (FIXED, ONE), (SCORE,), native=True, batching=Batching()),
    "odd-names": config("odd", "function", (ODD,), (ODD,), native=True, batching=Batching()),
}


@pytest.fixture(scope="module")
def messages() -> Any:
    """NVIDIA's own messages, out of tritonclient; its gRPC, which lies beside them, isn't needed."""
    path = Path(tritonclient.__file__).parent / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", CASES)
def test_the_file_is_as_it_was_found_right(name: str) -> None:
    assert text(CASES[name]) == (GOLDEN / f"{name}.pbtxt").read_text()


def test_there_is_no_file_without_a_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.pbtxt")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_protobuf_reads_it(name: str, messages: Any) -> None:
    told = CASES[name]
    found = text_format.Parse(text(told), messages.ModelConfig())
    assert (found.name, found.backend, found.platform) == (told.name, told.backend, told.platform)
    assert found.default_model_filename == told.file
    assert found.max_batch_size == told.max_batch_size
    assert found.HasField("dynamic_batching") == bool(told.max_batch_size and told.batching.dynamic)
    assert found.dynamic_batching.max_queue_delay_microseconds == (told.batching.delay_us or 0)
    assert [group.count for group in found.instance_group] == [told.batching.instances]
    assert {group.kind for group in found.instance_group} == {messages.ModelInstanceGroup.KIND_CPU}
    assert {key: value.string_value for key, value in found.parameters.items()} == dict(told.parameters)
    for tensors, specs in ((found.input, told.inputs), (found.output, told.outputs)):
        for tensor, spec in zip(tensors, specs, strict=True):
            assert tensor.name == spec.name
            datatype = messages.DataType.Name(tensor.data_type)
            assert datatype == ("TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}")
            inner = spec.shape[1:] if told.max_batch_size else spec.shape
            assert tuple(tensor.dims) == (inner or (1,)), "never without a dimension"
            assert tensor.HasField("reshape") == (not inner)
            assert tuple(tensor.reshape.shape) == ()


@pytest.mark.parametrize(
    ("name", "most", "widened"),
    [
        ("onnxruntime", 64, set()),
        ("columns", 64, {"carrier"}),
        ("no-batch", 0, {"threshold"}),
        ("openvino", 0, set()),
    ],
)
def test_what_triton_may_join_and_what_is_wider_on_the_wire(name: str, most: int, widened: set[str]) -> None:
    assert CASES[name].max_batch_size == most
    assert CASES[name].widened == widened


def test_only_the_python_backend_lacks_bf16() -> None:
    half = TensorSpec("h", "BF16", (-1, 2))
    assert config("m", "onnxruntime", (half,), (half,), native=True, batching=Batching()).backend == "onnxruntime"
    with pytest.raises(UnavailableError, match=r"tensor 'h': Triton's Python backend has no BF16\. Use FP32"):
        config("m", "onnxruntime", (half,), (half,), native=False, batching=Batching())


def test_a_backend_that_changes_the_precision_is_marked() -> None:
    assert {engine: native.exact for engine, native in NATIVE.items()} == {"onnxruntime": True, "openvino": False}


@pytest.mark.parametrize("value", ["", "a", '"', "\\", "\n\t\0", "ü€", "'"])
def test_quoted_text_comes_back(value: str, messages: Any) -> None:
    found = text_format.Parse(f"name: {quoted(value)}", messages.ModelConfig())
    assert found.name == value


@pytest.mark.parametrize(
    ("datatype", "array"),
    [
        ("FP32", np.array([[1.5, -2]], np.float32)),
        ("INT64", np.array([[1], [2]])),
        ("BOOL", np.array([True, False])),
        ("FP16", np.array([0.5], np.float16)),
        ("UINT8", np.zeros((0, 3), np.uint8)),
        ("BYTES", np.array([[b"a"], [b""], [b"\xff\0"]], object)),
    ],
)
def test_tensors_come_back(datatype: str, array: np.ndarray[Any, Any]) -> None:
    data = to_bytes(array, datatype)
    found = from_bytes(memoryview(data), datatype, array.shape)
    assert found.shape == array.shape
    assert found.dtype == array.dtype
    assert found.tolist() == array.tolist()


def test_text_is_sent_as_utf8_and_a_slice_as_it_reads() -> None:
    assert to_bytes(np.array(["ü", None], object), "BYTES") == b"\x02\0\0\0\xc3\xbc\0\0\0\0"
    assert to_bytes(np.arange(6, dtype=np.int32)[::-2], "INT32") == np.array([5, 3, 1], np.int32).tobytes()
