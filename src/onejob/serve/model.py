"""The model as clients see it: raw columns in, served outputs out, whatever engine computes in between.

With a family (the artifact names it and holds `encoding.json`) the inputs are the family's raw columns, and the
same encoding that fed the trainer runs here. Without one they are the graph's own tensors. Encoding is done request
by request, before batching, so that a bad value is refused alone; decoding is done for a whole batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from onejob.core.artifact import Json
from onejob.core.plugin import load
from onejob.core.tensor import DATATYPES, TensorSpec
from onejob.engines import Living, LoadedModel, open_model
from onejob.engines.declared import fit
from onejob.errors import BadRequestError, InferenceError, ModelCodeError, OverloadedError
from onejob.serve.rows import Arrays

Column = np.ndarray[Any, Any] | list[Any]
ASKED_WITH = (
    "It was asked with zeros and empty text, to see whether it answers; EXAMPLE in its file says what to ask it."
)
Signature = tuple[tuple[int, ...], ...]


class Encoding(Protocol):
    """What serving needs of a family's encoding; see "A family" in docs/architecture.md."""

    inputs: tuple[TensorSpec, ...]
    features: tuple[TensorSpec, ...]
    served: tuple[TensorSpec, ...]

    def encode(self, columns: Mapping[str, Column]) -> dict[str, np.ndarray[Any, Any]]: ...
    def encode_label(self, column: Column) -> np.ndarray[Any, Any]: ...
    def decode(self, outputs: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]: ...


