"""What exactly is wrong with a file that can't be read: the slow look, row by row, taken once something failed."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from onejob.data.spec import Format
from onejob.errors import SourceError

_TAIL = 1 << 16


def unreadable(name: str, path: Path, kind: str, how: Format | None, error: Exception) -> SourceError:
    """The error for a file that a reader gave up on, with the row where it can be found."""
    if isinstance(error, OSError) and error.strerror:
        return SourceError(f"can't be read: {error.strerror}", place=name)
    found = _csv_row(path, how) if kind == "csv" else _json_row(path) if kind == "ndjson" else None
    if found:
        return SourceError(found, place=name, cure="Mend the row, or fetch the file again.")
    words = str(error).strip().splitlines()
    return SourceError(
        f"can't be read as {kind}; it may be damaged or cut off ({words[0] if words else type(error).__name__})",
        place=name,
        cure="Fetch it again, or set format.kind if it is something else.",
    )


def refuse_cut_line(name: str, path: Path, how: Format) -> None:
    """SourceError if a CSV file ends in the middle of a line: a reader would fill the rest with nulls."""
    with path.open("rb") as file:
        first = file.readline(_TAIL)
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL))
        tail = file.read()
    if tail.endswith((b"\n", b"\r")):
        return
    last = tail.rpartition(b"\n")[2]
    # a quoted value may hold line ends, and then the last line says nothing by itself
    if last.count(b'"') % 2 or first.count(b'"') % 2:
        return
    wanted, fields = _fields(first, how), _fields(last, how)
    if fields < wanted:
        raise SourceError(
            f"ends in the middle of row {_rows(path, how)}: it has {fields} of {wanted} fields",
            place=name,
            cure="It was cut off: fetch it again.",
        )


def _fields(line: bytes, how: Format) -> int:
    text = line.decode("utf-8", "replace").rstrip("\r\n")
    return len(next(csv.reader([text], delimiter=how.separator), []))


def _rows(path: Path, how: Format) -> int:
    """The number of the last row of a file whose last line has no end."""
    with path.open("rb") as file:
        ends = sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 20), b""))
    return ends if how.header else ends + 1


def _csv_row(path: Path, how: Format | None) -> str | None:
    """The first row with more fields than the header, or text that isn't UTF-8."""
    separator, header = (how.separator, how.header) if how else (",", True)
    row = 0
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = csv.reader(file, delimiter=separator)
            wanted = 0
            for number, fields in enumerate(lines):
                row = number if header else number + 1
                wanted = wanted or len(fields)
                if len(fields) > wanted:
                    return f"row {row} has {len(fields)} fields, the first line {wanted}"
    except UnicodeDecodeError as error:
        return f"near row {row + 1}: {error.object[error.start : error.end]!r} is not UTF-8"
    except csv.Error as error:
        return f"row {row + 1}: {error}"
    return None


def _json_row(path: Path) -> str | None:
    """The first line that is no JSON object."""
    with path.open("rb") as file:
        for row, line in enumerate(file, start=1):
            if not line.strip():
                continue
            shown = line[:60].decode("utf-8", "replace").rstrip()
            try:
                value = json.loads(line)
            except ValueError:
                return f"row {row} is no JSON: {shown!r}"
            if not isinstance(value, dict):
                return f"row {row} is no JSON object: {shown!r}"
    return None
