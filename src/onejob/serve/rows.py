"""Rows of several requests as one batch and back: arrays, or the bytes that a client sent, joined at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onejob.errors import InferenceError

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]
Cut = tuple[int, int] | None
"""Rows from the first until the second; None for all."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How requests lie in bytes: each input's name, dtype and shape without the rows. Of one layout they join."""

    names: tuple[str, ...]
    dtypes: tuple[np.dtype[Any], ...]
    dims: tuple[tuple[int, ...], ...]
    row_bytes: tuple[int, ...]


class Raw:
    """Inputs as their bytes, in the order of the layout; arrays are made of a whole batch at once."""

    def __init__(self, layout: Layout, pieces: Sequence[bytes | memoryview]) -> None:
        self.layout = layout
        self.pieces = pieces


def join(parts: Sequence[Arrays | Raw], cuts: Sequence[Cut] | None = None) -> Arrays:
    """Several requests' inputs as one batch; of each all rows, or those of its cut."""
    first = parts[0]
    if isinstance(first, Raw) and _are_alike(parts, first.layout):
        return _from_bytes(first.layout, parts, cuts)  # type: ignore[arg-type]
    arrays = [_arrays(part) for part in parts]
    if cuts is not None:
        arrays = [
            {name: array[slice(*cut)] for name, array in part.items()} if cut else part
            for part, cut in zip(arrays, cuts, strict=True)
        ]
    if len(arrays) == 1:
        return arrays[0]
    return {name: np.concatenate([part[name] for part in arrays]) for name in arrays[0]}


def _are_alike(parts: Sequence[Arrays | Raw], layout: Layout) -> bool:
    for part in parts:  # noqa: SIM110 - a generator would cost as much again, for each request
        if not isinstance(part, Raw) or part.layout is not layout:
            return False
    return True


def _arrays(part: Arrays | Raw) -> Arrays:
    return _from_bytes(part.layout, [part], None) if isinstance(part, Raw) else part


def _from_bytes(layout: Layout, parts: Sequence[Raw], cuts: Sequence[Cut] | None) -> Arrays:
    found: dict[str, Array] = {}
    for at, name in enumerate(layout.names):
        buffers = [part.pieces[at] for part in parts]
        if cuts is not None:
            width = layout.row_bytes[at]
            buffers = [
                memoryview(buffer)[cut[0] * width : cut[1] * width] if cut else buffer
                for buffer, cut in zip(buffers, cuts, strict=True)
            ]
        whole = buffers[0] if len(buffers) == 1 else b"".join(buffers)
        found[name] = np.frombuffer(whole, layout.dtypes[at]).reshape(-1, *layout.dims[at])
    return found


def check_rows(outputs: Arrays, rows: int, batchable: bool = True) -> None:
    """InferenceError if an output doesn't have the batch's rows."""
    for name, array in outputs.items() if batchable else ():
        if array.ndim == 0 or len(array) != rows:
            raise InferenceError(f"output {name!r} has shape {list(array.shape)} for {rows} rows", place="engine")


def split(outputs: Arrays, rows: Sequence[int]) -> list[Arrays | Exception]:
    """A batch's outputs as each request's own."""
    if len(rows) == 1:
        return [outputs]
    parts: list[Arrays | Exception] = []
    start = 0
    for amount in rows:
        parts.append({name: array[start : start + amount] for name, array in outputs.items()})
        start += amount
    return parts
