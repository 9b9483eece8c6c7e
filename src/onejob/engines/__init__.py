"""What runs a model: one small port over ONNX Runtime, OpenVINO and PyTorch, shared by measuring and serving.

`open_model` imports only the engine that an artifact names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from onejob.core.artifact import Json
from onejob.core.plugin import load
from onejob.core.tensor import TensorSpec
from onejob.errors import UnavailableError

Arrays = Mapping[str, np.ndarray[Any, Any]]

MODULES: Mapping[str, str] = {
    "onnxruntime": "onejob.engines.onnxruntime",
    "openvino": "onejob.engines.openvino",
    "pytorch": "onejob.engines.pytorch",
}


class LoadedModel(Protocol):
    """A model in memory. Feature arrays in, output arrays out; the first dimension is the batch."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    precision: str
    """The precision that is really in use, read back from the engine."""

    def infer(self, arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
        """Run one batch; raises InferenceError with the engine's own words."""

    def close(self) -> None: ...


def open_model(folder: Path, meta: Mapping[str, Json], *, threads: int = 1) -> LoadedModel:
    """Open the model in an artifact's folder with the engine that its metadata names (a checkpoint: `pytorch`)."""
    name = meta.get("engine", "pytorch")
    if name not in MODULES:
        raise UnavailableError(f"no engine is called {name!r}", cure=f"Engines: {', '.join(MODULES)}.")
    return cast(LoadedModel, load(f"{MODULES[name]}:open_model")(folder, meta, threads))
