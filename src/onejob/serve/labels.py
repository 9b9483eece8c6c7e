"""Labels that come after the answers: read from JSON, NDJSON or CSV, checked row by row, durable before they are
acknowledged.

A bad row is refused by its line, value and reason; the good ones are kept. Batches are numbered in one order over all
writers of an endpoint (replicas, and `onejob label`), whatever the clock does, so that of two labels for one row it is
known which came later. Joining them with the traffic is monitoring's business.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onejob.core.artifact import Json, canonical
from onejob.core.faults import reach
from onejob.core.traffic import LABEL_SUFFIX, LABELS, SECOND, hidden, key_text, moment, secret_of
from onejob.errors import BadRequestError, OnejobError
from onejob.serve.identify import Roles
from onejob.serve.spool import Spool

ORDER, LOCK = "order", "lock"
MAX_BYTES = 8 << 20
TICK_SECONDS = 1.0
SHOWN = 100
"""Refused rows that an answer names; all are counted."""

Check = Callable[[list[Any]], Any]
Rows = Iterable[tuple[int, Any]]
"""(line, record) each; lines are counted from 1."""


@dataclass(frozen=True)
class Names:
    """The fields of a record, each by the names that it may have; the first that is there counts."""

    key: tuple[str, ...]
    request: tuple[str, ...]
    row: tuple[str, ...]
    label: tuple[str, ...]
    time: tuple[str, ...]

    @classmethod
    def of(cls, roles: Roles, told: Mapping[str, str | None] | None = None) -> Names:
        """The usual names and the job's own; `told` names a field's column and leaves no other."""
        usual = {
            "key": (roles.id, "id", "key"),
            "request": ("request_id",),
            "row": ("row",),
            "label": (roles.label, "label"),
            # the job's own time is that of the event, not that of the label
            "time": ("label_time", "time" if roles.time != "time" else None),
        }
        chosen = {name: (told[name],) if told and told.get(name) else names for name, names in usual.items()}
        return cls(**{name: tuple(text for text in names if text) for name, names in chosen.items()})


@dataclass(frozen=True, slots=True)
class Label:
    """A label for the row of a request, or for all rows of a key."""

    line: int
    value: Json
    key: str | None = None
    request: str | None = None
    row: int | None = None
    time: int | None = None
    """When it became known, in microseconds; None: when it arrived."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that was not taken."""

    line: int
    value: Json
    reason: str


@dataclass
class Batch:
    """What a file or a message came to."""

    labels: list[Label] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    def to_json(self, *, accepted: int) -> dict[str, Json]:
        rows: list[Json] = [{"line": r.line, "value": r.value, "reason": r.reason} for r in self.refused[:SHOWN]]
        return {"accepted": accepted, "refused": len(self.refused), "rows": rows}


