"""Runs a checkpoint as it was trained, with PyTorch on the CPU: the reference for every other engine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onejob.core.artifact import Json
from onejob.core.plugin import load
from onejob.core.ports import Support
from onejob.core.tensor import TensorSpec
from onejob.engines import Arrays
from onejob.errors import DamagedError, InferenceError, UnavailableError

try:
    import torch
    from safetensors.torch import load_file
except ModuleNotFoundError:  # `supported` must be able to say so
    torch = None  # type: ignore[assignment]

CURE = "Install it: `pip install 'onejob[train]'`."


class PyTorchModel:
    """A family's module with its trained weights; `infer` may be called from several threads at once."""

    def __init__(self, module: Any, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.precision = _precision(module)
        self._module = module

    def infer(self, arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
        """Run one batch; raises InferenceError with PyTorch's own words."""
        try:
            features = [torch.from_numpy(_writable(arrays[spec.name])) for spec in self.inputs]
        except KeyError as error:
            raise InferenceError(f"feature {error.args[0]!r} is missing", cure=f"Given: {', '.join(arrays)}.") from None
        try:
            with torch.inference_mode():
                results = self._module(*features)
        except (RuntimeError, IndexError) as error:
            raise InferenceError(str(error), place="pytorch") from error
        return {spec.name: result.numpy() for spec, result in zip(self.outputs, results, strict=True)}

    def close(self) -> None:
        self._module = None


def open_model(folder: Path, meta: Mapping[str, Json], threads: int) -> PyTorchModel:
    """Open a checkpoint's folder: `model.safetensors` and `encoding.json` (contract: checkpoint)."""
    if torch is None:
        raise UnavailableError("PyTorch is not installed", place="engine pytorch", cure=CURE)
    torch.set_num_threads(threads)
    family = meta["family"]
    encoding = load(f"{family}.encode").load(json.loads((folder / "encoding.json").read_bytes()))
    module = load(f"{family}.model").build(encoding, dict(meta["model"]))
    try:
        module.load_state_dict(load_file(folder / "model.safetensors"))
    except (RuntimeError, OSError, ValueError) as error:
        raise DamagedError(f"the weights don't fit the model: {error}", place=str(folder)) from error
    return PyTorchModel(module.eval(), encoding.features, encoding.outputs)


def supported() -> Support:
    """Whether PyTorch is installed; doesn't import it."""
    if importlib.util.find_spec("torch") is None:
        return Support("pytorch", "engine", False, "PyTorch is not installed", CURE)
    return Support("pytorch", "engine", True, importlib.metadata.version("torch"))


def _precision(module: Any) -> str:
    kinds = {str(p.dtype).removeprefix("torch.") for p in module.parameters()}
    names = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
    return "+".join(sorted(names.get(kind, kind) for kind in kinds))


def _writable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """PyTorch shares memory only with arrays that may be written, and warns otherwise."""
    return array if array.flags.writeable else array.copy()
