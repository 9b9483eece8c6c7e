"""Ports: the small protocols through which the loop reaches the world; adapters are chosen in loop/factory.

Each has a contract suite in `testing/` that every adapter, built-in or third-party, passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from onejob.core.artifact import Artifact, Json
from onejob.core.records import (
    Claim,
    ClaimRequest,
    Decision,
    Endpoint,
    Event,
    Execution,
    Lease,
    NewRun,
    NewSignal,
    NewTurn,
    Owner,
    Promotion,
    Ref,
    Run,
    Segment,
    Signal,
    StepRow,
    Turn,
)
from onejob.core.state import EndpointState, ExecutionState, PromotionState, RunState, StepState

# ---- processes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """A process, or a gang of them, to run in a work folder under a shim."""

    id: str
    """The execution's id, or `endpoint-<name>-<generation>`; unique on the executor."""
    argv: tuple[str, ...]
    """The command of every rank; each gets RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR in its environment, and in a
    gang MASTER_PORT too, whose listening socket rank 0 inherits as file descriptor ONEJOB_STORE_FD."""
    work: Path
    env: Mapping[str, str]
    """Added to the environment of the ranks (never written to disk: secrets travel here)."""
    secrets: tuple[str, ...] = ()
    """Names in `env` whose values must be taken out of the log."""
    processes: int = 1
    cpus: float = 1.0
    memory: int | None = None
    gpu_ids: tuple[int, ...] = ()
    timeout: float | None = None
    grace: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""
    arrive: float | None = 120.0
    """Seconds within which each rank of a gang must make the file `arrived/<rank>` in its folder; None: don't ask."""


@dataclass(frozen=True, slots=True)
class Status:
    """How a task stands: `starting`, `running`, `exited` (code, reason), or `gone` (its shim died without a word)."""

    state: str
    code: int | None = None
    """Exit code of the gang: 0, or that of the first rank that failed; 128+n for signal n."""
    reason: str = ""
    """One line: "rank 1 was killed by SIGKILL", "ran past its limit of 30 s", "rank 1 never arrived"."""
    rank: int | None = None
    cause: str = ""
    """Of an exit that didn't go well, one word: `exit` (by itself, with a code), `signal`, `timeout`, `arrive` (a rank
    never did), `memory`, `start` (the command can't be started), `stopped` (it was asked to)."""


class Executor(Protocol):
    """Runs tasks. A handle is JSON, enough for another process to go on with the task."""

    def submit(self, task: Task) -> Json:
        """Start the task and give its handle; submitting the same id into the same folder twice starts it once."""

    def poll(self, handles: Sequence[Json]) -> list[Status]:
        """The status of each task, in the order asked."""

    def cancel(self, handle: Json, *, now: bool = False) -> None:
        """SIGTERM, grace, SIGKILL to everything the task started, or with `now` SIGKILL alone; returns at once.

        `poll` then says `exited`, or `gone` after a SIGKILL.
        """

    def capacity(self) -> Mapping[str, Json]:
        """{"cpus": float, "gpus": [ids], "memory": bytes}: what this executor has in all."""


# ---- storage -----------------------------------------------------------------------------------------------------


class Blobs(Protocol):
    """Content-addressed bytes: written aside, made durable, renamed; verified on read."""

    def put(self, source: Path | bytes) -> tuple[str, int]:
        """Keep a file's bytes; gives (digest, size). Keeping the same bytes twice is keeping them once."""

    def get(self, digest: str) -> Path:
        """A read-only path whose bytes were checked against the digest; DamagedError, NotFoundError."""

    def has(self, digest: str) -> bool:
        """Whether the bytes are there (not whether they are sound)."""

    def delete(self, digest: str) -> int:
        """Forget the bytes; gives how many were freed."""

    def __iter__(self) -> Iterator[tuple[str, int, float]]:
        """Every (digest, size, time written)."""


class Runs(Protocol):
    """Runs and their steps."""

    def add_run(self, new: NewRun) -> Run: ...
    def get_run(self, run: int) -> Run: ...
    def list_runs(
        self, *, job: str | None = None, states: Sequence[RunState] | None = None, limit: int | None = None
    ) -> list[Run]:
        """Newest first."""

    def set_run(self, run: int, state: RunState, *, token: str, error: Json | None = None) -> None:
        """Change a run's state under its lease (LeaseLostError if the token is stale)."""

    def cancel_run(self, run: int) -> None:
        """Ask for a run to be cancelled, whoever holds it: state and event at once; the loop ends its executions."""

    def list_steps(self, run: int) -> list[StepRow]: ...
    def set_step(
        self,
        run: int,
        name: str,
        state: StepState,
        *,
        token: str,
        key: str | None = None,
        execution: str | None = None,
        cached: bool | None = None,
        attempt: int | None = None,
        reason: str | None = None,
    ) -> None:
        """Change a step under its run's lease; what is None stays as it is."""

    def last_step_with_other_key(self, job: str, step: str, key: str, before_run: int) -> StepRow | None:
        """The newest earlier step of that name and job that has another key: what `why` compares with."""


