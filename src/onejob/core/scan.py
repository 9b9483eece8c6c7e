"""One module's source, read without running it: its digest, its parts, and what it imports.

The digest is that of the normalised syntax tree, so comments and formatting don't count. Docstrings do count: a program
can read them (`__doc__`, a doctest, a command's help), so leaving them out would be a guess. A module counts whole; its
parts (functions, classes, constants, decorators, imports) only serve to tell a person what changed.
"""

from __future__ import annotations

import ast
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from onejob.core.artifact import digest_json, short

BY_NAME = frozenset(
    {
        "__import__",
        "importlib.__import__",
        "importlib.import_module",
        "onejob.core.plugin.load",
        "pkgutil.resolve_name",
        "pydoc.locate",
    }
)
"""Functions that import the module which their first argument names."""

TOP = "top-level code"
_QUIET = threading.Lock()
"""Warnings are silenced for a whole process: two threads at it would leave them silenced."""
_SKIPPED = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
"""Fields that say nothing about meaning: load or store follows from the place, `kind` is the u of u"text"."""

Piece = tuple[str, str]
"""(part, normalised text)."""


@dataclass(frozen=True, slots=True)
class Import:
    """One import: `from <level dots><module> import <names>`; no names for `import module`."""

    module: str
    names: tuple[str, ...]
    level: int
    line: int


@dataclass(frozen=True)
class Scan:
    """What a module's source says of itself."""

    digest: str
    parts: Mapping[str, str]
    """"function scale", "method Scaler.fit", "decorator of load", "constant FACTOR", ... -> short digest."""
    imports: tuple[Import, ...]
    exports: tuple[str, ...]
    """`__all__`, where it is a literal."""
    names: frozenset[str]
    """Names that a "module:name" may refer to; empty where they can't be known (a star import, `__getattr__`)."""


@lru_cache(maxsize=4096)
def scan(source: bytes) -> Scan:
    """Scan a module; SyntaxError or ValueError where it isn't Python.

    Remembered by content, not by the file's time: a second edit in the same clock tick must not be missed.
    """
    tree = parse(source)
    found: list[ast.AST] = []
    pieces = list(_pieces(tree.body, "", found))
    parts: dict[str, list[str]] = {}
    for part, text in pieces:
        parts.setdefault(part, []).append(text)
    imports = _imports(found)
    return Scan(
        digest=digest_json(pieces),
        parts={part: short(digest_json(texts)) for part, texts in parts.items()},
        imports=imports,
        exports=_exports(tree),
        names=_names(parts, imports, aliases(found)),
    )


def parse(source: bytes | str) -> ast.Module:
    """The syntax tree; a module's own SyntaxWarnings are its business at run time, not here."""
    with _QUIET, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def aliases(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Local name -> dotted name, from absolute imports: {"np": "numpy", "im": "importlib.import_module"}."""
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return names


def dotted(node: ast.AST, known: Mapping[str, str]) -> str | None:
    """The dotted name that an expression such as `np.random.seed` refers to; None for anything else."""
    trail: list[str] = []
    while isinstance(node, ast.Attribute):
        trail.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or (trail and node.id not in known):
        return None
    return ".".join([known.get(node.id, node.id), *reversed(trail)])


def by_name(call: ast.Call, known: Mapping[str, str]) -> Import | None:
    """The import that a call such as `importlib.import_module("helper")` makes, if its name is a literal."""
    if dotted(call.func, known) not in BY_NAME or not call.args:
        return None
    first = call.args[0]
    if not (isinstance(first, ast.Constant) and isinstance(first.value, str)):
        return None
    module = first.value.partition(":")[0]
    level = len(module) - len(module.lstrip("."))
    if level and not _own_package(call):
        return None
    return Import(module[level:], (), level, call.lineno)


def _own_package(call: ast.Call) -> bool:
    """Whether a relative `import_module(".x", __package__)` starts at the module's own package."""
    package = [*call.args[1:], *(word.value for word in call.keywords if word.arg == "package")]
    return bool(package) and isinstance(package[0], ast.Name) and package[0].id == "__package__"


# ---- the normalised text -----------------------------------------------------------------------------------------


def dump(value: Any, found: list[ast.AST]) -> str:
    """A syntax tree as text with one spelling, without positions; imports and calls met on the way go to `found`.

    Empty fields are left out, so that a new Python's new empty fields don't change the text. Not recursive: a sum of
    ten thousand terms is a deep tree.
    """
    out: list[str] = []
    stack: list[Any] = [value]
    while stack:
        item = stack.pop()
        if type(item) is str:  # written already
            out.append(item)
        elif isinstance(item, list | tuple):
            out.append("[")
            stack.append("]")
            for child in reversed(item):
                stack += (",", _spelt(child))
        elif isinstance(item, ast.AST):
            if isinstance(item, ast.Import | ast.ImportFrom | ast.Call):
                found.append(item)
            out.append(f"{type(item).__name__}(")
            stack.append(")")
            if isinstance(item, ast.Constant):
                stack.append(_spelt(item.value))
                continue
            for name in reversed(item._fields):
                child = getattr(item, name, None)
                if child is not None and child != [] and name not in _SKIPPED:
                    stack += (";", _spelt(child), f"{name}=")
    return "".join(out)


def _spelt(value: Any) -> Any:
    """Plain values as text, in ASCII; trees and lists as they are. Large integers have no decimal text, so hex."""
    if isinstance(value, ast.AST | list | tuple):
        return value if not isinstance(value, tuple) else list(value)
    if type(value) is int:
        return hex(value)
    return ascii(value)


def _pieces(body: Iterable[ast.stmt], owner: str, found: list[ast.AST]) -> Iterator[Piece]:
    """The statements of a module or class in order, each with the part that it belongs to."""
    rest = f"class {owner[:-1]}" if owner else TOP
    for position, node in enumerate(body):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from _function(node, owner, found)
            case ast.ClassDef():
                yield from _class(node, owner, found)
            case ast.Import() | ast.ImportFrom():
                yield "imports", dump(node, found)
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign() if names := _assigned(node):
                kind = "attribute" if owner else "constant"
                text = dump(node, found)
                for name in names:
                    yield f"{kind} {owner}{name}", text
            case ast.Expr(ast.Constant(str())) if position == 0:
                yield (f"docstring of {owner[:-1]}" if owner else "module docstring"), dump(node, found)
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While() | ast.Match() | ast.TryStar():
                yield from _block(node, owner, rest, found)
            case _:
                yield rest, dump(node, found)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, owner: str, found: list[ast.AST]) -> Iterator[Piece]:
    name, args = f"{owner}{node.name}", node.args
    for decorator in node.decorator_list:
        yield f"decorator of {name}", dump(decorator, found)
    if args.defaults or any(args.kw_defaults):
        yield f"default argument of {name}", dump([args.defaults, args.kw_defaults], found)
    signature = [args.posonlyargs, args.args, [args.vararg], args.kwonlyargs, [args.kwarg], [node.returns]]
    kind = type(node).__name__
    text = dump([kind, name, signature, getattr(node, "type_params", []), node.body], found)
    yield f"{'method' if owner else 'function'} {name}", text