class LabelLog:
    """Takes batches of labels for one endpoint; any thread may."""

    def __init__(
        self,
        folder: Path,
        roles: Roles,
        check: Check | None,
        *,
        private: Mapping[str, str] | None = None,
        age: float = 60.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder / LABELS
        self._roles = roles
        self._check = check
        self._mode = (private or {}).get(roles.id or "", "")
        self._secret = secret_of(folder) if self._mode == "hash" else b""
        self._age = age
        self._clock = clock
        self._spool = Spool(self._folder, LABEL_SUFFIX, clock=clock)
        self._lock = threading.Lock()
        self._accepted = self._refused = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="labels", daemon=True)

    def start(self) -> None:
        """Seal by age from now on."""
        self._thread.start()

    def stop(self, patience: float = 5.0) -> None:
        self._ending.set()
        self._thread.join(patience)

    def counts(self) -> dict[str, int]:
        return {"labels": self._accepted, "labels_refused": self._refused}

    def take(self, rows: Rows, names: Names | None = None, *, text: bool = False, strict: bool = False) -> Batch:
        """Check records and keep the good ones, durably; with `strict` none if one is bad.

        `text` says that values were read from text, where a number looks like one. StoreError and OSError: nothing was
        kept, and nothing may be acknowledged.
        """
        batch = read(rows, names or Names.of(self._roles), self._check, text=text)
        if self._mode == "drop":
            batch = _without_keys(batch)
        if batch.labels and not (strict and batch.refused):
            self._keep(batch.labels)
            self._accepted += len(batch.labels)
        elif strict and batch.refused:
            batch.labels.clear()
        self._refused += len(batch.refused)
        return batch

    def seal(self) -> None:
        """Hand over what was taken so far."""
        with self._lock:
            self._spool.seal()

    def _keep(self, labels: Sequence[Label]) -> None:
        with self._lock, _numbered(self._folder, self._clock) as order:
            arrived = round(self._clock() * SECOND)
            lines = b"".join(canonical(self._line(order, arrived, label)) + b"\n" for label in labels)
            reach("labels.before_write")
            self._spool.append(lines, durable=True)
            reach("labels.after_write")

    def _line(self, order: int, arrived: int, label: Label) -> dict[str, Json]:
        known = {"order": order, "line": label.line, "label": label.value, "arrived": arrived, "time": label.time}
        if label.request is not None:
            return {**known, "request": label.request, "row": label.row}
        assert label.key is not None
        return {**known, "key": hidden(label.key, self._secret) if self._secret else label.key}

    def _run(self) -> None:
        while not self._ending.wait(TICK_SECONDS):
            if self._spool.age >= self._age or self._spool.size >= MAX_BYTES:
                self._seal_quietly()
        self._seal_quietly()

    def _seal_quietly(self) -> None:
        with contextlib.suppress(
            OSError
        ):  # it stays where it is, durable, to be sealed at the next tick, or by the loop
            self.seal()


def parse(data: bytes, content_type: str) -> tuple[Rows, bool]:
    """A message's records, and whether their values are text; BadRequestError if it is no such message at all."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "text/csv":
        return _csv(data), True
    if kind in ("application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines"):
        return _ndjson(data), False
    if kind not in (
        "",
        "application/json",
        "application/x-www-form-urlencoded",
    ):  # the last is what curl says by itself
        cure = "Send application/json, application/x-ndjson or text/csv."
        raise BadRequestError(f"labels can't be read from {kind!r}", place="Content-Type", cure=cure)
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"failed to parse the labels' JSON: {error}", place="labels") from None
    found = message.get("labels") if isinstance(message, dict) else None
    if not isinstance(found, list):
        raise BadRequestError("'labels' must be an array of records", place="labels")
    return enumerate(found, 1), False


def read(rows: Rows, names: Names, check: Check | None, *, text: bool) -> Batch:
    """Records as labels, each checked by itself."""
    batch = Batch()
    known: dict[tuple[type, Json], Json | ValueError] = {}
    for line, record in rows:
        if isinstance(record, Refused):
            batch.refused.append(record)
            continue
        try:
            label = _read_one(line, record, names, text)
            mark = (type(label.value), label.value)
            if mark not in known:
                known[mark] = _checked(label.value, check, text)
            value = known[mark]
            if isinstance(value, ValueError):
                raise value
            batch.labels.append(replace(label, value=value))
        except ValueError as error:
            value, reason = error.args if len(error.args) == 2 else (None, str(error))
            batch.refused.append(Refused(line, _shown(value), reason))
    return batch


def mend(path: Path) -> tuple[int, bytes]:
    """How much of a dead writer's file is whole lines."""
    return path.read_bytes().rfind(b"\n") + 1, b""


