"""Runs a `model.onnx` with ONNX Runtime on the CPU: the engine that every other is measured against.

ONNX Runtime computes in the types that the graph holds and never changes them by itself, so the precision in use is the
one that the artifact declares. Threads don't spin while they wait: several replicas share a machine.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
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
    import onnxruntime as ort
except ModuleNotFoundError:  # `supported` must be able to say so
    ort = None

CURE = "Install it: `pip install 'onejob[serve]'`."

DATATYPES: Mapping[str, str] = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}
"""ONNX Runtime's name of a type -> the protocol's."""


class OnnxRuntimeModel:
    """A graph in an ONNX Runtime session; `infer` may be called from several threads at once."""

    __slots__ = ("_names", "_place", "_run", "inputs", "outputs", "precision")

    def __init__(self, session: Any, precision: str, place: str) -> None:
        self.inputs = tuple(_spec(node) for node in session.get_inputs())
        self.outputs = tuple(_spec(node) for node in session.get_outputs())
        self.precision = precision
        self._names = [spec.name for spec in self.outputs]
        self._run = session.run
        self._place = place

    def infer(self, arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
        try:
            return dict(zip(self._names, self._run(self._names, arrays), strict=True))
        except Exception as error:  # the engine's own exceptions share no other base
            raise InferenceError(_words(error), place=self._place) from error

    def close(self) -> None:
        """Free the session once running calls have ended; asking it again is an InferenceError."""
        self._run = _closed


def open_model(folder: Path, meta: Mapping[str, Json], threads: int = 1) -> OnnxRuntimeModel:
    """Open `model.onnx` in an artifact's folder.

    UnavailableError if ONNX Runtime isn't installed; InferenceError if the file is missing or can't be loaded.
    """
    if ort is None:
        raise UnavailableError("ONNX Runtime is not installed", place="engine onnxruntime", cure=CURE)
    path = folder / "model.onnx"
    if not path.is_file():
        raise InferenceError("there is no such file", place=str(path), cure="`onejob verify` says what is damaged.")
    try:
        session = ort.InferenceSession(str(path), _options(threads), providers=["CPUExecutionProvider"])
    except Exception as error:  # the engine's own exceptions share no other base
        cure = "`onejob verify` says whether the file is damaged."
        raise InferenceError(f"ONNX Runtime can't load it: {_words(error)}", place=str(path), cure=cure) from error
    return OnnxRuntimeModel(session, str(meta.get("precision", "fp32")), str(path))


def supported() -> Support:
    """Whether ONNX Runtime is installed, and which version."""
    if importlib.util.find_spec("onnxruntime") is None:
        return Support("onnxruntime", "engine", False, "the package onnxruntime is not installed", CURE)
    return Support("onnxruntime", "engine", True, _version())


def _version() -> str:
    for distribution in ("onnxruntime", "onnxruntime-gpu"):  # two distributions bring the same module
        try:
            return f"{distribution} {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of an unknown version"


def _options(threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.use_deterministic_compute = True
    options.log_severity_level = 3  # errors only: they come as exceptions too
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return options


def _spec(node: Any) -> TensorSpec:
    shape = tuple(size if isinstance(size, int) else -1 for size in node.shape)
    if node.type not in DATATYPES:
        cure = "Let the graph take and give another type, such as float, with a Cast inside."
        raise InferenceError(f"tensor {node.name!r} is a {node.type}, which can't be served", cure=cure)
    return TensorSpec(node.name, DATATYPES[node.type], shape)


def _closed(*_: object) -> list[Any]:
    raise InferenceError("the model is closed")


def _words(error: Exception) -> str:
    """The engine's words on one line, without its status codes."""
    text = " ".join(str(error).split())
    return text.rpartition("[ONNXRuntimeError] : ")[2] or text