def _class(node: ast.ClassDef, owner: str, found: list[ast.AST]) -> Iterator[Piece]:
    name = f"{owner}{node.name}"
    for decorator in node.decorator_list:
        yield f"decorator of {name}", dump(decorator, found)
    header = [name, node.bases, node.keywords, getattr(node, "type_params", [])]
    yield f"class {name}", dump(header, found)
    yield from _pieces(node.body, f"{name}.", found)


def _block(node: ast.stmt, owner: str, rest: str, found: list[ast.AST]) -> Iterator[Piece]:
    """A compound statement: what it holds goes to the parts by name, its own words to the rest."""
    yield rest, type(node).__name__
    for field, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield rest, f"{field}["
            yield from _pieces(value, owner, found)
            yield rest, "]"
        elif isinstance(value, list) and value and isinstance(value[0], ast.ExceptHandler | ast.match_case):
            for case in value:
                words = [child for name, child in ast.iter_fields(case) if name != "body"]
                yield rest, dump([field, words], found)
                yield from _pieces(case.body, owner, found)
        else:
            yield rest, dump([field, value], found)


def _assigned(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[str]:
    """Names that an assignment binds, in order; empty for `a.b = c` and the like."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    flat: list[ast.expr] = []
    while targets:
        target, *targets = targets
        if isinstance(target, ast.Tuple | ast.List):
            targets = [*target.elts, *targets]
        else:
            flat.append(target.value if isinstance(target, ast.Starred) else target)
    names = [target.id for target in flat if isinstance(target, ast.Name)]
    return names if len(names) == len(flat) else []


# ---- what it imports and binds -----------------------------------------------------------------------------------


def _imports(found: list[ast.AST]) -> tuple[Import, ...]:
    known = aliases(found)
    imports: list[Import] = []
    for node in found:
        if isinstance(node, ast.Import):
            imports += [Import(alias.name, (), 0, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            imports.append(Import(node.module or "", names, node.level, node.lineno))
        elif isinstance(node, ast.Call) and (named := by_name(node, known)):
            imports.append(named)
        elif isinstance(node, ast.Call) and (text := executed(node)) is not None:
            imports += [Import(i.module, i.names, i.level, node.lineno) for i in _imports(text)]
    return tuple(dict.fromkeys(imports))


def executed(call: ast.Call) -> list[ast.AST] | None:
    """The imports and calls in the literal text that a call of exec, eval or compile runs; None for anything else."""
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if name not in ("exec", "eval", "compile") or not call.args:
        return None
    text = call.args[0]
    if not (isinstance(text, ast.Constant) and isinstance(text.value, str | bytes)):
        return None
    try:
        tree = parse(text.value)
    except (SyntaxError, ValueError):
        return []
    found: list[ast.AST] = []
    dump(tree, found)
    return found


def _exports(tree: ast.Module) -> tuple[str, ...]:
    """The literal strings assigned or added to `__all__`."""
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and "__all__" in _assigned(node):
            words = ast.walk(node.value) if node.value else ()
            names += [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    return tuple(names)


def _names(parts: Iterable[str], imports: Iterable[Import], known: Mapping[str, str]) -> frozenset[str]:
    kinds = [part.partition(" ")[::2] for part in parts]
    names = {name for kind, name in kinds if kind in ("function", "class", "constant")}
    if "__getattr__" in names or TOP in parts or any("*" in one.names for one in imports):
        return frozenset()
    relative = {name for one in imports for name in one.names}
    return frozenset(names | set(known) | relative)