def _read_one(line: int, record: Any, names: Names, text: bool) -> Label:
    """ValueError(value, reason) for a record that names no row, or has no label."""
    if not isinstance(record, Mapping):
        raise ValueError(record, "is no record of fields and values")
    request, key = _first(record, names.request), _first(record, names.key)
    value = _first(record, names.label)
    if value is None:
        raise ValueError(request if request is not None else key, f"has no {' or '.join(names.label)}")
    if isinstance(value, list | dict):
        raise ValueError(value, "is no label: text, a number, true or false is wanted")
    told = _first(record, names.time)
    time = None if told is None else _about(told, moment, _plain(told) if text else told)
    if request is not None:
        row = _first(record, names.row)
        return Label(line, value, request=_about(request, key_text), row=_row(row, text), time=time)
    if key is None:
        raise ValueError(value, f"has neither {' nor '.join((*names.key, *names.request))}")
    return Label(line, value, key=_about(key, key_text), time=time)


def _first(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    for name in names:
        value = record.get(name)
        if value is not None and value != "" and value == value:
            return value
    return None


def _about(shown: Any, read: Callable[[Any], Any], value: Any = ...) -> Any:
    try:
        return read(shown if value is ... else value)
    except ValueError as error:
        raise ValueError(shown, str(error)) from None


def _row(value: Any, text: bool) -> int | None:
    if value is None:
        return None
    number = _plain(value) if text else value
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(value, "is no row of a request: a whole number from 0 is wanted")
    return number


def _checked(value: Json, check: Check | None, text: bool) -> Json | ValueError:
    """The label as the family takes it; or why it doesn't."""
    forms = [value, _plain(value)] if text and isinstance(value, str) else [value]
    if check is None:
        return forms[-1]
    reason = ""
    for form in forms:
        try:
            check([form])
        except OnejobError as error:
            reason = error.message.replace(", row 0:", ":")  # it was asked about one value
        else:
            return form
    return ValueError(value, f"is no label of this model: {reason}")


def _plain(value: Any) -> Any:
    """Text as the number or the truth that it spells, else as it is."""
    if not isinstance(value, str):
        return value
    word = value.strip()
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return value


def _without_keys(batch: Batch) -> Batch:
    reason = "is a key, and keys of this endpoint aren't recorded ([monitor] capture.private): name the request"
    refused = [Refused(label.line, label.key, reason) for label in batch.labels if label.key is not None]
    return Batch([label for label in batch.labels if label.key is None], [*batch.refused, *refused])


def _shown(value: Any) -> Json:
    plain = value if isinstance(value, str | int | float | bool) or value is None else str(value)
    if isinstance(plain, float) and plain != plain:
        return "nan"
    return plain[:80] if isinstance(plain, str) else plain


def _csv(data: bytes) -> Iterator[tuple[int, Any]]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRequestError(f"the labels are not UTF-8 text: {error}", place="labels") from None
    reader = csv.DictReader(io.StringIO(text, newline=""))
    while True:
        try:
            record = next(reader, None)
        except csv.Error as error:
            yield reader.line_num, Refused(reader.line_num, None, f"is no line of CSV: {error}")
            continue
        if record is None:
            return
        yield reader.line_num, {name: value for name, value in record.items() if name is not None}


def _ndjson(data: bytes) -> Iterator[tuple[int, Any]]:
    for line, text in enumerate(data.split(b"\n"), 1):
        if not text.strip():
            continue
        try:
            yield line, json.loads(text)
        except (ValueError, RecursionError) as error:
            shown = text[:80].decode(errors="replace")
            yield line, Refused(line, shown, f"is no line of JSON: {error}")


@contextmanager
def _numbered(folder: Path, clock: Callable[[], float]) -> Iterator[int]:
    """The next number of the endpoint's batches, which grows whatever the clock does; one writer at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            last = int((folder / ORDER).read_text() or 0)
        except (OSError, ValueError):
            last = 0
        order = max(round(clock() * SECOND), last + 1)
        aside = folder / f".{ORDER}"
        aside.write_text(str(order))
        aside.replace(folder / ORDER)
        yield order
    finally:
        os.close(lock)
