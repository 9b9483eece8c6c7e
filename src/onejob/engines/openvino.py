"""Runs a `model.onnx`, or OpenVINO's own `model.xml` with its `model.bin`, with OpenVINO on the CPU.

OpenVINO's default turns fp32 models into bf16 on processors that have it, without a word; so the precision is always
asked for (f32) and read back from the compiled model. An int8 graph keeps its int8 parts; the rest of it runs in f32.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onejob.core.artifact import Json
from onejob.core.ports import Support
from onejob.core.tensor import TensorSpec
from onejob.engines import Arrays
from onejob.errors import InferenceError, UnavailableError

try:
    import openvino as ov
except ModuleNotFoundError:  # `supported` must be able to say so
    ov = None

CURE = "Install it: `pip install 'onejob[openvino]'`."

DATATYPES: Mapping[str, str] = {
    "boolean": "BOOL",
    "u8": "UINT8",
    "u16": "UINT16",
    "u32": "UINT32",
    "u64": "UINT64",
    "i8": "INT8",
    "i16": "INT16",
    "i32": "INT32",
    "i64": "INT64",
    "f16": "FP16",
    "f32": "FP32",
    "f64": "FP64",
    "string": "BYTES",
}
"""OpenVINO's name of a type -> the protocol's."""

PRECISIONS: Mapping[str, str] = {"f32": "fp32", "bf16": "bf16", "f16": "fp16"}
"""What the compiled model says it computes floats in -> our name."""


class OpenVinoModel:
    """A compiled graph; calls from several threads take turns, since a request holds its tensors."""

    __slots__ = ("_lock", "_names", "_place", "_request", "inputs", "outputs", "precision")

    def __init__(self, compiled: Any, precision: str, place: str) -> None:
        self.inputs = tuple(_spec(port) for port in compiled.inputs)
        self.outputs = tuple(_spec(port) for port in compiled.outputs)
        self.precision = precision
        self._names = tuple(enumerate(spec.name for spec in self.inputs))
        self._request = compiled.create_infer_request()
        self._lock = threading.Lock()
        self._place = place

    def infer(self, arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
        # OpenVINO would silently take what an earlier call has set for an input that is missing
        if len(arrays) != len(self._names) or any(name not in arrays for _, name in self._names):
            wanted = ", ".join(name for _, name in self._names)
            raise InferenceError(f"the inputs are {wanted}, not {', '.join(arrays)}", place=self._place)
        try:
            with self._lock:
                return self._answer(arrays)
        except InferenceError:
            raise
        except Exception as error:  # the engine raises RuntimeError, TypeError and others
            raise InferenceError(_words(error), place=self._place) from error

    def _answer(self, arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
        """Set, infer, copy out; a third less overhead than handing `infer` a dictionary."""
        request = self._request
        if request is None:
            raise InferenceError("the model is closed", place=self._place)
        for position, name in self._names:
            tensor = ov.Tensor(np.ascontiguousarray(arrays[name]), shared_memory=True)
            request.set_input_tensor(position, tensor)
        request.infer(share_outputs=True)
        # a copy: the next call writes into the same memory
        return {spec.name: request.get_output_tensor(n).data.copy() for n, spec in enumerate(self.outputs)}

    def close(self) -> None:
        """Free the request; asking it again is an InferenceError."""
        with self._lock:
            self._request = None


def open_model(folder: Path, meta: Mapping[str, Json], threads: int = 1) -> OpenVinoModel:
    """Open `model.onnx` or `model.xml` in an artifact's folder and compile it for this CPU.

    UnavailableError if OpenVINO isn't installed or would compute in another precision than f32; InferenceError if the
    file is missing or can't be loaded.
    """
    if ov is None:
        raise UnavailableError("OpenVINO is not installed", place="engine openvino", cure=CURE)
    own = folder / "model.xml"
    path = own if own.is_file() else folder / "model.onnx"
    if not path.is_file():
        raise InferenceError("there is no such file", place=str(path), cure="`onejob verify` says what is damaged.")
    try:
        compiled = ov.Core().compile_model(str(path), "CPU", _options(threads))
        used = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    except Exception as error:  # the engine raises RuntimeError and others
        cure = "`onejob verify` says whether the file is damaged."
        raise InferenceError(f"OpenVINO can't load it: {_words(error)}", place=str(path), cure=cure) from error
    if used != "f32":
        raise UnavailableError(
            f"OpenVINO was asked for f32 and computes in {used}",
            place="engine openvino",
            cure="Take the engine onnxruntime on this machine.",
        )
    declared = str(meta.get("precision", "fp32"))
    return OpenVinoModel(compiled, PRECISIONS[used] if declared == "fp32" else declared, str(path))


def supported() -> Support:
    """Whether OpenVINO is installed, and which version."""
    if importlib.util.find_spec("openvino") is None:
        return Support("openvino", "engine", False, "the package openvino is not installed", CURE)
    try:
        return Support("openvino", "engine", True, f"openvino {importlib.metadata.version('openvino')}")
    except importlib.metadata.PackageNotFoundError:
        return Support("openvino", "engine", True, "of an unknown version")


def _options(threads: int) -> dict[str, Any]:
    return {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,  # several replicas share the machine: pinned, all would sit on its first core
    }


def _spec(port: Any) -> TensorSpec:
    shape = port.get_partial_shape()
    sizes = tuple(size.get_length() if size.is_static else -1 for size in shape)
    name, kind = port.get_any_name(), port.get_element_type().get_type_name()
    if kind not in DATATYPES:
        cure = "Let the model take and give another type, such as f32, with a Convert inside."
        raise InferenceError(f"tensor {name!r} is of type {kind}, which can't be served", cure=cure)
    return TensorSpec(name, DATATYPES[kind], sizes)


def _words(error: Exception) -> str:
    """The engine's own words, on one line, without the places in its source."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("Exception from ")]
    return " ".join(" ".join(lines).split()) or type(error).__name__
