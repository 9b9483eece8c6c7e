"""Reads labels that came late: sealed batches, in the one order in which they were taken."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onejob.core.artifact import Json
from onejob.core.traffic import SECOND
from onejob.errors import DamagedError


@dataclass(frozen=True, slots=True)
class Label:
    """A label for a row of a request, or for every row of a key."""

    order: int
    """Of its batch: a greater one came later."""
    line: int
    value: Json
    time: int
    """When it became known, in microseconds: as it says itself, else when it arrived."""
    arrived: int
    key: str | None = None
    request: str | None = None
    row: int | None = None

    @property
    def target(self) -> tuple[str, str, int | None]:
        """What it is for."""
        return ("key", self.key, None) if self.key is not None else ("request", self.request or "", self.row)


def read_labels(paths: Sequence[Path]) -> list[Label]:
    """The labels of these batches, the oldest first; DamagedError names a broken file and line."""
    found = [label for path in paths for label in _lines(path)]
    return sorted(found, key=lambda label: (label.order, label.line))


def summary(path: Path) -> dict[str, Json]:
    """What a batch's artifact says of it: rows, the range of the labels' times."""
    labels = list(_lines(path))
    times = [label.time for label in labels] or [0]
    return {"format": 1, "rows": len(labels), "begins": min(times) / SECOND, "ends": max(times) / SECOND}


def _lines(path: Path) -> list[Label]:
    lines = path.read_bytes().splitlines()
    try:
        told = json.loads(b"[%b]" % b",".join(lines))  # all at once: several times quicker than line by line
        if len(told) == len(lines):
            return [_label(line) for line in told]
    except (ValueError, KeyError, TypeError):
        pass
    return list(_parsed(path, lines))


def _parsed(path: Path, lines: Iterable[bytes]) -> Iterator[Label]:
    """Line by line, to name the one that is wrong."""
    for number, text in enumerate(lines, 1):
        try:
            yield _label(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            cure = "`onejob verify` says what is damaged."
            raise DamagedError(f"line {number} is no label: {error!r}", place=str(path), cure=cure) from error


def _label(line: dict[str, Json]) -> Label:
    arrived, time = line["arrived"], line["time"]
    return Label(
        line["order"],
        line["line"],
        line["label"],
        arrived if time is None else time,
        arrived,
        line.get("key"),
        line.get("request"),
        line.get("row"),
    )
