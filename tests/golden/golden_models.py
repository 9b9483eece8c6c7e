"""The models that the golden exchanges were recorded with: what they compute, and their signatures.

This file is also the `model.py` of each of them inside Triton's Python backend, so it needs numpy only. The tests
compute with the same functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

try:
    import triton_python_backend_utils as pb
except ImportError:
    pb = None

SHAPES = {"one": "-1", "three": "3", "grid": "-1,2", "two": "-1,-1", "box": "2,2"}
"""Name -> dims of models that take x of these dims, batched."""
Arrays = Mapping[str, np.ndarray[Any, Any]]

NUMBERS = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP16", "FP32", "FP64")
DATATYPES = (*NUMBERS, "BF16", "BOOL", "BYTES")
LABELS = ("ant", "bee", "cat", "dog", "elk")


def _same(inputs: Arrays, version: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"y": inputs["x"]}


def _pair(inputs: Arrays, version: int) -> dict[str, np.ndarray[Any, Any]]:
    a, b = inputs["a"].astype(np.float32), inputs["b"]
    return {"sum": a + b, "difference": a - b, "text": np.char.mod("%g", a + b).astype(object)}


def _versions(inputs: Arrays, version: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"y": inputs["x"] + np.float32(version)}


def _shaped(inputs: Arrays, version: int) -> dict[str, np.ndarray[Any, Any]]:
    """The shape that the input came in, on each row."""
    x = inputs["x"]
    return {"shape": np.tile(np.array(x.shape, dtype=np.int64), (len(x), 1))}


def _slow(inputs: Arrays, version: int) -> dict[str, np.ndarray[Any, Any]]:
    time.sleep(float(inputs["x"].max()))
    return {"y": inputs["x"]}


def _broken(inputs: Arrays, version: int) -> dict[str, np.ndarray[Any, Any]]:
    raise ValueError("this model is broken")


def _first(inputs: Arrays) -> str:
    value = inputs["text_input"].reshape(-1)[0]
    return value.decode() if isinstance(value, bytes) else str(value)


def _text(inputs: Arrays, version: int) -> dict[str, np.ndarray[Any, Any]]:
    """The text in capitals, with what else was asked; more texts for more `copies`."""
    told = [f"{name}={inputs[name].reshape(-1).tolist()}" for name in ("temperature", "stop") if name in inputs]
    text = " ".join([_first(inputs).upper(), *told])
    copies = int(inputs["copies"].reshape(-1)[0]) if "copies" in inputs else 1
    return {"text_output": np.array([text] * copies, dtype=object)}


def words(inputs: Arrays) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """One answer for each word, with its number; the word FAIL fails."""
    for number, word in enumerate(_first(inputs).split()):
        if word == "FAIL":
            raise ValueError("this word fails")
        yield {"text_output": np.array([word], dtype=object), "number": np.array([number], dtype=np.int32)}


COMPUTE: Mapping[str, Callable[[Arrays, int], dict[str, np.ndarray[Any, Any]]]] = {
    **{f"same_{datatype.lower()}": _same for datatype in DATATYPES},
    **dict.fromkeys(("scores", "fixed", "column", "priorities", "sequences", "loaded"), _same),
    **{f"shaped_{name}": _shaped for name in (*SHAPES, "free")},
    "pair": _pair,
    "versions": _versions,
    **dict.fromkeys(("slow", "queue"), _slow),
    "broken": _broken,
    "text": _text,
}


@dataclass(frozen=True)
class Model:
    """A model's signature; a tensor is "name DATATYPE dims more"."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batch: int = 8
    more: str = ""

    def config(self) -> str:
        """Its config.pbtxt."""
        return (
            f'backend: "python"\nmax_batch_size: {self.batch}\n'
            + _tensors("input", *self.inputs)
            + _tensors("output", *self.outputs)
            + "instance_group [{kind: KIND_CPU count: 1}]\n"
            + self.more
        )

    def shapes(self, tensors: tuple[str, ...]) -> Iterator[tuple[str, str, tuple[int, ...], bool]]:
        """(name, datatype, shape with the batch, whether it may be left out) of each."""
        for tensor in tensors:
            name, datatype, dims, *more = tensor.split(" ", 3)
            shape = tuple(int(size) for size in dims.split(","))
            yield name, datatype, (-1, *shape) if self.batch else shape, "optional: true" in more


