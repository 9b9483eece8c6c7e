"""The code that a step can reach: every module of the project and of onejob, whole, and what it imports beside them.

Starting from the modules that the step loads by name, every import statement is followed, wherever it stands
(in functions, `try`, `if TYPE_CHECKING` too), with the `__init__` of every package on the way, and calls such as
`import_module("x")` whose argument is a literal. Modules of distributions aren't followed: their versions count. What
can't be followed is declared in the job file, or warned about: never ignored silently (docs/design/keys.md).
"""

from __future__ import annotations

import difflib
import re
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onejob.core.artifact import Json, digest_bytes
from onejob.core.find import Finder, Found
from onejob.core.reads import Reads, resolve
from onejob.core.scan import Import, Scan, scan
from onejob.core.unfollowed import Kind, Unfollowed, unfollowed
from onejob.errors import JobFileError

_SEEN = re.compile(r"(.+\.py):([A-Za-z_][\w.]*)")
"""A declaration that a function was looked at: "helper.py:load"."""

_SAID: Mapping[Kind, tuple[str, str, str]] = {
    "import": ("imports a module by name", "imports", "the module"),
    "code": ("runs code from a text", "imports", "the modules that it imports"),
    "read": ("reads by path", "reads", "the file"),
    "program": ("runs another program", "reads", "the files that decide what it does"),
    "path": ("changes where modules are looked for", "imports", "the modules that are found so"),
    "env": ("reads an environment variable", "reads", ""),
}
"""Kind -> what is done, where a declaration goes, what is to be declared."""


@dataclass(frozen=True, slots=True)
class ModuleCode:
    """A module: its digest, and the digests of its parts, which only serve to explain."""

    digest: str
    parts: Mapping[str, str]


@dataclass(frozen=True)
class Closure:
    """All the code that a step can reach; paths are relative, and independent of where the folder lies."""

    project: Mapping[str, ModuleCode]
    engine: Mapping[str, ModuleCode]
    modules: tuple[str, ...]
    """Top-level names of what is imported beside these: their distributions' versions count."""
    reads: Mapping[str, str]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Json]:
        return {
            "project": {key: {"digest": m.digest, "parts": dict(m.parts)} for key, m in self.project.items()},
            "engine": {key: {"digest": m.digest, "parts": dict(m.parts)} for key, m in self.engine.items()},
            "modules": list(self.modules),
            "reads": dict(self.reads),
            "warnings": list(self.warnings),
        }


def closure(
    roots: Iterable[str],
    project: Path | str,
    imports: Sequence[str] = (),
    reads: Sequence[str] = (),
    *,
    env: Collection[str] = (),
    table: str = "",
) -> Closure:
    """Follow the roots: names of modules, "module:function", or of packages (these count whole, every module in them).

    `imports` and `reads` are what the job file declares in that `table`; `env` names the variables whose values count
    already. JobFileError names, all at once, what is declared and isn't there, and modules that aren't Python.
    """
    walk = _Walk(Path(project), tuple(imports), tuple(reads), frozenset(env), f"[{table}] " if table else "")
    for root in dict.fromkeys(roots):
        walk.root(root, f"{walk.table}code")
    for name in walk.declared_modules:
        walk.root(name, f"{walk.table}imports")
    walk.follow()
    walk.check_seen()
    if walk.mistakes:
        raise JobFileError(list(dict.fromkeys(walk.mistakes)))
    return walk.closure()


@dataclass(slots=True)
class _Wish:
    name: str
    needed: Found | None
    """The module that imports it; None for a root."""
    line: int = 0


