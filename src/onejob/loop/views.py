"""What the commands give back: frozen snapshots for people and programs to read, made by loop/commands.

Plain data only (text, numbers, tuples, mappings): the CLI draws them, `to_json` makes the one document of `--json`, and
nothing in here knows a ledger, a file or a clock. Times are seconds since the epoch, durations seconds, sizes bytes,
digests full hex; shortening them is the business of who draws them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from onejob.core.artifact import Json
from onejob.core.ports import Support

# ---- runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepView:
    """A step of a run, as it stands now."""

    name: str
    state: str
    cached: bool = False
    reason: str = ""
    """Why it waits, runs, was cached, failed or was skipped: one line."""
    done: float = 0
    total: float = 0
    """How far it is, in `unit`; total 0 means that it doesn't say."""
    unit: str = ""
    seconds: float | None = None
    """How long it has run, or ran; None before it starts and when it was cached."""
    eta: float | None = None
    """Seconds that it still needs, as far as one can tell."""
    metric: Mapping[str, Json] = field(default_factory=dict)
    """Its newest line of metrics."""
    execution: str | None = None


@dataclass(frozen=True, slots=True)
class EndpointView:
    """An endpoint, as it stands now."""

    name: str
    state: str
    url: str = ""
    digest: str = ""
    """What it serves."""
    generation: int = 0
    ready: int = 0
    replicas: int = 0
    """Replicas that are ready, of those that there should be."""
    requests: int | None = None
    error: Mapping[str, Json] | None = None
    repository: str | None = None
    """The folder whose models it serves; None if it serves one model, by its own name."""


@dataclass(frozen=True, slots=True)
class RunView:
    """A run with its steps, as it stands now."""

    job: str
    run: int
    state: str
    steps: tuple[StepView, ...] = ()
    endpoint: EndpointView | None = None
    created: float | None = None
    seconds: float | None = None
    """From its start to its end, or to now."""
    cause: Mapping[str, Json] = field(default_factory=dict)
    error: Mapping[str, Json] | None = None
    """The error that ended it, as `OnejobError.to_json` writes it."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ListView:
    """What `ps` lists: runs, newest first, and endpoints."""

    runs: tuple[RunView, ...] = ()
    endpoints: tuple[EndpointView, ...] = ()


# ---- check and why -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step of a job that was planned but not run."""

    name: str
    verdict: str
    """`cached`, `run`, or `unknown` (an earlier step runs first, so its key isn't known yet)."""
    reason: str = ""
    key: str | None = None


@dataclass(frozen=True, slots=True)
class CheckView:
    """A job that was read and planned: what each step would do, and what this machine lacks."""

    job: str
    path: str
    steps: tuple[PlannedStep, ...] = ()
    endpoint: str = ""
    """The endpoint that it would serve; empty if none."""
    missing: tuple[Support, ...] = ()
    """Plugins that the job needs and that can't run here, each with its cure."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that differs between two keys or two runs."""

    component: str
    """Where: `code.helper.py`, `options.lr`, `packages.polars`, `inputs.dataset`, `metrics.auc`."""
    old: Json
    new: Json
    text: str = ""
    """The same as a person says it: "helper.py changed (function scale)"."""


@dataclass(frozen=True, slots=True)
class StepWhy:
    """Why a step ran, or didn't have to."""

    step: str
    run: int | None
    verdict: str
    """`ran`, `cached`, `would run`, `would be cached`."""
    reason: str
    compared: str = ""
    """What its key was compared with: `11/train`."""
    changes: tuple[Change, ...] = ()
    key: str | None = None
    components: Mapping[str, Json] = field(default_factory=dict)
    """Every component of the key."""


@dataclass(frozen=True, slots=True)
class StoryLine:
    """Something that happened to an endpoint."""

    time: float
    """Event time."""
    kind: str
    """`signal`, `run`, `gate`, `promotion`, `probation` or `rollback`."""
    text: str
    run: int | None = None


@dataclass(frozen=True, slots=True)
class WhyView:
    """The answer of `why`, one entry a step; of an endpoint its story too."""

    ref: str
    steps: tuple[StepWhy, ...]
    story: tuple[StoryLine, ...] = ()
    outlook: str = ""
    """What the endpoint's loop waits for."""


@dataclass(frozen=True, slots=True)
class DiffView:
    """How two runs, steps or artifacts differ."""

    a: str
    b: str
    changes: tuple[Change, ...] = ()


# ---- one thing at a time -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArtifactView:
    """An artifact: what is in it, what names it, who made it and from what."""

    digest: str
    kind: str
    size: int = 0
    files: tuple[Mapping[str, Json], ...] = ()
    """{"path", "digest", "size"} each."""
    meta: Mapping[str, Json] = field(default_factory=dict)
    refs: tuple[str, ...] = ()
    created: float | None = None


