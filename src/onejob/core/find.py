"""Where a module's source lies, found without importing anything, by the rules that Python itself goes by.

A name is the project's, onejob's own (the engine), the standard library's, or a distribution's. The project's folder
comes first, as it does on `sys.path` when a step runs; onejob itself can't be shadowed, for it is loaded by then.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from pathlib import Path
from typing import Literal

Owner = Literal["project", "engine", "standard", "distribution", "outside", "missing"]
"""`outside`: code that is neither the project's nor installed (an editable install, PYTHONPATH)."""

ENGINE = Path(__file__).parents[1]
COMPILED = (*EXTENSION_SUFFIXES, *BYTECODE_SUFFIXES)
_SUFFIXES = (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES, *BYTECODE_SUFFIXES)
_INSTALLED = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True)
class Found:
    """A module: whose it is, and where; without a file it is a namespace, or isn't looked into."""

    name: str
    owner: Owner
    file: Path | None = None
    key: str = ""
    """Its file as a posix path, independent of where the folder lies: "helper.py", "onejob/core/plan.py"."""
    folders: tuple[tuple[Path, str], ...] = ()
    """For a package: where its modules lie, each with the beginning of their keys."""

    @property
    def package(self) -> bool:
        return bool(self.folders)

    @property
    def compiled(self) -> bool:
        return self.file is not None and self.file.name.endswith(COMPILED)


class Finder:
    """Finds modules for one project; remembers what it found."""

    def __init__(self, project: Path, declared: frozenset[str] = frozenset()) -> None:
        """`declared`: top-level names that the job declares, to be looked into even if they lie outside."""
        self.project = project
        self.declared = declared
        self._found: dict[str, Found | None] = {}

    def find(self, name: str) -> Found | None:
        """The module of that dotted name; None where its package has no such module."""
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def below(self, found: Found) -> Iterator[str]:
        """Names of all modules in a package, however deep."""
        stack, seen = [found], set()
        while stack:
            package = stack.pop()
            for folder, _ in package.folders:
                real = folder.resolve()
                if real in seen:  # a link to a folder above it
                    continue
                seen.add(real)
                names = sorted({_stem(path) for path in folder.iterdir()})
                for name in names:
                    module = self.find(f"{package.name}.{name}") if name.isidentifier() else None
                    if module and module.name != package.name:
                        yield module.name
                        stack.append(module)

    def names(self) -> list[str]:
        """Top-level modules of the project: what a mistyped name may have meant."""
        names = sorted({_stem(path) for path in self.project.iterdir()})
        return [name for name in names if name.isidentifier() and _look(((self.project, ""),), name, name, "project")]

    def _find(self, name: str) -> Found | None:
        parent, _, last = name.rpartition(".")
        if not parent:
            return self._top(name)
        package = self.find(parent)
        if package is None or package.owner in ("standard", "distribution", "missing"):
            return replace(package, name=name) if package else None
        if package.owner == "outside" and not package.package and package.file is None:
            return replace(package, name=name)  # not looked into
        return _look(package.folders, last, name, package.owner)

    def _top(self, name: str) -> Found:
        if name == "onejob":
            engine = _look(((ENGINE.parent, ""),), name, name, "engine")
            assert engine is not None
            return engine
        here = _look(((self.project, ""),), name, name, "project")
        if here and here.file:
            return here
        if name in sys.stdlib_module_names:
            return Found(name, "standard")
        there = self._elsewhere(name)
        # a folder without __init__.py is a module only where nothing else has that name
        return here if here and not there.file and there.owner == "missing" else there

    def _elsewhere(self, name: str) -> Found:
        """A module that is installed, or lies somewhere else on sys.path."""
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError, AttributeError):
            spec = None
        places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
        origin = Path(spec.origin) if spec and spec.has_location and spec.origin else None
        if origin is None and spec and spec.origin in ("built-in", "frozen"):
            return Found(name, "standard")
        if origin is None and not any(_installed(place) for place in places):
            # a namespace: the project's own folder, if it is on sys.path, or some data folder of the working directory
            return Found(name, "missing")
        if _installed(origin or places[0]) or origin is None:
            return Found(name, "distribution")
        if name not in self.declared:
            return Found(name, "outside")
        above = origin.parents[1] if places else origin.parent
        return _look(((above, ""),), name, name, "outside") or Found(name, "outside")


def _look(folders: tuple[tuple[Path, str], ...], last: str, name: str, owner: Owner) -> Found | None:
    """A module in folders: a package before a module, a regular package before a namespace, as importlib has it."""
    spaces: list[tuple[Path, str]] = []
    for folder, start in folders:
        path, key = folder / last, f"{start}{last}"
        if path.is_dir():
            for suffix in _SUFFIXES:
                if (path / f"__init__{suffix}").is_file():
                    return Found(
                        name, owner, path / f"__init__{suffix}", f"{key}/__init__{suffix}", ((path, f"{key}/"),)
                    )
            if last != "__pycache__" and not (path / "pyvenv.cfg").exists():
                spaces.append((path, f"{key}/"))
        for suffix in _SUFFIXES:
            if (folder / f"{last}{suffix}").is_file():
                return Found(name, owner, folder / f"{last}{suffix}", f"{key}{suffix}")
    return Found(name, owner, folders=tuple(spaces)) if spaces else None


def _installed(path: Path) -> bool:
    """Whether a file belongs to a distribution: then its version counts, and its bytes don't."""
    if _INSTALLED & set(path.parts):
        return True
    known = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(path.is_relative_to(place) for place in known if place)


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]