@dataclass
class _Walk:
    """The state of one closure: what is still to be visited, and what was found."""

    folder: Path
    imports: tuple[str, ...]
    given_reads: tuple[str, ...]
    env: frozenset[str]
    table: str
    mistakes: list[str] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)
    visited: dict[str, tuple[Found, ModuleCode]] = field(default_factory=dict)
    places: list[tuple[Found, Unfollowed]] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    """Warnings that don't stand for a single expression."""
    queue: deque[_Wish] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.seen = {match[0] for name in (*self.imports, *self.given_reads) if (match := _SEEN.fullmatch(name))}
        self.declared_modules = [name for name in self.imports if name not in self.seen]
        self.finder = Finder(self.folder, frozenset(name.partition(".")[0] for name in self.declared_modules))
        paths = [path for path in self.given_reads if path not in self.seen]
        self.reads: Reads = resolve(self.folder, paths, f"{self.table}reads")
        self.mistakes += self.reads.mistakes

    # ---- what to visit -------------------------------------------------------------------------------------------

    def root(self, root: str, place: str) -> None:
        """A module that is loaded by name."""
        name, _, attribute = root.partition(":")
        found = self.finder.find(name) if all(part.isidentifier() for part in name.split(".")) else None
        if found is None or found.owner == "missing":
            self.mistakes.append(f"{place}: no module is called {name!r}.{self._near(name)}")
            return
        self.queue.append(_Wish(name, None))
        if found.package and not attribute:
            self.queue.extend(_Wish(below, None) for below in self.finder.below(found))
        if attribute and found.owner == "project" and found.file and not found.compiled:
            read = self._scan(found)
            if read and read.names and attribute not in read.names:
                self.mistakes.append(f"{place}: {found.key} has no {attribute!r}.{_near(attribute, read.names)}")

    def follow(self) -> None:
        while self.queue:
            wish = self.queue.popleft()
            parts = wish.name.split(".")
            for end in range(1, len(parts) + 1):
                found = self.finder.find(".".join(parts[:end]))
                if found is None:
                    self._lost(parts[0])
                    break
                if found.file and found.owner in ("project", "engine", "outside"):
                    self._visit(found, wish)
                elif found.owner in ("distribution", "missing", "outside"):
                    self._beside(found, parts[0], wish)
                    break

    def _lost(self, top: str) -> None:
        """A name in a package that has no such module; a namespace may have it elsewhere, in a distribution."""
        found = self.finder.find(top)
        if found and found.file is None and found.owner == "project":
            self.modules.add(top)

    def _beside(self, found: Found, top: str, wish: _Wish) -> None:
        self.modules.add(top)
        if found.owner == "outside" and not (wish.needed and wish.needed.owner == "engine"):
            where = f"{wish.needed.key}:{wish.line}: " if wish.needed else ""
            self.notes[
                f"{where}module {top!r} lies outside the project and isn't installed as a copy, so a change in it "
                f"doesn't count in the key. Declare {top!r} in {self.table}imports."
            ] = None

    # ---- one module ----------------------------------------------------------------------------------------------

    def _visit(self, found: Found, wish: _Wish) -> None:
        if found.key in self.visited:
            return
        if found.compiled:
            assert found.file is not None
            self.visited[found.key] = (found, ModuleCode(digest_bytes(found.file.read_bytes()), {}))
            if found.owner != "engine" and found.name not in self.declared_modules:
                self.notes[
                    f"{found.key}: a compiled module: its bytes count, what it imports and reads can't be seen. "
                    f"Declare that, and {found.name!r} itself, in {self.table}imports."
                ] = None
            return
        read = self._scan(found)
        if read is None:
            return
        self.visited[found.key] = (found, ModuleCode(read.digest, read.parts))
        self.queue.extend(_Wish(name, found, one.line) for one in read.imports for name in self._targets(one, found))
        if found.owner != "engine":
            self.places += [(found, place) for place in unfollowed(_source(found))]
            top = found.name.partition(".")[0]
            if top in sys.stdlib_module_names and top not in self.declared_modules:
                self.notes[
                    f"{found.key}: has the name of a module of the standard library, so that either may be imported. "
                    f"Rename it, or declare {top!r} in {self.table}imports."
                ] = None

    def _scan(self, found: Found) -> Scan | None:
        try:
            return scan(_source(found))
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            where = f"{found.key}:{line}" if line else found.key
            self.mistakes.append(f"{where}: isn't Python that can be read: {getattr(error, 'msg', error)}")
        except OSError as error:
            self.mistakes.append(f"{found.key}: can't be read: {error.strerror}")
        return None

    def _targets(self, one: Import, found: Found) -> Iterator[str]:
        """Names of the modules that an import may load."""
        base = one.module
        if one.level:
            package = found.name.split(".") if found.package else found.name.split(".")[:-1]
            kept = len(package) - (one.level - 1)
            if kept <= 0:  # beyond the top: an ImportError at run time
                return
            base = ".".join([*package[:kept], *([base] if base else [])])
        yield base
        here = self.finder.find(base)
        if here is None or not here.package:
            return
        for name in one.names:
            names = [name]
            if name == "*":
                read = self._scan(here) if here.file and not here.compiled else None
                names = list(read.exports) if read else []
            yield from (f"{base}.{inner}" for inner in names if self.finder.find(f"{base}.{inner}"))

    # ---- what it comes to ----------------------------------------------------------------------------------------

    def check_seen(self) -> None:
        """A declaration "helper.py:load" must name a function that is there."""
        for name in sorted(self.seen):
            path, function = name.rsplit(":", 1)
            file = self.folder / path
            place = f"{self.table}{'imports' if name in self.imports else 'reads'}"
            if not file.is_file():
                near = _near(path, [found.key for found, _ in self.visited.values()])
                self.mistakes.append(f"{place}: {name!r}: there is no file {path!r}.{near}")
                continue
            read = self._scan(Found(path, "project", file, path))
            parts = {part.partition(" ")[2] for part in read.parts} if read else {function}
            nested = any(function.startswith(f"{part}.") for part in parts)
            if function not in parts and function != "module" and not nested:
                self.mistakes.append(f"{place}: {name!r}: {path} has no {function!r}.{_near(function, parts)}")

    def closure(self) -> Closure:
        ordered = sorted(self.visited.items())
        warnings = [self._warning(found, place) for found, place in self.places if not self._covered(found, place)]
        return Closure(
            project={key: code for key, (found, code) in ordered if found.owner != "engine"},
            engine={key: code for key, (found, code) in ordered if found.owner == "engine"},
            modules=tuple(sorted(self.modules)),
            reads=self.reads.digests,
            warnings=tuple(sorted([*warnings, *self.notes], key=_by_line)),
        )

    def _covered(self, found: Found, place: Unfollowed) -> bool:
        """Whether a declaration covers it: its function was declared as looked at, or it is itself what is declared."""
        if f"{found.key}:{place.function}" in self.seen:
            return True
        match place.kind:
            case "import":
                return bool(place.value) and any(f"{name}.".startswith(place.value) for name in self.declared_modules)
            case "read":
                return bool(place.value) and self.reads.covers(place.value)
            case "env":
                return place.value in self.env
            case _:
                return False

    def _warning(self, found: Found, place: Unfollowed) -> str:
        done, declare, what = _SAID[place.kind]
        where = f"{found.key}:{place.line}: `{place.text}`"
        seen = f'"{found.key}:{place.function}"'
        if place.kind == "env":
            name = place.value or "the variable"
            cure = f"Set {name} in [run] env, or add {seen} to {self.table}{declare}."
            return f"{where} {done} that doesn't count in the key. {cure}"
        if place.kind == "read" and place.value:
            return f"{where} {done}, which doesn't count in the key. Declare {what} in {self.table}{declare}."
        return f"{where} {done}, which can't be followed. Add to {self.table}{declare}: {what}, and {seen}."

    def _near(self, name: str) -> str:
        parent = name.rpartition(".")[0]
        package = self.finder.find(parent) if parent and all(p.isidentifier() for p in parent.split(".")) else None
        known = list(self.finder.below(package)) if package and package.package else self.finder.names()
        return _near(name, known)


def _source(found: Found) -> bytes:
    assert found.file is not None
    return found.file.read_bytes()


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _by_line(warning: str) -> tuple[str, int, str]:
    match = re.match(r"([^:]+):(\d+): ", warning)
    return (match[1], int(match[2]), warning) if match else (warning, 0, "")
