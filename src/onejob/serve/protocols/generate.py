"""Triton's generate extension: plain JSON fields for tensors, one answer or a stream of them (server-sent events).

A field that is named as an input is that tensor, from one value or a flat list of them; its shape is the model's, with
what varies last taking the values. `id` and the fields of `parameters` are as in an inference; any other field is a
parameter. An answer has a field for each output: a value, or a flat list.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from onejob.core.artifact import Json
from onejob.core.tensor import TensorSpec
from onejob.errors import BadRequestError
from onejob.serve.protocols import tensors, words
from onejob.serve.protocols.interface import Interface, Part, Wanted, fit
from onejob.serve.protocols.plan import Head, Plan, check_parameter, data_words

Array = np.ndarray[Any, Any]
EVENT_STREAM = b"text/event-stream; charset=utf-8"
ONE_ANSWER = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
    "number of responses"
)


def parse_generate(body: bytes, interface: Interface) -> Plan:
    """A request; its `arrays(b"")` are the tensors. BadRequestError in Triton's words."""
    message = words.parse_value(body)
    if not isinstance(message, dict):
        raise BadRequestError(f"attempt to get members for non-object: {words.brief(message)}")
    identifier = ""
    parts: list[Part] = []
    parameters: dict[str, Json] = {}
    for name, value in _fields(message):
        if name in interface.inputs:
            parts = [part for part in parts if part.name != name]
            parts.append(_tensor(interface.inputs[name], value, interface))
        elif name == "id":
            identifier = "" if value is None else words.text_of(value, "id")
        else:
            check_parameter(name, value, interface.name)
            parameters[name] = value
    rows = fit(parts, interface, identifier)
    order = list(interface.inputs)
    parts.sort(key=lambda part: order.index(part.name))
    wanted = tuple(Wanted(name, False) for name in interface.outputs)
    head = Head(wanted, parameters.get("timeout", 0), parameters.get("priority", 0), parameters)
    return Plan(interface, identifier, head, parts, rows)


def encode_generate(outputs: Mapping[str, Array], interface: Interface, version: str, identifier: str = "") -> bytes:
    """An answer, with its fields sorted as Triton's are."""
    fields: dict[str, Any] = {"model_name": interface.name, "model_version": version}
    if identifier:
        fields["id"] = identifier
    for name, array in outputs.items():
        if name in interface.outputs:
            data = tensors.encode_json(array, interface.outputs[name].datatype)
            fields[name] = orjson.Fragment(data[1:-1] if array.size == 1 else data)
    return orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)


def encode_event(message: bytes) -> bytes:
    """A message of a stream: JSON, so on one line."""
    return b"data: %b\n\n" % message


def encode_error(text: str) -> bytes:
    """The message that a stream ends with when it fails."""
    return orjson.dumps({"error": text})


def _fields(message: Mapping[str, Json]) -> list[tuple[str, Json]]:
    fields: list[tuple[str, Json]] = []
    for name, value in message.items():
        if name != "parameters":
            fields.append((name, value))
        elif isinstance(value, dict):
            fields.extend(value.items())
        else:
            raise BadRequestError(
                "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object: "
                f"{words.brief(value)}"
            )
    return fields


def _tensor(spec: TensorSpec, value: Json, interface: Interface) -> Part:
    data = value if isinstance(value, list) else [value]
    shape = _shape(spec, len(data))
    try:
        array = tensors.from_json(
            data, spec.datatype, shape, f"input '{spec.name}'", nulls=interface.raw, octets=interface.octets
        )
    except BadRequestError as error:
        raise BadRequestError(f"{data_words(data, spec.datatype, shape)}: {error}") from None
    return Part(spec.name, spec.datatype, shape, 0, 0, array)


def _shape(spec: TensorSpec, count: int) -> tuple[int, ...]:
    """The model's shape, with the last size that varies such that it holds `count` values, and 1 for the others."""
    sizes = [1 if size < 0 else size for size in spec.shape]
    known = math.prod(sizes)
    varying = [axis for axis, size in enumerate(spec.shape) if size < 0]
    if varying and known:
        sizes[varying[-1]] = count // known
    if not count or math.prod(sizes) != count:
        told = str(list(spec.shape)).replace(" ", "")
        raise BadRequestError(
            f"The schema can not convert input '{spec.name}' to tensor with proper shape: {count} values for {told}"
        )
    return tuple(sizes)
