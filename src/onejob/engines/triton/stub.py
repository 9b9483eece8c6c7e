"""Runs one of our engines inside Triton's Python backend: imported by the model.py that `repository` writes.

Requests that Triton hands over together are run together where their shapes allow it; if that fails, each is run
alone, so that only the culprit fails.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from onejob.core.artifact import Json
from onejob.engines import LoadedModel, open_model
from onejob.engines.function.code import FILE, Code, load
from onejob.engines.triton.repository import read_told
from onejob.errors import OnejobError

Arrays = Mapping[str, np.ndarray[Any, Any]]


class TritonPythonModel:
    """The class that Triton looks for; its methods have Triton's names."""

    def initialize(self, args: Mapping[str, str]) -> None:
        folder, meta, threads = read_told(Path(args["model_repository"]) / args["model_version"])
        self._model = open_here(folder, meta, threads)
        self._batched = all(spec.shape[:1] == (-1,) for spec in (*self._model.inputs, *self._model.outputs))
        self._texts = [spec.name for spec in self._model.inputs if spec.datatype == "BYTES"]
        self._octets = isinstance(self._model, Code)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        asked = [self._arrays(request) for request in requests]
        keys = [shapes(arrays) if self._batched else number for number, arrays in enumerate(asked)]
        answers: list[Arrays | Exception] = []
        for group in groups(keys):
            answers += self._answer([asked[number] for number in group])
        return [self._response(answer) for answer in answers]

    def finalize(self) -> None:
        self._model.close()

    def _answer(self, asked: Sequence[Arrays]) -> list[Arrays | Exception]:
        try:
            if len(asked) == 1:
                return [self._model.infer(asked[0])]
            whole = {name: np.concatenate([arrays[name] for arrays in asked]) for name in asked[0]}
            outputs = self._model.infer(whole)
        except Exception as error:
            return [error] if len(asked) == 1 else [found for one in asked for found in self._answer([one])]
        stops = np.cumsum([len(next(iter(arrays.values()))) for arrays in asked])
        starts = [0, *stops[:-1]]
        return [
            {name: array[start:stop] for name, array in outputs.items()}
            for start, stop in zip(starts, stops, strict=True)
        ]

    def _arrays(self, request: Any) -> Arrays:
        found = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if not self._octets:
            for name in self._texts:  # our other engines take text
                array = np.empty(found[name].shape, object)
                array.reshape(-1)[:] = [one.decode("utf-8", "replace") for one in found[name].reshape(-1)]
                found[name] = array
        return {spec.name: found[spec.name] for spec in self._model.inputs}

    def _response(self, answer: Arrays | Exception) -> Any:
        if isinstance(answer, Exception):
            words = str(answer) if isinstance(answer, OnejobError) else f"{type(answer).__name__}: {answer}"
            return pb.InferenceResponse(error=pb.TritonError(words))
        return pb.InferenceResponse([pb.Tensor(name, np.ascontiguousarray(array)) for name, array in answer.items()])


def open_here(folder: Path, meta: Mapping[str, Json], threads: int) -> LoadedModel | Code:
    """Open a model in this process; a Python function too, since this is a process of its own already."""
    if meta["engine"] != "function":
        return open_model(folder, meta, threads=threads)
    file = str((meta.get("options") or {}).get("file", FILE))
    os.chdir((folder / file).parent)
    return load(folder, file, threads=threads, triton=meta.get("python_backend"))


def shapes(arrays: Arrays) -> tuple[tuple[int, ...], ...]:
    """Only requests whose shapes are equal but for the rows can run together."""
    return tuple(array.shape[1:] for array in arrays.values())


def groups(keys: Sequence[Any]) -> list[list[int]]:
    """Numbers of neighbours with equal keys, in their order."""
    found: list[list[int]] = []
    for number, key in enumerate(keys):
        if found and keys[found[-1][0]] == key:
            found[-1].append(number)
        else:
            found.append([number])
    return found
