"""Garbage collection: mark what is referred to, then sweep the rest, safely while runs go on.

Kept are the artifacts that refs and endpoints name with all their lineage; inputs and outputs of the executions of
runs that go on, of each job's newest run and of its last done ones; what live executions read; and whatever is newer
than the grace period, named or not. The rest goes in an order that no claim, put or crash can fall into:

1. An execution whose outputs are to go is forgotten first, in one transaction that refuses if somebody has asked for
   its key of late or a run that goes on is attached to it. From then on its key is no longer "done".
2. The marks are made anew, and artifacts that are still unmarked are dropped from the catalogue, in one transaction
   that refuses those that something refers to, or that were added again of late.
3. A blob that no artifact of the catalogue names is deleted, unless it was put again of late (`delete_older`).

A crash in between leaves less to free for the next time, and nothing broken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from onejob.core.artifact import Artifact, Json, short
from onejob.core.faults import reach
from onejob.core.ports import Blobs, Ledger
from onejob.core.records import Execution, Run
from onejob.core.state import EXECUTION, RUN, ExecutionState, RunState, final

GRACE = 3600.0
KEEP_RUNS = 10


class CollectableLedger(Ledger, Protocol):
    """A ledger that forgets only what nobody has asked for since."""

    def forget_unused(self, execution: str, reason: str, before: float) -> bool: ...
    def drop_unused(self, digests: Sequence[str], before: float) -> list[str]: ...


class CollectableBlobs(Blobs, Protocol):
    """Blobs that are deleted only if nobody has put them since."""

    def delete_older(self, digest: str, before: float) -> int: ...
    def clean(self, before: float) -> int: ...


@dataclass(frozen=True, slots=True)
class Freed:
    """A blob that would be freed, and why."""

    digest: str
    size: int
    reason: str


@dataclass(frozen=True)
class GcPlan:
    """What is kept and what would go; pure data."""

    before: float
    """Whatever is as new as this, or newer, stays."""
    keep_runs: int
    kept: Mapping[str, str]
    """Digest of an artifact -> why it stays."""
    forget: Mapping[str, str]
    """Id of a done execution -> why it will no longer count."""
    drop: Mapping[str, str]
    """Digest of an artifact -> its kind."""
    free: tuple[Freed, ...]

    @property
    def size(self) -> int:
        """Bytes that would be freed."""
        return sum(blob.size for blob in self.free)


@dataclass(frozen=True, slots=True)
class Swept:
    """What was done: less than planned, where something was used meanwhile."""

    forgotten: tuple[str, ...]
    dropped: tuple[str, ...]
    freed: tuple[Freed, ...]
    leftovers: int
    """Bytes of files that killed writers had left aside."""

    @property
    def size(self) -> int:
        return sum(blob.size for blob in self.freed) + self.leftovers


def plan_gc(ledger: Ledger, blobs: Blobs, now: float, grace: float = GRACE, keep_runs: int = KEEP_RUNS) -> GcPlan:
    """Look, and change nothing: what stays and why, what would go and why."""
    before = now - grace
    kept = mark(ledger, before, keep_runs)
    artifacts = {digest: artifact for digest, artifact, _ in ledger.list_artifacts()}
    drop = {digest: artifact.kind for digest, artifact in artifacts.items() if digest not in kept}
    named = _names({digest: artifact for digest, artifact in artifacts.items() if digest in kept})
    was_named = _names({digest: artifacts[digest] for digest in drop})
    free = []
    for digest, size, written in blobs:
        if digest in named or written >= before:
            continue
        owner = was_named.get(digest)
        reason = f"nothing refers to {drop[owner]} {short(owner)}" if owner else "no artifact names it"
        free.append(Freed(digest, size, reason))
    return GcPlan(before, keep_runs, kept, _to_forget(ledger, kept), drop, tuple(free))


def sweep(ledger: CollectableLedger, blobs: CollectableBlobs, plan: GcPlan) -> Swept:
    """Carry the plan out, looking again before each thing goes; may be interrupted and repeated."""
    forgotten = tuple(e for e, reason in plan.forget.items() if ledger.forget_unused(e, reason, plan.before))
    reach("gc.after_forget")
    kept = mark(ledger, plan.before, plan.keep_runs)
    dropped = tuple(ledger.drop_unused([d for d in plan.drop if d not in kept], plan.before))
    reach("gc.after_drop")
    named = _names({digest: artifact for digest, artifact, _ in ledger.list_artifacts()})
    freed = []
    for blob in plan.free:
        if blob.digest not in named and blobs.delete_older(blob.digest, plan.before):
            freed.append(blob)
            reach("gc.after_blob")
    return Swept(forgotten, dropped, tuple(freed), blobs.clean(plan.before))


def mark(ledger: Ledger, before: float, keep_runs: int) -> dict[str, str]:
    """Digest of every artifact that stays -> why; the first reason found is told."""
    executions = {execution.id: execution for execution in ledger.list_executions()}
    kept: dict[str, str] = {}
    for digest, maker, reason in _roots(ledger):
        for ancestor in _lineage(digest, maker, executions):
            kept.setdefault(ancestor, reason)
    for run, reason in _kept_runs(ledger.list_runs(), keep_runs):
        for digest in _digests_of_run(ledger, run, executions):
            kept.setdefault(digest, reason)
    for execution in executions.values():
        if not final(EXECUTION, execution.state):
            _keep(kept, execution, f"execution {execution.id} is {execution.state}")
        elif (execution.finished or 0.0) >= before and not execution.forgotten:
            _keep(kept, execution, f"execution {execution.id} ended not long ago")
    for digest, _, seen in ledger.list_artifacts():
        if seen >= before:
            kept.setdefault(digest, "it is new")
    return kept


def _roots(ledger: Ledger) -> Iterator[tuple[str, str | None, str]]:
    for ref in ledger.list_refs():
        yield ref.digest, ref.execution, f"the ref {ref.name} stands on it"
    for endpoint in ledger.list_endpoints():
        reason = f"the endpoint {endpoint.name} stands on it"
        yield endpoint.artifact, endpoint.execution, reason
        for model in ledger.get_artifact(endpoint.artifact).meta.get("models", ()):
            yield model["digest"], None, reason
        for segment in ledger.list_segments(endpoint.name):
            yield segment.digest, None, f"it came back from the endpoint {endpoint.name}"
        for promotion in ledger.list_promotions(endpoint.name):
            reason = f"a promotion of the endpoint {endpoint.name} stands on it"
            yield promotion.digest, promotion.execution, reason
            yield promotion.former, promotion.former_execution, reason


def _lineage(digest: str, maker: str | None, executions: Mapping[str, Execution]) -> Iterator[str]:
    """An artifact and all that it was made from: by the execution named, and by every execution that left it."""
    makers: dict[str, list[Execution]] = defaultdict(list)
    for execution in executions.values():
        for output in execution.outputs.values():
            makers[output].append(execution)
    seen, todo = {digest}, [digest]
    if maker is not None and maker in executions:
        todo += executions[maker].inputs.values()
        seen.update(todo)
    while todo:
        found = todo.pop()
        yield found
        for execution in makers[found]:
            fresh = set(execution.inputs.values()) - seen
            seen |= fresh
            todo += fresh


def _kept_runs(runs: Sequence[Run], keep_runs: int) -> Iterator[tuple[Run, str]]:
    """Runs that go on, each job's newest, and its last done ones; `runs` has the newest first."""
    newest: set[tuple[str, str]] = set()
    done: dict[tuple[str, str], int] = defaultdict(int)
    for run in runs:
        line = (run.job, run.cause.get("kind", ""))  # runs that the loop adds must not push out those of a person
        if not final(RUN, run.state):
            yield run, f"run {run.id} of {run.job} goes on"
        elif line not in newest:
            yield run, f"run {run.id} is the newest of {run.job}"
        elif run.state is RunState.DONE and done[line] < keep_runs:
            yield run, f"run {run.id} is one of the last {keep_runs} of {run.job} that are done"
        newest.add(line)
        done[line] += run.state is RunState.DONE


