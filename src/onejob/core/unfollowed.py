"""What a module does that its source doesn't show: dynamic imports, files read by path, environment, other programs.

A step key can only count what can be seen. Everything here is reported with its line and function, so that the closure
(core/code.py) can warn about it, unless the job file declares it. The tables say what is looked for: the usual
ways, not every way (docs/design/keys.md).
"""

from __future__ import annotations

import ast
import builtins
import posixpath
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from onejob.core.scan import BY_NAME, aliases, by_name, dotted, executed, parse

Kind = Literal["import", "code", "read", "env", "program", "path"]

LOADERS = frozenset(
    {
        "importlib.machinery.SourceFileLoader",
        "importlib.metadata.entry_points",
        "importlib.util.spec_from_file_location",
        "pkgutil.iter_modules",
        "pkgutil.walk_packages",
        "runpy.run_module",
        "runpy.run_path",
    }
)
"""They import what no literal names."""

READERS = frozenset(
    {
        *("open", "io.open", "os.open", "codecs.open", "gzip.open", "bz2.open", "lzma.open", "tarfile.open"),
        *("zipfile.ZipFile", "shelve.open", "sqlite3.connect", "fileinput.input", "linecache.getlines"),
        *("glob.glob", "glob.iglob", "os.listdir", "os.scandir", "os.walk", "importlib.resources.files"),
        *("numpy.load", "numpy.loadtxt", "numpy.genfromtxt", "numpy.fromfile", "numpy.memmap"),
        *("torch.load", "joblib.load", "safetensors.safe_open", "h5py.File", "PIL.Image.open"),
        *("safetensors.numpy.load_file", "safetensors.torch.load_file", "onnx.load", "ctypes.CDLL"),
        *("urllib.request.urlopen", "urllib.request.urlretrieve", "requests.get", "requests.post", "httpx.get"),
    }
)
READER_FAMILIES = ("polars.read_", "polars.scan_", "pandas.read_", "pyarrow.csv.read_", "pyarrow.parquet.read_")
READER_METHODS = frozenset(
    {"read_text", "read_bytes", "open", "iterdir", "glob", "rglob", "from_pretrained", "read_csv", "read_parquet"}
)
"""Methods that read, whatever they are called on; a module's own function of such a name is looked up above."""

PROGRAMS = frozenset(
    {
        *("os.system", "os.popen", "os.posix_spawn", "os.posix_spawnp", "pty.spawn"),
        *("subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output", "subprocess.Popen"),
        *("subprocess.getoutput", "subprocess.getstatusoutput"),
        *("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"),
    }
)
PROGRAM_FAMILIES = ("os.exec", "os.spawn")
PATHS = frozenset({"sys.path", "sys.meta_path", "sys.path_hooks"})
ENVIRONMENTS = frozenset({"os.environ", "os.environb"})
ENV_READERS = frozenset({"os.getenv", "os.getenvb"})
ENV_WRITES = frozenset({"update", "clear"})

INPUTS = frozenset({"inputs", "out", "scratch", "work"})
"""What a StepContext gives: these files count already, or are the step's own."""
CONTEXTS = frozenset({"context", "ctx"})
_BUILTINS = frozenset(dir(builtins))
_DEPTH = 6


@dataclass(frozen=True, slots=True)
class Unfollowed:
    """One such place."""

    kind: Kind
    line: int
    function: str
    """`load`, `Scaler.fit`, or `module` outside any function: what a declaration "helper.py:load" names."""
    text: str
    """The expression, shortened."""
    value: str = ""
    """What is known of it: a file's path or the end of one, a variable's name, the beginning of a module's name."""


@dataclass(eq=False)
class _Scope:
    name: str
    outer: _Scope | None = None
    assigned: dict[str, list[ast.expr]] = field(default_factory=dict)
    derived: dict[str, list[ast.expr]] = field(default_factory=dict)
    """Names of loops and `with`: they come from the expression without being it."""
    contexts: set[str] = field(default_factory=set)

    def find(self, name: str, *, derived: bool = False) -> list[ast.expr]:
        scope: _Scope | None = self
        while scope:
            here = scope.assigned.get(name, []) + (scope.derived.get(name, []) if derived else [])
            if here:
                return here
            scope = scope.outer
        return []

    def is_context(self, name: str) -> bool:
        return name in self.contexts or bool(self.outer and self.outer.is_context(name))


