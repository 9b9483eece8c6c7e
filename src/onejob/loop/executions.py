"""Tending executions: start them, watch them, keep what they leave; end those that nobody wants."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from onejob.core.artifact import Json
from onejob.core.context import read_lines
from onejob.core.faults import reach
from onejob.core.key import StepKey, explain
from onejob.core.ports import Status
from onejob.core.records import Execution, Run, StepRow
from onejob.core.state import ExecutionState
from onejob.errors import LeaseLostError, OnejobError, RankError, StepError, StepTimeoutError
from onejob.loop.ingest import error_of, ingest, measured
from onejob.loop.keys import key_of
from onejob.loop.session import Session
from onejob.loop.tasks import prepare, task_of
from onejob.runs.spec import RunSpec, secret_values

LIVE = (ExecutionState.CLAIMED, ExecutionState.RUNNING)
STOPPED = 75
"""Exit code of a step that was asked to stop, and has saved its state."""

FOR_GOOD: Mapping[str, tuple[type[StepError], str]] = {
    "timeout": (StepTimeoutError, "Raise its `timeout`, or give it less to do."),
    "memory": (StepError, "Raise `memory` in its `resources`, or give it less to do."),
    "start": (StepError, "`onejob doctor` says what is missing."),
}
"""Cause -> the error that it means, and the cure: trying again would end the same way."""


def tend_execution(session: Session, run: Run, row: StepRow, execution: Execution) -> None:
    """Take the execution's lease if it is free; start it if it isn't yet, see how it stands, end it if it has ended."""
    token = session.hold("execution", execution.id) if session.is_here(execution.host) else None
    if token is None:
        return
    try:
        if execution.handle is None:
            _start(session, run, row, execution, token)
            return
        status = session.executors[execution.executor].poll([execution.handle])[0]
        if status.state in ("exited", "gone"):
            _end(session, run, row, execution, token, status)
    except LeaseLostError:
        session.drop("execution", execution.id)  # another supervisor took it over; it will say how it ended


def _start(session: Session, run: Run, row: StepRow, execution: Execution, token: str) -> None:
    """Submit it; a supervisor that died in here is followed by one that finds the same folder and the same task."""
    ledger = session.ledger
    try:
        work = prepare(session, execution, row.step, run.project)
        secrets = secret_values(RunSpec(**run.spec["run"]), Path(run.project), os.environ)
        task = task_of(execution, row.step, work, env=row.step.env, secrets=secrets)
        reach("loop.before_submit")
        handle = session.executors[execution.executor].submit(task)
        reach("loop.after_submit")
    except OnejobError as error:
        state = ExecutionState.LOST if error.retryable else ExecutionState.FAILED
        ledger.finish_execution(execution.id, token, state, error=error.to_json())
        return
    ledger.start_execution(execution.id, token, handle)


def _end(session: Session, run: Run, row: StepRow, execution: Execution, token: str, status: Status) -> None:
    """Ingest what it left, or say why it left nothing."""
    ledger, work = session.ledger, session.home.work(execution.id)
    for line in read_lines(work / "warnings.jsonl"):
        ledger.add_event(f"execution/{execution.id}", "warning", line)
    if status.state == "exited" and status.code == 0:
        _keep(session, run, row, execution, token, work)
        return
    state, error = verdict(status, error_of(work), place=row.name)
    ledger.finish_execution(execution.id, token, state, measured=measured(work), error=error)


def verdict(
    status: Status, reported: Mapping[str, Json] | None, *, place: str
) -> tuple[ExecutionState, dict[str, Json]]:
    """What a task that didn't end well means: failed for good, or lost and worth another try (pure)."""
    if reported:
        state = ExecutionState.LOST if reported.get("retryable") else ExecutionState.FAILED
        return state, dict(reported)
    if status.state == "exited" and status.code == STOPPED:
        return ExecutionState.LOST, dict(StepError("it was asked to stop, and saved its state", place=place).to_json())
    if known := FOR_GOOD.get(status.cause):
        kind, cure = known
        return ExecutionState.FAILED, dict(kind(status.reason, place=place, cure=cure).to_json())
    reason = status.reason or "its processes are gone without a word"
    error = StepError(reason, place=place) if status.rank is None else RankError(reason, place=place)
    return ExecutionState.LOST, dict(error.to_json())


def _keep(session: Session, run: Run, row: StepRow, execution: Execution, token: str, work: Path) -> None:
    ledger = session.ledger
    if changed := _changed_meanwhile(session, run, row, execution):
        error = StepError(f"while it ran, {changed}; so it isn't known what its result was made by", place=row.name)
        ledger.finish_execution(execution.id, token, ExecutionState.LOST, error=dict(error.to_json()))
        return
    try:
        outputs = ingest(session.blobs, work, row.step.outputs)
    except OnejobError as error:
        ledger.finish_execution(execution.id, token, ExecutionState.FAILED, error=dict(error.to_json()))
        return
    _tell_other_bytes(session, execution, {name: artifact.digest for name, artifact in outputs.items()})
    ledger.finish_execution(execution.id, token, ExecutionState.DONE, outputs=outputs, measured=measured(work))
    reach("loop.after_finish")
    shutil.rmtree(work / "out", ignore_errors=True)
    shutil.rmtree(work / "in", ignore_errors=True)
    shutil.rmtree(session.home.scratch(execution.key), ignore_errors=True)


def _changed_meanwhile(session: Session, run: Run, row: StepRow, execution: Execution) -> str:
    """What of the step's code is no longer what its key says (somebody edited a file while it ran)."""
    now = key_of(row.step, execution.inputs, Path(run.project)).key
    if now.digest == execution.key:
        return ""
    changes = explain(StepKey(session.ledger.get_key(execution.key)), now)
    return "; ".join(change.sentence() for change in changes)


def _tell_other_bytes(session: Session, execution: Execution, outputs: Mapping[str, str]) -> None:
    """The same key with other bytes means that the step isn't deterministic: worth an event, not a failure."""
    earlier = session.ledger.list_executions(states=[ExecutionState.DONE], key=execution.key, limit=1)
    if not earlier:
        return
    other = [name for name, digest in outputs.items() if earlier[0].outputs.get(name) not in (None, digest)]
    if other:
        data = {"outputs": other, "earlier": earlier[0].id}
        session.ledger.add_event(f"execution/{execution.id}", "same key, other bytes", data)


def end_unwanted(session: Session) -> None:
    """End live executions to which no run that still goes on is attached: cancelled, or left by a dead process."""
    ledger = session.ledger
    for execution in ledger.list_executions(states=LIVE):
        if ledger.attached_runs(execution.id) or not session.is_here(execution.host):
            continue
        token = session.hold("execution", execution.id)
        if token is None:
            continue
        if execution.handle is not None:
            executor = session.executors[execution.executor]
            status = executor.poll([execution.handle])[0]
            if status.state in ("starting", "running"):
                executor.cancel(execution.handle)
                continue
        elif not session.executors[execution.executor].revoke(session.home.work(execution.id)):
            continue
        error = dict(StepError("cancelled", place=execution.step).to_json())
        ledger.finish_execution(execution.id, token, ExecutionState.CANCELLED, error=error)
