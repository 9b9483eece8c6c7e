"""Find a request that an endpoint has answered, by its id: where `onejob trace REQUEST_ID` begins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from onejob.core.artifact import Json, canonical

FOLDER = "requests"


def find_request(folder: Path, request: str) -> dict[str, Json] | None:
    """What the request log says of the newest request with this id, or None (rotated away, or it never was)."""
    needle = canonical(request)
    for path in _newest_first(folder):
        for line in reversed(_lines_with(path, needle)):
            for record in reversed(_records(line)):
                if record.get("id") == request:
                    return record
    return None


def find_in_endpoints(endpoints: Path, request: str) -> tuple[str, dict[str, Json]] | None:
    """The endpoint and the line, looking through every endpoint of a home (`<home>/endpoints`)."""
    for folder in sorted(endpoints.glob("*")):
        record = find_request(folder, request)
        if record is not None:
            return folder.name, record
    return None


def recent(folder: Path, limit: int = 20) -> list[dict[str, Json]]:
    """The newest answered requests, newest first."""
    found: list[dict[str, Json]] = []
    for path in _newest_first(folder):
        lines = path.read_bytes().splitlines()[-limit:]
        found += [record for line in lines for record in _records(line)]
        if len(found) >= limit * 2:
            break  # replicas write side by side: one file more than needed, then sort
    return sorted(found, key=lambda record: float(record.get("time", 0.0)), reverse=True)[:limit]


def _newest_first(folder: Path) -> Iterator[Path]:
    yield from sorted((folder / FOLDER).glob("*.jsonl"), reverse=True)


def _lines_with(path: Path, needle: bytes) -> list[bytes]:
    try:
        with path.open("rb") as file:
            return [line for line in file if needle in line]
    except FileNotFoundError:
        return []  # rotated away in between


def _records(line: bytes) -> list[dict[str, Json]]:
    """The requests of a line: one, or those of a batch that were answered together."""
    try:
        told = json.loads(line)
    except ValueError:
        return []  # the torn last line of a killed writer
    if not isinstance(told, dict):
        return []
    if "ids" not in told:
        return [told]
    shared = {name: value for name, value in told.items() if name not in ("ids", "rows", "ms")}
    each = zip(told["ids"], told["rows"], told["ms"], strict=False)
    return [{**shared, "id": name, "rows": rows, "ms": took} for name, rows, took in each]
