"""Bodies of inference requests, made from what a model says of its inputs: random tensors of the right datatypes and
shapes, as KServe v2 has them, in JSON or as bytes.

The numbers mean nothing: floats are normal, whole numbers 0 to 9 (small enough for any table that they may look up),
text is short words. Where the values matter for the speed, send real ones from a file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onejob.core.artifact import Json
from onejob.core.tensor import DATATYPES, TensorSpec
from onejob.errors import UsageError

Array = np.ndarray[Any, Any]
WORDS = ("red", "green", "blue", "one", "two", "three", "north", "south")
BINARY, JSON = "binary", "json"


def inputs_of(metadata: Mapping[str, Json]) -> list[TensorSpec]:
    """The inputs that a model's metadata names."""
    inputs = metadata.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        raise UsageError("its metadata names no inputs", cure="Give a body with --data FILE.")
    return [TensorSpec(str(one["name"]), str(one["datatype"]), tuple(map(int, one["shape"]))) for one in inputs]


def shape_of(spec: TensorSpec, batch: int, shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """The shape to send: the first size, where it varies, is the batch; others that vary are asked for, or 1."""
    if (given := shapes.get(spec.name)) is not None:
        full = tuple(given) if len(given) == len(spec.shape) else (batch, *given)
        fits = len(full) == len(spec.shape) and all(
            want in (-1, size) for want, size in zip(spec.shape, full, strict=True)
        )
        if not fits:
            raise UsageError(f"it has the shape {list(spec.shape)}, not {list(given)}", place=f"--shape {spec.name}")
        return full
    return tuple((batch if place == 0 else 1) if size < 0 else size for place, size in enumerate(spec.shape))


def make_body(
    inputs: Sequence[TensorSpec],
    *,
    batch: int,
    form: str,
    shapes: Mapping[str, Sequence[int]],
    seed: int,
) -> tuple[bytes, int | None]:
    """A request's body, and the length of its JSON if bytes follow it."""
    for name in shapes.keys() - {spec.name for spec in inputs}:
        known = ", ".join(spec.name for spec in inputs)
        raise UsageError(f"there is no input {name!r}", place="--shape", cure=f"Inputs: {known}.")
    source = np.random.default_rng(seed)
    entries: list[Json] = []
    parts: list[bytes] = []
    for spec in inputs:
        shape = shape_of(spec, batch, shapes)
        values = _values(spec, shape, source)
        entry: dict[str, Json] = {"name": spec.name, "shape": list(shape), "datatype": spec.datatype}
        if form == BINARY:
            parts.append(_bytes(values, spec.datatype))
            entry["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            entry["data"] = values.reshape(-1).tolist()
        entries.append(entry)
    message: dict[str, Json] = {"inputs": entries}
    if form == BINARY:
        message["parameters"] = {"binary_data_output": True}
    head = json.dumps(message, separators=(",", ":")).encode()
    return (head, None) if form == JSON else (b"".join((head, *parts)), len(head))


def _values(spec: TensorSpec, shape: tuple[int, ...], source: np.random.Generator) -> Array:
    count = math.prod(shape)
    if spec.datatype == "BYTES":
        return np.array([WORDS[i] for i in source.integers(0, len(WORDS), count)], dtype=object).reshape(shape)
    if spec.datatype == "BF16":
        bits = source.standard_normal(count).astype(np.float32).view(np.uint32) & 0xFFFF0000
        return bits.astype(np.uint32).view(np.float32).reshape(shape)
    if spec.datatype not in DATATYPES:
        raise UsageError(f"it has the unknown datatype {spec.datatype!r}", place=f"input {spec.name}")
    dtype = np.dtype(DATATYPES[spec.datatype])
    if dtype.kind == "f":
        return source.standard_normal(count).astype(dtype).reshape(shape)
    return source.integers(0, 2 if dtype.kind == "b" else 10, count).astype(dtype).reshape(shape)


def _bytes(values: Array, datatype: str) -> bytes:
    """Little-endian, in row-major order."""
    if datatype == "BYTES":
        texts = [str(value).encode() for value in values.reshape(-1)]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    if datatype == "BF16":
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype(values.dtype.newbyteorder("<")).tobytes()
