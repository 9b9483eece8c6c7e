"""What onejob adds to a step: from its claim to its end in the ledger, against the bare function in a warm process.

    python bench/overhead.py [--runs 7]

Two steps: the data step of the flights example, and a data step on a file of ten rows. Each is run N times by
`onejob run --force` in a home of its own. Then the step's entry function alone is called N times, after one call to
warm up, in one process with the same options, inputs and threads. Overhead is the one less the other. Where it goes is
read from what a run leaves behind: the ledger's times, the shim's files, the time of the step's arrival. The medians
are what counts; other work on the machine is in them.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import machine

from onejob.core.artifact import Json
from onejob.core.context import InputArtifact, StepContext
from onejob.core.records import Execution
from onejob.core.state import ExecutionState
from onejob.exec.step import THREAD_VARIABLES
from onejob.loop import commands
from onejob.loop.session import Session
from onejob.loop.tasks import prepare

EXAMPLE = Path(commands.__file__).parents[2] / "examples" / "flights"
TEN = """name = "ten"

[data]
source = "rows.csv"
columns = { label = "y", numbers = ["x"] }
"""
PARTS = (
    "inputs laid out, shim started",
    "rank started: interpreter, imports",
    "entry function (its first call in the process)",
    "rank and shim ended",
    "supervisor noticed; code compared; outputs kept; ledger",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--bare", nargs=2, metavar=("WORK", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        call_bare(Path(options.bare[0]), options.runs, Path(options.bare[1]))
        return
    print(machine.describe())
    with tempfile.TemporaryDirectory(prefix="onejob-bench-") as folder:
        root = Path(folder)
        measure("the data step of the flights job", flights(root / "flights"), root / "home a", options.runs)
        measure("a data step on ten rows", ten_rows(root / "ten"), root / "home b", options.runs)


def flights(folder: Path) -> Path:
    """The example, with its data only."""
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / "job.toml").read_text()
    (folder / "job.toml").write_text(text[: text.index("[train]")])
    return folder


def ten_rows(folder: Path) -> Path:
    """A job on ten rows, with no steps of its own."""
    folder.mkdir()
    (folder / "job.toml").write_text(TEN)
    (folder / "rows.csv").write_text("x,y\n" + "".join(f"{n},{n % 2}\n" for n in range(10)))
    return folder


def measure(title: str, job: Path, home: Path, runs: int) -> None:
    """Run it, call it bare, and print both."""
    for _ in range(runs + 1):
        subprocess.run(
            [sys.executable, "-m", "onejob", "run", str(job), "--force", "--quiet", "--home", str(home)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    with commands.open(home) as session:
        done = session.ledger.list_executions(states=[ExecutionState.DONE], limit=runs)
        parts = [split(session, execution) for execution in done]
        bare = bare_seconds(session, done[0], runs, home.with_suffix(".json"))
    whole = [sum(part) for part in parts]
    over = statistics.median(whole) - statistics.median(bare)
    print(f"\n{title}, {runs} runs after one to warm up; load {machine.load():.1f}")
    print("  claim to end, s     ", "  ".join(f"{value:.3f}" for value in sorted(whole)))
    print("  bare function, s    ", "  ".join(f"{value:.3f}" for value in sorted(bare)))
    print(f"  overhead (of medians): {statistics.median(whole):.3f} - {statistics.median(bare):.3f} = {over:.3f} s")
    print("  where a run's time goes (medians):")
    for name, values in zip(PARTS, zip(*parts, strict=True), strict=True):
        print(f"    {statistics.median(values):6.3f} s  {name}")


def split(session: Session, execution: Execution) -> list[float]:
    """Seconds of each part, from the claim to the end: PARTS."""
    work = session.home.work(execution.id)
    assert execution.finished is not None
    marks = [
        execution.created,
        json.loads((work / "started.json").read_text())["time"],
        (work / "arrived" / "0").stat().st_mtime,
        (work / "measured.json").stat().st_mtime,  # the last thing that the data engine writes
        json.loads((work / "exit.json").read_text())["time"],
        execution.finished,
    ]
    return [later - earlier for earlier, later in itertools.pairwise(marks)]


def bare_seconds(session: Session, execution: Execution, runs: int, file: Path) -> list[float]:
    """The entry function of an execution, called again and again in one process of its own, with the same inputs."""
    [row] = [row for row in session.ledger.list_steps(execution.run) if row.execution == execution.id]
    run = session.ledger.get_run(execution.run)
    work = prepare(session, replace(execution, id="bare"), row.step, run.project)
    threads = dict.fromkeys(THREAD_VARIABLES, str(row.step.threads))
    command = [sys.executable, __file__, "--runs", str(runs), "--bare", str(work), str(file)]
    subprocess.run(command, check=True, env={**os.environ, **threads}, stdout=subprocess.DEVNULL, cwd=run.project)
    seconds: list[float] = json.loads(file.read_text())
    return seconds


def call_bare(work: Path, runs: int, file: Path) -> None:
    """In a process of its own: import, call once to warm up, then N times."""
    task = json.loads((work / "task.json").read_text())
    sys.path.insert(0, task["project"])
    module, _, name = task["entry"].partition(":")
    entry = getattr(importlib.import_module(module), name)
    seconds = []
    for number in range(runs + 1):
        (folder := work / f"call-{number}").mkdir()
        context = context_of(task, folder)
        began = time.perf_counter()
        entry(context)
        seconds.append(time.perf_counter() - began)
    file.write_text(json.dumps(seconds[1:]))


def context_of(task: dict[str, Json], work: Path) -> StepContext:
    """The context that the step had, in a folder of this call's own."""
    inputs = {
        name: InputArtifact(i["digest"], i["kind"], i["meta"], Path(i["path"])) for name, i in task["inputs"].items()
    }
    same = {name: task[name] for name in ("name", "options", "setup", "seed", "threads")}
    return StepContext(**same, inputs=inputs, work=work, scratch=work, project=Path(task["project"]))


if __name__ == "__main__":
    main()
