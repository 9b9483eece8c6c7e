"""Tensors on the wire: JSON lists and little-endian bytes to arrays and back, with nothing guessed and nothing cast
silently.

A whole number is welcome where a float is wanted; text, booleans and fractions are not welcome where a whole number
is, and a number that its datatype can't hold is refused. In JSON a null is NaN for floats and "not known" for text;
the other way round, NaN and infinity (which JSON lacks) become null. BF16 is float32 in arrays. BYTES elements are
text, or bytes where `octets` is true.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import orjson

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
DTYPES: Mapping[str, np.dtype[Any]] = {name: np.dtype(dtype) for name, dtype in DATATYPES.items()}
"""Datatype -> dtype of its arrays."""
SIZES: Mapping[str, int] = {
    **{name: dtype.itemsize for name, dtype in DTYPES.items() if name != "BYTES"},
    "BF16": 2,
}
"""Datatype -> bytes of an element on the wire; BYTES has no fixed size."""
VIEWED: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(dtype.newbyteorder("<").str) for name, dtype in DTYPES.items() if name not in ("BYTES", "BF16")
}
"""Datatype -> dtype of an array that is a view of the message's bytes."""
_CODES: Mapping[str, str] = {
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
    "BF16": "f",
}
"""Datatype -> the code of `struct`, which is quicker with a list of numbers than numpy, and stricter."""
_LIST: frozenset[type] = frozenset({list})
MAX_DEPTH = 32
_FEW = 64
_LENGTH = struct.Struct("<I")
_MIXED = "'data' mixes values and arrays"


def from_json(
    data: Json, datatype: str, shape: Sequence[int], place: str, *, nulls: bool = False, octets: bool = False
) -> Array:
    """An array from a flat or nested JSON list; `nulls` allows null text (a null is NaN where a float is wanted)."""
    flat, count = _flatten(data, place), math.prod(shape)
    if len(flat) != count:
        raise BadRequestError(f"expected {count} elements for shape {list(shape)!s:.200}, got {len(flat)}", place=place)
    if datatype == "BYTES":
        return _texts(flat, place, nulls, octets).reshape(shape)
    array = _packed(flat, datatype) if flat and datatype != "BOOL" else None
    if array is None:
        array = _numbers(flat, datatype, place)
    return array.reshape(shape)


def from_bytes(data: memoryview, datatype: str, shape: Sequence[int], place: str, *, octets: bool = False) -> Array:
    """An array from its little-endian bytes; BYTES elements come after a 4-byte length each."""
    count = math.prod(shape)
    if datatype == "BYTES":
        return _texts_from_bytes(data, count, place, octets).reshape(shape)
    expected = count * SIZES[datatype]
    if len(data) != expected:
        raise BadRequestError(f"byte size mismatch for {place}. Expected {expected}, got {len(data)}")
    if datatype == "BF16":
        return widened(np.frombuffer(data, dtype="<u2")).reshape(shape)
    return np.frombuffer(data, dtype=VIEWED[datatype]).reshape(shape)


def to_json(array: Array, datatype: str) -> list[Json]:
    """A flat JSON list, in row-major order."""
    if datatype == "BYTES":
        return [_text(value) for value in array.reshape(-1)]
    values: list[Json] = array.astype(DTYPES[datatype], copy=False).reshape(-1).tolist()
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return [value if math.isfinite(value) else None for value in values]
    return values


def encode_json(array: Array, datatype: str) -> bytes:
    """The flat JSON list as bytes: each number with as few digits as its datatype needs to be read back the same."""
    if datatype == "BYTES":
        return orjson.dumps(to_json(array, datatype))
    native = array.astype(DTYPES[datatype], copy=False).reshape(-1)
    return orjson.dumps(np.ascontiguousarray(native), option=orjson.OPT_SERIALIZE_NUMPY)


def to_bytes(array: Array, datatype: str) -> bytes:
    """Little-endian bytes, in row-major order; text with a 4-byte length before each."""
    if datatype == "BYTES":
        encoded = [value if isinstance(value, bytes) else _text(value).encode() for value in array.reshape(-1)]
        return b"".join([part for value in encoded for part in (_LENGTH.pack(len(value)), value)])
    if datatype == "BF16":
        return narrowed(array.astype(np.float32, copy=False)).tobytes()
    return array.astype(VIEWED[datatype], copy=False).tobytes()


def widened(bits: Array) -> Array:
    """The float32 of each BF16, given as its 16 bits: they are the upper half."""
    wide: Array = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


