"""What the ledger remembers, as frozen records; one record class for each table that the loop reads.

Times are seconds since the epoch, from the clock that the ledger was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onejob.core.artifact import Json
from onejob.core.plan import Plan, Step
from onejob.core.state import EndpointState, ExecutionState, PromotionState, RunState, StepState


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
class NewSignal:
    """A finding about an endpoint, to be stored."""

    kind: str
    """`harm`, `warning`, `slo` … of a report; `labels`, `schedule` by the clock of the traffic; `hand`."""
    block: str = ""
    """Of event time: `2013-03-10`."""
    value: float | None = None
    threshold: float | None = None
    evidence: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Signal:
    """A stored finding, with its evidence, and the run that it has caused."""

    id: int
    endpoint: str
    kind: str
    block: str
    value: float | None
    threshold: float | None
    evidence: Mapping[str, Json]
    champion: str | None
    """The engine that it is about. The same finding of the same block is in each later report of it: it counts once."""
    report: str | None
    """Digest of the report that told it first."""
    place: int
    """Its index in the report."""
    created: float
    event_time: float
    run: int | None = None
    """The run that it caused: it causes one at most."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A run that an endpoint's loop has added by itself, and whether its result was taken over."""

    run: int
    endpoint: str
    kind: str
    """`watch` (monitoring), `retrain`, or `look` (a held challenger before the gate again)."""
    event_time: float
    champion: str
    """What the endpoint served when it was added."""
    facts: Mapping[str, Json]
    """What it was planned from: {"labels", "segment", "promotion", "challenger", "look" …}."""
    taken: float | None = None
    outcome: str = ""
    """What became of its result, in a few words."""


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A turn to be added, with its run."""

    endpoint: str
    kind: str
    event_time: float
    champion: str
    facts: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """What the gate said of a challenger, and what came of it."""

    run: int
    """The run whose gate it was; one decision each."""
    endpoint: str
    verdict: str
    """`promote`, `hold` or `reject`."""
    reasons: tuple[str, ...]
    missing: tuple[str, ...]
    champion: str
    challenger: str
    execution: str | None
    """The execution that made the challenger."""
    artifact: str
    """Digest of the `decision` artifact."""
    event_time: float
    look: int = 1
    created: float = 0.0
    applied: float | None = None
    outcome: str = ""
    """`promoted`, `held`, `rejected`, `waits for a person`, or why a promotion was not carried out."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """An engine that took another's place at an endpoint."""

    id: int
    endpoint: str
    digest: str
    execution: str | None
    former: str
    former_execution: str | None
    cause: Mapping[str, Json]
    """`{"kind": "gate", "run": …}` or `{"kind": "person", "user": …}`."""
    created: float
    event_time: float
    state: PromotionState
    reason: str = ""
    """Why it is in this state."""
    ended: float | None = None
    """Event time at which it was kept or rolled back."""


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
