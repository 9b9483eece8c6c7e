"""The closure: which modules a step can reach, and what can't be followed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from onejob.core.artifact import digest_bytes
from onejob.core.code import Closure, closure
from onejob.errors import JobFileError

Write = Callable[[Mapping[str, str]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write files of a project; gives its folder."""
    folder = tmp_path / "project"
    folder.mkdir()

    def files(texts: Mapping[str, str]) -> Path:
        for name, text in texts.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return folder

    return files


def reached(project: Path, *roots: str, **declared: tuple[str, ...]) -> set[str]:
    return set(closure(roots, project, **declared).project)


# ---- what is followed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "import b",
        "import b as other",
        "from b import x",
        "from b import *",
        "def f():\n    import b",
        "try:\n    import b\nexcept ImportError:\n    b = None",
        "if TYPE_CHECKING:\n    import b",
        "if 0:\n    from b import x",
        "class A:\n    import b",
        "async def f():\n    async with g():\n        import b",
        "import importlib\nimportlib.import_module('b')",
        "from importlib import import_module as load\nload('b')",
        "__import__('b')",
        "from onejob.core.plugin import load\nload('b:x')",
        "exec('import b')",
        "match 1:\n    case 1:\n        import b",
        "f = lambda: __import__('b')",
    ],
)
def test_every_kind_of_import_is_followed(write: Write, line: str) -> None:
    project = write({"a.py": line, "b.py": "import c", "c.py": "", "unused.py": ""})
    code = closure(["a"], project)
    assert set(code.project) == {"a.py", "b.py", "c.py"}
    assert code.warnings == ()


def test_packages_bring_every_init_on_the_way(write: Write) -> None:
    project = write(
        {
            "a.py": "import p.q.r",
            "p/__init__.py": "from .side import x",
            "p/side.py": "x = 1",
            "p/q/__init__.py": "from .. import other",
            "p/other.py": "",
            "p/q/r.py": "from . import s\nfrom .s import t\nfrom ...p import side",
            "p/q/s/__init__.py": "",
            "p/q/s/t.py": "",
            "p/unused.py": "",
        }
    )
    assert reached(project, "a") == {
        *("a.py", "p/__init__.py", "p/side.py", "p/q/__init__.py", "p/other.py", "p/q/r.py", "p/q/s/__init__.py"),
        "p/q/s/t.py",
    }


def test_a_star_import_of_a_package_brings_what_it_exports(write: Write) -> None:
    project = write({"a.py": "from p import *", "p/__init__.py": "__all__ = ['q']", "p/q.py": "", "p/r.py": ""})
    assert reached(project, "a") == {"a.py", "p/__init__.py", "p/q.py"}


def test_a_root_that_is_a_package_counts_whole_and_one_with_a_function_is_followed(write: Write) -> None:
    project = write({"p/__init__.py": "def go(): ...", "p/q/__init__.py": "", "p/q/r.py": "import z", "z.py": ""})
    assert reached(project, "p") == {"p/__init__.py", "p/q/__init__.py", "p/q/r.py", "z.py"}
    assert reached(project, "p:go") == {"p/__init__.py"}


def test_circular_imports_end(write: Write) -> None:
    project = write({"a.py": "import b", "b.py": "import a, b"})
    assert reached(project, "a") == {"a.py", "b.py"}


def test_namespace_packages(write: Write) -> None:
    project = write(
        {"a.py": "import n.m.x\nfrom n import y", "n/m/x.py": "from .. import z", "n/y.py": "", "n/z.py": ""}
    )
    assert reached(project, "a") == {"a.py", "n/m/x.py", "n/y.py", "n/z.py"}
    assert reached(project, "n") == {"n/m/x.py", "n/y.py", "n/z.py"}


