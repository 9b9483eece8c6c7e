"""Captured rows as an Arrow IPC stream: a batch's bytes, and where the whole batches of a torn stream end.

nanoarrow writes; every Arrow reader reads it (`polars.read_ipc_stream`). Nulls are nulls, never NaN: what a client
left out must look left out when it is trained on.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import nanoarrow as na
import numpy as np
from nanoarrow import ipc

from onejob.core.artifact import Json, canonical
from onejob.core.tensor import TensorSpec
from onejob.core.traffic import ARRIVED, KEY, META, REQUEST, ROW, TIME

Array = np.ndarray[Any, Any]
END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""The stream's end."""
_TYPES: Mapping[str, tuple[Any, str]] = {
    "BOOL": (na.c_schema(na.bool_()), "bool"),
    "UINT8": (na.c_schema(na.uint8()), "uint8"),
    "UINT16": (na.c_schema(na.uint16()), "uint16"),
    "UINT32": (na.c_schema(na.uint32()), "uint32"),
    "UINT64": (na.c_schema(na.uint64()), "uint64"),
    "INT8": (na.c_schema(na.int8()), "int8"),
    "INT16": (na.c_schema(na.int16()), "int16"),
    "INT32": (na.c_schema(na.int32()), "int32"),
    "INT64": (na.c_schema(na.int64()), "int64"),
    "FP16": (na.c_schema(na.float32()), "float32"),
    "FP32": (na.c_schema(na.float32()), "float32"),
    "FP64": (na.c_schema(na.float64()), "float64"),
    "BYTES": (na.c_schema(na.string()), "object"),
}
"""Datatype -> Arrow's type and numpy's; half floats are widened, since few readers know them."""
_TEXT, _ROW, _MOMENT = na.c_schema(na.string()), na.c_schema(na.int32()), na.c_schema(na.timestamp("us", "UTC"))


@dataclass(frozen=True)
class Field:
    """A column of a segment."""

    name: str
    datatype: str
    many: bool = False
    """Several values a row: a list."""

    @classmethod
    def of(cls, name: str, spec: TensorSpec, *, batchable: bool = True) -> Field:
        scalar = batchable and spec.shape[1:] in ((), (1,))
        return cls(name, spec.datatype, many=not scalar)


class Stream:
    """The bytes of a stream, piece by piece: the first has the schema before its batch."""

    def __init__(self, fields: Sequence[Field], meta: Mapping[str, Json]) -> None:
        self._fields = tuple(fields)
        heads = {REQUEST: _TEXT, ROW: _ROW, ARRIVED: _MOMENT, TIME: _MOMENT, KEY: _TEXT}
        types = {field.name: _type_of(field) for field in self._fields}
        self._schema = na.c_schema(na.struct({**heads, **types})).modify(metadata={META.encode(): canonical(meta)})
        self._out = io.BytesIO()
        self._writer = ipc.StreamWriter.from_writable(self._out)

    def piece(
        self,
        requests: Sequence[str],
        rows: Array,
        arrived: Array,
        times: Array,
        keys: Sequence[str | None],
        columns: Sequence[Any],
    ) -> bytes:
        """One batch; `columns` holds, for each field, values as `_values` takes them."""
        heads = [
            _texts(requests),
            na.c_array_from_buffers(_ROW, len(rows), [None, rows.astype(np.int32)]),
            na.c_array_from_buffers(_MOMENT, len(rows), [None, arrived.astype(np.int64)]),
            na.c_array_from_buffers(_MOMENT, len(rows), [None, times.astype(np.int64)]),
            _texts(keys),
        ]
        children = [_values(field, column) for field, column in zip(self._fields, columns, strict=True)]
        batch = na.c_array_from_buffers(self._schema, len(rows), [None], children=[*heads, *children])
        self._out.seek(0)
        self._out.truncate()
        self._writer.write_array(batch)
        return self._out.getvalue()


def mend(path: Path) -> tuple[int, bytes]:
    """How much of a torn stream is whole batches, and the end that must follow."""
    whole = 0
    with path.open("rb") as file:
        try:
            with ipc.InputStream.from_readable(file) as source:
                stream = na.c_array_stream(source)
                while True:
                    stream.get_next()
                    whole = file.tell()
        except (StopIteration, ValueError, RuntimeError, OSError):
            pass  # the end, or the torn batch that a killed writer left
    return whole, END


def _type_of(field: Field) -> Any:
    plain = _TYPES[field.datatype][0]
    return na.list_(plain) if field.many else plain


def _values(field: Field, column: Any) -> Any:
    """A column: texts as a list of str or None; numbers as an array (NaN: null); lists as (lengths, values)."""
    if field.many:
        lengths, inner = column
        offsets = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        child = _values(Field(field.name, field.datatype), inner)
        return na.c_array_from_buffers(_type_of(field), len(lengths), [None, offsets], children=[child])
    if field.datatype == "BYTES":
        return _texts(column)
    kind, dtype = _TYPES[field.datatype]
    values: Array = np.ascontiguousarray(column, dtype)
    if dtype == "bool":
        return na.c_array_from_buffers(kind, len(values), [None, np.packbits(values, bitorder="little")])
    missing = np.isnan(values) if values.dtype.kind == "f" else None
    if missing is None or not missing.any():
        return na.c_array_from_buffers(kind, len(values), [None, values])
    bits = np.packbits(~missing, bitorder="little")
    return na.c_array_from_buffers(kind, len(values), [bits, values], null_count=int(missing.sum()))


def _texts(values: Sequence[str | None]) -> Any:
    nulls, amount = values.count(None), len(values)
    if nulls == amount:
        nothing = [np.zeros(-(-amount // 8), np.uint8), np.zeros(amount + 1, np.int32), b""]
        return na.c_array_from_buffers(_TEXT, amount, nothing, null_count=nulls)
    known = [value or "" for value in values] if nulls else cast(Sequence[str], values)
    text = "".join(known)
    data = text.encode(errors="replace")  # half a surrogate pair: JSON can hold it, UTF-8 can't
    if len(data) == len(text):  # plain ASCII: as many bytes as characters
        lengths = np.fromiter(map(len, known), np.int32, len(known))
    else:
        lengths = np.fromiter((len(value.encode(errors="replace")) for value in known), np.int32, len(known))
    offsets = np.zeros(len(known) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    bits = np.packbits([value is not None for value in values], bitorder="little") if nulls else None
    return na.c_array_from_buffers(_TEXT, len(known), [bits, offsets, data], null_count=nulls)
