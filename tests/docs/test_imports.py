"""How modules import each other, where import-linter can't look: inside functions, and at what a command loads."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "onejob"
ALLOWED = {"core/plugin.py", "cli/__init__.py"}
"""The two places that load by name."""
LOADERS = {"import_module", "__import__"}
MODULES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))

PRINT_LOADED = """
import json, sys
from onejob.cli import main
try:
    main({args!r})
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(sorted(sys.modules)))
"""
HEAVY = {"pydantic", "sqlalchemy", "rich", "numpy", "polars", "torch", "onnxruntime", "importlib.metadata"}


def hidden_imports(text: str) -> list[int]:
    """Lines of imports that stand inside a function, and of calls that import by name."""
    tree = ast.parse(text)
    lines = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            lines |= {n.lineno for n in ast.walk(function) if isinstance(n, ast.Import | ast.ImportFrom)}
            lines |= {n.lineno for n in ast.walk(function) if isinstance(n, ast.Call) and _name(n.func) in LOADERS}
    return sorted(lines)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("module", MODULES)
def test_no_import_stands_inside_a_function(module: str) -> None:
    if module not in ALLOWED:
        assert hidden_imports((SOURCE / module).read_text()) == []


def test_the_search_for_hidden_imports_finds_them() -> None:
    lines = ["import a", "def f():", "    import b", "    return importlib.import_module('c')", "class D:"]
    lines += ["    def g(self):", "        from e import h"]
    assert hidden_imports("\n".join(lines)) == [3, 4, 7]


@pytest.mark.parametrize("args", [["--help"], ["--version"]])
def test_the_top_help_loads_nothing_heavy(args: list[str]) -> None:
    """What keeps `onejob --help` quick, without measuring time."""
    *text, loaded = _python(PRINT_LOADED.format(args=args))
    assert text
    assert not loaded & HEAVY
    assert not {name for name in loaded if name.startswith(("onejob.loop", "onejob.store"))}


def test_completing_a_verb_loads_nothing_heavy() -> None:
    """The shell asks at every press of the tab key."""
    asked = {"_ONEJOB_COMPLETE": "bash_complete", "COMP_WORDS": "onejob st", "COMP_CWORD": "1"}
    *words, loaded = _python(f"import os; os.environ.update({asked})" + PRINT_LOADED.format(args=[]))
    assert words == ["plain,stop"]
    assert not loaded & HEAVY


def _python(code: str) -> list[Any]:
    """Run some code; its lines, and last the set of modules that it loaded."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *lines, loaded = done.stdout.splitlines()
    return [*lines, set(json.loads(loaded))]
