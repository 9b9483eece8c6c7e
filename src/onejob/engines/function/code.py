"""A user's Python file as a model: what it takes and gives, and a function to call, checked at both ends.

    INPUTS = {"x": ("FP32", [-1, 64])}
    OUTPUTS = {"y": ("FP32", [-1, 10])}

    def infer(x):
        return {"y": x @ WEIGHT}

    EXAMPLE = {"x": [[0.5] * 64]}       # optional: what it is asked with before anybody asks

or a class `Model` with a method `infer`, and an optional `close`; its `inputs` and `outputs` go before the tables. Or a
model of Triton's Python backend (triton_backend.py).
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from onejob.core.artifact import Json
from onejob.core.tensor import DATATYPES, TensorSpec
from onejob.engines.declared import BY_NUMPY, fit
from onejob.engines.function import pb_utils, triton_backend
from onejob.errors import InferenceError

Array = np.ndarray[Any, Any]
FILE = "model.py"
EXAMPLE = 'Write, say, INPUTS = {"x": ("FP32", [-1, 64])}; -1 is any number of rows.'


class Code:
    """A user's model. `infer` raises whatever the user's code raises, and InferenceError for answers that don't fit."""

    def __init__(
        self,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        call: Callable[..., Any],
        close: Callable[[], Any] = lambda: None,
        place: str = FILE,
        *,
        example: Mapping[str, Array] | None = None,
        joins: bool = True,
        picky: bool = False,
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.example = example
        """What it says that it can be asked."""
        self.close = close
        self.joins = joins
        """Whether requests may be joined into one call, if its sizes say so."""
        self.picky = picky
        """Whether it may refuse an input that we make up: it was written for a server that makes up none."""
        self._call = call
        self._place = place
        self._alone = outputs[0].name if len(outputs) == 1 else None

    def infer(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Ask it; what it gives comes as the arrays that it has declared, in their order."""
        found = self._call(**arrays)
        if not isinstance(found, Mapping):
            if self._alone is None:
                raise InferenceError(f"infer gave {_kind(found)}, not a dict of its outputs", place=self._place)
            found = {self._alone: found}
        if found.keys() != {spec.name for spec in self.outputs}:
            wanted, got = ", ".join(spec.name for spec in self.outputs), ", ".join(map(str, found))
            raise InferenceError(f"infer gave {got or 'nothing'}, where OUTPUTS has {wanted}", place=self._place)
        return {spec.name: fit(spec, found[spec.name], self._place) for spec in self.outputs}


def load(folder: Path, file: str = FILE, *, threads: int = 1, triton: Mapping[str, Json] | None = None) -> Code:
    """Run the file and make its model; InferenceError where it isn't one, else what the user's code raises.

    `triton` has the `name`, `version` and `config` of a model of Triton's Python backend.
    """
    path = folder / file
    if not path.is_file():
        raise InferenceError("there is no such file", place=str(path))
    sys.modules.setdefault(triton_backend.MODULE, pb_utils)
    module = _run(path)
    maker, function = getattr(module, "Model", None), getattr(module, "infer", None)
    if maker is None and not callable(function):
        if kind := getattr(module, triton_backend.CLASS, None):
            return _of_triton(kind, triton or {"name": path.parent.name, "version": "1", "config": {}}, path)
        cure = "Write `def infer(x): …`, or a class Model with such a method."
        raise InferenceError("it has neither a class Model nor a function infer", place=file, cure=cure)
    made = maker(**_wanted(maker, folder, threads)) if maker is not None else None
    call = getattr(made, "infer", None) if maker is not None else function
    if not callable(call):
        raise InferenceError("the class Model has no method infer", place=file)
    inputs = specs(_table(made, module, "inputs"), "INPUTS", file)
    outputs = specs(_table(made, module, "outputs"), "OUTPUTS", file)
    _check_takes(call, inputs, file)
    example = examples(inputs, _table(made, module, "example"), f"{file} EXAMPLE")
    return Code(inputs, outputs, call, getattr(made, "close", None) or (lambda: None), file, example=example)


def _of_triton(kind: Any, told: Mapping[str, Json], path: Path) -> Code:
    made = triton_backend.TritonModel(kind, told, path.parent)
    example = examples(made.inputs, made.example, f"{triton_backend.CONFIG} model_warmup", joins=made.joins)
    return Code(
        made.inputs,
        made.outputs,
        made.infer,
        made.close,
        path.name,
        example=example,
        joins=made.joins,
        picky=example is None,
    )


def specs(table: Json, name: str, place: str) -> tuple[TensorSpec, ...]:
    """The tensors of a table such as {"x": ("FP32", [-1, 64])}."""
    if not isinstance(table, Mapping) or not table:
        raise InferenceError(f"{name} is {'empty' if table == {} else 'not there'}", place=place, cure=EXAMPLE)
    return tuple(_spec(str(key), value, f"{place} {name}") for key, value in table.items())


def examples(inputs: tuple[TensorSpec, ...], table: Json, place: str, *, joins: bool = True) -> dict[str, Array] | None:
    """The inputs that a table such as {"x": [[0.5, 1]]} has; None where there is none."""
    if table is None:
        return None
    if not isinstance(table, Mapping) or set(table) != {spec.name for spec in inputs}:
        raise InferenceError(f"it should have {', '.join(spec.name for spec in inputs)}", place=place)
    found = {spec.name: fit(spec, table[spec.name], place, "input") for spec in inputs}
    free = joins and all(spec.shape[:1] == (-1,) for spec in inputs)
    if free and (len(rows := {len(array) for array in found.values()}) > 1 or 0 in rows):
        raise InferenceError("its inputs should have as many rows, one at least", place=place)
    return found


def _run(path: Path) -> ModuleType:
    """The file as a module; modules beside it can be imported by it."""
    name = path.stem if path.stem not in sys.modules else f"onejob_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InferenceError("it is not a Python file", place=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _wanted(maker: Any, folder: Path, threads: int) -> dict[str, Any]:
    """What the class takes of what there is to tell it."""
    given = {"folder": folder, "threads": threads}
    taken = inspect.signature(maker).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        return given
    return {parameter.name: given[parameter.name] for parameter in taken if parameter.name in given}


def _table(made: Any, module: ModuleType, name: str) -> Json:
    own = getattr(made, name, None) if made is not None else None
    return own if own is not None else getattr(module, name.upper(), None)


def _check_takes(call: Callable[..., Any], inputs: tuple[TensorSpec, ...], place: str) -> None:
    try:
        inspect.signature(call).bind(**{spec.name: None for spec in inputs})
    except TypeError as error:
        names = ", ".join(spec.name for spec in inputs)
        raise InferenceError(f"infer can't be called with the inputs {names}: {error}", place=place) from None


def _spec(name: str, value: Any, place: str) -> TensorSpec:
    try:
        datatype, shape = value
        sizes = tuple(int(size) for size in shape)
    except (TypeError, ValueError):
        raise InferenceError(f"{name!r} is {value!r}, not a datatype and a shape", place=place, cure=EXAMPLE) from None
    if datatype not in DATATYPES:
        near = BY_NUMPY.get(str(datatype)) or next(iter(difflib.get_close_matches(str(datatype), DATATYPES, 1)), "")
        cure = f"Did you mean {near!r}?" if near else f"Known: {', '.join(DATATYPES)}."
        raise InferenceError(f"{name!r} has the unknown datatype {datatype!r}", place=place, cure=cure)
    if any(size < -1 for size in sizes):
        raise InferenceError(f"{name!r} has the shape {list(sizes)}: a size is -1, or how many", place=place)
    return TensorSpec(name, datatype, sizes)


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