def test_a_folder_of_data_does_not_hide_a_distribution_but_a_module_does(write: Write) -> None:
    project = write({"a.py": "import numpy, click", "numpy/train.csv": "1", "click.py": "import b", "b.py": ""})
    code = closure(["a"], project)
    assert set(code.project) == {"a.py", "click.py", "b.py"}
    assert code.modules == ("numpy",)


def test_onejob_itself_cannot_be_hidden_and_counts_as_the_engine(write: Write) -> None:
    project = write({"a.py": "from onejob.core.artifact import short", "onejob.py": ""})
    code = closure(["a"], project)
    assert set(code.project) == {"a.py"}
    assert set(code.engine) == {"onejob/__init__.py", "onejob/core/__init__.py", "onejob/core/artifact.py"}


def test_the_engine_is_followed_into_its_own_imports(write: Write) -> None:
    code = closure(["onejob.core.job:parse_job"], write({}))
    assert {"onejob/errors.py", "onejob/core/spec.py", "onejob/core/mistakes.py"} <= set(code.engine)
    assert code.modules == ("pydantic",)
    assert code.warnings == ()  # what the engine reads isn't the user's to declare


def test_distributions_are_named_by_their_top_module_once_and_the_standard_library_is_not(write: Write) -> None:
    project = write(
        {"a.py": "import numpy.linalg, numpy as np, os.path, not_installed.x\nfrom packaging.version import V"}
    )
    assert closure(["a"], project).modules == ("not_installed", "numpy", "packaging")


def test_a_module_named_like_one_of_the_standard_library_counts_and_is_warned_about(write: Write) -> None:
    project = write({"a.py": "import statistics", "statistics.py": "import b", "b.py": ""})
    code = closure(["a"], project, table="train")
    assert set(code.project) == {"a.py", "statistics.py", "b.py"}
    assert code.warnings == (
        "statistics.py: has the name of a module of the standard library, so that either may be imported. Rename it, "
        "or declare 'statistics' in [train] imports.",
    )
    assert closure(["a"], project, imports=["statistics"]).warnings == ()


def test_environments_in_the_project_are_not_the_project(write: Write) -> None:
    project = write(
        {
            "a.py": "import venv.lib\nfrom env.lib.x import y",
            "env/pyvenv.cfg": "",
            "env/lib/x.py": "",
        }
    )
    code = closure(["a"], project)
    assert set(code.project) == {"a.py"}


def test_links_are_read_where_they_lead(write: Write, tmp_path: Path) -> None:
    project = write({"a.py": "import b, p.c"})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "shared.py").write_text("x = 1")
    (tmp_path / "elsewhere" / "c.py").write_text("y = 1")
    (project / "b.py").symlink_to(tmp_path / "elsewhere" / "shared.py")
    (project / "p").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "loop").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(project)
    code = closure(["a"], project)
    assert set(code.project) == {"a.py", "b.py", "p/c.py"}
    assert closure(["a"], tmp_path / "link") == code
    assert set(closure(["p"], project).project) == {"p/c.py", "p/shared.py"}


def test_the_folder_does_not_count(write: Write, tmp_path: Path) -> None:
    project = write({"a.py": "import p.b\nopen('x')", "p/b.py": "", "data.csv": "1"})
    one = closure(["a"], project, reads=["data.csv"])
    project.rename(tmp_path / "it's moved")
    assert closure(["a"], tmp_path / "it's moved", reads=["data.csv"]) == one


def test_an_edit_is_seen_even_in_the_same_clock_tick(write: Write) -> None:
    project = write({"a.py": "X = 1"})
    about = os.stat(project / "a.py")
    one = closure(["a"], project)
    with (project / "a.py").open("r+") as file:
        file.write("X = 2")
    os.utime(project / "a.py", ns=(about.st_atime_ns, about.st_mtime_ns))
    assert closure(["a"], project) != one


def test_a_compiled_module_counts_by_its_bytes(write: Write) -> None:
    name = f"fast{EXTENSION_SUFFIXES[0]}"
    project = write({"a.py": "import fast", name: "machine code", "fast.py": "slow = True"})
    code = closure(["a"], project, table="train")
    assert code.project[name].digest == digest_bytes(b"machine code")
    assert code.warnings == (
        f"{name}: a compiled module: its bytes count, what it imports and reads can't be seen. Declare that, and "
        "'fast' itself, in [train] imports.",
    )
    assert closure(["a"], project, imports=["fast"]).warnings == ()


def test_code_outside_the_project_that_is_no_copy_is_warned_about_and_counts_once_declared(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libs" / "mylib").mkdir(parents=True)
    (tmp_path / "libs" / "mylib" / "__init__.py").write_text("from . import deep")
    (tmp_path / "libs" / "mylib" / "deep.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path / "libs")
    project = write({"a.py": "\nimport mylib"})
    code = closure(["a"], project)
    assert code.modules == ("mylib",)
    assert code.warnings == (
        "a.py:2: module 'mylib' lies outside the project and isn't installed as a copy, so a change in it doesn't "
        "count in the key. Declare 'mylib' in imports.",
    )
    declared = closure(["a"], project, imports=["mylib"])
    assert set(declared.project) == {"a.py", "mylib/__init__.py", "mylib/deep.py"}
    assert declared.warnings == ()


def test_nothing_is_imported(write: Write) -> None:
    project = write({"dangerous_a.py": "import dangerous_b\nraise SystemExit", "dangerous_b.py": "raise SystemExit"})
    closure(["dangerous_a"], project)
    assert not {"dangerous_a", "dangerous_b"} & set(sys.modules)


def test_as_json(write: Write) -> None:
    project = write({"a.py": "import numpy\nX = 1", "d.csv": "1"})
    data = closure(["a"], project, reads=["d.csv"]).to_json()
    assert set(data) == {"project", "engine", "modules", "reads", "warnings"}
    assert set(data["project"]["a.py"]["parts"]) == {"imports", "constant X"}
    assert data["reads"] == {"d.csv": digest_bytes(b"1")}


# ---- mistakes ----------------------------------------------------------------------------------------------------


def mistakes(*roots: str, project: Path, **declared: tuple[str, ...]) -> list[str]:
    with pytest.raises(JobFileError) as caught:
        closure(roots, project, table="train", **declared)
    return caught.value.mistakes


def test_what_is_declared_and_is_not_there_is_a_mistake_all_at_once(write: Write) -> None:
    project = write({"helper.py": "def scale(): ...", "data/x.csv": "", "plugins/fast.py": "", "plugins/slow.py": ""})
    found = mistakes(
        "helper:scal",
        "helpr",
        project=project,
        imports=("plugins.fsat", "helper.py:lod", "not a name"),
        reads=("data/y.csv", "../x.csv", "/etc/hosts", "*.npy", "gone.py:load"),
    )
    assert found == [
        "[train] reads: 'data/y.csv': there is no such file in the job's folder. Did you mean 'data/x.csv'?",
        "[train] reads: '../x.csv' lies outside the project. Copy it, or link it, into the job's folder.",
        "[train] reads: '/etc/hosts' lies outside the project. Copy it, or link it, into the job's folder.",
        "[train] reads: '*.npy': there is no such file in the job's folder.",
        "[train] code: helper.py has no 'scal'. Did you mean 'scale'?",
        "[train] code: no module is called 'helpr'. Did you mean 'helper'?",
        "[train] imports: no module is called 'plugins.fsat'. Did you mean 'plugins.fast'?",
        "[train] imports: no module is called 'not a name'.",
        "[train] reads: 'gone.py:load': there is no file 'gone.py'.",
        "[train] imports: 'helper.py:lod': helper.py has no 'lod'.",
    ]


def test_a_module_that_is_not_python_is_a_mistake_with_its_line(write: Write) -> None:
    project = write({"a.py": "import b, c", "b.py": "x = 1\ndef f(:\n", "c.py": "x = '\0'"})
    assert [text.partition(": isn't Python")[0] for text in mistakes("a", project=project)] == ["b.py:2", "c.py"]


# ---- what can't be followed --------------------------------------------------------------------------------------


def warnings(project: Path, **declared: tuple[str, ...]) -> list[str]:
    return list(closure(["a"], project, **declared).warnings)


def test_a_file_read_by_a_literal_path_is_covered_by_its_declaration_and_no_other(write: Write) -> None:
    project = write({"a.py": "def load():\n    return open('data/x.csv')", "data/x.csv": "1", "data/y.csv": "1"})
    assert warnings(project) == [
        "a.py:2: `open('data/x.csv')` reads by path, which doesn't count in the key. Declare the file in reads."
    ]
    assert warnings(project, reads=("data/y.csv",)) == warnings(project)
    for cover in ("data/x.csv", "./data/x.csv", "data", "data/*.csv"):
        code = closure(["a"], project, reads=(cover,))
        assert code.warnings == ()
        assert "data/x.csv" in code.reads


def test_a_file_read_by_another_path_is_covered_by_looking_at_the_function(write: Write) -> None:
    project = write({"a.py": "class A:\n    def load(self, path):\n        return open(path)", "x.csv": "1"})
    expected = (
        'a.py:3: `open(path)` reads by path, which can\'t be followed. Add to reads: the file, and "a.py:A.load".'
    )
    assert warnings(project) == [expected]
    assert warnings(project, reads=("x.csv",)) == [expected]
    assert warnings(project, reads=("x.csv", "a.py:A.load")) == []
    assert list(closure(["a"], project, reads=("x.csv", "a.py:A.load")).reads) == ["x.csv"]


def test_a_dynamic_import_is_covered_by_what_it_may_import(write: Write) -> None:
    project = write(
        {
            "a.py": "import importlib\ndef f(n):\n    importlib.import_module(f'plugins.{n}')\n"
            "def g(n):\n    __import__(n)",
            "plugins/fast.py": "import deep",
            "deep.py": "",
        }
    )
    first, second = warnings(project)
    assert first.startswith("a.py:3: `importlib.import_module(f'plugins.{n}')` imports a module by name")
    assert second.startswith("a.py:5: `__import__(n)` imports a module by name")
    code = closure(["a"], project, imports=["plugins"])
    assert set(code.project) == {"a.py", "plugins/fast.py", "deep.py"}
    assert code.warnings == (second,)
    assert warnings(project, imports=("plugins.fast", "a.py:g")) == []


def test_a_variable_is_covered_by_its_value_in_the_job(write: Write) -> None:
    project = write({"a.py": "import os\nMODE = os.environ['MODE']"})
    assert warnings(project) == [
        "a.py:2: `os.environ['MODE']` reads an environment variable that doesn't count in the key. Set MODE in [run] "
        'env, or add "a.py:module" to reads.'
    ]
    assert closure(["a"], project, env={"OTHER"}).warnings != ()
    assert closure(["a"], project, env={"MODE"}).warnings == ()


def test_warnings_come_in_the_order_of_files_and_lines(write: Write) -> None:
    project = write({"a.py": "import b\n" + "\n" * 8 + "open('x')\nopen('w')", "b.py": "\nopen('y')"})
    assert [text.partition(" ")[0] for text in warnings(project)] == ["a.py:10:", "a.py:11:", "b.py:2:"]


def test_declared_folders_leave_out_what_is_not_the_projects(write: Write) -> None:
    project = write(
        {"a.py": "", "m/x": "1", "m/.git/y": "1", "m/env/pyvenv.cfg": "", "m/env/z": "", "m/__pycache__/q": ""}
    )
    code: Closure = closure(["a"], project, reads=["m"])
    assert list(code.reads) == ["m/x"]
