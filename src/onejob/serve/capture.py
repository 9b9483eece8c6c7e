"""Records what was asked and answered, never in a request's way.

The request's path appends references to a bounded buffer, and that is all. A thread samples, hides what is private,
and writes about once a second, so a crash loses at most the last second's rows. When the disk is slow the buffer fills,
when it is full the write fails: rows are dropped and counted, and serving goes on.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from onejob.core.artifact import Json
from onejob.core.faults import reach
from onejob.core.tensor import TensorSpec
from onejob.core.traffic import CAPTURE, INPUT, KEY, OUTPUT, SEGMENT_SUFFIX, hidden, secret_of
from onejob.errors import UnavailableError
from onejob.serve.identify import Roles, Told
from onejob.serve.model import Column
from onejob.serve.rows import Arrays
from onejob.serve.segment import END, Field, Stream
from onejob.serve.spool import Spool

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.5
FLUSH_REQUESTS, FLUSH_ROWS = 512, 2048
"""So many are written at once: what is written soon is still in the processor's caches, and is freed soon. Left to pile
up for half a second, the same rows cost a request twice as much."""
MOST_BYTES = 64 << 20
"""Bytes of request bodies that may wait; what is decoded of them takes a few times as much."""
MOST_ROWS = 100_000
PIECE_ROWS, PIECE_BYTES = 8192, 16 << 20
"""At most so much is written as one batch (a request of more rows is one batch by itself)."""
REASONS = ("buffer", "disk", "space", "value")
"""Why a row was dropped: the buffer was full; a write failed; the disk's reserve was reached; it can't be written."""


@dataclass(frozen=True)
class Rules:
    """What `[monitor] capture` says."""

    rate: float
    private: Mapping[str, str]
    segment: int
    age: float
    reserve: int

    @classmethod
    def of(cls, options: Mapping[str, Json]) -> Rules:
        return cls(
            rate=float(options.get("rate", 1.0)),
            private=dict(options.get("private", {})),
            segment=int(options.get("segment", 64 << 20)),
            age=float(options.get("age", 60.0)),
            reserve=int(options.get("reserve", 256 << 20)),
        )


@dataclass(slots=True)
class Record:
    """A request by reference, or a batch of them; ids and outputs come when it is answered. Made for each request, so
    it isn't frozen: that would cost a microsecond."""

    requests: Sequence[str]
    counts: Sequence[int]
    """Rows of each of the requests."""
    size: int
    told: Told
    columns: Mapping[str, Column]
    outputs: Arrays

    @property
    def rows(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True)
