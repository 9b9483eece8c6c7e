"""A real Triton Inference Server, out of the nvidia-pytriton wheel: its binary and Python backend, without PyTriton.

    python bench/serve/triton.py install FOLDER              # a virtual environment; some 200 MB, done once
    python bench/serve/triton.py run FOLDER REPOSITORY --http 8000 [options of tritonserver]

It needs no GPU. The wheel brings the server and the Python backend only: no figure from it says anything of Triton's
native backends. Python models run in FOLDER's environment, which has numpy and onnxruntime; `run` becomes the server
(one pid, with a stub process for each instance of a model). Stop it with SIGTERM and leave it the time to end: a
killed one leaves its files in /dev/shm.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

PACKAGES = ("nvidia-pytriton==0.7.0", "onnxruntime")
VERSION = "2.51.0"
STOP_SECONDS = 30
QUIET = ("--log-info=0", "--log-warning=0", "--allow-gpu-metrics=0")


def install(folder: Path) -> None:
    """A virtual environment with the server, and its backend folder; nothing is done a second time."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if not _server(folder).exists():
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    _backends(folder)


def command(folder: Path, repository: Path, options: Sequence[str] = ()) -> list[str]:
    """The server's command line; `options` are tritonserver's own."""
    return [
        str(_server(folder)),
        f"--model-repository={repository}",
        f"--backend-directory={_backends(folder)}",
        "--allow-cpu-metrics=0",
        *options,
    ]


def environment(folder: Path) -> dict[str, str]:
    """What the server and its stubs need: the wheel's libraries, this Python's, and the environment's packages."""
    packages = _packages(folder)
    libraries = [packages / "nvidia_pytriton.libs", Path(sysconfig.get_config_var("LIBDIR"))]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
        "PYTHONPATH": str(packages),
        "PATH": f"{folder / 'bin'}:{os.environ.get('PATH', '')}",
    }


@contextmanager
def running(
    folder: Path, repository: Path, port: int, options: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """A server on 127.0.0.1:`port` (HTTP; gRPC and metrics off) that is live; it is ended well after the block."""
    ports = ["--http-address=127.0.0.1", f"--http-port={port}", "--allow-grpc=0", "--allow-metrics=0", *QUIET]
    process = subprocess.Popen(command(folder, repository, [*ports, *options]), env=environment(folder))
    regions: set[Path] = set()
    try:
        _wait(process, f"http://127.0.0.1:{port}/v2/health/live")
        regions = _regions(process.pid)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for region in regions:  # of one that crashed: they are left for ever
            region.unlink(missing_ok=True)


def _regions(pid: int) -> set[Path]:
    """The shared memory between a server and its stubs."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/triton_python_backend_shm_region_" in line}


def _wait(process: subprocess.Popen[bytes], url: str, seconds: float = 60) -> None:
    for _ in range(int(seconds / 0.1)):
        if process.poll() is not None:
            raise SystemExit(f"tritonserver ended with {process.returncode} before it was live")
        try:
            with urlopen(url, timeout=1):
                return
        except (URLError, OSError):
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
    raise SystemExit(f"tritonserver was not live within {seconds:.0f} s")


def _packages(folder: Path) -> Path:
    return folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"


def _server(folder: Path) -> Path:
    return _packages(folder) / "pytriton" / "tritonserver" / "bin" / "tritonserver"


def _backends(folder: Path) -> Path:
    """The folder of backends, with the stub of this version of Python beside the library as the server wants it."""
    source = _server(folder).parent.parent
    target = folder / "backends"
    stub = target / "python" / "triton_python_backend_stub"
    if not stub.exists():
        shutil.copytree(source / "backends" / "python", target / "python", dirs_exist_ok=True)
        version = f"3.{sys.version_info.minor}"
        shutil.copy(source / "python_backend_stubs" / version / stub.name, stub.with_suffix(".aside"))
        stub.with_suffix(".aside").replace(stub)
        stub.chmod(0o755)
    return target


def _run(folder: Path, repository: Path, http: int, more: Sequence[str]) -> None:
    grpc: Mapping[str, int] = {"http-port": http, "grpc-port": http + 1, "metrics-port": http + 2}
    ports = [f"--{name}={port}" for name, port in grpc.items() if not any(f"--{name}" in option for option in more)]
    argv = command(folder, repository, [*ports, *more])
    os.execve(argv[0], argv, environment(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("install").add_argument("folder", type=Path)
    run = verbs.add_parser("run")
    run.add_argument("folder", type=Path)
    run.add_argument("repository", type=Path)
    run.add_argument("--http", type=int, default=8000, help="port; gRPC is on the next one, metrics on the one after")
    arguments, more = parser.parse_known_args()
    if arguments.verb == "install":
        install(arguments.folder)
    else:
        _run(arguments.folder, arguments.repository, arguments.http, more)


if __name__ == "__main__":
    main()
