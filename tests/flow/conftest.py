"""Whole jobs on a small table: a project folder with a job file, a helper module and a module that the helper calls."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DATA = """
name = "tiny"

[data]
family = "tabular"
source = "rows.csv"
steps = ["helper:prepare", { split = { by = "time", test = 0.25 } }]
columns = { label = "late", categories = ["carrier"], numbers = ["distance", "hour"], time = "day" }
retries = 0
"""

TRAIN = """
[train]
epochs = 2
batch = 64
checkpoint = 2
model = { hidden = [8], dropout = 0.1 }
resources = { processes = PROCESSES }
retries = 0
"""

REST = """
[optimize]
budget = { metric = "auc", drop = 0.2 }
candidates = ["onnxruntime-fp32"]
rounds = 5
calls = 5
retries = 0

[serve]
batch = { max = 16, wait_ms = 1 }
"""

HELPER = '''"""Steps of the tiny job."""

import polars as pl

from scaling import scale

FACTOR = 1.0


def prepare(rows: pl.LazyFrame) -> pl.LazyFrame:
    return rows.with_columns(scale(pl.col("distance")) * FACTOR)
'''

SCALING = '''"""What the helper calls."""


def scale(column):
    return column * 2
'''


@dataclass(frozen=True)
class Project:
    """A project folder and a home, with the command line to use them."""

    folder: Path
    home: Path

    def cli(
        self, *args: str, env: Mapping[str, str] | None = None, timeout: float = 150
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "onejob", *args],
            cwd=self.folder,
            env={**os.environ, "ONEJOB_HOME": str(self.home), **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def json(self, *args: str, env: Mapping[str, str] | None = None) -> Any:
        done = self.cli(*args, "--json", env=env)
        assert done.returncode == 0, f"{args}: {done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def steps(self, *args: str, env: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
        """Run the job and give its steps by name."""
        view = self.json("run", "job.toml", *args, env=env)
        return {step["name"]: step for step in view["steps"]}

    def digests(self) -> dict[str, str]:
        """What the refs name: dataset, checkpoint, engine."""
        kinds = ("dataset", "checkpoint", "engine")
        shown = {kind: self.cli("show", f"tiny/{kind}@latest", "--json") for kind in kinds}
        return {
            k: json.loads(done.stdout)["artifacts"][0]["digest"] for k, done in shown.items() if done.returncode == 0
        }

    def processes(self) -> list[str]:
        """Command lines of processes that work in this home."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                if str(self.home) in line and " onejob." in line:
                    found.append(line)
        return found


def rows_csv(count: int = 400) -> str:
    """A small table with a signal in it."""
    source = random.Random(5)
    lines = ["day,carrier,distance,hour,late"]
    for index in range(count):
        carrier = source.choice(["AA", "UA", "B6"])
        hour = source.randrange(5, 23)
        late = source.random() < 0.1 + 0.03 * (hour - 5) + (0.2 if carrier == "B6" else 0)
        lines.append(
            f"2024-01-{1 + index * 28 // count:02d},{carrier},{source.randrange(100, 2500)},{hour},{int(late)}"
        )
    return "\n".join(lines) + "\n"


def make_project(root: Path, *, stages: str = "data", processes: int = 1) -> Project:
    folder, home = root / "project", root / "home"
    folder.mkdir(parents=True)
    project = Project(folder, home)
    job = DATA
    if stages in ("train", "all"):
        job += TRAIN.replace("PROCESSES", str(processes))
    if stages == "all":
        job += REST
    project.write("job.toml", job)
    project.write("helper.py", HELPER)
    project.write("scaling.py", SCALING)
    project.write("rows.csv", rows_csv())
    return project


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> None:
    """Tests that were started behind a shell's `&` ignore Ctrl-C, and what they start would inherit that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A job with only [data]."""
    return make_project(tmp_path)