class ServedModel:
    """An engine, and the family's encoding around it if there is one."""

    def __init__(
        self,
        loaded: LoadedModel,
        encoding: Encoding | None = None,
        labels: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._loaded = loaded
        self._encoding = encoding
        self.labels: Mapping[str, Sequence[str]] = labels or {}
        """Output -> what its classes are called."""
        inputs, outputs = (loaded.inputs, loaded.outputs) if encoding is None else (encoding.inputs, encoding.served)
        self.inputs: dict[str, TensorSpec] = {spec.name: spec for spec in inputs}
        self.outputs: dict[str, TensorSpec] = {spec.name: spec for spec in outputs}
        free = all(spec.shape[:1] == (-1,) for spec in (*loaded.inputs, *loaded.outputs))
        self.batchable = free and getattr(loaded, "joins", True)
        self._picky = bool(getattr(loaded, "picky", False))
        self._own_example: Arrays | None = getattr(loaded, "example", None)

    @property
    def raw(self) -> bool:
        """Whether the inputs are a family's raw columns, where a null means: not known."""
        return self._encoding is not None

    def prepare(self, columns: Mapping[str, Column]) -> tuple[Arrays, int, Signature]:
        """A decoded request as the engine's features, its rows, and the shapes that decide what runs together."""
        rows = self._rows(columns)
        if self._encoding is not None:
            arrays: Arrays = self._encoding.encode({name: self._flat(name, value) for name, value in columns.items()})
        else:
            arrays = {name: np.asarray(columns[name]) for name in self.inputs}
        return arrays, rows, tuple(array.shape[1:] for array in arrays.values())

    def infer(self, arrays: Arrays) -> Arrays:
        """Run one batch of features; for the batcher, on whatever thread."""
        outputs: Mapping[str, np.ndarray[Any, Any]] = self._loaded.infer(arrays)
        return outputs if self._encoding is None else self._as_declared(self._encoding.decode(outputs))

    def example(self, rows: int) -> Arrays:
        """Inputs that it says it takes; else what any model of its signature should: zeros, empty text, nulls."""
        count = rows if self.batchable else 1
        if (own := self._own_example) is not None and not self.raw:
            wrapped = {name: array.take(range(count), 0, mode="wrap") for name, array in own.items()}
            return wrapped if self.batchable else own
        return {name: _example(spec, count, raw=self.raw) for name, spec in self.inputs.items()}

    def warm_up(self, rows: int) -> bool:
        """Run an example; InferenceError if the model can't answer, or answers with other rows than it was asked.

        False if it `refuses` the example: then nothing is known of how it answers others.
        """
        features, _, _ = self.prepare(self.example(rows))
        try:
            found = self.infer(features)
        except InferenceError as error:
            if self.refuses(error):
                return False
            if isinstance(error, ModelCodeError) and self._own_example is None:
                raise ModelCodeError(error.message, place=error.place, cure=ASKED_WITH) from None
            raise
        for name, array in found.items():
            if self.batchable and (array.ndim == 0 or len(array) != rows):
                raise InferenceError(f"output {name!r} has shape {list(array.shape)} for {rows} rows", place="warm-up")
        self._picky = False  # it takes examples: from now on one that fails says something
        return True

    def refuses(self, error: Exception) -> bool:
        """Whether an example failed by the model's own code, of which nobody knows whether it takes examples."""
        return self._picky and isinstance(error, ModelCodeError | BadRequestError | OverloadedError)

    @property
    def check_labels(self) -> Callable[[list[Any]], Any] | None:
        """Raises DataError for labels that the family doesn't take; None without a family: any will do."""
        return self._encoding.encode_label if self._encoding is not None else None

    @property
    def apart(self) -> bool:
        """Whether it computes in a process of its own: quick as it may be, waiting for it could block the loop."""
        return isinstance(self._loaded, Living)

    def dead(self) -> str:
        """Why the engine can't answer now, if it knows; "" otherwise. Cheap: asked several times a second."""
        alive = getattr(self._loaded, "dead", None)
        return str(alive()) if alive is not None else ""

    def kill(self, why: str) -> None:
        """End the process of an engine that has one; another takes its place."""
        if isinstance(self._loaded, Living):
            self._loaded.kill(why)

    @property
    def octets(self) -> bool:
        """Whether BYTES elements are bytes to it, not text."""
        return self._encoding is None and bool(getattr(self._loaded, "octets", False))

    def close(self) -> None:
        self._loaded.close()

    def _as_declared(self, outputs: Mapping[str, Any]) -> Arrays:
        """What a family's code gave; InferenceError if it isn't what clients are told they get."""
        if not isinstance(outputs, Mapping):
            raise InferenceError(f"decode gave {type(outputs).__name__}, not a dict of its outputs", place="engine")
        if missing := [name for name in self.outputs if name not in outputs]:
            raise InferenceError(f"the model left no output {missing[0]!r}", place="engine")
        return {name: fit(spec, outputs[name], "engine") for name, spec in self.outputs.items()}

    def _flat(self, name: str, value: Column) -> Column:
        """A raw column as one dimension, however the client sent it."""
        is_column = isinstance(value, np.ndarray) and self.inputs[name].shape in ((-1,), (-1, 1))
        return value.reshape(-1) if is_column and isinstance(value, np.ndarray) else value

    def _rows(self, columns: Mapping[str, Column]) -> int:
        if not self.batchable:
            return 1
        rows = {name: len(column) for name, column in columns.items()}
        if len(set(rows.values())) > 1:
            told = ", ".join(f"{name} has {count}" for name, count in rows.items())
            raise BadRequestError(f"inputs differ in their number of rows: {told}", place="request")
        count = next(iter(rows.values()))
        if count == 0:
            raise BadRequestError("a request needs one row or more", place="request")
        return count


def open_served(folder: Path, meta: Mapping[str, Json], *, threads: int) -> ServedModel:
    """Open the model in an artifact's folder, with its family's encoding where the artifact has one."""
    loaded = open_model(folder, meta, threads=threads)
    path = folder / "encoding.json"
    if not meta.get("family") or not path.exists():
        return ServedModel(loaded, labels=meta.get("labels"))
    return ServedModel(loaded, load(f"{meta['family']}.encode").load(json.loads(path.read_text())))


def _example(spec: TensorSpec, rows: int, *, raw: bool) -> np.ndarray[Any, Any]:
    shape = [
        rows if axis == 0 and size < 0 else max(size, 1) if size < 0 else size for axis, size in enumerate(spec.shape)
    ]
    if spec.datatype == "BYTES":
        return np.full(shape, None if raw else "", dtype=object)
    return np.zeros(shape, dtype=DATATYPES[spec.datatype])
