"""What this machine has for tasks: CPUs and memory as far as this process may use them, GPUs, room on a disk.

A container's limits count: CPU affinity and the quotas of every control group above us, version 1 or 2. GPUs come from
nvidia-smi's CSV; the parser is tested on its text, and has not yet met a real GPU.
"""

from __future__ import annotations

import csv
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
NVIDIA_DRIVER = PROC / "driver/nvidia/version"
GPU_QUERY = ("index", "uuid", "name", "memory.total", "driver_version")
NVIDIA_SMI_LIMIT = 30.0
"""Seconds: with a sick driver nvidia-smi may hang."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as nvidia-smi names it."""

    index: int
    uuid: str
    model: str
    memory: int
    """Bytes."""
    driver: str


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process may use of its machine."""

    cpus: float
    memory: int
    """Bytes."""
    gpus: tuple[Gpu, ...]


def machine() -> Machine:
    return Machine(cpus=cpus(), memory=memory(), gpus=gpus())


def cpus(proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """CPU cores: those that we may run on, or fewer where a control group has a quota."""
    quotas = [quota for folder in _groups("cpu", proc, cgroups) if (quota := _cpu_quota(folder))]
    return min([float(len(os.sched_getaffinity(0))), *quotas])


def threads_of(processes: int) -> int:
    """Threads for each of so many processes that compute at once: the cores, over them."""
    return max(1, int(cpus() / processes))


def memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes of memory: the machine's, or less where a control group has a limit."""
    total = next(
        int(line.split()[1]) * 1024
        for line in (proc / "meminfo").read_text().splitlines()
        if line.startswith("MemTotal")
    )
    limits = [
        int(text)
        for folder in _groups("memory", proc, cgroups)
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _text(folder / name)).isdigit()
    ]
    return min([total, *limits])


def disk_free(path: Path) -> int:
    """Bytes that may still be written where `path` is, or will be."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs of this machine; empty where there is no nvidia-smi, or where it fails."""
    program = shutil.which("nvidia-smi")
    # what GPUs there are doesn't change while one driver is loaded, and asking takes up to a second
    return _ask_for_gpus(program, _text(NVIDIA_DRIVER)) if program else ()


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The answer of `nvidia-smi --query-gpu=… --format=csv,noheader,nounits`, in the order of GPU_QUERY.

    Memory is in MiB, or `[N/A]` where it is shared with the host's. Lines of another form (complaints) are left out.
    """
    rows = [[field.strip() for field in row] for row in csv.reader(text.splitlines())]
    return tuple(
        Gpu(int(index), uuid, model, int(mib) << 20 if mib.isdigit() else 0, driver)
        for index, uuid, model, mib, driver in (row for row in rows if len(row) == len(GPU_QUERY))
        if index.isdigit()
    )


@functools.lru_cache(maxsize=1)
def _ask_for_gpus(program: str, driver: str) -> tuple[Gpu, ...]:
    try:
        answer = subprocess.run(
            [program, f"--query-gpu={','.join(GPU_QUERY)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_LIMIT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_gpus(answer.stdout) if answer.returncode == 0 else ()


def _groups(controller: str, proc: Path, cgroups: Path) -> Iterator[Path]:
    """Our control group's folder for a controller and every one above it, in both versions; they may not all exist.

    Lines of /proc/self/cgroup are `0::/path` (version 2) and `4:cpu,cpuacct:/path` (version 1). In a container the
    path is often the host's and the mount is our own group: so the mount itself is looked at too.
    """
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for root in (cgroups / controllers, cgroups / controller) if controllers else (cgroups, cgroups / "unified"):
            folder = root / path.lstrip("/")
            yield from (above for above in (folder, *folder.parents) if above.is_relative_to(root))


def _cpu_quota(folder: Path) -> float | None:
    """CPUs that a control group may use; None without a quota."""
    quota, period = [*_text(folder / "cpu.max").split(), "", ""][:2]
    if not quota:
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
