"""Reads captured traffic: sealed segments as columns of numpy arrays.

Numbers are float64 or their own whole type, with NaN for a null; texts are object arrays of str or None; columns of
several values a row are object arrays of arrays. Times are int64 microseconds since the epoch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import nanoarrow as na
import numpy as np
from nanoarrow import ipc

from onejob.core.artifact import Json
from onejob.core.traffic import ARRIVED, INPUT, KEY, META, OUTPUT, REQUEST, ROW, SECOND, STRAYS, TIME
from onejob.errors import DamagedError

Array = np.ndarray[Any, Any]
_PLAIN: Mapping[str, str] = {
    "uint8": "u1",
    "uint16": "u2",
    "uint32": "u4",
    "uint64": "u8",
    "int8": "i1",
    "int16": "i2",
    "int32": "i4",
    "int64": "i8",
    "float": "f4",
    "double": "f8",
    "timestamp": "i8",
}
"""Arrow's type -> numpy's."""


@dataclass(frozen=True)
class Traffic:
    """Captured rows, in the order of the segments and within them."""

    request: Array
    row: Array
    arrived: Array
    time: Array
    """Event time: as the request told it, else that of its arrival."""
    key: Array
    engine: Array
    """Digest of the engine that answered."""
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]

    def __len__(self) -> int:
        return len(self.request)

    def take(self, rows: Array) -> Traffic:
        """These rows, by index or by a mask."""
        return Traffic(
            self.request[rows],
            self.row[rows],
            self.arrived[rows],
            self.time[rows],
            self.key[rows],
            self.engine[rows],
            {name: values[rows] for name, values in self.inputs.items()},
            {name: values[rows] for name, values in self.outputs.items()},
        )


def read_traffic(paths: Sequence[Path]) -> Traffic:
    """All rows of these segments. A column that some of them lack is null there; DamagedError names a broken file."""
    parts = [part for path in paths for part in _batches(path)]
    heads = {name: _joined([p.heads[name] for p in parts], dtype) for name, dtype in _HEADS.items()}
    engines = np.array([p.engine for p in parts for _ in range(len(p))], dtype=object)
    return Traffic(
        request=heads[REQUEST],
        row=heads[ROW],
        arrived=heads[ARRIVED],
        time=heads[TIME],
        key=heads[KEY],
        engine=engines,
        inputs=_columns(parts, INPUT),
        outputs=_columns(parts, OUTPUT),
    )


def summary(path: Path) -> dict[str, Json]:
    """What a segment's artifact says of it: endpoint, engines with their rows, range of event times, rows, schema.

    `newest` holds event time and rows of the newest requests (loop/champion.py makes a clock of them).
    """
    stream = _open(path)
    meta = _meta(stream, path)
    rows, begins, ends = 0, None, None
    newest: dict[str, tuple[int, int]] = {}
    for part in _batches(path):
        times = part.heads[TIME]
        rows += len(part)
        newest = _newest(newest, part)
        begins = min(int(times.min()), begins if begins is not None else int(times.min()))
        ends = max(int(times.max()), ends if ends is not None else int(times.max()))
    schema = {child.name: _words(na.Schema(child)) for child in stream.get_schema().children}
    return {
        "format": 1,
        "endpoint": meta["endpoint"],
        "engines": {meta["engine"]: rows},
        "begins": (begins or 0) / SECOND,
        "ends": (ends or 0) / SECOND,
        "rows": rows,
        "newest": [[time / SECOND, count] for time, count in newest.values()],
        "columns": meta["columns"],
        "private": meta["private"],
        "rate": meta["rate"],
        "schema": schema,
    }


def _newest(known: Mapping[str, tuple[int, int]], part: _Part) -> dict[str, tuple[int, int]]:
    """The newest requests, with their event time and rows, the newest first: of those known and a batch's."""
    times, requests, found = part.heads[TIME], part.heads[REQUEST], dict[str, int]()
    for at in np.argsort(-times, kind="stable"):
        found.setdefault(requests[at], int(times[at]))
        if len(found) > STRAYS:
            break
    told = {request: (time, int((requests == request).sum())) for request, time in found.items()}
    return dict(sorted({**known, **told}.items(), key=lambda each: -each[1][0])[: STRAYS + 1])