class Signature:
    """What the model takes and gives."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    batchable: bool
    roles: Roles


class Capture:
    """The buffer, and the thread that empties it. `add` belongs to the event loop's thread, all else to its own."""

    def __init__(
        self,
        folder: Path,
        meta: Mapping[str, Json],
        signature: Signature,
        rules: Rules,
        *,
        spool: Spool | None = None,
        free: Callable[[Path], int] | None = None,
    ) -> None:
        check_private(rules.private, signature)
        self._folder = folder / CAPTURE
        self._rules = rules
        self._signature = signature
        self._secret = secret_of(folder) if "hash" in rules.private.values() else b""
        self._fields, self._sources = _fields(signature, rules.private)
        self._pick_inputs = _picker([one.name for one in self._sources.values() if not one.output])
        self._pick_outputs = _picker([one.name for one in self._sources.values() if one.output])
        self._meta = {"format": 1, **meta, "columns": signature.roles.to_json(), "private": dict(rules.private)}
        self._meta["rate"] = rules.rate
        self._spool = spool or Spool(self._folder, SEGMENT_SUFFIX)
        self._stream: Stream | None = None
        self._free = free or _free
        self._buffer: deque[Record] = deque()
        self._added = self._taken = self._added_rows = self._taken_rows = 0
        self.rows = 0
        """Rows written."""
        self.dropped = dict.fromkeys(REASONS, 0)
        self.fault = ""
        """Why the last write failed; empty while all is well."""
        self._ending = False
        self._wake = threading.Event()
        self._due = FLUSH_ROWS
        """When so many rows have been added, the thread is woken."""
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)

    def add(self, record: Record) -> None:
        """Remember an answered request; dropped and counted when the buffer is full."""
        rows = record.rows
        full = self._added - self._taken + record.size > MOST_BYTES and self._buffer
        if full or self._added_rows - self._taken_rows + rows > MOST_ROWS:
            self.dropped["buffer"] += rows
            return
        self._added += record.size
        self._added_rows += rows
        self._buffer.append(record)
        if self._added_rows >= self._due or len(self._buffer) >= FLUSH_REQUESTS:
            self._due = self._added_rows + FLUSH_ROWS
            self._wake.set()

    def start(self) -> None:
        self._thread.start()

    def stop(self, patience: float = 5.0) -> None:
        """Write and seal the rest; give up on a disk that doesn't answer."""
        self._ending = True
        self._wake.set()
        self._thread.join(patience)

    def counts(self) -> dict[str, int]:
        """Names and values for the endpoint's counters."""
        told = {f"capture_dropped.{reason}": count for reason, count in self.dropped.items() if count}
        return {"capture_rows": self.rows, **told}

    # ---- the thread

    def flush(self) -> None:
        """Write what is buffered, and seal the file when it is large or old enough. Never raises."""
        while self._buffer:
            self._write(self._take())
        if self._spool.size >= self._rules.segment or self._spool.age >= self._rules.age:
            self.seal()

    def seal(self) -> None:
        """Hand the file over, whatever its size."""
        try:
            self._spool.seal(END)
            self._stream = None
        except OSError as error:
            self._blame(str(error))

    def _run(self) -> None:
        while not self._ending:
            self._wake.wait(FLUSH_SECONDS)
            self._wake.clear()
            self.flush()
        self.flush()
        self.seal()

    def _take(self) -> list[Record]:
        taken: list[Record] = []
        rows = size = 0
        while self._buffer and rows < PIECE_ROWS and size < PIECE_BYTES:
            record = self._buffer.popleft()
            taken.append(record)
            rows, size = rows + record.rows, size + record.size
        self._taken += size
        self._taken_rows += rows
        return taken

    def _write(self, records: list[Record]) -> None:
        amount = sum(record.rows for record in records)
        try:
            if self._free(self._folder.parent) < self._rules.reserve:
                self._drop("space", amount, "less space is left than [monitor] capture.reserve")
                return
            amount, data = self._encoded(records)
            if not amount:
                return
            reach("capture.before_write")
            self._spool.append(data)
            reach("capture.after_write")
        except OSError as error:
            self._drop("disk", amount, str(error))
            return
        except Exception as error:  # a value that no column takes: nothing that a client sends may stop the thread
            if len(records) == 1:
                self._drop("value", amount, f"{type(error).__name__}: {error}")
            for record in records if len(records) > 1 else ():
                self._write([record])  # only the culprit is dropped
            return
        self.rows += amount
        if self.fault:
            logger.info("capture goes on")
            self.fault = ""
        if self._spool.size >= self._rules.segment:
            self.seal()

    def _encoded(self, records: list[Record]) -> tuple[int, bytes]:
        """The rows that the sampling keeps, as bytes of the stream."""
        counts = np.array(list(chain.from_iterable([record.counts for record in records])))
        single = bool((counts == 1).all())
        requests = list(chain.from_iterable([record.requests for record in records]))
        if not single:
            requests = [request for request, count in zip(requests, counts.tolist(), strict=True) for _ in range(count)]
        rows, told = [record.rows for record in records], [record.told for record in records]
        keyed = any(one.keys is not None for one in told)
        keys: list[str | None] = [None] * sum(rows)
        if keyed:
            keys = list(chain.from_iterable([one.keys_of(count) for one, count in zip(told, rows, strict=True)]))
        mode = self._rules.private.get(self._signature.roles.id or "")
        if mode and keyed:
            keys = [hidden(key, self._secret) if key is not None and mode == "hash" else None for key in keys]
        kept = sampled(self._rules.rate, requests, keys)
        if kept is not None and not len(kept):
            return 0, b""
        numbers = np.zeros(len(counts), int) if single else np.concatenate([np.arange(count) for count in counts])
        times = arrived = np.repeat([one.arrived for one in told], rows)
        if any(one.times is not None for one in told):
            times = np.array(list(chain.from_iterable([one.times_of(n) for one, n in zip(told, rows, strict=True)])))
        found = self._parts(records)
        columns = [
            self._column(*one, parts, records, kept) for one, parts in zip(self._sources.items(), found, strict=True)
        ]
        if self._stream is None or not self._spool.size:
            self._stream = Stream(self._fields, self._meta)
        if kept is not None:
            requests, keys = [requests[row] for row in kept], [keys[row] for row in kept]
            numbers, arrived, times = numbers[kept], arrived[kept], times[kept]
        return len(requests), self._stream.piece(requests, numbers, arrived, times, keys, columns)

    def _parts(self, records: list[Record]) -> list[Sequence[Column]]:
        """For each field, its value in each record."""
        # two looks into each record, whatever its columns: this is half of what capture costs
        asked = [self._pick_inputs(record.columns) for record in records]
        given = [self._pick_outputs(record.outputs) for record in records]
        return [*zip(*asked, strict=True), *zip(*given, strict=True)]

    def _column(self, field: Field, source: _Source, parts: Sequence[Column], records: list[Record], kept: Any) -> Any:
        """A field's values over all records, those that the sampling keeps."""
        if field.many:
            return _lists(parts, [record.rows for record in records], kept)
        values = _texts(parts) if source.spec.datatype == "BYTES" else _numbers(parts, source.spec)
        if source.hide:
            values = [_hidden(value, self._secret) for value in values]
        if kept is None:
            return values
        return [values[row] for row in kept] if isinstance(values, list) else values[kept]

    def _drop(self, reason: str, rows: int, why: str) -> None:
        self.dropped[reason] += rows
        if not self._spool.size:
            self._stream = None  # the schema went with what was dropped
        self._blame(why)

    def _blame(self, why: str) -> None:
        if why != self.fault:
            logger.warning("capture drops rows: %s", why)
        self.fault = why


