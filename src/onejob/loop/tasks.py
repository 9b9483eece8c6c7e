"""From a step that is due to a task: the work folder with its inputs, and the command to run in it.

Preparing twice is preparing once: a supervisor that died half-way is followed by one that does it again.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from onejob.core.artifact import Artifact, Json
from onejob.core.context import write_json
from onejob.core.faults import reach
from onejob.core.plan import Step
from onejob.core.ports import Task
from onejob.core.records import Execution
from onejob.loop.session import Session

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "POLARS_MAX_THREADS",
)

ARRIVE = 120.0
"""Seconds that a rank may take from its start to its entry function; imports are most of it."""


def prepare(session: Session, execution: Execution, step: Step, project: str) -> Path:
    """Lay out the work folder of an execution: inputs as read-only links to verified blobs, and task.json."""
    work = session.home.work(execution.id)
    work.mkdir(parents=True, exist_ok=True)
    inputs: dict[str, Json] = {}
    sources: dict[str, Json] = {}
    for name, digest in execution.inputs.items():
        artifact = session.ledger.get_artifact(digest)
        folder = work / "in" / name
        if artifact.kind == "source":
            sources |= link_sources(session.ledger.locations(digest), folder)
        else:
            lay_out(session, artifact, folder)
        meta = dict(artifact.meta)
        inputs[name] = {"digest": digest, "kind": artifact.kind, "meta": meta, "path": str(folder)}
    reach("task.prepared_inputs")
    scratch = session.home.scratch(execution.key)
    scratch.mkdir(parents=True, exist_ok=True)
    write_json(
        work / "task.json",
        {
            "id": execution.id,
            "name": step.name,
            "entry": step.entry,
            "options": dict(step.options),
            "setup": dict(step.setup),
            "seed": step.seed or 0,
            "threads": step.threads,
            "project": project,
            "scratch": str(scratch),
            "inputs": inputs,
            "outputs": list(step.outputs),
            "sources": sources,
        },
    )
    return work


def task_of(
    execution: Execution, step: Step, work: Path, *, env: Mapping[str, str], secrets: Mapping[str, str]
) -> Task:
    """The task of an execution; secrets travel in the environment only."""
    threads = dict.fromkeys(THREAD_VARIABLES, str(step.threads))
    return Task(
        id=execution.id,
        argv=(sys.executable, "-m", "onejob.exec.step", str(work)),
        work=work,
        # The order of sets of text must not decide anything.
        env={"PYTHONHASHSEED": "0", **threads, **env, **secrets},
        secrets=tuple(secrets),
        processes=step.needs.processes,
        cpus=step.needs.cpus,
        memory=step.needs.memory,
        gpu_ids=tuple(execution.needs.get("gpu_ids", ())),
        timeout=step.timeout,
        arrive=step.setup.get("arrive", ARRIVE),
    )


def lay_out(session: Session, artifact: Artifact, folder: Path) -> None:
    """Put an artifact's files into a folder, as hard links to their verified blobs where the disk allows it."""
    for entry in artifact.files:
        target = folder / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        blob = session.blobs.get(entry.digest)
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        aside.unlink(missing_ok=True)
        try:
            os.link(blob, aside)
        except OSError:
            shutil.copyfile(blob, aside)
        aside.replace(target)


def link_sources(locations: Mapping[str, str], folder: Path) -> dict[str, Json]:
    """Symbolic links to source files; gives {path: [size, mtime_ns]}, by which the step sees that none has changed."""
    seen: dict[str, Json] = {}
    for name, path in locations.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.symlink_to(path)
        about = os.stat(path)
        seen[path] = [about.st_size, about.st_mtime_ns]
    return seen
