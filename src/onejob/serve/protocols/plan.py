"""The head of a v2 inference request, understood once.

Clients that send binary tensors send the same few hundred bytes of JSON with each request. `Plans` keeps what they
mean by those bytes, so that a repeated head costs no parsing: the arrays are views of the body at known places. A head
that holds tensors itself is understood anew each time. As in Triton the message is read first, then the model is
asked whether it fits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onejob.core.artifact import Json
from onejob.core.tensor import TensorSpec
from onejob.errors import BadRequestError, NotFoundError
from onejob.serve.protocols import tensors, words
from onejob.serve.protocols.interface import Interface, Part, Wanted, fit, refused, wrong_size

Array = np.ndarray[Any, Any]

MAX_HEADS = 256
MAX_HEAD = 4096
"""So many heads, of at most so many bytes, are remembered for a model."""
MAX_RANK = 32
MAX_VALUES = 1 << 48
"""Largest product of the other sizes of an empty tensor; of any other, the message's length is the limit."""
_SOURCES = ("data", "binary_data_size", "shared_memory_region")
_SOURCE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But "
)
_ID = b'{"id":"'


class Plan:
    """What a head means: call `arrays` for each request that has it."""

    __slots__ = ("_octets", "_parts", "_place", "_views", "head", "id", "rows", "signature", "size")

    size: int
    """Bytes after the head."""

    def __init__(self, interface: Interface, identifier: str, head: Head, parts: Sequence[Part], rows: int) -> None:
        self.id = identifier
        self.head = head
        self.rows = rows
        """Rows of the batch; 1 for a model without one."""
        signature, views, self.size = [], [], 0
        for part in parts:
            self.size += part.size
            if part.name in interface.inputs:
                signature.append(part.shape[1:])
            if part.data is None and part.size and part.datatype in tensors.VIEWED:
                views.append((part.name, part.shape, tensors.VIEWED[part.datatype], part.offset))
        self.signature = tuple(signature)
        """What must be equal for requests to run together."""
        self._views = tuple(views) if len(views) == len(parts) else None
        self._parts = tuple(parts)
        self._octets = interface.octets
        self._place = f"for model '{interface.name}'"

    @property
    def repeatable(self) -> bool:
        """Whether a request with the same head brings its own tensors."""
        return all(part.data is None for part in self._parts)

    def arrays(self, body: bytes, start: int = 0) -> dict[str, Array]:
        """The tensors in the model's order; the bytes after the head begin at `start`."""
        if len(body) - start != self.size:
            raise _wrong_total(self._parts, len(body) - start, self._place)
        if self._views is not None:
            return {name: np.ndarray(shape, dtype, body, start + at) for name, shape, dtype, at in self._views}
        view = memoryview(body)
        return {
            part.name: self._read(part, view[start + part.offset :][: part.size]) if part.data is None else part.data
            for part in self._parts
        }

    def _read(self, part: Part, data: memoryview) -> Array:
        place = f"input '{part.name}' {self._place}"
        return tensors.from_bytes(data, part.datatype, part.shape, place, octets=self._octets)


@dataclass(frozen=True, slots=True)
class Head:
    """What a request says beside its inputs."""

    outputs: tuple[Wanted, ...]
    """In the client's order; all of the model's if it named none."""
    timeout_us: int = 0
    priority: int = 0
    """1 is the most urgent; 0: not said."""
    parameters: Mapping[str, Json] = field(default_factory=dict)


class Plans:
    """Reads the requests of one model."""

    def __init__(self, interface: Interface) -> None:
        self._interface = interface
        self._known: dict[bytes, Plan] = {}

    def read(self, body: bytes, header_length: int | None) -> tuple[Plan, str, dict[str, Array]]:
        """The plan of a request, its id, and its arrays; `header_length` is its JSON's length if bytes follow it."""
        if header_length is None:
            plan = parse_head(body, self._interface, 0)
            return plan, plan.id, plan.arrays(b"")
        if header_length == 0:
            plan = raw_plan(body, self._interface)
            return plan, "", plan.arrays(body if plan.size else b"")
        if not 0 < header_length <= len(body):
            raise _no_length(str(header_length), len(body))
        plan, identifier = self._find(body[:header_length], len(body) - header_length)
        return plan, identifier, plan.arrays(body, header_length)

    def _find(self, head: bytes, binary: int) -> tuple[Plan, str]:
        key, identifier = _split(head)
        plan = self._known.get(key)
        if plan is not None:
            return plan, plan.id if identifier is None else identifier
        plan = parse_head(head, self._interface, binary)
        if plan.repeatable and len(head) <= MAX_HEAD:
            if len(self._known) >= MAX_HEADS:
                self._known.clear()
            self._known[key] = plan
        return plan, plan.id if identifier is None else identifier


def header_length(text: bytes | None, size: int) -> int | None:
    """What `Inference-Header-Content-Length` says of a body of that size: the length of its JSON, 0 for none at all."""
    if text is None:
        return None
    if not text.isdigit() or len(text) > 18 or int(text) > size:
        raise _no_length(text.decode("latin-1"), size)
    return int(text)


