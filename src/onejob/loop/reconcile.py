"""One level-triggered pass: look at every run in scope, and do the next thing that its state asks for.

A pass can be repeated, interrupted at any line and run by several processes at once: runs, executions and endpoints are
leased, state changes are guarded by the lease's token, and work happens outside any transaction. What each state asks
for is a table at the end of this page; the functions above it are its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onejob.core.artifact import Json
from onejob.core.faults import reach
from onejob.core.key import StepKey, explain
from onejob.core.plan import Existing, Output, Source, Step
from onejob.core.records import ClaimRequest, Execution, Run, StepRow
from onejob.core.state import ExecutionState, RunState, StepState
from onejob.errors import LeaseLostError, OnejobError, SourceError, StepError
from onejob.loop.endpoints import tend_endpoint, want_serving
from onejob.loop.executions import LIVE, end_unwanted, tend_execution
from onejob.loop.keys import key_of, source_artifact
from onejob.loop.session import Session

ENDED = frozenset({StepState.DONE, StepState.FAILED, StepState.CANCELLED, StepState.SKIPPED})
OPEN = (RunState.QUEUED, RunState.RUNNING)


@dataclass(frozen=True)
class Held:
    """A run that we hold, with its steps as this pass sees them."""

    session: Session
    run: Run
    token: str
    rows: Mapping[str, StepRow]

    def set(
        self,
        row: StepRow,
        state: StepState,
        *,
        key: str | None = None,
        execution: str | None = None,
        cached: bool | None = None,
        attempt: int | None = None,
        reason: str | None = None,
    ) -> None:
        self.session.ledger.set_step(
            self.run.id,
            row.name,
            state,
            token=self.token,
            key=key,
            execution=execution,
            cached=cached,
            attempt=attempt,
            reason=reason,
        )


def reconcile(session: Session, scope: Sequence[int] | None = None) -> None:
    """One pass over the runs in scope (None: all), over executions that nobody wants any more, and over endpoints."""
    ledger = session.ledger
    runs = ledger.list_runs(states=OPEN) if scope is None else [ledger.get_run(run) for run in scope]
    for run in sorted(runs, key=lambda run: run.id):
        if run.state in OPEN:
            _advance_if_ours(session, run)
    end_unwanted(session)
    if scope is None:
        for endpoint in ledger.list_endpoints():
            tend_endpoint(session, endpoint.name)


def _advance_if_ours(session: Session, run: Run) -> None:
    token = session.hold("run", run.id)
    if token is None:
        return
    try:
        advance_run(session, run, token)
    except LeaseLostError:
        # Cancelled, or another supervisor went on with it: what we did under the old lease is dropped.
        session.drop("run", run.id)


def advance_run(session: Session, run: Run, token: str) -> None:
    """Move every step of a run that can move, then the run itself."""
    ledger = session.ledger
    if run.state is RunState.QUEUED:
        ledger.set_run(run.id, RunState.RUNNING, token=token)
    for row in ledger.list_steps(run.id):
        moved = row
        # A step may take several turns in one pass: waiting -> ready -> running, or -> done from the cache.
        for _ in range(4):
            held = Held(session, run, token, {r.name: r for r in ledger.list_steps(run.id)})
            current = held.rows[row.name]
            if current.state in ENDED:
                break
            TURNS[current.state](held, current)
            moved = {r.name: r for r in ledger.list_steps(run.id)}[row.name]
            if moved.state == current.state:
                break
    _end_run(session, run, token)


def _waiting(held: Held, row: StepRow) -> None:
    """Find the step's key, once every input is there."""
    earlier = [held.rows[i.step] for i in row.step.inputs.values() if isinstance(i, Output)]
    if broken := [r for r in earlier if r.state in ENDED and r.state is not StepState.DONE]:
        held.set(row, StepState.SKIPPED, reason=f"{broken[0].name} {broken[0].state}")
        return
    if any(r.state is not StepState.DONE for r in earlier):
        return
    try:
        inputs = input_digests(held.session, row.step, held.rows)
        keyed = key_of(row.step, inputs, Path(held.run.project))
    except OnejobError as error:
        held.set(row, StepState.FAILED, reason=str(error))
        return
    ledger = held.session.ledger
    ledger.add_key(keyed.key.digest, keyed.key.components)
    for warning in keyed.warnings:
        ledger.add_event(f"step/{held.run.id}/{row.name}", "warning", {"text": warning})
    held.set(row, StepState.READY, key=keyed.key.digest, reason=_why(held, row, keyed.key.digest))


def _why(held: Held, row: StepRow, key: str) -> str:
    """Why the step has the key it has: against the newest earlier step of that name with another key."""
    ledger = held.session.ledger
    other = ledger.last_step_with_other_key(held.run.job, row.name, key, held.run.id)
    if other is None or other.key is None:
        return "first time"
    changes = explain(StepKey(ledger.get_key(other.key)), StepKey(ledger.get_key(key)))
    return "; ".join(change.sentence() for change in changes)