class Executions(Protocol):
    """Tries at producing what a key names; at most one live execution for each key."""

    def claim(self, request: ClaimRequest, owner: Owner, ttl: float) -> Claim:
        """Win, or learn who is at it or was; slots are counted in the same transaction."""

    def get_execution(self, execution: str) -> Execution: ...
    def list_executions(
        self,
        *,
        states: Sequence[ExecutionState] | None = None,
        key: str | None = None,
        job: str | None = None,
        limit: int | None = None,
    ) -> list[Execution]:
        """Newest first."""

    def start_execution(self, execution: str, token: str, handle: Json) -> None:
        """claimed -> running."""

    def finish_execution(
        self,
        execution: str,
        token: str,
        state: ExecutionState,
        *,
        outputs: Mapping[str, Artifact] | None = None,
        measured: Mapping[str, Json] | None = None,
        error: Json | None = None,
    ) -> None:
        """End it, free its slots and index its outputs, in one transaction."""

    def forget_execution(self, execution: str, reason: str) -> None:
        """A done execution whose outputs are damaged or gone no longer counts as done for its key."""

    def add_key(self, key: str, components: Mapping[str, Json]) -> None: ...
    def get_key(self, key: str) -> Mapping[str, Json]: ...
    def attached_runs(self, execution: str) -> list[int]:
        """Runs not yet ended with a step attached to this execution."""


class Leases(Protocol):
    """Leases on runs, executions and endpoints: `what` is "run", "execution" or "endpoint"."""

    def lease(self, what: str, key: int | str, owner: Owner, ttl: float) -> Lease | None:
        """Take it if it is free, expired, ours already, or its owner is a dead process of this host; else None."""

    def renew(self, what: str, key: int | str, token: str, ttl: float) -> bool:
        """Hold it longer; False when it was lost."""

    def release(self, what: str, key: int | str, token: str) -> None: ...


class Catalog(Protocol):
    """Artifacts and refs."""

    def add_artifact(self, artifact: Artifact, *, locations: Mapping[str, str] | None = None) -> None:
        """Index an artifact; `locations` (path in the artifact -> path on disk) for sources kept where they lie."""

    def get_artifact(self, digest: str) -> Artifact:
        """By full digest, or a unique prefix of at least 6 digits; NotFoundError, UsageError if ambiguous."""

    def locations(self, digest: str) -> Mapping[str, str]: ...
    def list_artifacts(self, *, kind: str | None = None) -> list[tuple[str, Artifact, float]]:
        """(digest, artifact, time first seen), newest first."""

    def producers(self, digest: str) -> list[Execution]:
        """Executions that left this artifact, newest first."""

    def set_ref(self, name: str, digest: str, execution: str | None, *, expect: str | None = None) -> None:
        """Point a ref; with `expect`, only if it points there now (ConflictError)."""

    def get_ref(self, name: str) -> Ref | None: ...
    def list_refs(self, prefix: str = "") -> list[Ref]: ...
    def drop_artifacts(self, digests: Sequence[str]) -> None:
        """Forget artifacts that nothing refers to any more (gc)."""


class Endpoints(Protocol):
    """Served names."""

    def want_endpoint(
        self, name: str, *, artifact: str, execution: str | None, options: Mapping[str, Json]
    ) -> Endpoint:
        """Say what a name should serve; the same wish twice changes nothing, another one counts the generation up."""

    def get_endpoint(self, name: str) -> Endpoint | None: ...
    def list_endpoints(self) -> list[Endpoint]: ...
    def set_endpoint(
        self,
        name: str,
        state: EndpointState,
        *,
        port: int | None = None,
        handle: Json | None = None,
        error: Json | None = None,
        expect: EndpointState | None = None,
    ) -> None:
        """Say where it stands; with `expect`, only if it stands so now (ConflictError)."""


