"""How long `onejob run` takes when nothing has changed: the whole flights job with its endpoint, every step cached.

    python bench/rerun.py [--runs 7]

Runs the example once in a home of its own (nothing of the user's is touched), once more to warm up, then N times: wall
and CPU seconds of the whole command, as a shell sees it. Ends with exit code 1 if any of these ran a step: by the run's
own table, and by the folders in which steps work. Then N times again with a stopwatch inside (rerun_parts.py): what
takes the time. The medians are what counts; other work on the machine is in them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import machine

EXAMPLE = "flights"


@dataclass(frozen=True)
class Timed:
    """One call of the command: seconds, steps that it ran, steps that it took from the cache."""

    wall: float
    cpu: float
    ran: int
    cached: int
    load: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    count = parser.parse_args().runs
    with tempfile.TemporaryDirectory(prefix="onejob-bench-") as folder:
        home, job = Path(folder) / "home", Path(folder) / EXAMPLE
        os.environ["ONEJOB_HOME"] = str(home)
        onejob("demo", EXAMPLE, "--no-year", "--folder", str(job), "--quiet")
        try:
            before = sorted(os.listdir(home / "work"))
            timed_run(job)
            runs = [timed_run(job) for _ in range(count)]
            parts = [timed_parts(job, Path(folder) / "parts.json") for _ in range(count)]
            started = len(set(os.listdir(home / "work")) - set(before))
        finally:
            onejob("stop", EXAMPLE)
    report(runs, parts, started)
    shutil.rmtree(folder, ignore_errors=True)
    sys.exit(1 if started or any(run.ran for run in runs) else 0)


def onejob(*args: str) -> str:
    """One call of the command; gives what it prints."""
    return subprocess.run([sys.executable, "-m", "onejob", *args], check=True, stdout=subprocess.PIPE, text=True).stdout


def timed_run(job: Path) -> Timed:
    """`onejob run` once, from outside."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    printed = onejob("run", str(job), "--json")
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    steps = json.loads(printed)["steps"]
    cached = sum(bool(step["cached"]) for step in steps)
    return Timed(wall, cpu, len(steps) - cached, cached, machine.load())


def timed_parts(job: Path, file: Path) -> dict[str, float]:
    """`onejob run` once, with the stopwatch inside: part -> seconds, in the order of the work."""
    script = Path(__file__).with_name("rerun_parts.py")
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, script, str(file), str(began), "run", str(job), "--json"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    end = time.perf_counter()
    found: dict[str, float] = json.loads(file.read_text())
    last = found.pop("last")
    return {**found, "end of the interpreter": end - last}


def report(runs: list[Timed], parts: list[dict[str, float]], started: int) -> None:
    print(machine.describe())
    print(f"\n`onejob run` with nothing changed, {len(runs)} times after one to warm up")
    print("       wall s    CPU s   steps run   cached   load")
    for number, run in enumerate(runs, 1):
        print(f"{number:4}  {run.wall:7.3f}  {run.cpu:7.3f}   {run.ran:9}   {run.cached:6}   {run.load:.1f}")
    wall, cpu = (statistics.median(getattr(run, name) for run in runs) for name in ("wall", "cpu"))
    print(
        f"median{wall:7.3f}  {cpu:7.3f}   {sum(run.ran for run in runs):5} in all; folders of new executions: {started}"
    )
    print("\nwhat takes the time (medians of as many calls again, with a stopwatch inside)")
    for name in parts[0]:
        print(f"  {statistics.median(part[name] for part in parts):6.3f} s  {name}")
    print(f"  {statistics.median(sum(part.values()) for part in parts):6.3f} s  in all")


if __name__ == "__main__":
    main()
