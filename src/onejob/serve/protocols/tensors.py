"""Tensors on the wire: JSON lists and little-endian bytes to arrays and back, with nothing guessed and nothing cast
silently.

A whole number is welcome where a float is wanted; text, booleans and fractions are not welcome where a whole number
is, and a number that its datatype can't hold is refused. In JSON a null is NaN for floats and "not known" for text;
the other way round, NaN and infinity (which JSON lacks) become null. Every error is a BadRequestError in Triton's
words where known.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onejob.core.artifact import Json
from onejob.core.tensor import DATATYPES
from onejob.errors import BadRequestError

Array = np.ndarray[Any, Any]
_WHOLE: frozenset[type] = frozenset({int})
_PLAIN: Mapping[str, frozenset[type]] = {
    "b": frozenset({bool}),
    "i": _WHOLE,
    "u": _WHOLE,
    "f": frozenset({int, float, type(None)}),
}
"""Kind of a numpy dtype -> the types of JSON values that it takes."""
MAX_DEPTH = 32
_LENGTH = struct.Struct("<I")


def from_json(data: Json, datatype: str, shape: Sequence[int], place: str, *, nulls: bool = False) -> Array:
    """An array from a flat or nested JSON list; `nulls` allows null text (a null is NaN where a float is wanted)."""
    flat = _flatten(data, place)
    if len(flat) != math.prod(shape):
        raise BadRequestError(
            f"expected {math.prod(shape)} elements for shape {list(shape)}, got {len(flat)}", place=place
        )
    array = _texts(flat, place, nulls) if datatype == "BYTES" else _numbers(flat, datatype, place)
    return array.reshape(shape)


def from_bytes(data: memoryview, datatype: str, shape: Sequence[int], place: str) -> Array:
    """An array from its little-endian bytes; BYTES elements are UTF-8 text after a 4-byte length each."""
    if datatype == "BYTES":
        return _texts_from_bytes(data, math.prod(shape), place).reshape(shape)
    dtype = np.dtype(DATATYPES[datatype])
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise BadRequestError(f"byte size mismatch for {place}. Expected {expected}, got {len(data)}")
    return np.frombuffer(data, dtype=dtype.newbyteorder("<")).reshape(shape)


def to_json(array: Array, datatype: str) -> list[Json]:
    """A flat JSON list, in row-major order."""
    if datatype == "BYTES":
        return [_text(value) for value in array.reshape(-1)]
    values: list[Json] = array.reshape(-1).tolist()
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return [value if math.isfinite(value) else None for value in values]
    return values


def to_bytes(array: Array, datatype: str) -> bytes:
    """Little-endian bytes, in row-major order; text with a 4-byte length before each."""
    if datatype == "BYTES":
        encoded = [_text(value).encode() for value in array.reshape(-1)]
        return b"".join(_LENGTH.pack(len(value)) + value for value in encoded)
    return array.astype(np.dtype(DATATYPES[datatype]).newbyteorder("<"), copy=False).tobytes()


def _flatten(data: Json, place: str, depth: int = 0) -> list[Json]:
    if not isinstance(data, list) or depth > MAX_DEPTH:
        raise BadRequestError(f"'data' must be an array, nested at most {MAX_DEPTH} deep", place=place)
    if not any(isinstance(value, list) for value in data):
        return data
    flat: list[Json] = []
    for value in data:
        if not isinstance(value, list):
            raise BadRequestError("'data' mixes values and arrays", place=place)
        flat.extend(_flatten(value, place, depth + 1))
    return flat


def _numbers(flat: list[Json], datatype: str, place: str) -> Array:
    dtype = np.dtype(DATATYPES[datatype])
    allowed = _PLAIN[dtype.kind]
    if not allowed.issuperset(map(type, flat)):
        bad = next(value for value in flat if type(value) not in allowed)
        raise BadRequestError(f"{bad!r} is not {datatype}", place=place)
    if dtype.kind == "f":
        return _floats(flat, dtype, datatype, place)
    if dtype.kind in "iu" and flat:
        limits = np.iinfo(dtype)
        if min(flat) < limits.min or max(flat) > limits.max:
            bad = next(value for value in flat if not limits.min <= value <= limits.max)
            raise BadRequestError(f"{bad} is outside {datatype}'s {limits.min} to {limits.max}", place=place)
    return np.array(flat, dtype=dtype)


def _floats(flat: list[Json], dtype: np.dtype[Any], datatype: str, place: str) -> Array:
    try:
        wide = np.array(flat, dtype=np.float64)  # None becomes NaN
        with np.errstate(over="ignore"):
            array = wide.astype(dtype, copy=False)
        fits = bool((np.isinf(array) == np.isinf(wide)).all())
    except OverflowError:
        fits = False
    if not fits:
        raise BadRequestError(f"a value is too large for {datatype}", place=place)
    return array


def _texts(flat: list[Json], place: str, nulls: bool) -> Array:
    for value in flat:
        if not isinstance(value, str) and not (nulls and value is None):
            raise BadRequestError(f"{value!r} is not BYTES: text is wanted", place=place)
    array = np.empty(len(flat), dtype=object)
    array[:] = flat
    return array


def _texts_from_bytes(data: memoryview, count: int, place: str) -> Array:
    array = np.empty(count, dtype=object)
    offset = 0
    for index in range(count):
        if offset + 4 > len(data):
            raise BadRequestError(f"unexpected end of the data: {index} of {count} elements are there", place=place)
        (length,) = _LENGTH.unpack_from(data, offset)
        offset += 4
        if offset + length > len(data):
            raise BadRequestError(f"element {index} claims {length} bytes, {len(data) - offset} are there", place=place)
        try:
            array[index] = str(data[offset : offset + length], "utf-8")
        except UnicodeDecodeError as error:
            raise BadRequestError(f"element {index} is not UTF-8 text: {error}", place=place) from None
        offset += length
    if offset != len(data):
        raise BadRequestError(f"{len(data) - offset} bytes more than its {count} elements", place=place)
    return array


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return "" if value is None else str(value)
