"""Artifacts: immutable results, named by the digest of their manifest.

An artifact is a kind, the digests of its files, and deterministic metadata: nothing else. When it was made, by whom,
how long it took and what was measured belong to the *execution* that produced it; one artifact may have several.
The manifest's canonical JSON is itself a blob, so blobs and refs alone are enough to read everything back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = Any  # what json.loads gives back, spelt by name in signatures

MANIFEST_FORMAT = 1
CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of an artifact: its path inside the artifact (posix), SHA-256 in hex, size in bytes."""

    path: str
    digest: str
    size: int


@dataclass(frozen=True)
class Artifact:
    """An immutable result; `digest` is the SHA-256 of its canonical manifest."""

    kind: str
    files: tuple[FileEntry, ...]
    meta: Mapping[str, Json] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return digest_bytes(self.manifest_bytes())

    @property
    def size(self) -> int:
        """Bytes of all files together, shared ones counted as often as they are named."""
        return sum(entry.size for entry in self.files)

    def manifest(self) -> dict[str, Json]:
        entries = sorted(self.files, key=lambda entry: entry.path)
        return {
            "format": MANIFEST_FORMAT,
            "kind": self.kind,
            "files": [{"path": e.path, "digest": e.digest, "size": e.size} for e in entries],
            "meta": dict(self.meta),
        }

    def manifest_bytes(self) -> bytes:
        return canonical(self.manifest())

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Json]) -> Artifact:
        files = tuple(FileEntry(f["path"], f["digest"], f["size"]) for f in manifest["files"])
        return cls(kind=manifest["kind"], files=files, meta=manifest["meta"])


def canonical(value: Json) -> bytes:
    """JSON with one spelling per value: sorted keys, no spaces, UTF-8, no NaN; the input of every digest."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_bytes(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def digest_json(value: Json) -> str:
    """The digest of a value's canonical JSON."""
    return digest_bytes(canonical(value))


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def short(digest: str) -> str:
    """The first 12 hex digits: what a person reads."""
    return digest[:12]


def walk_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every regular file under a folder, as (posix path inside it, path), in a fixed order."""
    for path in sorted(folder.rglob("*"), key=lambda p: p.relative_to(folder).as_posix()):
        if path.is_file() and not path.is_symlink():
            yield path.relative_to(folder).as_posix(), path
