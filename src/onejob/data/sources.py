"""Where the tables are: a path, a glob, or a data set of an installed package becomes a list of files.

A package is found by its folder, without importing it: data packages are old, and what they import may be gone.
"""

from __future__ import annotations

import difflib
import glob
import importlib.util
import os
import re
from pathlib import Path

from onejob.core.plan import Source
from onejob.errors import SourceError, UnavailableError

ENDINGS: dict[str, str] = {
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".ndjson": "ndjson",
    ".jsonl": "ndjson",
}
"""Ending of a file's name -> what the file is; `.gz` and `.zip` may follow."""
PACKED = (".gz", ".zip")
_GLOB = re.compile(r"[*?\[]")


def resolve(text: str, project: str, *, place: str) -> Source:
    """The files that a source names, sorted; relative paths start at the job file's folder.

    SourceError: nothing is there, or the name is ambiguous. UnavailableError: a URL, which can't be read.
    """
    if "://" in text:
        scheme = text.partition("://")[0]
        raise UnavailableError(
            f"{text!r}: {scheme}:// sources can't be read",
            place=place,
            cure="Copy the files to this machine, or mount them, and give their path.",
        )
    files = _local(text, Path(project), place)
    return Source(files or _packaged(text, Path(project), place))


def kind_of(name: str) -> str | None:
    """What a file is, by its name: csv, parquet, arrow, ndjson; None where the name doesn't say."""
    return ENDINGS.get(Path(unpacked(name)).suffix.lower())


def unpacked(name: str) -> str:
    """The name without `.gz` or `.zip`."""
    ending = Path(name).suffix
    return name.removesuffix(ending) if ending.lower() in PACKED else name


def _local(text: str, project: Path, place: str) -> tuple[tuple[str, str], ...]:
    """Files of this machine as (logical name, path); empty where there are none."""
    # a path that exists is never read as a pattern: folders may be called "runs [old]"
    whole = project / text
    if whole.is_file():
        return ((_logical(whole, project, whole.parent), os.path.abspath(whole)),)
    if whole.is_dir():
        found = sorted(path for path in whole.rglob("*") if path.is_file() and kind_of(path.name))
        if not found:
            raise SourceError(
                f"folder {text!r} holds no file of a kind that can be read",
                place=place,
                cure=f"Such files end in {', '.join(ENDINGS)}, or in one of these and .gz or .zip.",
            )
        return tuple((_logical(path, project, whole), os.path.abspath(path)) for path in found)
    wild = _GLOB.search(text)
    if not wild:
        return ()
    pattern = text if os.path.isabs(text) else os.path.join(glob.escape(str(project)), text)
    matches = sorted(Path(path) for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
    if not matches:
        raise SourceError(f"no file matches {text!r}", place=place, cure=f"The pattern was looked for from {project}.")
    fixed = Path(os.path.dirname(project / text[: wild.start()]))
    return tuple((_logical(path, project, fixed), os.path.abspath(path)) for path in matches)


def _logical(path: Path, project: Path, below: Path) -> str:
    """A file's name as it counts: below the project where it lies there, else below the folder that was named."""
    whole = Path(os.path.abspath(path))
    for start in (Path(os.path.abspath(project)), Path(os.path.abspath(below))):
        if whole.is_relative_to(start):
            return whole.relative_to(start).as_posix()
    return whole.name


def _packaged(text: str, project: Path, place: str) -> tuple[tuple[str, str], ...]:
    """The one file of an installed package that holds the data set, as `package/…/dataset.csv`."""
    package, slash, name = text.partition("/")
    if not slash or not name or not re.fullmatch(r"[A-Za-z_]\w*", package):
        raise _missing_file(text, project, place)
    folder = _package_folder(package)
    if folder is None:
        if kind_of(text) or (project / package).is_dir():
            raise _missing_file(text, project, place)
        raise SourceError(
            f"{text!r} is no file, and no package called {package!r} is installed",
            place=place,
            cure=f"`pip install {package}`, or give the path of a file.",
        )
    return (_data_set(folder, package, name, place),)


def _package_folder(package: str) -> Path | None:
    """The folder of an installed package; finding a top-level package doesn't import it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    folders = [Path(place) for place in spec.submodule_search_locations]
    return next((folder for folder in folders if folder.is_dir()), None)


def _data_set(folder: Path, package: str, name: str, place: str) -> tuple[str, str]:
    held = sorted(path for path in folder.rglob("*") if path.is_file() and kind_of(path.name))
    inside = {path: path.relative_to(folder).as_posix() for path in held}
    # "flights" finds data/flights.csv.zip; "data/flights" and "data/flights.csv.zip" say it more exactly
    found = [path for path in held if _names(inside[path], name)]
    if len(found) == 1:
        return f"{package}/{inside[found[0]]}", str(found[0])
    if found:
        listed = ", ".join(f"{package}/{inside[path]}" for path in found)
        raise SourceError(
            f"{package}/{name} may be any of: {listed}", place=place, cure="Give the one that is meant, in full."
        )
    stems = sorted({_stem(path.name) for path in held})
    near = difflib.get_close_matches(name, stems, n=3) or stems[:8]
    raise SourceError(
        f"package {package!r} holds no data set called {name!r}",
        place=place,
        cure=f"It holds: {', '.join(near)}." if near else "It holds no file of a kind that can be read.",
    )


def _names(path: str, name: str) -> bool:
    """Whether `name` names the file at `path`: with or without its endings, with or without the folders before it."""
    bare = f"{os.path.dirname(path)}/{_stem(path)}".lstrip("/")
    return any(whole == name or whole.endswith(f"/{name}") for whole in (path, unpacked(path), bare))


def _stem(name: str) -> str:
    return Path(unpacked(name)).stem


def _missing_file(text: str, project: Path, place: str) -> SourceError:
    wanted = project / text
    folder = wanted.parent
    if not folder.is_dir():
        return SourceError(f"no such file: {text!r}", place=place, cure=f"There is no folder {folder}.")
    beside = sorted(path.name for path in folder.iterdir() if kind_of(path.name))
    near = difflib.get_close_matches(wanted.name, beside, n=3) or beside[:8]
    held = f"{folder} holds: {', '.join(near)}." if near else f"{folder} holds no file of a kind that can be read."
    return SourceError(f"no such file: {text!r}", place=place, cure=held)