@dataclass(frozen=True)
class _Source:
    """Where a field's values come from."""

    name: str
    spec: TensorSpec
    output: bool
    hide: bool


def check_private(private: Mapping[str, str], signature: Signature) -> None:
    """A misspelt name would let private values through, so an unknown one is an error."""
    roles = signature.roles
    known = [*signature.inputs, *signature.outputs, *([roles.id] if roles.id else [])]
    for name in private:
        if name not in known:
            cure = f"Columns: {', '.join(known)}."
            raise UnavailableError(f"no column is called {name!r}", place="[monitor] capture.private", cure=cure)
        if name == roles.time:
            cure = "Name another column in [data] columns.time, or take it out of the list."
            raise UnavailableError(
                f"{name!r} is the event time, which must be recorded", place="[monitor] capture.private", cure=cure
            )


def sampled(rate: float, requests: Sequence[str], keys: Sequence[str | None]) -> Any:
    """Indices of the rows that a rate keeps, by the hash of key or request id: the same everywhere; None for all."""
    if rate >= 1:
        return None
    bound = int(rate * (1 << 64))
    names = (request if key is None else key for request, key in zip(requests, keys, strict=True))
    hashes = (int.from_bytes(hashlib.blake2b(name.encode(errors="replace"), digest_size=8).digest()) for name in names)
    return np.array([row for row, hashed in enumerate(hashes) if hashed < bound], dtype=np.int64)


def _fields(signature: Signature, private: Mapping[str, str]) -> tuple[list[Field], dict[Field, _Source]]:
    sources: dict[Field, _Source] = {}
    for prefix, specs in ((INPUT, signature.inputs), (OUTPUT, signature.outputs)):
        for name, spec in specs.items():
            mode = private.get(name)
            if mode == "drop":
                continue
            field = Field.of(prefix + name, spec, batchable=signature.batchable)
            if mode == "hash":
                if field.many:
                    cure = "Drop it: write 'drop'."
                    raise UnavailableError(f"column {name!r} holds lists, which can't be hashed", place=KEY, cure=cure)
                field = Field(field.name, "BYTES")
            sources[field] = _Source(name, spec, prefix == OUTPUT, mode == "hash")
    return list(sources), sources


def _picker(names: Sequence[str]) -> Callable[[Mapping[str, Column]], tuple[Column, ...]]:
    """Takes these columns out of a record, in their order."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda columns: tuple(columns[name] for name in names)


def _texts(parts: Sequence[Column]) -> list[str | None]:
    """Text columns of several requests as one list; a number or truth that was sent as a category is text too."""
    flat = _flat(parts)
    if {str, type(None)}.issuperset(map(type, flat)):
        return flat
    return [_text(value) for value in flat]


def _flat(parts: Sequence[Column]) -> list[Any]:
    if np.ndarray in set(map(type, parts)):
        parts = [part.reshape(-1).tolist() if isinstance(part, np.ndarray) else part for part in parts]
    return list(chain.from_iterable(parts))


def _text(value: Any) -> str | None:
    match value:
        case None | str():
            return value
        case bool():
            return "true" if value else "false"
        case bytes():
            return value.decode(errors="replace")
        case float() if value != value:
            return None
    return str(value)


def _numbers(parts: Sequence[Column], spec: TensorSpec) -> Any:
    if {np.ndarray}.issuperset(map(type, parts)):
        return np.concatenate([np.asarray(part).reshape(-1) for part in parts])
    return np.array(_flat(parts), dtype=np.float64 if spec.datatype.startswith("FP") else None)  # None becomes NaN


def _lists(parts: Sequence[Column], rows: Sequence[int], kept: Any) -> tuple[Any, Any]:
    """(lengths, flat values) of a column with several values a row, as arrays; text as a list."""
    tables = [np.asarray(part).reshape(count, -1) for part, count in zip(parts, rows, strict=True)]
    lengths = np.repeat([table.shape[1] for table in tables], rows)
    if kept is None:
        flat = np.concatenate([table.reshape(-1) for table in tables])
    else:
        pieces = [row for table in tables for row in table]
        flat = np.concatenate([pieces[row] for row in kept])
        lengths = lengths[kept]
    return lengths, [_text(value) for value in flat.tolist()] if flat.dtype == object else flat


def _hidden(value: Any, secret: bytes) -> str | None:
    if value is None or value != value:
        return None
    return hidden(value if isinstance(value, str) else repr(float(value)), secret)


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
