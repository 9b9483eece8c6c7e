"""Installs a Triton Inference Server out of the wheel of nvidia-pytriton: its program and Python backend.

    python -m onejob.engines.triton.wheel [FOLDER]

75 MB to fetch, 230 MB on the disk; no GPU is needed. FOLDER (`triton` in this Python's environment, if not told)
becomes a virtual environment with the wheel, backends/, and bin/tritonserver, which sets what the server needs and
becomes it; without FOLDER that is linked beside this Python too, where the engine finds it. The wheel has the Python
backend only.
Models run in the environment of the first `python3` on the server's PATH: this one, which has numpy 1, for the backend
misreads the arrays of numpy 2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from onejob.errors import OnejobError, UnavailableError

PACKAGES = ("nvidia-pytriton==0.7.0", "numpy==1.26.4")
VERSION = "2.51.0"
PYTHONS = ((3, 11), (3, 12))
"""Versions that have both a stub in the wheel and that numpy."""
PLACE = "Triton's wheel"
SYSTEM = "/usr/lib/x86_64-linux-gnu"
"""Where Debian and Ubuntu have libraries."""
PROGRAM = """#!/bin/sh
# Triton {version} out of nvidia-pytriton; its Python backend runs Python {python}.
here={here}
packages=$here/lib/python{python}/site-packages
export LD_LIBRARY_PATH="$packages/nvidia_pytriton.libs:"{library}"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
export PATH="$here/bin:$PATH"
exec "$packages/pytriton/tritonserver/bin/tritonserver" --backend-directory="$here/backends" "$@"
"""


def install(folder: Path) -> Path:
    """The program, installed if it isn't; UnavailableError where it can't be. Doing it twice is doing it once."""
    if sys.version_info[:2] not in PYTHONS:
        wanted = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        raise UnavailableError(f"it works with Python {wanted}, not {_python()}", place=PLACE)
    program = folder / "bin" / "tritonserver"
    text = PROGRAM.format(
        version=VERSION, python=_python(), here=_quoted(str(folder.resolve())), library=_quoted(library())
    )
    if program.is_file() and program.read_text() == text:
        return program
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    packages = folder / "lib" / f"python{_python()}" / "site-packages"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    _run(*pip, "--python", str(folder / "bin" / "python"), "install", "--no-deps", *PACKAGES)
    _gather_backend(packages / "pytriton" / "tritonserver", folder / "backends")
    program.parent.mkdir(parents=True, exist_ok=True)
    aside = program.with_suffix(".aside")
    aside.write_text(text)
    aside.chmod(0o755)
    aside.replace(program)
    return program


def library() -> str:
    """The folder with this Python's shared library, which the stub is linked with."""
    name = f"libpython{_python()}.so.1.0"
    folders = [sysconfig.get_config_var("LIBDIR"), SYSTEM]
    for folder in filter(None, folders):
        if (Path(folder) / name).exists():
            return str(folder)
    raise UnavailableError(f"{name} isn't there", place=PLACE, cure=f"apt-get install libpython{_python()}")


def _run(*command: str) -> None:
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        cure = "Doing it again goes on from there."
        words = done.stderr.strip()[-500:]
        raise UnavailableError(f"`{' '.join(command)}` failed: {words}", place=PLACE, cure=cure)


def _gather_backend(server: Path, target: Path) -> None:
    """The backend, with the stub of this version of Python beside it, as the server wants it."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(server / "backends" / "python", target / "python")
    stub = target / "python" / "triton_python_backend_stub"
    shutil.copy(server / "python_backend_stubs" / _python() / stub.name, stub)
    stub.chmod(0o755)


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _quoted(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"


def main(argv: list[str]) -> int:
    own = Path(sys.prefix) / "triton"
    try:
        program = install(Path(argv[0]) if argv else own)
    except OnejobError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if not argv:
        beside = Path(sys.executable).parent / program.name
        aside = beside.with_name(f".{program.name}.{os.getpid()}")
        aside.symlink_to(program)
        aside.replace(beside)
        program = beside
    print(program)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
