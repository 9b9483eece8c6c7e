"""What it costs to ask a model in another process: a Python function, and the same one under Triton where there is one.

    python bench/hop.py

The function gives back what it gets. By turns in one run; CPU time of this process and of those that answer, which
neighbours on the machine change less than the time on the clock.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from onejob.engines import open_model
from onejob.engines.triton.engine import supported, through
from onejob.machines import processes

MODEL = """
INPUTS = OUTPUTS = {"x": ("FP32", [-1, 64])}


def infer(x):
    return x
"""
SIZES = ((1, 2000), (64, 2000), (40_960, 40))
"""Rows of 64 floats, and calls."""


def spent(pids: list[int]) -> float:
    """CPU time of processes so far, in seconds."""
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def measure(model: Any, rows: int, calls: int) -> tuple[float, float, float, float]:
    """Mean and best time of a call, CPU time of it here and there, in microseconds."""
    x = {"x": np.random.default_rng(0).random((rows, 64), np.float32)}
    for _ in range(10):
        model.infer(x)
    pid = model._kept.get(0).process.pid
    pids = [pid, *(one.pid for one in processes.descendants(pid))]
    here, there, began, best = time.process_time(), spent(pids), time.perf_counter(), float("inf")
    for _ in range(calls):
        at = time.perf_counter()
        model.infer(x)
        best = min(best, time.perf_counter() - at)
    mean = (time.perf_counter() - began) / calls
    used = [(time.process_time() - here) / calls, (spent(pids) - there) / calls]
    return mean * 1e6, best * 1e6, used[0] * 1e6, used[1] * 1e6


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.py").write_text(MODEL)
        models = {"function": open_model(Path(folder), {"engine": "function"})}
        if supported().available:
            models["under Triton"] = open_model(Path(folder), through({"engine": "function"}))
        heads = ("mean us", "best us", "CPU here", "there", "MB/s")
        print(f"{'rows x 64 floats':18}{'engine':14}" + "".join(f"{head:>10}" for head in heads))
        for rows, calls in SIZES:
            for _ in range(2):
                for name, model in models.items():
                    mean, best, here, there = measure(model, rows, calls)
                    speed = 2 * rows * 256 / best
                    print(
                        f"{rows:<18}{name:14}{mean:10.0f}{best:10.0f}{here:10.0f}{there:10.0f}{speed:10.0f}", flush=True
                    )
        for model in models.values():
            model.close()


if __name__ == "__main__":
    main()
