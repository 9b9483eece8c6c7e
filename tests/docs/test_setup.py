"""tools/setup.sh on a made-up machine: its PATH holds what a test puts there, and its Python takes notes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "setup.sh"
TOOLS = ("sh", "cat", "cksum", "dirname", "pwd", "date", "rm", "mkdir", "cp", "touch", "chmod")
PYTHON = """#!/bin/sh
echo "$@" >>"$LOG"
case "$1 $2" in
    "-c import venv, ensurepip") exit {venv} ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m onejob.engines.triton.wheel") exit {triton} ;;
    "tools/clients.py .venv/clients") exit {clients} ;;
    "-m pip") [ "$3" != install ] || { touch .venv/bin/onejob && chmod +x .venv/bin/onejob; } ;;
esac
"""


class Machine:
    """A checkout and a PATH of its own; not root."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.log = folder / "check out", folder / "bin", folder / "log"
        (self.folder / "tools").mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(SCRIPT, self.folder / "tools")
        (self.folder / "pyproject.toml").write_text("[project]\n")
        (self.folder / "constraints.txt").write_text("click==8\n")
        (self.folder / "tools" / "clients.py").write_text("")
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
        self.add("id", "#!/bin/sh\necho 1000\n")
        for name in ("git", "make", "curl", "initdb"):
            self.add(name, "#!/bin/sh\n")
        self.add_python()

    def add(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def add_python(self, *, venv: bool = True, triton: bool = True, clients: bool = True) -> None:
        works = {"venv": venv, "triton": triton, "clients": clients}
        text = PYTHON
        for what, well in works.items():
            text = text.replace(f"{{{what}}}", "0" if well else "8")
        self.add("python3", text)

    def remove(self, name: str) -> None:
        (self.bin / name).unlink()

    def set_up(self, extra: str = "all") -> tuple[int, str]:
        """Exit code and stderr; the log holds what Python was asked to do by this call."""
        self.log.write_text("")
        env = {"PATH": str(self.bin), "LOG": str(self.log)}
        done = subprocess.run([self.folder / "tools/setup.sh", extra], env=env, capture_output=True, text=True)
        return done.returncode, done.stderr

    def asked(self, what: str) -> int:
        return sum(line.startswith(what) for line in self.log.read_text().splitlines())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("name", "extra", "error", "cure"),
    [
        ("git", "all", "'git' is not installed", "apt-get install git"),
        ("make", "all", "'make' is not installed", "apt-get install make"),
        ("curl", "dev", "'curl' is not installed", "apt-get install curl"),
        ("python3", "all", "Python 3.11 or newer is not installed", "apt-get install python3 python3-venv"),
    ],
)
def test_what_is_missing_is_named_with_its_cure(name: str, extra: str, error: str, cure: str, machine: Machine) -> None:
    machine.remove(name)
    code, text = machine.set_up(extra)
    assert code == 1
    assert f"error: {error}" in text
    assert f"cure: {cure}" in text


def test_a_python_without_venv_is_named(machine: Machine) -> None:
    machine.add_python(venv=False)
    code, text = machine.set_up()
    assert code == 1
    assert "cure: apt-get install python3-venv" in text
    assert not (machine.folder / ".venv").exists()


def test_the_second_call_does_nothing(machine: Machine) -> None:
    code, text = machine.set_up()
    assert code == 0
    assert "installing onejob[all]" in text
    assert (machine.asked("-m venv"), machine.asked("-m pip install")) == (1, 1)
    assert machine.set_up() == (0, "")
    assert (machine.asked("-m venv"), machine.asked("-m pip")) == (0, 0)


def test_what_brings_more_counts_for_less(machine: Machine) -> None:
    assert machine.set_up("dev")[0] == 0
    assert machine.set_up("all") == (0, "")
    (machine.folder / "constraints.txt").write_text("click==9\n")
    assert "installing onejob[all]" in machine.set_up("all")[1]
    assert "installing onejob[dev]" in machine.set_up("dev")[1], "other constraints than those it was made with"


@pytest.mark.parametrize("what", ["-m onejob.engines.triton.wheel", "tools/clients.py .venv/clients"])
def test_only_development_needs_servers_and_clients(machine: Machine, what: str) -> None:
    assert machine.set_up("all")[0] == 0
    assert machine.asked(what) == 0
    assert machine.set_up("dev")[0] == 0
    assert machine.asked(what) == 1
    assert machine.set_up("dev") == (0, "")
    assert machine.asked(what) == 0


def test_without_a_triton_it_goes_on_and_says_so(machine: Machine) -> None:
    machine.add_python(triton=False)
    code, text = machine.set_up("dev")
    assert code == 0
    assert "going on without a Triton" in text


def test_without_a_client_it_goes_on_and_says_so(machine: Machine) -> None:
    machine.add_python(clients=False)
    code, text = machine.set_up("dev")
    assert code == 0
    assert "going on without; where nothing may be left out (CI), the tests fail" in text


def test_an_install_that_was_cut_off_is_gone_on_with(machine: Machine) -> None:
    machine.set_up()
    for stamp in (machine.folder / ".venv").glob("onejob-setup-*"):
        stamp.unlink()
    assert machine.set_up()[0] == 0
    assert (machine.asked("-m venv"), machine.asked("-m pip install")) == (0, 1)


def test_a_half_made_environment_is_made_again(machine: Machine) -> None:
    (machine.folder / ".venv" / "bin").mkdir(parents=True)
    code, text = machine.set_up()
    assert code == 0
    assert "half made" in text
    assert machine.asked("-m venv") == 1


def test_an_environment_from_elsewhere_is_made_again(machine: Machine) -> None:
    machine.set_up()
    machine.folder = machine.folder.rename(machine.folder.with_name("moved"))
    code, text = machine.set_up()
    assert code == 0
    assert "from elsewhere" in text
    assert machine.asked("-m venv") == 1