def _ready(held: Held, row: StepRow) -> None:
    """Take it from the cache, join whoever is at it, or claim it and start."""
    assert row.key is not None
    session, ledger = held.session, held.session.ledger
    name = "local"
    answer = ledger.claim(
        ClaimRequest(
            key=row.key,
            step=row.name,
            job=held.run.job,
            run=held.run.id,
            inputs=ledger.get_key(row.key)["inputs"],
            needs=_needs(row.step),
            capacity=session.executors[name].capacity(),
            executor=name,
            host=session.owner.host,
            fresh_from=held.run.id if row.name in held.run.forced else None,
        ),
        session.owner,
        session.ttl,
    )
    if answer.answer == "full":
        if answer.reason != row.reason:
            held.set(row, StepState.READY, reason=answer.reason)
        return
    assert answer.execution is not None
    found = answer.execution
    if answer.answer == "done":
        if lost := missing_outputs(session, found):
            ledger.forget_execution(found.id, f"its output {lost} is gone from the blobs")
            return
        cached = found.run != held.run.id
        reason = f"the same key as in run {found.run}" if cached else row.reason
        held.set(row, StepState.DONE, execution=found.id, cached=cached, reason=reason)
        return
    reach("loop.after_claim")
    held.set(row, StepState.RUNNING, execution=found.id, cached=False)


def _running(held: Held, row: StepRow) -> None:
    """Tend its execution, if nobody else does, and take over how it ended."""
    assert row.execution is not None
    session = held.session
    execution = session.ledger.get_execution(row.execution)
    if execution.state in LIVE:
        tend_execution(session, held.run, row, execution)
        execution = session.ledger.get_execution(row.execution)
    match execution.state:
        case ExecutionState.DONE:
            held.set(row, StepState.DONE, cached=execution.run != held.run.id)
        case ExecutionState.FAILED:
            held.set(row, StepState.FAILED, reason=error_text(execution))
        case ExecutionState.LOST if row.attempt < row.step.retries:
            reason = f"again, since {error_text(execution)}"
            held.set(row, StepState.WAITING, attempt=row.attempt + 1, reason=reason)
        case ExecutionState.LOST:
            tries = row.attempt + 1
            text = f"{error_text(execution)} (tried {tries} times)" if tries > 1 else error_text(execution)
            held.set(row, StepState.FAILED, reason=text)
        case ExecutionState.CANCELLED:
            held.set(row, StepState.WAITING, reason="again, since another run cancelled it")


TURNS: Mapping[StepState, Callable[[Held, StepRow], None]] = {
    StepState.WAITING: _waiting,
    StepState.READY: _ready,
    StepState.RUNNING: _running,
}


def _end_run(session: Session, run: Run, token: str) -> None:
    """Once every step has ended: failed, or set the refs, serve, and be done."""
    ledger = session.ledger
    rows = {row.name: row for row in ledger.list_steps(run.id)}
    if any(row.state not in ENDED for row in rows.values()):
        return
    if failed := [row for row in rows.values() if row.state is StepState.FAILED]:
        ledger.set_run(run.id, RunState.FAILED, token=token, error=_failure(session, failed[0]))
        return
    reach("loop.before_refs")
    for name, output in run.plan["refs"].items():
        execution = ledger.get_execution(rows[output["step"]].execution or "")
        digest = execution.outputs[output["output"]]
        known = ledger.get_ref(name)
        if known is None or known.digest != digest or known.execution != execution.id:
            ledger.set_ref(name, digest, execution.id)
    if run.plan["serving"]:
        endpoint = want_serving(session, run, rows)
        if endpoint.error:
            ledger.set_run(run.id, RunState.FAILED, token=token, error=endpoint.error)
            return
        if endpoint.state != "ready":
            return
    reach("loop.before_done")
    ledger.set_run(run.id, RunState.DONE, token=token)


def _failure(session: Session, row: StepRow) -> Json:
    if row.execution and (error := session.ledger.get_execution(row.execution).error):
        return {**error, "step": row.name}
    return {**StepError(row.reason, place=row.name).to_json(), "step": row.name}


def input_digests(session: Session, step: Step, rows: Mapping[str, StepRow]) -> dict[str, str]:
    """Input name -> artifact digest, for a step whose earlier steps are done; sources are hashed where they lie."""
    digests = {}
    for name, value in step.inputs.items():
        match value:
            case Source():
                artifact, locations = source_artifact(value)
                if not value.files:
                    raise SourceError(f"input {name!r} names no files", place=step.name)
                session.blobs.put(artifact.manifest_bytes())
                session.ledger.add_artifact(artifact, locations=locations)
                digests[name] = artifact.digest
            case Output(earlier, output):
                execution = session.ledger.get_execution(rows[earlier].execution or "")
                digests[name] = execution.outputs[output]
            case Existing(digest):
                digests[name] = session.ledger.get_artifact(digest).digest
    return digests


def missing_outputs(session: Session, execution: Execution) -> str:
    """The first output of a done execution of which a file is gone, or nothing."""
    for name, digest in execution.outputs.items():
        artifact = session.ledger.get_artifact(digest)
        if not all(session.blobs.has(entry.digest) for entry in artifact.files):
            return name
    return ""


def error_text(execution: Execution) -> str:
    """How an execution ended, in one line."""
    error = execution.error or {}
    text = f"{error['place']}: {error.get('message', '')}" if error.get("place") else error.get("message", "")
    return f"{text} {error.get('cure', '')}".strip() or f"it was {execution.state}"


def _needs(step: Step) -> dict[str, Json]:
    count = step.needs.processes
    return {"cpus": step.needs.cpus * count, "gpus": step.needs.gpus * count}