def parse_head(head: bytes | memoryview, interface: Interface, binary: int) -> Plan:
    """Understand a request's JSON, which `binary` bytes follow; BadRequestError in Triton's words."""
    message = words.parse_value(head)
    members: Mapping[str, Json] = message if isinstance(message, dict) else {}
    identifier = members.get("id")
    identifier = "" if identifier is None else words.text_of(identifier, "id")
    parts = _read_inputs(members, interface, binary, identifier)
    parameters = read_parameters(members.get("parameters"), interface.name)
    default = parameters.get("binary_data_output", False)
    wanted = _read_outputs(members.get("outputs"), interface, words.flag_of(default, "binary_data_output"))
    rows = fit(parts, interface, identifier)
    order = {name: number for number, name in enumerate(interface.inputs)}
    parts.sort(key=lambda part: order.get(part.name, len(order)))
    head_said = Head(wanted, parameters.get("timeout", 0), parameters.get("priority", 0), parameters)
    return Plan(interface, identifier, head_said, parts, rows)


def raw_plan(body: bytes, interface: Interface) -> Plan:
    """A body that is nothing but the bytes of the model's one input, for one row; all outputs come as bytes."""
    if len(interface.inputs) != 1:
        raise BadRequestError(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(interface.inputs)} inputs in "
            f"'{interface.name}' model configuration"
        )
    spec = next(iter(interface.inputs.values()))
    dims = spec.shape[1:] if interface.batched else spec.shape
    if spec.datatype == "BYTES":
        part = _raw_text(body, spec.name, dims, interface)
    else:
        part = _raw_numbers(len(body), spec, dims, interface)
    head = Head(interface.all_outputs[True])
    return Plan(interface, "", head, [part], 1)


