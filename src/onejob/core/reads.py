"""Files that a step declares to read by path: found in the project and digested.

A folder or a glob stands for all files in it.
"""

from __future__ import annotations

import difflib
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from onejob.core.artifact import digest_file

_NOT_PROJECT = frozenset({".onejob", ".git", ".venv", "__pycache__", "site-packages"})


@dataclass(frozen=True)
class Reads:
    """What was declared, and what it comes to."""

    declared: tuple[str, ...]
    digests: Mapping[str, str]
    """Posix path in the project -> digest."""
    mistakes: tuple[str, ...]

    def covers(self, path: str) -> bool:
        """Whether a path that stands in the code, all of it or its end, is a declared file or folder."""
        plain = posixpath.normpath(path).lstrip("/")
        tail = f"/{plain}"
        if any(f"/{known}".endswith(tail) for known in self.digests):
            return True
        return any(
            fnmatchcase(plain, one) or f"/{one}".endswith(tail) or f"{plain}/".startswith(f"{one}/")
            for one in (posixpath.normpath(name) for name in self.declared)
        )


def resolve(project: Path, declared: Sequence[str], place: str) -> Reads:
    """Find and digest declared files; mistakes say which aren't there, or aren't in the project."""
    digests: dict[str, str] = {}
    mistakes: list[str] = []
    for name in declared:
        plain = posixpath.normpath(name)
        if plain.startswith(("/", "../", "~")) or plain == "..":
            mistakes.append(f"{place}: {name!r} lies outside the project. Copy it, or link it, into the job's folder.")
            continue
        files = list(_files(project, plain))
        if not files:
            mistakes.append(f"{place}: {name!r}: there is no such file in the job's folder.{_near(plain, project)}")
        for path in files:
            try:
                digests[path] = digest_file(project / path)
            except OSError as error:
                mistakes.append(f"{place}: {path!r} can't be read: {error.strerror}.")
    return Reads(tuple(declared), dict(sorted(digests.items())), tuple(mistakes))


def _files(project: Path, name: str) -> Iterator[str]:
    """A file; or all files of a folder or a glob, without version control, environments and onejob's own things."""
    path = project / name
    if path.is_file():
        yield name
        return
    found = [path] if path.is_dir() else sorted(project.glob(name)) if any(sign in name for sign in "*?[") else []
    for place in found:
        inside = [place] if place.is_file() else _walk(place)
        for file in inside:
            relative = file.relative_to(project)
            if not _NOT_PROJECT & set(relative.parts):
                yield relative.as_posix()


def _walk(folder: Path) -> Iterator[Path]:
    """Files of a folder, however deep; links to folders aren't followed, so that none is walked for ever."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not (Path(place) / name / "pyvenv.cfg").exists())
        yield from (Path(place) / name for name in sorted(names))


def _near(name: str, project: Path) -> str:
    folder = (project / name).parent
    known = sorted(path.relative_to(project).as_posix() for path in folder.iterdir()) if folder.is_dir() else []
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
