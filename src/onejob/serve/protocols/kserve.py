"""The messages of the KServe v2 protocol (and v1's plain records), as pure functions between bytes and arrays.

v2: JSON, and tensors in JSON or as bytes after it (`Inference-Header-Content-Length`, `binary_data_size`), mixed as
the client likes. Errors are BadRequestErrors in Triton's words where those are known, so that a client's handling
of them holds here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from onejob.core.artifact import Json
from onejob.core.tensor import TensorSpec
from onejob.errors import BadRequestError, InferenceError
from onejob.serve.protocols import tensors
from onejob.serve.protocols.interface import Interface
from onejob.serve.protocols.plan import Plans
from onejob.serve.protocols.words import parse_object as parse_json

__all__ = ["NORMAL", "InferRequest", "decode_infer", "decode_predict", "encode_infer", "encode_predict", "parse_json"]

NORMAL = 2
"""The priority of a request that names none."""
Specs = Mapping[str, TensorSpec]
Arrays = Mapping[str, np.ndarray[Any, Any]]
Column = np.ndarray[Any, Any] | list[Any]


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A decoded v2 request."""

    id: str
    arrays: Arrays
    outputs: tuple[tuple[str, bool], ...]
    """(name, whether as bytes) of each output that the client wants, in its order."""
    timeout_us: int = 0
    priority: int = NORMAL
    """1 is the highest."""
    parameters: Mapping[str, Json] = field(default_factory=dict)


def decode_infer(
    body: bytes,
    header_length: int | None,
    model: str,
    inputs: Specs,
    outputs: Specs,
    *,
    raw: bool = False,
    extras: Sequence[str] = (),
) -> InferRequest:
    """A v2 inference request; `header_length` is the length of its JSON if bytes follow it.

    `extras` are names that may be among the inputs too, with any datatype, one value a row.
    """
    interface = Interface(model, inputs, outputs, raw=raw, extras=tuple(extras))
    plan, identifier, arrays = Plans(interface).read(body, header_length)
    for wanted in plan.head.outputs:
        if wanted.classes:
            raise BadRequestError(f"output '{wanted.name}' asks for classification, which this server doesn't give")
    wanted_pairs = tuple((wanted.name, wanted.binary) for wanted in plan.head.outputs)
    head = plan.head
    return InferRequest(identifier, arrays, wanted_pairs, head.timeout_us, head.priority or NORMAL, head.parameters)


def encode_infer(
    outputs: Arrays,
    specs: Specs,
    wanted: Sequence[tuple[str, bool]],
    head: Mapping[str, Json],
) -> tuple[bytes, int | None]:
    """A v2 inference answer, and the length of its JSON if bytes follow it. `head`: what comes before the outputs."""
    described: list[Any] = []
    parts: list[bytes] = []
    for name, binary in wanted:
        if name not in outputs:
            raise InferenceError(f"the model left no output {name!r}", place="engine")
        array, datatype = outputs[name], specs[name].datatype
        entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(array.shape)}
        if binary:
            data = tensors.to_bytes(array, datatype)
            parts.append(data)
            entry["parameters"] = {"binary_data_size": len(data)}
        else:
            entry["data"] = orjson.Fragment(tensors.encode_json(array, datatype))
        described.append(entry)
    text = orjson.dumps({**head, "outputs": described})
    if not any(binary for _, binary in wanted):
        return text, None
    return b"".join((text, *parts)), len(text)


def decode_predict(body: bytes, inputs: Specs, *, raw: bool, extras: Sequence[str] = ()) -> Mapping[str, Column]:
    """A v1 request: `{"instances": [record, …]}`, each a record of the model's inputs, as columns over all of them.

    Raw columns are plain lists: the family's encoding reads them, and says what it can't take. `extras` are names that
    a record may have too; a column of them is there if one record has it, with None where another hasn't.
    """
    instances = parse_json(body).get("instances")
    if not isinstance(instances, list) or not instances:
        raise BadRequestError("'instances' must be an array of one record or more", place="request")
    if len(inputs) == 1 and not any(isinstance(instance, dict) for instance in instances):
        name = next(iter(inputs))
        instances = [{name: instance} for instance in instances]
    for row, instance in enumerate(instances):
        if not isinstance(instance, dict):
            raise BadRequestError("a record is an object of column names and values", place=f"instances[{row}]")
        for name in inputs:
            if name not in instance:
                cure = "Give null if it is not known." if raw else ""
                raise BadRequestError(f"column {name!r} is missing.", place=f"instances[{row}]", cure=cure)
    columns = {name: [instance[name] for instance in instances] for name in inputs}
    found: dict[str, Column] = {}
    for name in extras:
        if name not in inputs and any(name in instance for instance in instances):
            found[name] = [instance.get(name) for instance in instances]
    return {**(columns if raw else {name: _column(columns[name], spec) for name, spec in inputs.items()}), **found}


def encode_predict(outputs: Arrays, specs: Specs) -> bytes:
    """A v1 answer: `{"predictions": [record, …]}`, one for each instance."""
    if missing := [name for name in specs if name not in outputs]:
        raise InferenceError(f"the model left no output {missing[0]!r}", place="engine")
    columns = {name: _rows(array, specs[name].datatype) for name, array in outputs.items() if name in specs}
    predictions = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return orjson.dumps({"predictions": predictions})


def _column(values: list[Json], spec: TensorSpec) -> np.ndarray[Any, Any]:
    place = f"column {spec.name!r}"
    if len(spec.shape) == 1 or spec.shape[1:] == (1,):
        shape = [len(values), *spec.shape[1:]]
        return tensors.from_json(values, spec.datatype, shape, place)
    shapes = {_shape(value) for value in values}
    expected = spec.shape[1:]
    shape_one = shapes.pop()
    fits = len(shape_one) == len(expected) and all(w in (-1, s) for w, s in zip(expected, shape_one, strict=False))
    if shapes or not fits:
        raise BadRequestError(f"a value of shape {list(expected)} is wanted in each record", place=place)
    return tensors.from_json(values, spec.datatype, [len(values), *shape_one], place)


def _shape(value: Json) -> tuple[int, ...]:
    shape: list[int] = []
    while isinstance(value, list):
        shape.append(len(value))
        value = value[0] if value else None
    return tuple(shape)


def _rows(array: np.ndarray[Any, Any], datatype: str) -> list[Json]:
    """An output as one plain value for each row: a number or text, or a list of them."""
    flat = tensors.to_json(array, datatype)
    width = len(flat) // len(array) if len(array) else 1
    if array.ndim == 1 or (array.ndim == 2 and width == 1):
        return flat
    return [flat[start : start + width] for start in range(0, len(flat), width)]
