"""Clients that the tests ask an endpoint with and that can't live beside onejob: each in a folder of its own.

    python tools/clients.py FOLDER        # .venv/clients, where the tests look

`perf_analyzer`, NVIDIA's load generator, is the program in an old wheel of tritonclient (newer need a newer glibc); of
CUDA's runtime and of libb64 it needs the library file, out of a wheel and a Debian package. `kserve` is KServe's
Python client, whose packages have other versions than onejob's. `prometheus` scrapes: the program out of its Debian
package, so that no service is installed and started. What is there already is left alone. Exit code 1 if one
couldn't be had: its tests are skipped then, and fail where the variable CI is set.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

WHEELS = {
    "tritonclient==2.41.0": "tritonclient-2.41.0.data/data/bin/perf_analyzer",
    "nvidia-cuda-runtime-cu12==12.9.79": "nvidia/cuda_runtime/lib/libcudart.so.12",
}
LIBB64, PROMETHEUS = "libb64-0d", "prometheus"
PINS = Path(__file__).with_name("kserve.txt")


def perf_analyzer(folder: Path) -> None:
    """`perf_analyzer`, which finds its libraries beside itself."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-qq",
        "--disable-pip-version-check",
        "--no-deps",
        "-d",
        str(folder),
    ]
    subprocess.run([*pip, "--only-binary", ":all:", *WHEELS], check=True)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as files:
            for member in set(WHEELS.values()) & set(files.namelist()):
                (folder / Path(member).name).write_bytes(files.read(member))
        wheel.unlink()
    if ctypes.util.find_library("b64") is None:
        _libb64(folder)
    program = folder / "perf_analyzer"
    program.rename(folder / "program")
    program.write_text('#!/bin/sh\nhere=$(dirname "$0")\nLD_LIBRARY_PATH="$here" exec "$here/program" "$@"\n')
    program.chmod(0o755)
    (folder / "program").chmod(0o755)
    subprocess.run([str(program), "--version"], check=True, capture_output=True)


def _libb64(folder: Path) -> None:
    with _unpacked(LIBB64, folder) as files:
        for library in files.rglob("libb64.so*"):
            shutil.copy(library, folder / library.name)


def prometheus(folder: Path) -> None:
    """`prometheus` and `promtool`: they need no file beside them."""
    with _unpacked(PROMETHEUS, folder) as files:
        for name in ("prometheus", "promtool"):
            shutil.copy(files / "usr" / "bin" / name, folder / name)
            subprocess.run([str(folder / name), "--version"], check=True, capture_output=True)


@contextmanager
def _unpacked(name: str, folder: Path) -> Iterator[Path]:
    """The files of a Debian package: nothing is installed."""
    download = ["apt-get", "download", "-qq", name]
    tried = subprocess.run(download, cwd=folder, stderr=subprocess.DEVNULL)
    if tried.returncode and os.geteuid() == 0:  # the lists may be missing, or old
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(download, cwd=folder, check=True)
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", str(package), str(folder / "deb")], check=True)
    yield folder / "deb"
    shutil.rmtree(folder / "deb")
    package.unlink()


def kserve(folder: Path) -> None:
    """A virtual environment with the client."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-compile", "--no-deps", "-r", str(PINS)], check=True)
    subprocess.run([str(folder / "bin" / "python"), "-c", "import kserve"], check=True)


CLIENTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "perf_analyzer": (perf_analyzer, f"{WHEELS} {LIBB64}"),
    "kserve": (kserve, PINS.read_text()),
    "prometheus": (prometheus, PROMETHEUS),
}
"""How each is made, and what it is made of."""


def install(name: str, place: Path) -> str:
    """Why it couldn't be had; empty if it is there. Half of one is never there: the mark is written last."""
    make, wanted = CLIENTS[name]
    folder = place / name
    mark = folder / "made-of"
    if mark.exists() and mark.read_text() == wanted:
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        make(folder)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        return str(error)
    mark.write_text(wanted)
    return ""


def main() -> int:
    place = Path(sys.argv[1]).resolve()
    missing = {name: why for name in CLIENTS if (why := install(name, place))}
    for name, why in missing.items():
        print(f"{name} can't be had here, so its tests are skipped: {why}", file=sys.stderr)
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
