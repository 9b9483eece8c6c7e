"""What stands beside every figure: the processor, how busy it is, and the versions that did the work."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("torch", "polars", "onnxruntime")


def describe() -> str:
    """Two lines: processor, cores and load; Python and packages."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{_processor()}, {os.cpu_count()} CPUs, load {load} (1, 5, 15 min)\n{versions()}"


def versions() -> str:
    """Python, and the packages that do the heavy work."""
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in PACKAGES)])


def load() -> float:
    """How many processes wanted a CPU in the last minute, on average."""
    return os.getloadavg()[0]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
