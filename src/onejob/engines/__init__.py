"""What runs a model: one small port over ONNX Runtime, OpenVINO, PyTorch and others, shared by measuring and serving.

`open_model` imports only the engine that an artifact names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

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
    "function": "onejob.engines.function.engine",
    "triton": "onejob.engines.triton.engine",
}


class LoadedModel(Protocol):
    """A model in memory. Feature arrays in, output arrays out; the first dimension is the batch.

    One that runs a user's code may say more of itself: `joins` (False: each request is a call, whatever its sizes),
    `example` (arrays that it can be asked), `picky` (it may refuse an input that we make up).
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    precision: str
    """The precision that is really in use, read back from the engine."""

    def infer(self, arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
        """Run one batch; raises InferenceError with the engine's own words."""

    def close(self) -> None: ...


@runtime_checkable
class Living(Protocol):
    """A second power, of a model that computes in another process: it can say whether that is there, and end it.

    Its `infer` only waits, however quick the model is: it never belongs on an event loop's thread. `close` may take
    seconds.
    """

    def dead(self) -> str:
        """Why the process isn't there, or not ready; empty while it is. Cheap, from any thread."""

    def kill(self, why: str = "") -> None:
        """End the process now, whatever it does; the call that it has fails, saying why; another takes its place."""


def open_model(folder: Path, meta: Mapping[str, Json], *, threads: int = 1) -> LoadedModel:
    """Open the model in an artifact's folder with the engine that its metadata names (a checkpoint: `pytorch`)."""
    name = meta.get("engine", "pytorch")
    if name not in MODULES:
        raise UnavailableError(f"no engine is called {name!r}", cure=f"Engines: {', '.join(MODULES)}.")
    return cast(LoadedModel, load(f"{MODULES[name]}:open_model")(folder, meta, threads))
