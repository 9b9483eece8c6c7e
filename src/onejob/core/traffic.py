"""What comes back from an endpoint: the words that serving (which writes it) and monitoring (which reads it) share.

    capture/open/*.arrows     records that a replica is writing: an Arrow IPC stream, locked by its writer
    capture/sealed/*.arrows   whole and durable; the loop makes `traffic` artifacts of them
    labels/open/*.jsonl       labels that a replica was given: a line each, durable before they are acknowledged
    labels/sealed/*.jsonl     the loop makes `labels` artifacts of them
    private.key               with which private values are hashed; it leaves the home in backups only

A segment's columns: `request`, `row`, `arrived` and `time` (microseconds, UTC), `key`, `input.<name>`,
`output.<name>`. Its schema's metadata holds, under `onejob`, {"format", "endpoint", "engine", "columns", "private",
"rate"}.
A line of labels: {"order", "line", "key" | "request" and "row", "label", "time", "arrived"}.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import math
import os
from pathlib import Path

from onejob.core.artifact import Json

CAPTURE, LABELS = "capture", "labels"
OPEN, SEALED = "open", "sealed"
SECRET = "private.key"
SEGMENT_SUFFIX, LABEL_SUFFIX = ".arrows", ".jsonl"

REQUEST, ROW, ARRIVED, TIME, KEY = "request", "row", "arrived", "time", "key"
INPUT, OUTPUT = "input.", "output."
META = "onejob"

SECOND = 1_000_000
"""Moments are whole microseconds since the epoch."""
STRAYS = 8
"""So many of the newest requests may be wrong about their event time without stopping the loop's clock."""
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)
_FIRST, _LAST = -62_135_596_800, 253_402_300_799
"""The years 1 to 9999, in seconds."""
MAX_KEY = 256


def moment(value: Json) -> int:
    """Microseconds since the epoch, from ISO text with a zone or from seconds; ValueError says what is wrong."""
    if isinstance(value, str):
        try:
            read = datetime.datetime.fromisoformat(value)
        except ValueError:
            raise ValueError("is not a time: ISO text such as '2024-05-01T12:00:00Z', or seconds since 1970") from None
        if read.tzinfo is None:
            raise ValueError("has no time zone: add Z, or an offset such as +02:00")
        return (read - _EPOCH) // _MICROSECOND
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("is not a time: ISO text such as '2024-05-01T12:00:00Z', or seconds since 1970")
    if not _FIRST <= value <= _LAST:
        raise ValueError("is no time of the years 1 to 9999 in seconds since 1970 (are these milliseconds?)")
    return round(value * SECOND)


def key_text(value: Json) -> str:
    """A key as the text by which it is joined; ValueError says what is wrong."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError("is no key: text or a whole number is wanted")
    if not 0 < len(value) <= MAX_KEY:
        raise ValueError(f"is no key: it has {len(value)} characters, and 1 to {MAX_KEY} are wanted")
    return value


def hidden(text: str, secret: bytes) -> str:
    """A private value's stand-in: equal values have equal ones, and nobody without the secret can guess them."""
    return hashlib.blake2b(text.encode(errors="replace"), key=secret, digest_size=16, person=b"onejob").hexdigest()


def secret_of(folder: Path) -> bytes:
    """The secret of an endpoint's folder, made by whoever needs it first."""
    path = folder / SECRET
    if not path.exists():
        aside = folder / f".{SECRET}.{os.getpid()}"
        aside.unlink(missing_ok=True)
        file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, os.urandom(32))
            os.fsync(file)
        finally:
            os.close(file)
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)  # unlike a rename, it leaves alone what another was quicker to make
        aside.unlink()
    return path.read_bytes()