def _tensors(kind: str, *tensors: str) -> str:
    entries = []
    for tensor in tensors:
        name, datatype, dims, *more = tensor.split(" ", 3)
        datatype = "STRING" if datatype == "BYTES" else datatype
        entries.append(f'{{name: "{name}" data_type: TYPE_{datatype} dims: [{dims}] {" ".join(more)}}}')
    return f"{kind} [{', '.join(entries)}]\n"


_BATCHING = "dynamic_batching {%s}\n"
_REJECT = (
    "default_queue_policy {timeout_action: REJECT default_timeout_microseconds: 30000000 "
    "allow_timeout_override: true %s}"
)
_TEXT = (
    "text_input BYTES 1",
    "copies INT32 1 optional: true",
    "temperature FP32 1 optional: true",
    "stop BYTES -1 optional: true",
)
MODELS: Mapping[str, Model] = {
    **{f"same_{name.lower()}": Model((f"x {name} -1",), (f"y {name} -1",)) for name in DATATYPES},
    **{f"shaped_{name}": Model((f"x FP32 {dims}",), ("shape INT64 -1",)) for name, dims in SHAPES.items()},
    "shaped_free": Model(("x FP32 -1,2",), ("shape INT64 -1,-1",), batch=0),
    "scores": Model(("x FP32 5",), ('y FP32 5 label_filename: "labels.txt"',)),
    "pair": Model(("a INT32 2", "b FP32 2"), ("sum FP32 2", "difference FP32 2", "text BYTES 2")),
    "fixed": Model(("x FP32 2,2",), ("y FP32 2,2",), batch=0),
    "column": Model(("x INT64 1 reshape: {shape: []}",), ("y INT64 1 reshape: {shape: []}",)),
    "versions": Model(("x FP32 1",), ("y FP32 1",), more="version_policy {all {}}\n"),
    "slow": Model(("x FP32 1",), ("y FP32 1",), batch=1, more=_BATCHING % (_REJECT % "")),
    "queue": Model(("x FP32 1",), ("y FP32 1",), batch=1, more=_BATCHING % (_REJECT % "max_queue_size: 1")),
    "priorities": Model(("x FP32 1",), ("y FP32 1",), more=_BATCHING % "priority_levels: 3 default_priority_level: 2"),
    "sequences": Model(("x FP32 1",), ("y FP32 1",), more="sequence_batching {}\n"),
    "broken": Model(("x FP32 1",), ("y FP32 1",)),
    "text": Model(_TEXT, ("text_output BYTES -1",), batch=0),
    "text_batched": Model(("text_input BYTES 1",), ("text_output BYTES 1",), batch=4),
    "words": Model(
        ("text_input BYTES 1",),
        ("text_output BYTES 1", "number INT32 1"),
        batch=0,
        more="model_transaction_policy {decoupled: true}\n",
    ),
    "loaded": Model(("x FP32 1",), ("y FP32 1",)),
    "unloadable": Model(("x FP32 1",), ("y FP32 1",)),
}
VERSIONS: Mapping[str, tuple[int, ...]] = {"versions": (1, 3)}


class TritonPythonModel:
    """Any of the models, by the name that it is served under."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self.name, self.version = args["model_name"], int(args["model_version"])
        if self.name == "unloadable":
            raise ValueError("this model can't be loaded")

    def execute(self, requests: list[Any]) -> list[Any] | None:
        if self.name == "words":
            for request in requests:
                self._stream(request)
            return None
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        if self.name == "same_bf16":  # numpy has no such type: the tensor is handed on as it is
            tensor = pb.get_input_tensor_by_name(request, "x")
            return pb.InferenceResponse([pb.Tensor.from_dlpack("y", tensor)])
        compute = COMPUTE["text" if self.name == "text_batched" else self.name]
        outputs = compute(_inputs(request), self.version)
        if self.name == "text_batched":
            outputs = {name: array.reshape(-1, 1) for name, array in outputs.items()}
        wanted = request.requested_output_names()
        return pb.InferenceResponse([pb.Tensor(name, array) for name, array in outputs.items() if name in wanted])

    def _stream(self, request: Any) -> None:
        sender = request.get_response_sender()
        try:
            for outputs in words(_inputs(request)):
                sender.send(pb.InferenceResponse([pb.Tensor(name, array) for name, array in outputs.items()]))
        except ValueError as error:
            sender.send(pb.InferenceResponse(error=pb.TritonError(str(error))))
        sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _inputs(request: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