def read_parameters(value: Json, model: str) -> dict[str, Json]:
    """The parameters of a request, those that mean something here checked."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequestError(
            f"failed to get request params.: attempt to get members for non-object: {words.brief(value)}"
        )
    for name, given in value.items():
        check_parameter(name, given, model)
    return value


def check_parameter(name: str, value: Json, model: str) -> None:
    """One parameter of a request; BadRequestError if it can't be one."""
    if name in ("timeout", "priority"):
        words.unsigned_of(value, name)
    elif name == "sequence_id":
        if type(value) is not int:
            words.text_of(value, name)
        if value not in (0, ""):
            raise _no_sequences(model, name)
    elif name in ("sequence_start", "sequence_end"):
        if words.flag_of(value, name):
            raise _no_sequences(model, name)
    elif name.startswith("triton_"):
        raise BadRequestError(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
        )
    elif name != "binary_data_output" and (value is None or isinstance(value, list | dict)):
        raise BadRequestError(f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def _split(head: bytes) -> tuple[bytes, str | None]:
    """A head with an empty id for its own, and the id, where that comes first and is plain: it differs each time."""
    if not head.startswith(_ID):
        return head, None
    end = head.find(b'"', len(_ID))
    identifier = head[len(_ID) : end]
    if end < 0 or b"\\" in identifier or not identifier.isascii():
        return head, None
    text = identifier.decode("ascii")
    return (_ID + head[end:], text) if text.isprintable() else (head, None)


def _raw_text(body: bytes, name: str, dims: tuple[int, ...], interface: Interface) -> Part:
    """The whole body is the one element."""
    if dims not in ((), (1,)):
        raise BadRequestError(f"For BYTE datatype raw input '{name}', the model must have input shape [1]")
    shape = (1, *dims) if interface.batched else dims
    data = memoryview(len(body).to_bytes(4, "little") + body)
    array = tensors.from_bytes(data, "BYTES", shape, f"input '{name}'", octets=interface.octets)
    return Part(name, "BYTES", shape, 0, 0, array)


def _raw_numbers(length: int, spec: TensorSpec, dims: tuple[int, ...], interface: Interface) -> Part:
    if dims.count(-1) > 1:
        raise BadRequestError(
            f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one "
            "variable-sized dimension"
        )
    step = math.prod(dim for dim in dims if dim >= 0) * tensors.SIZES[spec.datatype]
    dims = tuple(length // max(step, 1) if dim < 0 else dim for dim in dims)
    shape = (1, *dims) if interface.batched else dims
    expected = math.prod(shape) * tensors.SIZES[spec.datatype]
    if expected != length:
        raise wrong_size("raw_input", interface.name, expected, length, "")
    return Part(spec.name, spec.datatype, shape, 0, length, None)


def _read_inputs(message: Mapping[str, Json], interface: Interface, binary: int, identifier: str) -> list[Part]:
    entries = words.list_of(words.member(message, "inputs"), "inputs")
    parts: list[Part] = []
    names: set[str] = set()
    offset = 0
    for entry in entries:
        part = _read_input(entry, interface, offset, binary)
        if part.name in names:
            raise refused(identifier, f"input '{part.name}' already exists in request")
        names.add(part.name)
        parts.append(part)
        offset += part.size
    if offset != binary:
        raise _wrong_total(parts, binary, f"for model '{interface.name}'")
    return parts


def _read_input(entry: Json, interface: Interface, offset: int, binary: int) -> Part:
    parameters = words.object_of(entry.get("parameters")) if isinstance(entry, dict) else {}
    source = _source(entry, parameters)
    name = words.text_of(words.member(entry, "name"), "name")
    datatype = words.text_of(words.member(entry, "datatype"), "datatype")
    if datatype not in tensors.DTYPES:
        raise BadRequestError(f"invalid datatype for input {name}: {datatype!r:.40}")
    sizes = words.list_of(words.member(entry, "shape"), "shape")
    shape = tuple(words.unsigned_of(size, "shape") for size in sizes)
    if len(shape) > MAX_RANK:
        raise BadRequestError(
            f"input '{name}' has {len(shape)} dimensions, more than the {MAX_RANK} that a tensor can have"
        )
    if 0 in shape and math.prod(size for size in shape if size) > MAX_VALUES:
        raise BadRequestError(f"input '{name}' has a shape that nothing can hold: {list(shape)}")
    if source == "binary_data_size":
        size = words.unsigned_of(parameters[source], source)
        if offset + size > binary:
            raise _too_short(name, offset + size - binary, f"for model '{interface.name}'")
        return Part(name, datatype, shape, offset, size, None)
    data = entry["data"] if isinstance(entry, dict) else None
    nulls = interface.raw or name in interface.extras
    try:
        array = tensors.from_json(data, datatype, shape, f"input '{name}'", nulls=nulls, octets=interface.octets)
    except BadRequestError as error:
        raise BadRequestError(f"{data_words(data, datatype, shape)}: {error}") from None
    return Part(name, datatype, shape, 0, 0, array)


def _source(entry: Json, parameters: Mapping[str, Json]) -> str:
    found = [name for name in _SOURCES if name in (entry if name == "data" and isinstance(entry, dict) else parameters)]
    if len(found) != 1:
        told = "set " + " ".join(f"'{name}'" for name in found) if found else "no field is set"
        raise BadRequestError(f"{_SOURCE}{told}")
    if found[0] == "shared_memory_region":
        raise _no_region(parameters[found[0]])
    return found[0]


def _read_outputs(value: Json, interface: Interface, default: bool) -> tuple[Wanted, ...]:
    entries = [] if value is None else words.list_of(value, "outputs")
    if not entries:
        return interface.all_outputs[default]
    wanted: dict[str, Wanted] = {}
    for entry in entries:
        name = words.text_of(words.member(entry, "name"), "name")
        if name not in interface.outputs:
            raise BadRequestError(f"unexpected inference output '{name}' for model '{interface.name}'")
        asked = words.object_of(entry.get("parameters"))
        if "shared_memory_region" in asked:
            raise _no_region(asked["shared_memory_region"])
        classes = words.unsigned_of(asked.get("classification", 0), "classification", "set")
        wanted[name] = Wanted(name, words.flag_of(asked.get("binary_data", default), "binary_data"), classes)
    return tuple(wanted.values())


def data_words(data: Json, datatype: str, shape: Sequence[int]) -> str:
    """What Triton says of JSON data that it can't take."""
    if not isinstance(data, list):
        return "Unable to parse 'data': attempt to access JSON non-array as array"
    if _count(data) != math.prod(shape):
        return "Unable to parse 'data': Shape does not match true shape of 'data' field"
    if datatype == "BYTES":
        return "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
    kinds = {"b": "non-boolean as boolean", "i": "non-signed-integer as signed-integer"}
    kinds |= {"u": "non-unsigned-integer as unsigned-integer", "f": "non-number as double"}
    return f"Unable to parse 'data': attempt to access JSON {kinds[tensors.DTYPES[datatype].kind]}"


def _count(data: Json) -> int:
    """Values in nested lists, however deep."""
    count, left = 0, [data]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left.extend(value)
        else:
            count += 1
    return count


def _wrong_total(parts: Sequence[Part], binary: int, place: str) -> BadRequestError:
    for part in parts:
        if part.offset + part.size > binary:
            return _too_short(part.name, part.offset + part.size - binary, place)
    return BadRequestError(f"unexpected additional input data {place}")


def _too_short(name: str, lacking: int, place: str) -> BadRequestError:
    cure = "Inference-Header-Content-Length must be the length of the JSON."
    return BadRequestError(
        f"unexpected size for input '{name}', expecting {lacking} additional bytes {place}", cure=cure
    )


def _no_length(text: str, size: int) -> BadRequestError:
    told = f"inference header size should be in range (0, {size}), got: {text}"
    return BadRequestError(
        f"{told}: Inference-Header-Content-Length is the length of the JSON that the body begins with"
    )


def _no_sequences(model: str, name: str) -> BadRequestError:
    return BadRequestError(f"model '{model}' has no sequence batcher, so '{name}' can mean nothing to it")


def _no_region(name: Json) -> NotFoundError:
    return NotFoundError(
        f"Unable to find shared memory region: '{name}'", cure="Send the tensor's bytes after the JSON."
    )