def _digests_of_run(ledger: Ledger, run: Run, executions: Mapping[str, Execution]) -> Iterator[str]:
    for row in ledger.list_steps(run.id):
        if row.execution is not None and row.execution in executions:
            execution = executions[row.execution]
            yield from execution.inputs.values()
            yield from execution.outputs.values()
    yield from _existing(run.plan)


def _existing(value: Json) -> Iterator[str]:
    """Digests that a plan names itself: `{"digest": ...}` at any depth."""
    if isinstance(value, dict):
        if set(value) == {"digest"}:
            yield value["digest"]
        for item in value.values():
            yield from _existing(item)
    elif isinstance(value, list):
        for item in value:
            yield from _existing(item)


def _keep(kept: dict[str, str], execution: Execution, reason: str) -> None:
    for digest in (*execution.inputs.values(), *execution.outputs.values()):
        kept.setdefault(digest, reason)


def _to_forget(ledger: Ledger, kept: Mapping[str, str]) -> dict[str, str]:
    forget = {}
    for execution in ledger.list_executions(states=[ExecutionState.DONE]):
        gone = [name for name, digest in execution.outputs.items() if digest not in kept]
        if gone and not execution.forgotten:
            forget[execution.id] = f"gc: its output {gone[0]} is kept no longer"
    return forget


def _names(artifacts: Mapping[str, Artifact]) -> dict[str, str]:
    """Digest of every blob that the artifacts name (files and manifests) -> an artifact that does."""
    named = {}
    for digest, artifact in artifacts.items():
        named[digest] = digest
        for entry in artifact.files:
            named[entry.digest] = digest
    return named
