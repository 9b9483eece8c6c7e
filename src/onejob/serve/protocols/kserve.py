"""The messages of the KServe v2 protocol (and v1's plain records), as pure functions between bytes and arrays.

v2: JSON, and tensors in JSON or as bytes after it (`Inference-Header-Content-Length`, `binary_data_size`), mixed as
the client likes. Errors are BadRequestErrors in Triton's words where those are known, so that a client's handling
of them holds here too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onejob.core.artifact import Json
from onejob.core.tensor import DATATYPES, TensorSpec
from onejob.errors import BadRequestError, InferenceError
from onejob.serve.protocols import tensors

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


def parse_json(body: bytes | memoryview) -> dict[str, Json]:
    """A JSON object, or BadRequestError."""
    try:
        message = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"failed to parse the request JSON buffer: {error}") from None
    if not isinstance(message, dict):
        raise BadRequestError("failed to parse the request JSON buffer: an object is wanted")
    return message


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
    if header_length is not None and not 0 <= header_length <= len(body):
        raise BadRequestError(f"Inference-Header-Content-Length {header_length} exceeds the body's {len(body)} bytes")
    view = memoryview(body)
    message = parse_json(body if header_length is None else view[:header_length])
    binary = view[len(body) if header_length is None else header_length :]
    parameters = _object(message.get("parameters", {}), "'parameters'")
    arrays, used = _decode_inputs(message, binary, header_length is not None, model, inputs, raw, extras)
    if used != len(binary):
        raise BadRequestError(f"unexpected additional input data for model '{model}'")
    timeout = parameters.get("timeout", 0)
    if not isinstance(timeout, int) or isinstance(timeout, bool) or timeout < 0:
        raise BadRequestError(f"parameter 'timeout' is a number of microseconds, not {timeout!r}")
    identifier = message.get("id", "")
    if not isinstance(identifier, str):
        raise BadRequestError(f"'id' must be a string, not {identifier!r}")
    wanted = _wanted_outputs(message, parameters, model, outputs)
    priority = parameters.get("priority", 0)
    if not isinstance(priority, int) or isinstance(priority, bool) or priority < 0:
        raise BadRequestError(f"parameter 'priority' is a number, not {priority!r}")
    return InferRequest(identifier, arrays, wanted, timeout, priority or NORMAL, parameters)


def encode_infer(
    outputs: Arrays,
    specs: Specs,
    wanted: Sequence[tuple[str, bool]],
    head: Mapping[str, Json],
) -> tuple[bytes, int | None]:
    """A v2 inference answer, and the length of its JSON if bytes follow it. `head`: what comes before the outputs."""
    described: list[Json] = []
    parts: list[bytes] = []
    for name, binary in wanted:
        if name not in outputs:
            raise InferenceError(f"the model left no output {name!r}", place="engine")
        array, datatype = outputs[name], specs[name].datatype
        entry: dict[str, Json] = {"name": name, "datatype": datatype, "shape": list(array.shape)}
        if binary:
            data = tensors.to_bytes(array, datatype)
            parts.append(data)
            entry["parameters"] = {"binary_data_size": len(data)}
        else:
            entry["data"] = tensors.to_json(array, datatype)
        described.append(entry)
    text = json.dumps({**head, "outputs": described}, separators=(",", ":"), allow_nan=False).encode()
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
    columns = {name: _rows(array, specs[name].datatype) for name, array in outputs.items() if name in specs}
    predictions = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return json.dumps({"predictions": predictions}, separators=(",", ":"), allow_nan=False).encode()


def _decode_inputs(
    message: Mapping[str, Json],
    binary: memoryview,
    framed: bool,
    model: str,
    specs: Specs,
    raw: bool,
    extras: Sequence[str],
) -> tuple[dict[str, np.ndarray[Any, Any]], int]:
    if "inputs" not in message:
        raise BadRequestError("Unable to parse 'inputs': attempt to access non-existing object member 'inputs'")
    entries = message["inputs"]
    if not isinstance(entries, list):
        raise BadRequestError("Unable to parse 'inputs': an array is wanted")
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    offset = 0
    for entry in entries:
        name, spec, extra = _known_input(_object(entry, "an input"), model, specs, extras)
        if name in arrays:
            raise BadRequestError(f"input '{name}' is there twice for model '{model}'")
        nulls = raw or extra
        shape = _check_signature(entry, spec, model, nulls)
        size = _binary_size(entry, name, framed)
        if size is None:
            arrays[name] = tensors.from_json(entry.get("data"), spec.datatype, shape, f"input '{name}'", nulls=nulls)
            continue
        if offset + size > len(binary):
            raise BadRequestError(
                f"input '{name}' claims {size} bytes of binary data, {len(binary) - offset} are there"
            )
        arrays[name] = tensors.from_bytes(binary[offset : offset + size], spec.datatype, shape, f"input '{name}'")
        offset += size
    if not arrays.keys() >= specs.keys():
        missing = ", ".join(f"'{name}'" for name in specs if name not in arrays)
        given = ", ".join(f"'{name}'" for name in arrays)
        raise BadRequestError(
            f"expected {len(specs)} inputs but got {len(arrays)} inputs for model '{model}'. Got input(s) [{given}], "
            f"but missing required input(s) [{missing}]. Please provide all required input(s)."
        )
    return arrays, offset


def _known_input(
    entry: Mapping[str, Json], model: str, specs: Specs, extras: Sequence[str]
) -> tuple[str, TensorSpec, bool]:
    name = entry.get("name")
    if not isinstance(name, str):
        raise BadRequestError("Unable to parse 'name': an input's name must be a string")
    if name in specs:
        return name, specs[name], False
    if name not in extras:
        raise BadRequestError(f"unexpected inference input '{name}' for model '{model}'")
    return name, TensorSpec(name, str(entry.get("datatype")), (-1,)), True


def _check_signature(entry: Mapping[str, Json], spec: TensorSpec, model: str, raw: bool) -> list[int]:
    datatype, shape = entry.get("datatype"), entry.get("shape")
    if datatype not in DATATYPES:
        raise BadRequestError(f"input '{spec.name}' has the unknown data-type {datatype!r}")
    if datatype != spec.datatype:
        raise BadRequestError(
            f"inference input '{spec.name}' data-type is '{datatype}', but model '{model}' expects '{spec.datatype}'"
        )
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise BadRequestError(f"Unable to parse 'shape' of input '{spec.name}': an array of sizes is wanted")
    expected = list(spec.shape)
    fits = len(shape) == len(expected) and all(want in (-1, size) for want, size in zip(expected, shape, strict=True))
    column = raw and expected in ([-1], [-1, 1])  # some clients know a column as [rows], some as [rows, 1]
    if not fits and not (column and shape[1:] in ([], [1]) and shape):
        told = f"Expected {json.dumps(expected, separators=(',', ':'))}, got {json.dumps(shape, separators=(',', ':'))}"
        raise BadRequestError(f"unexpected shape for input '{spec.name}' for model '{model}'. {told}.")
    return shape


def _binary_size(entry: Mapping[str, Json], name: str, framed: bool) -> int | None:
    parameters = _object(entry.get("parameters", {}), f"'parameters' of input '{name}'")
    if "shared_memory_region" in parameters:
        raise BadRequestError(f"input '{name}' lies in shared memory, which this server doesn't take")
    size = parameters.get("binary_data_size")
    if size is None:
        if "data" not in entry:
            raise BadRequestError(f"Unable to parse 'data': input '{name}' has neither 'data' nor 'binary_data_size'")
        return None
    if type(size) is not int or size < 0 or not framed or "data" in entry:
        raise BadRequestError(
            "must specify valid 'Inference-Header-Content-Length' in request header and 'binary_data_size' "
            f"when passing inputs in binary data format: input '{name}'"
        )
    return size


def _wanted_outputs(
    message: Mapping[str, Json], parameters: Mapping[str, Json], model: str, specs: Specs
) -> tuple[tuple[str, bool], ...]:
    default = parameters.get("binary_data_output", False) is True
    entries = message.get("outputs") or []
    if not isinstance(entries, list):
        raise BadRequestError("Unable to parse 'outputs': an array is wanted")
    wanted: dict[str, bool] = {}
    for entry in entries:
        name = _object(entry, "an output").get("name")
        if not isinstance(name, str) or name not in specs:
            raise BadRequestError(f"unexpected inference output '{name}' for model '{model}'")
        asked = _object(entry.get("parameters", {}), f"'parameters' of output '{name}'")
        for word in ("classification", "shared_memory_region"):
            if asked.get(word):
                raise BadRequestError(f"output '{name}' asks for {word}, which this server doesn't give")
        wanted[name] = asked.get("binary_data", default) is True
    return tuple(wanted.items()) or tuple((name, default) for name in specs)


def _object(value: Json, what: str) -> Mapping[str, Json]:
    if not isinstance(value, dict):
        raise BadRequestError(f"{what} must be an object")
    return value


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
