"""What a running step sees: its options, its inputs as folders, a place for outputs, and how to report.

The step's process reads `task.json` in its work folder and writes files there; it never sees the ledger or the blobs.

    work/<execution>/task.json            what to do (written by the loop)
                     in/<input>/...       the files of each input artifact
                     out/<output>/...     the files of each output; out/<output>.json its kind and metadata
                     measured.json        what was measured: belongs to the execution, not to an artifact
                     metrics.jsonl        append-only: one line for each step or epoch
                     progress.jsonl       append-only: {"done", "total", "unit", "time"}
                     warnings.jsonl       append-only: {"text"}
                     error.json           the error, when the step reports one
                     log                  what it printed, with secrets taken out
    scratch/<step key>/                   survives attempts: checkpoints to resume from
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onejob.core.artifact import Json, canonical


@dataclass(frozen=True)
class InputArtifact:
    """An input of a step: what it is, and the folder that holds its files."""

    digest: str
    kind: str
    meta: Mapping[str, Json]
    path: Path

    def file(self, name: str) -> Path:
        return self.path / name


@dataclass(frozen=True)
class StepContext:
    """Handed to a step's entry function; all that the function may know of the world."""

    name: str
    options: Mapping[str, Json]
    setup: Mapping[str, Json]
    inputs: Mapping[str, InputArtifact]
    work: Path
    scratch: Path
    project: Path
    seed: int = 0
    threads: int = 1
    rank: int = 0
    world: int = 1
    stopping: Callable[[], bool] = field(default=lambda: False)
    """True once the step was asked to stop: save what is worth saving at the next boundary, then raise `Stopped`."""
    clock: Callable[[], float] = time.time

    def out(self, name: str) -> Path:
        """The folder for the files of an output, made on first use; only rank 0 leaves outputs."""
        folder = self.work / "out" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def emit(self, name: str, kind: str, meta: Mapping[str, Json]) -> None:
        """Declare an output whose files are complete; metadata must be deterministic."""
        self.out(name)
        write_json(self.work / "out" / f"{name}.json", {"kind": kind, "meta": dict(meta)})

    def measure(self, values: Mapping[str, Json]) -> None:
        """Keep what was measured (times, scores, counts); later calls add to earlier ones."""
        path = self.work / "measured.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        write_json(path, {**known, **values})

    def metric(self, values: Mapping[str, Json]) -> None:
        """Append one line of metrics, such as {"split": "train", "step": 12, "epoch": 0, "loss": 0.41}."""
        append_line(self.work / "metrics.jsonl", values)

    def progress(self, done: int, total: int, unit: str) -> None:
        """Say how far the step is; drawn as a bar with the time left."""
        line = {"done": done, "total": total, "unit": unit, "time": self.clock()}
        append_line(self.work / "progress.jsonl", line)

    def warn(self, text: str) -> None:
        """Tell the user something worth a line, without failing."""
        append_line(self.work / "warnings.jsonl", {"text": text})


class Stopped(Exception):  # noqa: N818 - not an error: the step was asked to stop, and did
    """Raised by a step that was asked to stop and has saved its state."""


def write_json(path: Path, value: Json) -> None:
    """Write JSON aside, make it durable, then rename: a reader sees the old file or the whole new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("wb") as file:
        file.write(canonical(value))
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def append_line(path: Path, value: Json) -> None:
    """Append one JSON line with a single write, so that a killed writer leaves at most one torn last line."""
    with path.open("ab") as file:
        file.write(canonical(value) + b"\n")


def read_lines(path: Path) -> list[dict[str, Json]]:
    """The lines of an append-only file; a torn last line (a killed writer) is left out."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_bytes().split(b"\n"):
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines
