"""The Triton that is installed out of a wheel: what is made around it, and what it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onejob.engines.triton import wheel
from onejob.errors import UnavailableError

SERVER = """#!/bin/sh
echo "$@"
echo "$LD_LIBRARY_PATH"
echo "$PATH"
"""


class Pip:
    """What running pip would leave; it takes notes."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.fails = False

    def __call__(self, command: tuple[str, ...], **_: Any) -> subprocess.CompletedProcess[str]:
        self.asked.append(tuple(command))
        if "pip" in command:
            if self.fails:
                return subprocess.CompletedProcess(command, 1, "", "no network\n")
            made = Path(command[command.index("--python") + 1]).parents[1]
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            server = made / "lib" / f"python{version}" / "site-packages" / "pytriton" / "tritonserver"
            for folder in ("bin", "backends/python", f"python_backend_stubs/{version}"):
                (server / folder).mkdir(parents=True, exist_ok=True)
            (server / "bin" / "tritonserver").write_text(SERVER)
            (server / "bin" / "tritonserver").chmod(0o755)
            (server / "backends" / "python" / "libtriton_python.so").write_text("")
            (server / "python_backend_stubs" / version / "triton_python_backend_stub").write_text("stub")
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pip:
    made = Pip()
    monkeypatch.setattr(wheel.subprocess, "run", made)
    monkeypatch.setattr(wheel, "library", lambda: "/python's/lib")
    monkeypatch.setattr(wheel, "PYTHONS", (sys.version_info[:2],))
    return made


def test_it_is_installed_once_and_starts_with_what_it_needs(
    pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "it's here"
    program = wheel.install(folder)
    asked = len(pip.asked)
    assert wheel.install(folder) == program
    assert len(pip.asked) == asked, "a second time nothing is done"
    assert set(wheel.PACKAGES) < set(pip.asked[-1])
    assert os.access(folder / "backends" / "python" / "triton_python_backend_stub", os.X_OK)
    assert (folder / "backends" / "python" / "libtriton_python.so").exists()
    monkeypatch.undo()
    done = subprocess.run([program, "--http-port=1"], capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    told, libraries, path = done.stdout.splitlines()
    assert told == f"--backend-directory={folder}/backends --http-port=1"
    assert libraries.split(":")[0].startswith(f"{folder}/lib/python")
    assert libraries.endswith(":/python's/lib")
    assert path.startswith(f"{folder}/bin:"), "models run in its own environment"


def test_one_for_another_python_is_made_again(pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel.install(tmp_path)
    asked = len(pip.asked)
    monkeypatch.setattr(wheel, "library", lambda: "/another/lib")
    wheel.install(tmp_path)
    assert len(pip.asked) > asked
    assert "/another/lib" in (tmp_path / "bin" / "tritonserver").read_text()


def test_what_fails_is_told_and_leaves_no_program(pip: Pip, tmp_path: Path) -> None:
    pip.fails = True
    with pytest.raises(UnavailableError, match=r"pip.*failed: no network"):
        wheel.install(tmp_path)
    assert not (tmp_path / "bin" / "tritonserver").exists()
    pip.fails = False
    wheel.install(tmp_path)


def test_a_python_that_it_does_not_work_with(pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "PYTHONS", ((3, 2),))
    with pytest.raises(UnavailableError, match=r"works with Python 3\.2, not 3\."):
        wheel.install(tmp_path)
    assert not pip.asked


def test_the_library_of_python_is_there_or_named_with_its_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = f"libpython3.{sys.version_info.minor}.so.1.0"
    monkeypatch.setattr(wheel.sysconfig, "get_config_var", lambda _: str(tmp_path))
    (tmp_path / name).write_text("")
    assert wheel.library() == str(tmp_path)
    (tmp_path / name).unlink()
    monkeypatch.setattr(wheel, "SYSTEM", str(tmp_path))
    with pytest.raises(
        UnavailableError, match=rf"libpython.*isn't there\. apt-get install libpython3\.{sys.version_info.minor}"
    ):
        wheel.library()


def test_by_default_it_is_put_beside_this_python(
    pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(wheel.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(wheel.sys, "executable", str(tmp_path / "bin" / "python"))
    for _ in range(2):
        assert wheel.main([]) == 0
    linked = tmp_path / "bin" / "tritonserver"
    assert linked.resolve() == tmp_path / "triton" / "bin" / "tritonserver"
    assert capsys.readouterr().out.splitlines() == [str(linked)] * 2
    pip.fails = True
    assert wheel.main([str(tmp_path / "other")]) == UnavailableError.exit_code
    assert "no network" in capsys.readouterr().err