@lru_cache(maxsize=1024)
def unfollowed(source: bytes) -> tuple[Unfollowed, ...]:
    """Every such place of a module, in the order of its lines."""
    tree = parse(source)
    nodes = list(_scoped(tree))
    bound = {node.name for node, _ in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    known = aliases(node for node, _ in nodes)
    look = _Look(known, bound | {name for _, scope in nodes for name in scope.assigned})
    found = [place for node, scope in nodes for place in look.at(node, scope)]
    return tuple(sorted(set(found), key=lambda place: (place.line, place.kind, place.text)))


def _scoped(tree: ast.Module) -> Iterator[tuple[ast.AST, _Scope]]:
    """Every node with its scope; a scope's assignments are complete once all nodes were given."""
    stack: list[tuple[ast.AST, _Scope]] = [(tree, _Scope("module"))]
    while stack:
        node, scope = stack.pop()
        yield node, scope
        _assign(node, scope)
        inner = scope
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = _Scope(node.name if scope.name == "module" else f"{scope.name}.{node.name}", scope)
        stack += [(child, inner) for child in reversed(list(ast.iter_child_nodes(node)))]


def _assign(node: ast.AST, scope: _Scope) -> None:
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                if isinstance(target, ast.Name):
                    scope.assigned.setdefault(target.id, []).append(value)
        case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
            scope.assigned.setdefault(name, []).append(value)
        case ast.NamedExpr(target=ast.Name(id=name), value=value):
            scope.assigned.setdefault(name, []).append(value)
        case ast.For(target=target, iter=source) | ast.AsyncFor(target=target, iter=source):
            _derive(target, source, scope)
        case ast.comprehension(target=target, iter=source):
            _derive(target, source, scope)
        case ast.withitem(context_expr=source, optional_vars=target) if target is not None:
            _derive(target, source, scope)
        case ast.arg(arg=name, annotation=annotation):
            kind = ast.unparse(annotation).strip("'\"").rpartition(".")[2] if annotation else ""
            if kind == "StepContext" or (not kind and name in CONTEXTS):
                scope.contexts.add(name)


def _derive(target: ast.AST, source: ast.expr, scope: _Scope) -> None:
    for name in ast.walk(target):
        if isinstance(name, ast.Name):
            scope.derived.setdefault(name.id, []).append(source)


class _Look:
    """Looks at single nodes, knowing a module's imports and the names that it binds itself."""

    def __init__(self, known: Mapping[str, str], bound: set[str]) -> None:
        self.known = known
        self.bound = bound
        self.handled: set[int] = set()
        """Mentions of the environment that were seen as part of a larger expression."""

    def at(self, node: ast.AST, scope: _Scope) -> Iterator[Unfollowed]:
        if isinstance(node, ast.Call):
            yield from self._call(node, scope)
        elif isinstance(node, ast.Subscript) and self._name(node.value) in ENVIRONMENTS:
            self.handled.add(id(node.value))
            if isinstance(node.ctx, ast.Load):
                yield self._place("env", node, scope, _literal(node.slice, scope))
        elif isinstance(node, ast.Compare) and len(node.comparators) == 1:
            if self._name(node.comparators[0]) in ENVIRONMENTS:
                self.handled.add(id(node.comparators[0]))
                yield self._place("env", node, scope, _literal(node.left, scope))
        elif isinstance(node, ast.Attribute | ast.Name) and id(node) not in self.handled:
            name = self._name(node)
            if name in ENVIRONMENTS and isinstance(node.ctx, ast.Load):
                yield self._place("env", node, scope)
            elif name in PATHS:
                yield self._place("path", node, scope)

    def _call(self, node: ast.Call, scope: _Scope) -> Iterator[Unfollowed]:
        name = self._name(node.func)
        if name is None and isinstance(node.func, ast.Attribute):
            yield from self._method(node, node.func, scope)
        elif name is None:
            return
        elif name in BY_NAME:
            if by_name(node, self.known) is None:
                yield self._place("import", node, scope, _beginning(node))
        elif name in LOADERS:
            yield self._place("import", node, scope)
        elif name in ("exec", "eval", "compile"):
            if executed(node) is None:
                yield self._place("code", node, scope)
        elif name in READERS or name.startswith(READER_FAMILIES):
            yield from self._read(node, node.args[0] if node.args else None, 1, scope)
        elif name in PROGRAMS or name.startswith(PROGRAM_FAMILIES):
            yield self._place("program", node, scope)
        elif name in ENV_READERS:
            yield self._place("env", node, scope, _literal(node.args[0], scope) if node.args else "")
        elif name == "site.addsitedir":
            yield self._place("path", node, scope)
        elif isinstance(node.func, ast.Attribute) and self._name(node.func.value) in ENVIRONMENTS:
            self.handled.add(id(node.func.value))
            if node.func.attr not in ENV_WRITES:
                yield self._place("env", node, scope, _literal(node.args[0], scope) if node.args else "")

    def _method(self, node: ast.Call, func: ast.Attribute, scope: _Scope) -> Iterator[Unfollowed]:
        """A call on an object: a Path, or something that was opened (then its opening was reported)."""
        if func.attr in READER_METHODS and not self._opened(func.value, scope):
            yield from self._read(node, func.value, 0, scope)

    def _opened(self, node: ast.expr, scope: _Scope) -> bool:
        origins = scope.find(node.id, derived=True) if isinstance(node, ast.Name) else [node]
        calls = [self._name(origin.func) or "" for origin in origins if isinstance(origin, ast.Call)]
        return any(name in READERS or name.startswith(READER_FAMILIES) for name in calls)

    def _read(self, node: ast.Call, path: ast.expr | None, mode_at: int, scope: _Scope) -> Iterator[Unfollowed]:
        opens = ast.unparse(node.func).rpartition(".")[2] == "open"
        if (opens and _writes(node, mode_at)) or (path is not None and _from_context(path, scope)):
            return
        yield self._place("read", node, scope, _path(path, scope) if path is not None else "")

    def _name(self, node: ast.AST) -> str | None:
        """Its dotted name: what an import brought, or a builtin that the module doesn't bind itself."""
        name = dotted(node, self.known)
        if name and isinstance(node, ast.Name) and node.id not in self.known:
            return name if name in _BUILTINS and name not in self.bound else None
        return name

    def _place(self, kind: Kind, node: ast.expr, scope: _Scope, value: str = "") -> Unfollowed:
        text = " ".join(ast.unparse(node).split())
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        return Unfollowed(kind, node.lineno, scope.name, shown, value)


def _writes(node: ast.Call, at: int) -> bool:
    """Whether a call of open has a literal mode that only writes."""
    modes = [*node.args[at : at + 1], *(word.value for word in node.keywords if word.arg == "mode")]
    texts = [mode.value for mode in modes if isinstance(mode, ast.Constant) and isinstance(mode.value, str)]
    return any(set(text) & set("wax") and "+" not in text for text in texts)


def _from_context(node: ast.expr, scope: _Scope, depth: int = _DEPTH) -> bool:
    """Whether a path comes from the step's context: an input, or the step's own folder."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and inner.attr in INPUTS:
            if isinstance(inner.value, ast.Name) and scope.is_context(inner.value.id):
                return True
        elif isinstance(inner, ast.Name) and depth:
            origins = scope.find(inner.id, derived=True)
            if origins and all(_from_context(origin, scope, depth - 1) for origin in origins):
                return True
    return False


def _literal(node: ast.expr, scope: _Scope, depth: int = _DEPTH) -> str:
    """The text of a literal, or of a name that is bound once, to a literal; empty for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    origins = scope.find(node.id) if isinstance(node, ast.Name) and depth else []
    return _literal(origins[0], scope, depth - 1) if len(origins) == 1 else ""


def _beginning(node: ast.Call) -> str:
    """The literal beginning of a module's name, up to its last dot: f"plugins.{name}" -> "plugins."."""
    first = node.args[0] if node.args else None
    if isinstance(first, ast.JoinedStr) and first.values:
        first = first.values[0]
    elif isinstance(first, ast.BinOp) and isinstance(first.op, ast.Add):
        first = first.left
    text = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
    return "" if text.startswith(".") else text[: text.rfind(".") + 1]


def _path(node: ast.expr, scope: _Scope, depth: int = _DEPTH) -> str:
    """What a literal says of a path: all of it, or its last components; empty where it says nothing."""
    further: Callable[[ast.expr], str] = lambda inner: _path(inner, scope, depth - 1) if depth else ""  # noqa: E731
    match node:
        case ast.Constant():
            return _literal(node, scope)
        case ast.Name(id=name):
            origins = scope.find(name)
            return further(origins[0]) if len(origins) == 1 else ""
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            end = further(right)
            start = further(left) if end else ""
            return posixpath.join(start, end) if start else end
        case (
            ast.JoinedStr(values=[*_, ast.Constant(value=str(end))])
            | ast.BinOp(op=ast.Add(), right=ast.Constant(value=str(end)))
        ):
            return end.partition("/")[2]  # up to the first slash it may be half a name
        case ast.Call(args=[*_, last]):
            return further(last)
        case ast.Call(func=ast.Attribute(value=inner)):
            return further(inner)
        case _:
            return ""
