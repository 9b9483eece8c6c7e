"""Files of the home that a backup holds beside ledger and blobs, since nothing could make them anew.

They lie in the tar as `home/<path in the home>`; the header has each one's digest and mode. They are copied before the
rows are read: what is made an artifact in between is in the backup twice, and never not at all.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from onejob.core.artifact import Json, digest_file
from onejob.errors import ConflictError, DamagedError
from onejob.store.blobs import fsync

PREFIX = "home/"
Found = Iterable[tuple[str, Path]]
"""(path in the home, where the file lies now). Copied one by one, so an iterator can go after a file that is moved."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A file as it goes into the backup."""

    path: Path
    digest: str
    mode: int

    def to_json(self) -> dict[str, Json]:
        return {"digest": self.digest, "mode": self.mode}


def copy_files(found: Found, folder: Path) -> dict[str, Copy]:
    """Copies in `folder`, by path in the home; what went away is left out, and of two with one path the last stays."""
    copies: dict[str, Copy] = {}
    for number, (name, path) in enumerate(found):
        target = folder / str(number)
        try:
            with path.open("rb") as file, target.open("wb") as out:
                shutil.copyfileobj(file, out)
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        except FileNotFoundError:
            continue
        copies[name] = Copy(target, digest_file(target), mode)
    return copies


def bring_back(name: str, about: Mapping[str, Json], copy: Path, home: Path, source: Path) -> None:
    """Put one file in its place, durably; ConflictError if the home has another one there."""
    target = home / _inside(name, source)
    if digest_file(copy) != about["digest"]:
        raise DamagedError(f"{name} is damaged in the backup", place=str(source), cure="Take another backup.")
    if target.exists():
        if digest_file(target) != about["digest"]:  # else a restore that was interrupted brought it
            cure = "Restore into a new home, with --home."
            raise ConflictError("the home has such a file already", place=str(target), cure=cure)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    os.chmod(copy, about["mode"])
    fsync(copy)
    os.rename(copy, target)
    fsync(target.parent)


def _inside(name: str, source: Path) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise DamagedError(f"{name!r} lies outside of a home", place=str(source), cure="Take another backup.")
    return path
