"""Verify: hash again everything that an artifact is and stands on, down to the source files.

Nothing is believed because it was checked before: every blob is read. Sources lie outside onejob and may have changed
since; that is told, and is not damage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from onejob.core.artifact import Artifact, digest_file
from onejob.core.ports import Blobs, Ledger
from onejob.core.records import Execution
from onejob.errors import NotFoundError, StoreError

DAMAGE = ("damaged", "missing")


class PathBlobs(Blobs, Protocol):
    """Blobs that lie in files."""

    def path(self, digest: str) -> Path: ...


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that isn't as it was."""

    what: str
    """`damaged`, `missing` (a blob, or an artifact that is gone), `source changed`, `source gone`."""
    artifact: str
    kind: str
    path: str
    """Path in the artifact; "manifest" for the manifest itself."""
    place: str
    """Where the bytes lie, or should."""
    expected: str
    actual: str | None
    """The digest of what is there; None if nothing is, or it can't be read."""

    def __str__(self) -> str:
        there = f"its bytes digest to {self.actual}" if self.actual else "nothing can be read there"
        return (
            f"{self.what}: {self.path} of {self.kind} {self.artifact}: {self.place}: should be {self.expected}, {there}"
        )


@dataclass(frozen=True, slots=True)
class Link:
    """One artifact of the lineage, the execution that left it (None: a source), and what that one read."""

    artifact: str
    kind: str
    execution: str | None
    inputs: Mapping[str, str]


@dataclass
class Report:
    """What was hashed, and what isn't as it was; `lineage` goes from the artifact to its sources."""

    lineage: list[Link] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    size: int = 0
    """Bytes that were read."""

    @property
    def damaged(self) -> list[Finding]:
        """Findings that are damage."""
        return [finding for finding in self.findings if finding.what in DAMAGE]

    @property
    def sound(self) -> bool:
        return not self.damaged


def verify_lineage(ledger: Ledger, blobs: PathBlobs, digest: str, *, execution: str | None = None) -> Report:
    """Hash an artifact and its lineage; `execution` says which of its makers to follow, else the newest that counts."""
    report, hasher = Report(), _Hasher(blobs)
    todo, seen = [digest], {digest}
    while todo:
        current = todo.pop(0)
        artifact = _artifact(ledger, blobs, current)
        if artifact is None:
            place = str(blobs.path(current))
            report.findings.append(Finding("missing", current, "artifact", "manifest", place, current, None))
            continue
        maker = _maker(ledger, current, execution if current == digest else None)
        inputs = dict(maker.inputs) if maker else {}
        report.lineage.append(Link(current, artifact.kind, maker.id if maker else None, inputs))
        report.findings += _check(artifact, current, _locations(ledger, current), blobs, hasher)
        todo += [d for d in dict.fromkeys(inputs.values()) if d not in seen]
        seen.update(inputs.values())
    report.files, report.size = hasher.files, hasher.size
    return report


@dataclass
class _Hasher:
    """Reads each file once, however many artifacts share it."""

    blobs: PathBlobs
    files: int = 0
    size: int = 0
    known: dict[Path, str | None] = field(default_factory=dict)

    def digest(self, path: Path) -> str | None:
        if path not in self.known:
            try:
                self.known[path] = digest_file(path)
                self.size += path.stat().st_size
                self.files += 1
            except OSError:
                self.known[path] = None
        return self.known[path]


def _check(
    artifact: Artifact, digest: str, locations: Mapping[str, str], blobs: PathBlobs, hasher: _Hasher
) -> list[Finding]:
    wanted = [("manifest", digest, blobs.path(digest), False)]
    for entry in artifact.files:
        if entry.path in locations and not blobs.has(entry.digest):
            wanted.append((entry.path, entry.digest, Path(locations[entry.path]), True))
        else:
            wanted.append((entry.path, entry.digest, blobs.path(entry.digest), False))
    findings = []
    for path, expected, place, source in wanted:
        actual = hasher.digest(place)
        if actual == expected:
            continue
        if source:
            what = "source gone" if actual is None else "source changed"
        else:
            what = "damaged" if actual is not None or place.exists() else "missing"
        findings.append(Finding(what, digest, artifact.kind, path, str(place), expected, actual))
    return findings


def _artifact(ledger: Ledger, blobs: PathBlobs, digest: str) -> Artifact | None:
    """From the catalogue; where it is unknown, or says something else than its digest, from its manifest's blob."""
    try:
        found = ledger.get_artifact(digest)
        if found.digest == digest:
            return found
    except NotFoundError:
        pass
    try:
        return Artifact.from_manifest(json.loads(blobs.get(digest).read_bytes()))
    except (StoreError, NotFoundError):
        return None


def _locations(ledger: Ledger, digest: str) -> Mapping[str, str]:
    try:
        return ledger.locations(digest)
    except NotFoundError:
        return {}


def _maker(ledger: Ledger, digest: str, execution: str | None) -> Execution | None:
    makers = ledger.producers(digest)
    if execution is not None:
        makers = [maker for maker in makers if maker.id == execution] or makers
    counting = [maker for maker in makers if not maker.forgotten]
    return next(iter(counting or makers), None)
