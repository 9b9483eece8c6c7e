"""What is seen in a module that its source doesn't show."""

from __future__ import annotations

import pytest

from onejob.core.unfollowed import Unfollowed, unfollowed


def kinds(source: str) -> list[tuple[str, str]]:
    return [(place.kind, place.value) for place in unfollowed(source.encode())]


IMPORTS = """import os, sys, subprocess, importlib, runpy, ctypes, json, gzip, sqlite3, site
import numpy as np, polars as pl
"""

SEEN = [
    ("importlib.import_module(name)", "import", ""),
    ("importlib.import_module('plugins.' + name)", "import", "plugins."),
    ("importlib.import_module(f'plugins.{name}')", "import", "plugins."),
    ("importlib.import_module('.x', 'other')", "import", ""),
    ("__import__(name)", "import", ""),
    ("runpy.run_path('x.py')", "import", ""),
    ("importlib.util.spec_from_file_location('x', path)", "import", ""),
    ("exec(text)", "code", ""),
    ("eval(f'{x} + 1')", "code", ""),
    ("compile(text, 'x', 'exec')", "code", ""),
    ("open(path)", "read", ""),
    ("open('x.csv')", "read", "x.csv"),
    ("open('x.csv', 'rb')", "read", "x.csv"),
    ("open('x.csv', 'r+')", "read", "x.csv"),
    ("open('x.csv', mode)", "read", "x.csv"),
    ("json.load(open('x.json'))", "read", "x.json"),
    ("with open(Path(__file__).parent / 'x.csv') as file: ...", "read", "x.csv"),
    ("open(os.path.join(folder, 'x.csv'))", "read", "x.csv"),
    ("open(f'{folder}/a/x.csv')", "read", "a/x.csv"),
    ("open(f'{folder}/a_{n}.csv')", "read", ""),
    ("open(folder + '/x.csv')", "read", "x.csv"),
    ("NAME = 'x.csv'\nopen(NAME)", "read", "x.csv"),
    ("def f():\n    p = Path('d') / 'x.csv'\n    return open(p)", "read", "d/x.csv"),
    ("NAME = 'x.csv'\nNAME = 'y.csv'\nopen(NAME)", "read", ""),
    ("Path('x.csv').read_text()", "read", "x.csv"),
    ("path.read_bytes()", "read", ""),
    ("(folder / 'x.csv').open()", "read", "x.csv"),
    ("folder.rglob('*')", "read", ""),
    ("np.load('x.npy')", "read", "x.npy"),
    ("np.loadtxt('x.txt')", "read", "x.txt"),
    ("np.fromfile('x.bin')", "read", "x.bin"),
    ("pl.read_csv('x.csv')", "read", "x.csv"),
    ("pl.scan_parquet('x.parquet')", "read", "x.parquet"),
    ("gzip.open('x.gz')", "read", "x.gz"),
    ("sqlite3.connect('x.db')", "read", "x.db"),
    ("os.listdir('d')", "read", "d"),
    ("ctypes.CDLL('x.so')", "read", "x.so"),
    ("AutoModel.from_pretrained(name)", "read", ""),
    ("os.environ['HOME']", "env", "HOME"),
    ("os.environ.get('HOME', '')", "env", "HOME"),
    ("os.environ.setdefault('HOME', '')", "env", "HOME"),
    ("'HOME' in os.environ", "env", "HOME"),
    ("os.getenv('HOME')", "env", "HOME"),
    ("NAME = 'HOME'\nos.getenv(NAME)", "env", "HOME"),
    ("os.environ[name]", "env", ""),
    ("dict(os.environ)", "env", ""),
    ("for name in os.environ: ...", "env", ""),
    ("subprocess.run(['ls'])", "program", ""),
    ("os.system('ls')", "program", ""),
    ("os.execvp('ls', [])", "program", ""),
    ("sys.path.insert(0, 'lib')", "path", ""),
    ("sys.path += ['lib']", "path", ""),
    ("sys.path[:0] = ['lib']", "path", ""),
    ("site.addsitedir('lib')", "path", ""),
]


@pytest.mark.parametrize(("source", "kind", "value"), SEEN)
def test_seen(source: str, kind: str, value: str) -> None:
    assert kinds(IMPORTS + source) == [(kind, value)]


@pytest.mark.parametrize(
    "source",
    [
        "importlib.import_module('helper')",
        "importlib.import_module('.x', __package__)",
        "exec('x = 1')",
        "eval('1 + 1')",
        "open('x.csv', 'w')",
        "open('x.csv', mode='ab')",
        "Path('x').open('w')",
        "Path('x').write_text('')",
        "os.environ['HOME'] = 'x'",
        "del os.environ['HOME']",
        "os.environ.update(HOME='x')",
        "re.compile(text)",
        "model.eval()",
        "def open(path): ...\nopen('x')",
        "from mine import open\nopen('x')",
        "import webbrowser\nwebbrowser.open('x')",
        "np.zeros(3)",
        "pl.col('x')",
        "sys.argv",
        "os.path.join('a', 'b')",
        "'x' in names",
        "'open(x)'  # open(x)",
        "def step(context):\n    open(context.inputs['dataset'].path / 'x')",
        "def step(context):\n    context.inputs['dataset'].file('x').read_text()",
        "def step(context):\n    folder = context.out('dataset')\n    path = folder / 'x'\n    path.read_text()",
        "def step(c: StepContext):\n    for path in c.inputs['d'].path.glob('*'):\n        np.load(path)",
        "def step(c: 'onejob.core.context.StepContext'):\n    [np.load(p) for p in sorted(c.scratch.iterdir())]",
    ],
)
def test_not_seen(source: str) -> None:
    assert kinds(IMPORTS + source) == []


def test_a_context_is_a_parameter_and_not_any_name() -> None:
    assert kinds("context = other()\nopen(context.inputs['x'])") == [("read", "")]
    assert kinds("def f(context: Other):\n    open(context.inputs['x'])") == [("read", "")]


def test_each_place_names_its_function_and_line() -> None:
    source = b"""
open(a)
def f():
    def g():
        open(b)
class A:
    def m(self):
        open(c)
    open(d)
"""
    assert [(place.line, place.function) for place in unfollowed(source)] == [
        (2, "module"),
        (5, "f.g"),
        (8, "A.m"),
        (9, "A"),
    ]


def test_a_long_expression_is_shortened() -> None:
    (place,) = unfollowed(f"open(x + {'y' * 100!r})".encode())
    assert place == Unfollowed("read", 1, "module", f"open(x + '{'y' * 47}...", "")


def test_what_was_opened_is_reported_once() -> None:
    source = "import zipfile\nwith zipfile.ZipFile('x.zip') as z:\n    z.open('inner')"
    assert kinds(source) == [("read", "x.zip")]