@dataclass(frozen=True, slots=True)
class ExecutionView:
    """One try at a step, with what was measured."""

    id: str
    step: str
    job: str
    run: int
    state: str
    executor: str = ""
    host: str = ""
    created: float | None = None
    seconds: float | None = None
    key: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    measured: Mapping[str, Json] = field(default_factory=dict)
    error: Mapping[str, Json] | None = None
    log: str = ""
    """Path of what it printed."""


@dataclass(frozen=True, slots=True)
class Node:
    """A link of a chain from an answer, or an artifact, back to the source files."""

    depth: int
    kind: str
    """`request`, `endpoint`, `execution`, `run`, or the kind of an artifact."""
    name: str
    """What a person calls it: a ref, `12/train`, a file's logical name."""
    digest: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ShowView:
    """All that `show` knows of one thing; what doesn't belong to it is empty."""

    ref: str
    kind: str
    """`run`, `step`, `artifact`, `endpoint` or `request`."""
    run: RunView | None = None
    endpoint: EndpointView | None = None
    artifacts: tuple[ArtifactView, ...] = ()
    executions: tuple[ExecutionView, ...] = ()
    lineage: tuple[Node, ...] = ()
    metrics: Mapping[str, tuple[Mapping[str, Json], ...]] = field(default_factory=dict)
    """Step name -> its lines of metrics, oldest first."""
    details: Mapping[str, Json] = field(default_factory=dict)
    """Anything else worth a line each."""
    story: tuple[StoryLine, ...] = ()
    """Of an endpoint: its signals, runs, decisions and promotions."""
    outlook: str = ""
    """What the endpoint's loop waits for."""


@dataclass(frozen=True, slots=True)
class TraceView:
    """The chain from what was asked for back to the source files, in reading order."""

    ref: str
    nodes: tuple[Node, ...]


# ---- keeping -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StopView:
    """What was asked to stop, and where it stands."""

    ref: str
    kind: str
    """`run` or `endpoint`."""
    state: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Damage:
    """A file whose bytes are not what its digest says, or that is gone."""

    artifact: str
    kind: str
    path: str
    problem: str
    """`damaged`, `missing`, `source changed` or `source gone`."""
    where: str = ""
    """The path on disk."""
    cure: str = ""


@dataclass(frozen=True, slots=True)
class VerifyView:
    """A whole lineage, hashed again."""

    ref: str
    artifacts: int = 0
    files: int = 0
    size: int = 0
    damaged: tuple[Damage, ...] = ()
    changed: tuple[Damage, ...] = ()
    """Sources that were changed or moved since they were read: no damage, but they can't be read again."""


@dataclass(frozen=True, slots=True)
class GcView:
    """What nothing refers to any more, and was (or would be) freed."""

    dry_run: bool
    artifacts: int = 0
    blobs: int = 0
    folders: int = 0
    """Work and scratch folders."""
    freed: int = 0
    kept: int = 0
    """Bytes of the blobs that stay."""
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BackupView:
    """A backup file that was written, or read back."""

    path: str
    blobs: int = 0
    size: int = 0
    runs: int = 0
    files: int = 0
    """Of endpoints, that are in no blob yet."""


@dataclass(frozen=True, slots=True)
class DoctorView:
    """This machine, through onejob's eyes."""

    version: str
    home: str
    facts: Mapping[str, Json] = field(default_factory=dict)
    """`python`, `platform`, `cpus`, `memory`, `gpus`, `ledger`, `disk_free` …"""
    supports: tuple[Support, ...] = ()
    problems: tuple[str, ...] = ()
    """What would stop a job from running at all, each with its cure."""


@dataclass(frozen=True, slots=True)
class InitView:
    """A new job file."""

    folder: str
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What was guessed and should be looked at."""


@dataclass(frozen=True, slots=True)
class DemoView:
    """An example that was copied and run."""

    name: str
    folder: str
    run: RunView
    question: Mapping[str, Json] = field(default_factory=dict)
    """The request that the endpoint was asked."""
    answer: Mapping[str, Json] = field(default_factory=dict)
    command: str = ""
    """The same request, as a command for the shell."""
    tries: tuple[tuple[str, str], ...] = ()
    """What to try next: (command, what it shows) each; the command can be pasted as it is."""
    year: Mapping[str, Json] | None = None
    """The year that was played after it, as `--json FILE` writes it."""


def to_json(value: Any) -> Json:
    """Any view, or anything made of plain data, as JSON values; dataclasses become objects in their fields' order."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_json(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no word for it
    return value
