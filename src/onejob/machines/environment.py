"""What a result may depend on, of this Python and this machine: distributions, the interpreter, the hardware.

importlib.metadata reads every RECORD anew, each time it is asked which distribution provides a module. Here what was
read is remembered, with inode, time and size of the files that it came from, and the folders of sys.path are listed
anew each time: so a package that is upgraded while we run is seen at once, and asking again takes milliseconds.
"""

from __future__ import annotations

import itertools
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import TypeVar

from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from onejob.core.artifact import Json
from onejob.machines import inventory

ABSENT = "absent"
"""Stands for the version of a requirement that isn't installed."""

# fmt: off
NUMERIC_FLAGS = frozenset({
    "sse4_1", "sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512dq", "avx512bw", "avx512vl",
    "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx512vbmi", "avx512_vbmi2", "avx512ifma", "avx512_bitalg",
    "avx_vnni", "avx_vnni_int8", "avx_ne_convert", "avx_ifma", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16",
    "asimd", "asimdhp", "asimddp", "asimdfhm", "fphp", "bf16", "i8mm", "sve", "sve2", "svebf16", "svei8mm",
    "sme",
})
# fmt: on
"""CPU flags by which numeric libraries choose their code, so that sums may come out differently."""

IMPORTABLE = (".py", ".so", ".pyd")
METADATA_FILES = ("METADATA", "PKG-INFO", "RECORD", "top_level.txt", "requires.txt")