def narrowed(array: Array) -> Array:
    """The 16 bits of the BF16 nearest to each float32; ties go to the even one, NaN stays NaN."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    upper = bits >> np.uint32(16)
    rounded = (bits + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(array), upper | np.uint32(0x40), rounded).astype("<u2")


def _flatten(data: Json, place: str) -> list[Json]:
    """The list itself if it is flat; whether all of it is, is seen when its values are."""
    if not isinstance(data, list):
        raise BadRequestError("'data' must be an array", place=place)
    for _ in range(MAX_DEPTH):
        if not data or type(data[0]) is not list:
            break
        if not _LIST.issuperset(map(type, data)):
            raise BadRequestError(_MIXED, place=place)
        data = list(chain.from_iterable(data))
    else:
        raise BadRequestError(f"'data' is nested more than {MAX_DEPTH} deep", place=place)
    flat: list[Json] = data
    return flat


@lru_cache(maxsize=256)
def _struct(code: str, count: int) -> struct.Struct:
    return struct.Struct(f"<{count}{code}")


def _packed(flat: list[Json], datatype: str) -> Array | None:
    """Numbers as an array; None if there is anything that must be looked at more closely."""
    code = _CODES[datatype]
    try:
        packed = _struct(code, len(flat)).pack(*flat)
    except (struct.error, OverflowError, TypeError):
        return None
    array = np.frombuffer(packed, np.float32 if datatype == "BF16" else VIEWED[datatype])
    # a boolean has passed as 0 or 1
    suspicious = len(flat) <= _FEW or bool(((array == 0) | (array == 1)).any())
    if suspicious and bool in set(map(type, flat)):
        return None
    if datatype == "BF16":
        return _to_bf16(array)
    return array


def _to_bf16(array: Array) -> Array | None:
    """Rounded to what BF16 has; None if a value is too large for it."""
    rounded = widened(narrowed(array))
    return None if (np.isinf(rounded) != np.isinf(array)).any() else rounded


def _numbers(flat: list[Json], datatype: str, place: str) -> Array:
    """The careful way: it takes nulls, and says what it can't take."""
    dtype = DTYPES[datatype]
    allowed = _PLAIN[dtype.kind]
    if not allowed.issuperset(map(type, flat)):
        bad = next(value for value in flat if type(value) not in allowed)
        raise BadRequestError(_MIXED if isinstance(bad, list) else f"{bad!r:.80} is not {datatype}", place=place)
    if dtype.kind == "f":
        return _floats(flat, datatype, place)
    if dtype.kind in "iu" and flat:
        limits = np.iinfo(dtype)
        if min(flat) < limits.min or max(flat) > limits.max:
            bad = next(value for value in flat if not limits.min <= value <= limits.max)
            raise BadRequestError(f"{bad} is outside {datatype}'s {limits.min} to {limits.max}", place=place)
    return np.array(flat, dtype=dtype)


def _floats(flat: list[Json], datatype: str, place: str) -> Array:
    array: Array | None = None
    try:
        wide = np.array(flat, dtype=np.float64)  # None becomes NaN
        with np.errstate(over="ignore"):
            array = wide.astype(DTYPES[datatype], copy=False)
        if (np.isinf(array) != np.isinf(wide)).any():
            array = None
        elif datatype == "BF16":
            array = _to_bf16(array)
    except OverflowError:
        array = None
    if array is None:
        raise BadRequestError(f"a value is too large for {datatype}", place=place)
    return array


def _texts(flat: list[Json], place: str, nulls: bool, octets: bool) -> Array:
    for value in flat:
        if not isinstance(value, str) and not (nulls and value is None):
            wrong = _MIXED if isinstance(value, list) else f"{value!r:.80} is not BYTES: text is wanted"
            raise BadRequestError(wrong, place=place)
    array = np.empty(len(flat), dtype=object)
    array[:] = [value.encode() if isinstance(value, str) else value for value in flat] if octets else flat
    return array


def _texts_from_bytes(data: memoryview, count: int, place: str, octets: bool) -> Array:
    raw: list[memoryview] = []
    offset = 0
    while offset < len(data):
        if offset + 4 > len(data):
            raise BadRequestError(
                f"incomplete string length indicator for inference {place}, expecting 4 bytes but only "
                f"{len(data) - offset} bytes available"
            )
        (length,) = _LENGTH.unpack_from(data, offset)
        offset += 4
        if offset + length > len(data):
            raise BadRequestError(
                f"incomplete string data for inference {place}, expecting string of length {length} but only "
                f"{len(data) - offset} bytes available"
            )
        if len(raw) == count:
            raise BadRequestError(
                f"unexpected number of string elements {count + 1} for inference {place}, expecting {count}"
            )
        raw.append(data[offset : offset + length])
        offset += length
    if len(raw) != count:
        raise BadRequestError(f"expected {count} string elements for inference {place}, got {len(raw)}")
    array = np.empty(count, dtype=object)
    array[:] = [bytes(value) for value in raw] if octets else [_decoded(value, place) for value in raw]
    return array


def _decoded(data: memoryview, place: str) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise BadRequestError(f"an element is not UTF-8 text: {error}", place=place) from None


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return "" if value is None else str(value)
