"""From nothing to an answered request: a fresh clone in a new folder, `make demo`, and what takes the time.

    python bench/clone.py [--of REPOSITORY] [--runs 1]

pip's caches are as they are on this machine: warm, if it has installed onejob before. The clone has a virtual
environment and a home of its own; both are removed again. Lines of the output are timed as they come; the steps' times
are the ledger's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine

REPOSITORY = Path(__file__).resolve().parents[1]
MARKS = {
    "making a virtual environment": "virtual environment",
    "installing onejob": "install (pip)",
    "installed in": "",
}
"""Words at the beginning of a line of tools/setup.sh -> the part that begins there; "" is the demo itself."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", default=str(REPOSITORY), help="what to clone; default: this checkout's last commit")
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    print(machine.describe())
    runs = []
    for number in range(options.runs):
        with tempfile.TemporaryDirectory(prefix="onejob-bench-") as folder:
            parts, answer = from_nothing(options.of, Path(folder))
        runs.append(parts)
        print(f"run {number + 1}: {sum(parts.values()):.1f} s, load then {machine.load():.1f}; answered by {answer}")
    print(f"\nseconds, medians of {options.runs}")
    for name in runs[0]:
        print(f"{statistics.median(run.get(name, 0.0) for run in runs):8.1f}  {name}")
    print(f"{statistics.median(sum(run.values()) for run in runs):8.1f}  in all")


def from_nothing(repository: str, folder: Path) -> tuple[dict[str, float], str]:
    """Clone, `make demo`: seconds by part, in the order of the work, and the engine that answered."""
    place, home = folder / "clone", folder / "home"
    began = time.perf_counter()
    subprocess.run(["git", "clone", "--quiet", repository, str(place)], check=True)
    parts = {"git clone": time.perf_counter() - began}
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ["ONEJOB_HOME"] = str(home)
    output = make_demo(place, environ, parts)
    demo = parts.pop("")
    onejob = [str(place / ".venv" / "bin" / "onejob")]

    def call(*args: str) -> str:
        return subprocess.run([*onejob, *args], check=True, env=environ, stdout=subprocess.PIPE, text=True).stdout

    try:
        shown = json.loads(call("show", "1", "--json"))
    finally:
        call("stop", "flights")
    if '"onejob_request_id"' not in output:
        sys.exit(f"the demo ended without an answer:\n{output}")
    steps = {step["name"]: step["seconds"] for step in shown["run"]["steps"]}
    engine = shown["run"]["endpoint"]["digest"][:12]
    return {**parts, **split_demo(steps, shown, demo)}, engine


def make_demo(place: Path, environ: dict[str, str], parts: dict[str, float]) -> str:
    """Run it, and book the time between its lines to the parts that they begin; gives what it printed."""
    lines, part, mark = [], "", time.perf_counter()
    command = subprocess.Popen(
        ["make", "demo", "ARGS=--no-year"],
        cwd=place,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert command.stdout
    for line in command.stdout:
        for words, begins in MARKS.items():
            if line.startswith(words):
                now = time.perf_counter()
                parts[part] = parts.get(part, 0.0) + now - mark
                part, mark = begins, now
        lines.append(line)
    parts[part] = parts.get(part, 0.0) + time.perf_counter() - mark
    if command.wait():
        sys.exit("".join(lines))
    return "".join(lines)


def split_demo(steps: dict[str, float], shown: dict[str, object], demo: float) -> dict[str, float]:
    """The demo's seconds: each step, the endpoint (from the last step's end to the run's end), and what is left."""
    executions: list[dict[str, float]] = shown["executions"]  # type: ignore[assignment]
    run: dict[str, float] = shown["run"]  # type: ignore[assignment]
    last = max(execution["created"] + execution["seconds"] for execution in executions)
    spans = sorted((e["created"], e["created"] + e["seconds"], str(e["step"])) for e in executions)
    parts, reached = {}, run["created"]
    for start, end, name in spans:  # steps overlap: each is booked only what it adds
        parts[f"step {name}"] = max(0.0, end - max(start, reached))
        reached = max(reached, end)
    parts["endpoint, until it is ready"] = run["created"] + run["seconds"] - last
    parts["the rest: start of onejob, planning, keys, question and answer"] = demo - sum(parts.values())
    assert set(steps) == {str(e["step"]) for e in executions}, "the first run in a new home runs every step"
    return parts


if __name__ == "__main__":
    main()