class Segments(Protocol):
    """What came back from endpoints: sealed traffic and batches of labels."""

    def add_segment(self, endpoint: str, artifact: Artifact, *, begins: float, ends: float, rows: int) -> Segment:
        """Index the artifact and number it as the endpoint's next segment, in one transaction; twice is once."""

    def list_segments(
        self,
        endpoint: str,
        *,
        kind: str | None = None,
        after: int = 0,
        since: float | None = None,
        until: float | None = None,
        newest: int | None = None,
    ) -> list[Segment]:
        """In the order of sealing; `after` a number, and such as reach into [since, until); the `newest` so many."""

    def drop_segments(self, endpoint: str, numbers: Sequence[int]) -> int:
        """Forget segments, so that `gc` may free their artifacts; gives how many there were."""


class Signals(Protocol):
    """What is found about endpoints, and the runs that it causes."""

    def add_signals(
        self,
        endpoint: str,
        signals: Sequence[NewSignal],
        *,
        event_time: float,
        champion: str | None = None,
        report: str | None = None,
        turn: int | None = None,
        facts: Mapping[str, Json] | None = None,
    ) -> list[Signal]:
        """Store findings, and end the turn that brought them (`facts` join its own), in one transaction; gives the new
        ones. What is said of the same champion, kind and block is one finding; without a champion each is its own.
        """

    def list_signals(self, endpoint: str, *, fresh: bool = False, limit: int | None = None) -> list[Signal]:
        """Newest first; `fresh` ones have caused no run."""

    def add_turn(
        self, new: NewRun, turn: NewTurn, *, signals: Sequence[int] = (), raised: Sequence[NewSignal] = ()
    ) -> Run | None:
        """Add a run for an endpoint's loop that consumes signals (`raised` are new ones), in one transaction.

        None, and nothing is added, if a run of that kind is open for the endpoint, or a signal is consumed already.
        """

    def list_turns(
        self, endpoint: str, *, kind: str | None = None, taken: bool | None = None, limit: int | None = None
    ) -> list[Turn]:
        """Newest first."""

    def end_turn(self, run: int, outcome: str) -> None:
        """Say what became of a turn's result; once."""


class Promotions(Protocol):
    """What the gate said of challengers, and which engines took others' places."""

    def add_decision(self, decision: Decision) -> Decision:
        """Store it and end its run's turn, in one transaction; the same run again gives the stored one."""

    def list_decisions(self, endpoint: str, *, limit: int | None = None) -> list[Decision]:
        """Newest first."""

    def settle_decision(self, run: int, outcome: str) -> None:
        """Say what came of a decision; once."""

    def promote(
        self,
        endpoint: str,
        *,
        digest: str,
        execution: str | None,
        cause: Mapping[str, Json],
        event_time: float,
        state: PromotionState,
        options: Mapping[str, Json] | None = None,
        expect: str | None = None,
        decision: int | None = None,
        ref: str | None = None,
    ) -> Promotion:
        """Let an endpoint serve another engine: wish, ref, promotion and the decision's outcome in one transaction.

        A promotion before it that was still on probation is kept. A decision is carried out once: the second time
        gives the same promotion. ConflictError if the endpoint doesn't serve `expect` any more.
        """

    def roll_back(
        self, promotion: int, *, reason: str, cause: Mapping[str, Json], event_time: float, ref: str | None = None
    ) -> Promotion:
        """Let the former engine serve again, once; ConflictError if the endpoint serves something else by now."""

    def keep_promotion(self, promotion: int, *, reason: str, event_time: float) -> None:
        """End a probation well; ConflictError if it was rolled back."""

    def list_promotions(self, endpoint: str, *, limit: int | None = None) -> list[Promotion]:
        """Newest first."""


class Log(Protocol):
    """The append-only log."""

    def events(self, *, after: int = 0, subject: str | None = None, limit: int | None = None) -> list[Event]:
        """Oldest first; `subject` matches itself and everything below it (`run/12` matches `step/12/...` too)."""

    def newest_event(self) -> int:
        """The number of the newest line; 0 for none."""

    def add_event(self, subject: str, kind: str, data: Mapping[str, Json]) -> None: ...


class Ledger(Runs, Executions, Leases, Catalog, Endpoints, Segments, Signals, Promotions, Log, Protocol):
    """All that is remembered; SQLite or PostgreSQL, the same statements."""

    def close(self) -> None: ...


# ---- capabilities ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a plugin can run here; if not, why and what would help."""

    name: str
    kind: str
    """`engine`, `executor`, `family` or `store`."""
    available: bool
    detail: str = ""
    """A version, or why not."""
    cure: str = ""


class Probe(Protocol):
    """Something that can say whether it runs here, without importing what may be missing."""

    def supported(self) -> Support: ...