FileIds = tuple[tuple[int, int, int], ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Distribution:
    """An installed distribution: its canonical name and the folder of its metadata."""

    name: str
    folder: str


@dataclass(frozen=True, slots=True)
class Metadata:
    """What its METADATA file says."""

    version: str
    requirements: tuple[Requirement, ...]


_metadata: dict[str, tuple[FileIds, Metadata]] = {}
_modules: dict[str, tuple[FileIds, frozenset[str]]] = {}


def distributions(modules: Iterable[str]) -> dict[str, str]:
    """The distributions that provide these top-level modules, and all that they require: canonical name -> version.

    A requirement counts if its marker holds here, and with the extras that are asked for; one that isn't installed has
    the version "absent". Modules that no distribution provides (the standard library's, the user's own) are left out.
    """
    wanted = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names
    installed = {found.name: found for found in reversed(list(_installed()))}  # the first on the path wins
    provided = {name: _remember(_read_modules, found.folder, _modules) for name, found in installed.items()}
    return _with_requirements([name for name, names in provided.items() if names & wanted], installed)


def python_version() -> str:
    """The interpreter, such as `cpython 3.11.7`."""
    return f"{sys.implementation.name} {platform.python_version()}"


def hardware(level: str) -> Json:
    """What of the machine may count in a step key.

    `none`: nothing. `device`: {"device": "cpu"} or the GPU's model. `exact`: the CPU's model and those of its flags
    that numeric libraries go by, and each GPU's model and driver too.
    """
    if level == "none":
        return {}
    gpus = inventory.gpus()
    device = gpus[0].model if gpus else "cpu"
    if level == "device":
        return {"device": device}
    assert level == "exact", level
    model, flags = parse_cpu(_first_cpu())
    return {
        "device": device,
        "cpu": model,
        "flags": sorted(flags & NUMERIC_FLAGS),
        "gpus": [{"model": gpu.model, "driver": gpu.driver} for gpu in gpus],
    }


def parse_cpu(text: str) -> tuple[str, frozenset[str]]:
    """Model and flags from a processor's part of /proc/cpuinfo; ARM gives numbers for a model, and `Features`."""
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    arm = f"{fields.get('CPU implementer', '')} {fields.get('CPU part', '')}".strip()
    steps = " ".join(fields[key] for key in ("cpu family", "model", "stepping") if key in fields)
    name = f"{fields['model name']} ({steps})" if "model name" in fields else arm
    return name or platform.machine(), frozenset(fields.get("flags", fields.get("Features", "")).split())


def _with_requirements(names: Iterable[str], installed: Mapping[str, Distribution]) -> dict[str, str]:
    """Versions of these distributions and of what they require, transitively, with the extras asked for on the way."""
    environment = {key: str(value) for key, value in default_environment().items()}
    versions: dict[str, str] = {}
    todo: list[tuple[str, str]] = [(name, "") for name in names]
    seen = set(todo)
    while todo:
        name, extra = todo.pop()
        if name not in installed:
            versions[name] = ABSENT
            continue
        metadata = _remember(_read_metadata, installed[name].folder, _metadata)
        versions[name] = metadata.version
        for requirement in metadata.requirements:
            if requirement.marker and not requirement.marker.evaluate({**environment, "extra": extra}):
                continue
            required = canonicalize_name(requirement.name)
            new = {(required, ""), *((required, canonicalize_name(asked)) for asked in requirement.extras)} - seen
            seen |= new
            todo += sorted(new)
    return dict(sorted(versions.items()))


def _installed() -> Iterator[Distribution]:
    """Every distribution on sys.path, in its order; the name is in the metadata folder's own name."""
    for place in sys.path:
        try:
            entries = sorted(os.listdir(place or "."))
        except OSError:
            continue
        for entry in entries:
            stem, _, kind = entry.rpartition(".")
            if kind in ("dist-info", "egg-info"):
                yield Distribution(canonicalize_name(stem.partition("-")[0]), os.path.join(place or ".", entry))


def _remember(read: Callable[[str], T], folder: str, memory: dict[str, tuple[FileIds, T]]) -> T:
    """What `read(folder)` gives, read again only when the metadata there have changed."""
    now = _file_ids(folder)
    known = memory.get(folder)
    if known is None or known[0] != now:
        known = memory[folder] = (now, read(folder))
    return known[1]


def _file_ids(folder: str) -> FileIds:
    """Tells one state of a metadata folder from another: inode, time and size of the files that are read."""
    return tuple(_file_id(os.path.join(folder, name) if name else folder) for name in ("", *METADATA_FILES))


def _file_id(path: str) -> tuple[int, int, int]:
    try:
        about = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (about.st_ino, about.st_mtime_ns, about.st_size)


def _read_metadata(folder: str) -> Metadata:
    found = PathDistribution(Path(folder))
    requirements = []
    for text in found.requires or ():
        try:
            requirements.append(Requirement(text))
        except InvalidRequirement:
            continue  # old packages have spellings that pip ignores too
    return Metadata(found.version, tuple(requirements))


def _read_modules(folder: str) -> frozenset[str]:
    """Top-level names that a distribution provides: by top_level.txt, or else by the paths of its files."""
    if names := _text(folder, "top_level.txt").split():
        return frozenset(names)
    files = _text(folder, "RECORD").splitlines() or _text(folder, "SOURCES.txt").splitlines()
    paths = {line.partition(",")[0].strip('"') for line in files}
    names = [name for path in paths if (name := _module_of(path))]
    linked = [name for path in paths if path.endswith(".pth") and "/" not in path for name in _linked(folder, path)]
    return frozenset([*names, *linked])


def _module_of(path: str) -> str:
    """The top-level module that a file of a distribution belongs to; empty if to none (scripts, metadata)."""
    first, slash, _ = path.partition("/")
    if slash:
        return first if first.isidentifier() and first != "__pycache__" else ""
    stem = first.partition(".")[0]
    return stem if first.endswith(IMPORTABLE) and stem.isidentifier() else ""


def _linked(folder: str, name: str) -> Iterator[str]:
    """Modules in the folders that a .pth file of an editable installation adds to the path."""
    for line in _text(os.path.dirname(folder), name).splitlines():
        if os.path.isdir(line):
            entries = (entry for entry in os.scandir(line) if not entry.name.startswith("."))
            yield from (
                entry.name.partition(".")[0] for entry in entries if entry.is_dir() or entry.name.endswith(".py")
            )


def _first_cpu() -> str:
    """The part of /proc/cpuinfo on the first processor: with hundreds of them the file is megabytes long."""
    try:
        with open("/proc/cpuinfo") as file:
            return "".join(itertools.takewhile(str.strip, file))
    except OSError:
        return ""


def _text(folder: str, name: str) -> str:
    try:
        return Path(folder, name).read_text(errors="replace")
    except OSError:
        return ""
