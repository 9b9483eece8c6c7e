"""A module's digest and parts: what counts, what doesn't, and what a change is called."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import onejob
from onejob.core.scan import dump, scan

MODULE = '''"""What it is."""
import math
from functools import lru_cache as cache

FACTOR = 2
LOW, (HIGH, *REST) = 1, (2, 3)

@cache(maxsize=4)
def scale(x, by=FACTOR, *, plus=0):
    return x * by + plus

class Scaler(dict, metaclass=type):
    """Scales."""
    limit = 10

    @staticmethod
    def fit(rows, deep=True):
        return max(rows)

    class Inner:
        def go(self):
            return 1

try:
    import fast
except ImportError:
    fast = None

if fast:
    def quick():
        return 1
else:
    def quick():
        return 2

print(FACTOR)
'''

CHANGES = {
    '"""What it is."""': ('"""What it was."""', {"module docstring"}),
    "import math": ("import maths", {"imports"}),
    "FACTOR = 2": ("FACTOR = 3", {"constant FACTOR"}),
    "(2, 3)": ("(2, 4)", {"constant LOW", "constant HIGH", "constant REST"}),
    "maxsize=4": ("maxsize=8", {"decorator of scale"}),
    "by=FACTOR": ("by=7", {"default argument of scale"}),
    "plus=0": ("plus=1", {"default argument of scale"}),
    "x * by + plus": ("x + by * plus", {"function scale"}),
    "(dict, metaclass": ("(list, metaclass", {"class Scaler"}),
    '"""Scales."""': ('"""Scales well."""', {"docstring of Scaler"}),
    "limit = 10": ("limit = 11", {"attribute Scaler.limit"}),
    "@staticmethod": ("@classmethod", {"decorator of Scaler.fit"}),
    "deep=True": ("deep=1", {"default argument of Scaler.fit"}),
    "max(rows)": ("min(rows)", {"method Scaler.fit"}),
    "            return 1\n\ntry": ("            return 3\n\ntry", {"method Scaler.Inner.go"}),
    "import fast": ("import faster as fast", {"imports"}),
    "except ImportError": ("except OSError", {"top-level code"}),
    "fast = None": ("fast = 0", {"constant fast"}),
    "if fast:": ("if not fast:", {"top-level code"}),
    "return 2": ("return 5", {"function quick"}),
    "print(FACTOR)": ("print(HIGH)", {"top-level code"}),
}


@pytest.mark.parametrize("old", CHANGES)
def test_each_kind_of_change_changes_the_digest_and_just_its_parts(old: str) -> None:
    new, parts = CHANGES[old]
    assert MODULE.count(old) == 1
    before, after = scan(MODULE.encode()), scan(MODULE.replace(old, new).encode())
    assert before.digest != after.digest
    names = {*before.parts, *after.parts}
    assert {name for name in names if before.parts.get(name) != after.parts.get(name)} == parts


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("FACTOR = 2", "FACTOR = 2  # twice"),
        ("FACTOR = 2", "\n\n# twice\nFACTOR    =    (2)"),
        ("return x * by + plus", "return (\n        x\n        * by + plus  # here\n    )"),
        ('"""Scales."""', "'''Scales.'''"),
        ("FACTOR = 2", "FACTOR = 0x2"),
    ],
)
def test_comments_and_formatting_do_not_count(old: str, new: str) -> None:
    changed = MODULE.replace(old, new)
    assert changed != MODULE
    assert scan(MODULE.encode()).digest == scan(changed.encode()).digest


def test_line_ends_byte_order_marks_and_declared_encodings_do_not_count() -> None:
    text = 'NAME = "Zoë"\n\ndef f():\n    return 1\n'
    digest = scan(text.encode()).digest
    assert scan(text.replace("\n", "\r\n").encode()).digest == digest
    assert scan(b"\xef\xbb\xbf" + text.encode()).digest == digest
    assert scan(b"# coding: latin-1\n" + text.encode("latin-1")).digest == digest


def test_reordering_counts_though_no_part_changed() -> None:
    one, two = scan(b"def a(): pass\ndef b(): pass\n"), scan(b"def b(): pass\ndef a(): pass\n")
    assert one.digest != two.digest
    assert one.parts == two.parts


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("x = 1", "x = True"),
        ("x = 1", "x = 1.0"),
        ("x = 0.0", "x = -0.0"),
        ("x = 'a'", "x = b'a'"),
        ("x = 'ab'", "x = ('a', 'b')"),
        ("x = None", "x = 'None'"),
        ("x = ...", "x = 'Ellipsis'"),
        ("f(a, b)", "f((a, b))"),
        ("f(a=1)", "f(**{'a': 1})"),
        ("def f(a, /): 0", "def f(a): 0"),
        ("def f(a, *, b): 0", "def f(a, b): 0"),
        ("def f(*a): 0", "def f(**a): 0"),
        ("def f(): 0", "async def f(): 0"),
        ("def f() -> int: 0", "def f() -> str: 0"),
        ("def f(a: int): 0", "def f(a: str): 0"),
        ("def f(a=1, b=2): 0", "def f(a, b=2): 0"),
        ("def f(*, a=1, b): 0", "def f(*, a, b=1): 0"),
        ("if a: b\nelse: c", "if a:\n b\nc"),
        ("if a:\n b()\n c()", "if a:\n b()\nc()"),
        ("class A:\n x = 1", "class A: pass\nx = 1"),
        ("class A:\n class B:\n  x = 1", "class A:\n class B: pass\n x = 1"),
        ("try: a\nexcept: b", "try: a\nfinally: b"),
        ("for a in b: c", "async def f(): 0\nfor a in b: c"),
        ("from . import a", "from .. import a"),
        ("from a import b", "from a.b import b"),
        ("import a", "import a as b"),
        ("x = {**a}", "x = {None: a}"),
        ("x = a[1:]", "x = a[:1]"),
        ("x = f'{a}'", "x = f'{a!r}'"),
        ("x = f'{a:>3}'", "x = f'{a:>4}'"),
        ("global x", "import x"),
        ("@a\n@b\ndef f(): 0", "@b\n@a\ndef f(): 0"),
        ("x = '\\ud800'", "x = '\\ud801'"),
    ],
)
def test_what_means_another_thing_has_another_digest(one: str, two: str) -> None:
    assert scan(one.encode()).digest != scan(two.encode()).digest


def test_large_numbers_and_deep_trees_are_no_trouble() -> None:
    big = "x = 0x" + "f" * 5000
    assert scan(big.encode()).digest != scan(f"{big}f".encode()).digest
    chain = ast.parse("a")
    for _ in range(5000):
        chain.body = [ast.Expr(ast.BinOp(chain.body[0].value, ast.Add(), ast.Name("b", ast.Load())))]  # type: ignore[attr-defined]
    assert dump(chain, []).count("BinOp") == 5000


def test_the_text_agrees_with_pythons_own_dump_over_real_modules() -> None:
    """Two modules have one digest exactly if `ast.dump` says that they are the same."""
    folder = Path(onejob.__file__).parent / "core"
    by_digest, by_dump = {}, {}
    for path in sorted(folder.rglob("*.py")):
        source = path.read_bytes()
        by_digest.setdefault(scan(source).digest, []).append(path)
        by_dump.setdefault(ast.dump(ast.parse(source)), []).append(path)
        assert scan(ast.unparse(ast.parse(source)).encode()).digest == scan(source).digest, path
    assert sorted(by_digest.values()) == sorted(by_dump.values())


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=20))
def test_any_text_constant_is_told_apart_from_a_longer_one(text: str) -> None:
    assert scan(f"x = {text!r}".encode()).digest != scan(f"x = {text + 'a'!r}".encode()).digest


def test_invalid_escapes_warn_nobody() -> None:
    scan(b"x = '\\d+'")


def test_imports_are_found_wherever_they_stand() -> None:
    source = b"""
import a.b, c as d
def f():
    from e import f1, f2
    class G:
        from . import h
if TYPE_CHECKING:
    from ..i import j
try:
    import importlib as il
    il.import_module("k.l")
except ImportError:
    __import__("m")
lambda: il.import_module(".n", __package__)
exec("import o; from p import q")
import_module = il.import_module
def g(x=__import__("r")): ...
@__import__("s").t
class U(__import__("v").W): ...
"""
    found = {(one.module, one.names, one.level) for one in scan(source).imports}
    assert found == {
        ("a.b", (), 0),
        ("c", (), 0),
        ("e", ("f1", "f2"), 0),
        ("", ("h",), 1),
        ("i", ("j",), 2),
        ("importlib", (), 0),
        ("k.l", (), 0),
        ("m", (), 0),
        ("n", (), 1),
        ("o", (), 0),
        ("p", ("q",), 0),
        ("r", (), 0),
        ("s", (), 0),
        ("v", (), 0),
    }