_HEADS: Mapping[str, str] = {REQUEST: "object", ROW: "i4", ARRIVED: "i8", TIME: "i8", KEY: "object"}


@dataclass(frozen=True)
class _Part:
    """One batch of one segment."""

    engine: str
    heads: Mapping[str, Array]
    columns: Mapping[str, Array]

    def __len__(self) -> int:
        return len(self.heads[ROW])


def _batches(path: Path) -> Iterator[_Part]:
    stream = _open(path)
    meta, schema = _meta(stream, path), stream.get_schema()
    names = [child.name for child in schema.children]
    while True:
        try:
            view = stream.get_next().view()
        except StopIteration:
            return
        except (RuntimeError, ValueError) as error:
            raise _damaged(path, error) from error
        arrays = {name: _array(view.child(i), na.Schema(schema.child(i))) for i, name in enumerate(names)}
        heads = {name: arrays.pop(name) for name in _HEADS}
        yield _Part(meta["engine"], heads, arrays)


def _open(path: Path) -> Any:
    try:
        return na.c_array_stream(ipc.InputStream.from_path(str(path)))
    except (RuntimeError, ValueError, OSError) as error:
        raise _damaged(path, error) from error


def _meta(stream: Any, path: Path) -> dict[str, Json]:
    try:
        found = dict((stream.get_schema().metadata or {}).items())
        return dict(json.loads(found[META.encode()]))
    except (RuntimeError, ValueError, KeyError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DamagedError:
    return DamagedError(
        f"it is no segment of captured traffic: {error}", place=str(path), cure="`onejob verify` says what is damaged."
    )


def _array(view: Any, schema: Any) -> Array:
    """A column of a batch; copied, since the buffers end with the batch."""
    kind = schema.type.name.lower()
    length, offset = view.length, view.offset
    assert offset == 0, "a stream's batches begin at their first row"
    if kind in ("string", "large_string"):
        return _texts(view, length)
    if kind == "list":
        offsets = np.frombuffer(view.buffer(1), "i4")[: length + 1].tolist()
        inner = _array(view.child(0), schema.value_type)
        found = np.empty(length, object)
        found[:] = [inner[a:b] for a, b in pairwise(offsets)]
        return found
    if kind == "bool":
        return np.unpackbits(np.frombuffer(view.buffer(1), "u1"), count=length, bitorder="little").astype(bool)
    values = np.frombuffer(view.buffer(1), _PLAIN[kind])[:length].copy()
    valid = _valid(view, length)
    if valid is not None:
        values = values if values.dtype.kind == "f" else values.astype("f8")
        values[~valid] = np.nan
    return values


def _texts(view: Any, length: int) -> Array:
    offsets = np.frombuffer(view.buffer(1), "i4")[: length + 1].tolist()
    data = bytes(view.buffer(2))
    found = np.empty(length, object)
    text = data.decode()
    if len(text) == len(data):  # plain ASCII: characters lie where bytes do
        found[:] = [text[a:b] for a, b in pairwise(offsets)]
    else:
        found[:] = [data[a:b].decode() for a, b in pairwise(offsets)]
    valid = _valid(view, length)
    if valid is not None:
        found[~valid] = None
    return found


def _valid(view: Any, length: int) -> Array | None:
    if not view.null_count:
        return None
    bits = np.frombuffer(view.buffer(0), "u1")
    return np.unpackbits(bits, count=length, bitorder="little").astype(bool)


def _columns(parts: Sequence[_Part], prefix: str) -> dict[str, Array]:
    names = dict.fromkeys(name for part in parts for name in part.columns if name.startswith(prefix))
    return {name.removeprefix(prefix): _joined([_or_null(part, name, parts) for part in parts]) for name in names}


def _or_null(part: _Part, name: str, parts: Sequence[_Part]) -> Array:
    if name in part.columns:
        return part.columns[name]
    like = next(other.columns[name] for other in parts if name in other.columns)
    return np.full(len(part), None if like.dtype == object else np.nan, object if like.dtype == object else "f8")


def _joined(arrays: Sequence[Array], dtype: str | None = None) -> Array:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype or "f8")


def _words(schema: Any) -> str:
    kind = schema.type.name.lower()
    return f"list<{_words(schema.value_type)}>" if kind == "list" else kind
