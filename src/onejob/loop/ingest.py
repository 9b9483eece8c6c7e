"""From a finished work folder to artifacts: bytes into blobs first, then one ledger transaction makes them count."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from onejob.core.artifact import Artifact, FileEntry, Json, walk_files
from onejob.core.faults import reach
from onejob.core.ports import Blobs
from onejob.errors import StepError


def ingest(blobs: Blobs, work: Path, outputs: Sequence[str]) -> dict[str, Artifact]:
    """Keep every declared output of a work folder; doing it twice is doing it once."""
    kept = {}
    for name in outputs:
        declared = _read(work / "out" / f"{name}.json")
        if declared is None:
            raise StepError(f"it ended well, but its output {name!r} is gone", place=str(work / "out"))
        entries = []
        for path, file in walk_files(work / "out" / name):
            digest, size = blobs.put(file)
            entries.append(FileEntry(path, digest, size))
            reach("ingest.after_blob")
        artifact = Artifact(declared["kind"], tuple(entries), declared["meta"])
        blobs.put(artifact.manifest_bytes())
        kept[name] = artifact
    reach("ingest.before_commit")
    return kept


def measured(work: Path) -> dict[str, Json]:
    """What the step measured, or nothing."""
    return _read(work / "measured.json") or {}


def error_of(work: Path) -> dict[str, Json] | None:
    """The error that the step reported, if it did."""
    return _read(work / "error.json")


def _read(path: Path) -> dict[str, Json] | None:
    try:
        data: Json = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None
