"""A model of Triton's Python backend, run as it is: `class TritonPythonModel`, and the configuration that goes with it.

`execute` gets one request with all rows that came together, as if one client had sent them: a model that takes requests
of several rows (Triton's `max_batch_size` says so) can't tell. Where it takes none, each request is a call.
https://github.com/triton-inference-server/python_backend#usage
"""

from __future__ import annotations

import asyncio
import inspect
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onejob.core.artifact import Json
from onejob.core.tensor import DATATYPES, TensorSpec
from onejob.engines.function import pb_utils
from onejob.errors import BadRequestError, InferenceError, OverloadedError

Array = np.ndarray[Any, Any]
MODULE = "triton_python_backend_utils"
CLASS = "TritonPythonModel"
CONFIG = "config.pbtxt"
CURE = 'Write input [{ name: "x" data_type: TYPE_FP32 dims: [4] }] and output, as Triton wants them.'
REFUSED = {
    "sequence_batching": "sequences aren't there yet",
    "ensemble_scheduling": "an ensemble isn't a model of its own",
}
ENVIRONMENT = "EXECUTION_ENV_PATH"


class TritonModel:
    """An instance of the user's class, and what of its configuration counts."""

    def __init__(self, kind: Any, told: Mapping[str, Json], folder: Path) -> None:
        """`told` has `name`, `version` and `config`; `folder` is the version's. Raises what the user's code raises."""
        config = _complete(kind, told["config"])
        self.most = int(config.get("max_batch_size") or 0)
        self._given = [_Tensor(one, self.most > 0) for one in _listed(config, "input")]
        self._wanted = [_Tensor(one, self.most > 0) for one in _listed(config, "output")]
        self.inputs = tuple(one.spec for one in self._given)
        self.outputs = tuple(one.spec for one in self._wanted)
        self._name = str(told["name"])
        self.example = _warm_up(config, self._given, folder)
        """What its configuration says it can be asked."""
        pb_utils.model_dir = str(folder)
        self._model = kind()
        if initialize := getattr(self._model, "initialize", None):
            initialize(_arguments(told, config, folder))
        if not callable(getattr(self._model, "execute", None)):
            raise InferenceError(f"the class {CLASS} has no method execute", place=folder.name)

    @property
    def joins(self) -> bool:
        """Whether requests may be joined into one."""
        return self.most > 0

    def infer(self, **arrays: Array) -> dict[str, Array]:
        """Ask it for all rows, `max_batch_size` at a time."""
        rows = len(next(iter(arrays.values())))
        if not self.joins or rows <= self.most:
            return self._ask(arrays)
        starts = range(0, rows, self.most)
        found = [self._ask({name: array[at : at + self.most] for name, array in arrays.items()}) for at in starts]
        return {spec.name: np.concatenate([one[spec.name] for one in found]) for spec in self.outputs}

    def close(self) -> None:
        if finalize := getattr(self._model, "finalize", None):
            finalize()

    def _ask(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        tensors = [pb_utils.Tensor(one.spec.name, one.inwards(arrays[one.spec.name])) for one in self._given]
        request = pb_utils.InferenceRequest(tensors, [spec.name for spec in self.outputs], self._name)
        answers = self._model.execute([request])
        if inspect.isawaitable(answers):
            answers = asyncio.run(_done(answers))
        if not isinstance(answers, list | tuple) or len(answers) != 1:
            given = f"{len(answers)} responses" if isinstance(answers, list | tuple) else f"a {type(answers).__name__}"
            raise InferenceError(f"execute gave {given} for 1 request, not a list of one", place=self._name)
        (answer,) = answers
        if answer is None or not hasattr(answer, "output_tensors"):
            raise InferenceError("execute gave no InferenceResponse", place=self._name)
        if answer.has_error():
            raise _as_error(answer.error())
        found = {tensor.name(): tensor.as_numpy() for tensor in answer.output_tensors()}
        if missing := [spec.name for spec in self.outputs if spec.name not in found]:
            raise InferenceError(f"the response lacks the output {missing[0]!r}", place=self._name)
        return {one.spec.name: one.outwards(found[one.spec.name]) for one in self._wanted}


class _Tensor:
    """An input or output: as clients know it, and as the model does where the configuration has a `reshape`."""

    def __init__(self, told: Mapping[str, Json], batched: bool) -> None:
        front = [-1] if batched else []
        self.spec = TensorSpec(str(told["name"]), _datatype(told), tuple(front + _dims(told.get("dims"), told)))
        reshape = told.get("reshape")
        self._inside = None if reshape is None else tuple(front + _dims(reshape.get("shape", []), told))
        self.batched, self.told = batched, told

    def inwards(self, array: Array) -> Array:
        return array if self._inside is None else array.reshape(self._sized(self._inside, array))

    def outwards(self, array: Array) -> Array:
        return array if self._inside is None else array.reshape(self._sized(self.spec.shape, array))

    def _sized(self, shape: tuple[int, ...], array: Array) -> tuple[int, ...]:
        return (len(array), *shape[1:]) if self.batched else shape


def _complete(kind: Any, config: Mapping[str, Json]) -> dict[str, Json]:
    """The configuration, with what the model itself says of it; InferenceError for what can't be run here."""
    found = dict(config)
    if completes := getattr(kind, "auto_complete_config", None):
        whole = {"max_batch_size": 0, "input": [], "output": [], **found}
        made = completes(pb_utils.ModelConfig(json.dumps(whole)))
        if made is None:
            raise InferenceError("auto_complete_config returned no configuration", place=CLASS)
        found = made.as_dict()
    for name, why in REFUSED.items():
        if name in found:
            raise InferenceError(f"{name}: {why}", place=CONFIG)
    if (found.get("model_transaction_policy") or {}).get("decoupled"):
        cure = "Return one response for each request."
        raise InferenceError("decoupled: a stream of answers isn't there yet", place=CONFIG, cure=cure)
    if ENVIRONMENT in (found.get("parameters") or {}):
        cure = "Install what it needs beside onejob, and leave the parameter out."
        raise InferenceError(f"{ENVIRONMENT}: a packed environment isn't unpacked here", place=CONFIG, cure=cure)
    return found


def _listed(config: Mapping[str, Json], name: str) -> list[Mapping[str, Json]]:
    listed = config.get(name) or []
    if not listed:
        raise InferenceError(f"there is no {name} in it, and the model adds none", place=CONFIG, cure=CURE)
    for one in listed:
        if not isinstance(one, Mapping) or not one.get("name"):
            raise InferenceError(f"an {name} has no name", place=CONFIG, cure=CURE)
    return list(listed)


def _datatype(told: Mapping[str, Json]) -> str:
    name = str(told.get("data_type", ""))
    datatype = "BYTES" if name == "TYPE_STRING" else name.removeprefix("TYPE_")
    if datatype not in DATATYPES or not name.startswith("TYPE_"):
        known = ", ".join(f"TYPE_{one}" if one != "BYTES" else "TYPE_STRING" for one in DATATYPES)
        raise InferenceError(f"{told['name']!r} has the data_type {name!r}", place=CONFIG, cure=f"Known: {known}.")
    return datatype


def _dims(sizes: Json, told: Mapping[str, Json]) -> list[int]:
    try:
        found = [int(size) for size in (sizes if isinstance(sizes, list | tuple) else [sizes])]
    except (TypeError, ValueError):
        found = [-2]
    if any(size < -1 for size in found):
        raise InferenceError(f"{told['name']!r} has the dims {sizes!r}", place=CONFIG, cure=CURE)
    return found


def _warm_up(config: Mapping[str, Json], given: list[_Tensor], folder: Path) -> dict[str, Array] | None:
    """The first sample of `model_warmup`, as Triton makes it: zeros, random numbers, or a file below `warmup`."""
    sample = next(iter(config.get("model_warmup") or []), None)
    if sample is None:
        return None
    found: dict[str, Array] = {}
    for one in given:
        told = (sample.get("inputs") or {}).get(one.spec.name)
        if told is None:
            raise InferenceError(f"model_warmup lacks the input {one.spec.name!r}", place=CONFIG)
        rows = [int(sample.get("batch_size") or 1)] if one.batched else []
        shape = [*rows, *_dims(told.get("dims") or [], one.told)]
        found[one.spec.name] = _sample(told, one.spec.datatype, shape, folder.parent / "warmup")
    return found


def _sample(told: Mapping[str, Json], datatype: str, shape: list[int], folder: Path) -> Array:
    dtype = np.dtype(DATATYPES[datatype])
    if file := told.get("input_data_file"):
        try:
            data = (folder / str(file)).read_bytes()
            found = pb_utils.deserialize_bytes_tensor(data) if dtype.hasobject else np.frombuffer(data, dtype)
            return found.reshape(shape)
        except (OSError, ValueError, struct.error) as error:
            raise InferenceError(f"model_warmup has the input_data_file {file!r}: {error}", place=CONFIG) from None
    if dtype.hasobject:
        return np.full(shape, b"", dtype)
    if told.get("random_data"):
        return np.random.default_rng(0).integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)
    return np.zeros(shape, dtype)


def _arguments(told: Mapping[str, Json], config: Mapping[str, Json], folder: Path) -> dict[str, str]:
    groups = config.get("instance_group") or [{}]
    kind = "GPU" if any(group.get("kind") == "KIND_GPU" for group in groups) else "CPU"
    return {
        "model_config": json.dumps(config),
        "model_instance_kind": kind,
        "model_instance_name": f"{told['name']}_0_0",
        "model_instance_device_id": "0",
        "model_repository": str(folder.parent),
        "model_version": str(told["version"]),
        "model_name": str(told["name"]),
    }


def _as_error(error: Any) -> InferenceError:
    """What a model says is wrong, in its own words, as the status that Triton gives."""
    words, code = str(error.message()), error.code()
    if code == pb_utils.TritonError.INVALID_ARG:
        return BadRequestError(words)
    return OverloadedError(words) if code == pb_utils.TritonError.UNAVAILABLE else InferenceError(words)


async def _done(answers: Any) -> Any:
    return await answers
