"""What the ledger remembers, as frozen records; one record class for each table that the loop reads.

Times are seconds since the epoch, from the clock that the ledger was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onejob.core.artifact import Json
from onejob.core.plan import Plan, Step
from onejob.core.state import EndpointState, ExecutionState, RunState, StepState


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that may hold leases: host, pid and the process's start time, so that a reused pid isn't mistaken."""

    host: str
    pid: int
    started: float

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}:{self.started:.2f}"

    @classmethod
    def parse(cls, text: str) -> Owner:
        host, pid, started = text.rsplit(":", 2)
        return cls(host, int(pid), float(started))


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on something until `expires`; the token fences off a holder that was too late."""

    owner: str
    token: str
    expires: float


@dataclass(frozen=True)
class Run:
    """One execution of a job."""

    id: int
    job: str
    state: RunState
    project: str
    """The folder of the job file when the run was made."""
    spec: Mapping[str, Json]
    """The resolved job, as JSON; secrets appear by name only."""
    plan: Mapping[str, Json]
    """`{"steps": [...], "serving": ..., "refs": ...}`: the plan, as JSON."""
    cause: Mapping[str, Json]
    """`{"kind": "person", "user": ..., "command": ...}` or `{"kind": "signal", ...}`."""
    forced: tuple[str, ...]
    """Names of steps that must run even if their key is known."""
    created: float
    finished: float | None = None
    error: Mapping[str, Json] | None = None
    lease: Lease | None = None


@dataclass(frozen=True)
class StepRow:
    """A planned step of a run: where it stands."""

    run: int
    position: int
    name: str
    state: StepState
    step: Step
    key: str | None = None
    execution: str | None = None
    cached: bool = False
    """The execution was there before this run asked for it."""
    attempt: int = 0
    reason: str = ""
    """Why it waits, runs, was cached, failed or was skipped: one line for a person."""


@dataclass(frozen=True)
class Execution:
    """One try at producing what a step key names."""

    id: str
    key: str
    step: str
    job: str
    run: int
    """The run that started it; others may be attached to it too."""
    state: ExecutionState
    created: float
    started: float | None = None
    finished: float | None = None
    needs: Mapping[str, Json] = field(default_factory=dict)
    """What it holds of its executor's capacity: {"cpus", "gpus", "gpu_ids"}; freed when it ends."""
    executor: str = "local"
    host: str = ""
    handle: Mapping[str, Json] | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Input name -> artifact digest."""
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Output name -> artifact digest; empty until done."""
    measured: Mapping[str, Json] = field(default_factory=dict)
    error: Mapping[str, Json] | None = None
    forgotten: str = ""
    """Why a done execution no longer counts as done for its key: its outputs are damaged or gone."""
    lease: Lease | None = None


@dataclass(frozen=True)
class Endpoint:
    """A served name: what it should serve, and where it stands."""

    name: str
    state: EndpointState
    artifact: str
    """Digest of the engine (or checkpoint) that it serves."""
    execution: str | None
    """The execution that produced it, for `trace`."""
    options: Mapping[str, Json]
    generation: int
    """Counts up with each change of what it should serve."""
    port: int = 0
    handle: Mapping[str, Json] | None = None
    created: float = 0.0
    updated: float = 0.0
    error: Mapping[str, Json] | None = None
    lease: Lease | None = None


@dataclass(frozen=True, slots=True)
class Ref:
    """A name for an artifact, such as `flights/engine@champion`."""

    name: str
    digest: str
    execution: str | None
    updated: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A sealed piece of what came back from an endpoint; `number` counts up in the order of sealing."""

    number: int
    endpoint: str
    digest: str
    """Of the artifact."""
    kind: str
    """`traffic` or `labels`."""
    begins: float
    ends: float
    """The range of event times (traffic), or of the labels' own times: seconds since the epoch."""
    rows: int


@dataclass(frozen=True, slots=True)
class Event:
    """A line of the append-only log, written in the same transaction as the change that it tells of."""

    seq: int
    time: float
    subject: str
    """`run/12`, `step/12/train`, `execution/ab12`, `endpoint/flights`, `ref/flights/engine@champion`."""
    kind: str
    data: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run to be added."""

    job: str
    project: str
    spec: Mapping[str, Json]
    plan: Plan
    cause: Mapping[str, Json]
    forced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """A wish to produce what a key names."""

    key: str
    step: str
    job: str
    run: int
    inputs: Mapping[str, str]
    needs: Mapping[str, Json]
    """{"cpus": float, "gpus": float} for the whole gang."""
    capacity: Mapping[str, Json]
    """{"cpus": float, "gpus": [ids]} of the executor: what may be held by all running executions together."""
    executor: str
    host: str
    fresh_from: int | None = None
    """For a forced step: only what this run or a later one has started counts as done."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a `ClaimRequest`.

    `won`: a new execution is ours (`execution`, with its lease). `done`: it was there (`execution`). `busy`: somebody
    is at it (`execution`). `full`: no slots are free; `reason` says what is missing.
    """

    answer: str
    execution: Execution | None = None
    reason: str = ""
