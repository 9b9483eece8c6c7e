"""How named arrays lie in a run of bytes, one after the other; and text arrays as bytes. Pure.

The head that says so is a JSON list of [name, dtype, shape], dtype in numpy's words and null for text. It is the same
bytes for the same shapes, so both ends remember what it means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]

ALIGN = 64
NULL, TEXT, BYTES = 0, 1, 2
"""What an element of a text array is."""


@dataclass(frozen=True, slots=True)
class Part:
    """An array in a body; a text array has no dtype, and takes as many bytes as it happens to need."""

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The arrays of a message in their order, and the bytes that say so."""

    head: bytes
    parts: tuple[Part, ...]
    fixed: tuple[list[int], int] | None
    """Where each begins, and where the last ends; None where there is text."""

    def places(self, texts: Sequence[int]) -> tuple[list[int], int]:
        """Where each array begins, and where the last ends; `texts` are the sizes of the text arrays."""
        return self.fixed or places(self.parts, texts)


class Plans:
    """Plans by what they are for, remembered; of many different ones the latest."""

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._known: dict[Any, Plan] = {}

    def of(self, arrays: Arrays) -> Plan:
        """For arrays that are to be sent."""
        key = tuple([(name, array.dtype, array.shape) for name, array in arrays.items()])
        return self._known.get(key) or self._keep(key, plan(arrays))

    def read(self, head: bytes) -> Plan:
        """For arrays that have come."""
        return self._known.get(head) or self._keep(head, read(head))

    def _keep(self, key: Any, made: Plan) -> Plan:
        if len(self._known) >= self._most:
            self._known.clear()
        self._known[key] = made
        return made


def plan(arrays: Arrays) -> Plan:
    parts = [
        [name, None if array.dtype.hasobject else array.dtype.newbyteorder("<").str, list(array.shape)]
        for name, array in arrays.items()
    ]
    return read(json.dumps(parts).encode())


def read(head: bytes) -> Plan:
    parts = tuple(_part(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(head))
    return Plan(head, parts, None if any(part.dtype is None for part in parts) else places(parts, ()))


def _part(name: str, dtype: str | None, shape: tuple[int, ...]) -> Part:
    kind = np.dtype(dtype) if dtype else None
    return Part(name, kind, shape, int(np.prod(shape, dtype=np.int64)) * kind.itemsize if kind else 0)


def places(parts: Sequence[Part], texts: Sequence[int]) -> tuple[list[int], int]:
    starts, at, given = [], 0, iter(texts)
    for part in parts:
        at = -(-at // ALIGN) * ALIGN
        starts.append(at)
        at += part.size if part.dtype is not None else next(given)
    return starts, at


def pack(array: Array) -> bytes:
    """A text array as bytes: lengths, kinds, and the elements one after the other."""
    kinds, pieces = bytearray(array.size), []
    for at, value in enumerate(array.reshape(-1).tolist()):
        if isinstance(value, str):
            kinds[at] = TEXT
            pieces.append(value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, bytes):
            kinds[at] = BYTES
            pieces.append(value)
        elif value is None:
            pieces.append(b"")
        else:
            raise TypeError(f"{value!r} is not text")
    lengths = np.fromiter(map(len, pieces), np.uint32, len(pieces))
    return b"".join([lengths.tobytes(), kinds, *pieces])


def unpack(data: memoryview, shape: tuple[int, ...], *, octets: bool = False) -> Array:
    """The text array that `pack` made bytes of; with `octets` its text comes as bytes."""
    count = int(np.prod(shape, dtype=np.int64))
    found = np.empty(count, object)
    kinds, at = data[4 * count : 5 * count], 5 * count
    for number, length in enumerate(np.frombuffer(data, np.uint32, count).tolist()):
        piece, at = data[at : at + length], at + length
        if kinds[number] == TEXT and not octets:
            found[number] = str(piece, "utf-8", "surrogatepass")
        elif kinds[number] != NULL:
            found[number] = bytes(piece)
    return found.reshape(shape)
