"""From a step that is due to a task: the work folder with its inputs, and the command to run in it.

Preparing twice is preparing once: a supervisor that died half-way is followed by one that does it again.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from onejob.core.artifact import Artifact, FileEntry, Json, short
from onejob.core.context import write_json
from onejob.core.faults import reach
from onejob.core.plan import Source, Step
from onejob.core.ports import Task
from onejob.core.records import Execution
from onejob.core.state import ExecutionState
from onejob.errors import DamagedError, NotFoundError, OnejobError, SourceError, StorageFullError, StoreError
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
            # Where our own job has them: the same bytes may lie elsewhere too, for another job.
            value = step.inputs.get(name)
            files = dict(value.files) if isinstance(value, Source) else session.ledger.locations(digest)
            sources |= link_sources(files, folder)
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
        blob = _sound(session, artifact, entry)
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        aside.unlink(missing_ok=True)
        try:
            os.link(blob, aside)
        except OSError:
            shutil.copyfile(blob, aside)
        aside.replace(target)


def _sound(session: Session, artifact: Artifact, entry: FileEntry) -> Path:
    """A blob whose bytes are right; where they aren't, whatever has left them no longer counts as done."""
    try:
        return session.blobs.get(entry.digest)
    except (DamagedError, NotFoundError) as error:
        again = forget_makers(session, entry.digest, f"its output {entry.path} is damaged or gone")
        cure = "Run the job again: it is made anew." if again else "Restore it from a backup, or remove the file."
        what = f"{entry.path} of {artifact.kind} {short(artifact.digest)} is damaged or gone"
        raise DamagedError(what, place=error.place or entry.digest, cure=cure) from error


def forget_makers(session: Session, blob: str, reason: str) -> int:
    """Forget every done execution that left a file with these bytes: an artifact may share it with others."""
    forgotten = 0
    for digest, artifact, _ in session.ledger.list_artifacts():
        if all(entry.digest != blob for entry in artifact.files):
            continue
        for made in session.ledger.producers(digest):
            if made.state is ExecutionState.DONE:
                session.ledger.forget_execution(made.id, reason)
                forgotten += 1
    return forgotten


def link_sources(locations: Mapping[str, str], folder: Path) -> dict[str, Json]:
    """Symbolic links to source files; gives {path: [size, mtime_ns]}, by which the step sees that none has changed."""
    seen: dict[str, Json] = {}
    for name, path in locations.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.symlink_to(path)
        try:
            about = os.stat(path)
        except OSError as error:
            cure = "Put it back, or change [data] source."
            raise SourceError(f"can't be read any more: {error.strerror}", place=path, cure=cure) from error
        seen[path] = [about.st_size, about.st_mtime_ns]
    return seen


def explained(error: OSError, place: Path) -> OnejobError:
    """What the disk said, in words that name the place and the cure."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        cure = "Free some space, for example with `onejob gc`; running again goes on from here."
        return StorageFullError(f"no space is left ({error.strerror})", place=str(place), cure=cure)
    cure = "See that this folder and its disk can be written."
    return StoreError(f"the folder can't be used ({error.strerror or error})", place=str(place), cure=cure)
