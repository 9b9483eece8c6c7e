"""Tending executions: start them, watch them, keep what they leave; end those that nobody wants.

An execution is tended under its lease, by the supervisor of a run that is attached to it; or, where that one has died,
by whoever comes along: what has ended is kept and its slots are freed, so that no other run waits for the dead.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from onejob.core.artifact import Json
from onejob.core.context import read_lines
from onejob.core.faults import reach
from onejob.core.key import StepKey, explain
from onejob.core.plan import Source, Step
from onejob.core.ports import Status
from onejob.core.records import Execution, Run, StepRow
from onejob.core.state import ExecutionState
from onejob.errors import (
    ConflictError,
    DamagedError,
    LeaseLostError,
    OnejobError,
    RankError,
    StepError,
    StepTimeoutError,
    StoreError,
)
from onejob.loop.ingest import error_of, ingest, measured
from onejob.loop.keys import key_of, source_artifact
from onejob.loop.session import Session
from onejob.loop.tasks import explained, prepare, task_of
from onejob.runs.spec import RunSpec, secret_values

LIVE = (ExecutionState.CLAIMED, ExecutionState.RUNNING)
OVER = ("exited", "gone")
UNSTARTED = "given up before it started"
STOPPED = 75
"""Exit code of a step that was asked to stop, and has saved its state."""

FOR_GOOD: Mapping[str, tuple[type[StepError], str]] = {
    "timeout": (StepTimeoutError, "Raise its `timeout`, or give it less to do."),
    "memory": (StepError, "Raise `memory` in its `resources`, or give it less to do."),
    "start": (StepError, "`onejob doctor` says what is missing."),
}
"""Cause -> the error that it means, and the cure: trying again would end the same way."""


def tend_execution(session: Session, run: Run, row: StepRow, execution: Execution) -> bool:
    """Start the execution if it isn't yet, see how it stands, end it if it has ended; whether it may have changed.

    Nothing is done, or read, where another supervisor holds it.
    """
    if not _ours(session, execution):
        return False
    token = session.hold("execution", execution.id)
    if token is None:
        return True
    try:
        if execution.handle is None:
            _start(session, run, row, execution, token)
            return True
        status = session.executors[execution.executor].poll([execution.handle])[0]
        if status.state not in OVER:
            return False
        _end(session, row, execution, token, status)
    except LeaseLostError:
        pass  # another supervisor took it over, and will say how it ended
    session.drop("execution", execution.id)
    return True


def _ours(session: Session, execution: Execution) -> bool:
    """Whether it may be tended from here: its machine is this one, or its supervisor and its task there are over."""
    if not session.is_free(execution.lease):
        return False
    if session.is_here(execution.host) or execution.handle is None:
        return True
    return session.executors[execution.executor].poll([execution.handle])[0].state in OVER


# ---- start -------------------------------------------------------------------------------------------------------


def _start(session: Session, run: Run, row: StepRow, execution: Execution, token: str) -> None:
    """Submit it; a supervisor that died in here is followed by one that finds the same folder and the same task."""
    if not session.is_here(execution.host):
        _give_up(session, execution, token, ExecutionState.CANCELLED, StepError(UNSTARTED, place=row.name))
        return
    handle = session.executors[execution.executor].adopt(session.home.work(execution.id))
    try:
        if handle is None:
            handle = _submit(session, run, row, execution)
    except ConflictError as error:  # no failed attempt: the step finds its key anew, and is claimed under that
        _give_up(session, execution, token, ExecutionState.CANCELLED, error)
    except OnejobError as error:
        if isinstance(error, StoreError) and not isinstance(error, DamagedError):
            raise  # the disk or the ledger: the step isn't to blame, and goes on when it is mended
        _give_up(session, execution, token, ExecutionState.LOST if error.retryable else ExecutionState.FAILED, error)
    else:
        session.ledger.start_execution(execution.id, token, handle)


def _submit(session: Session, run: Run, row: StepRow, execution: Execution) -> Json:
    """Lay out its folder and start it; ConflictError if its key is no longer right, or it was given up meanwhile."""
    try:
        if changed := _changed(session, row.step, execution, Path(run.project)):
            raise ConflictError(f"before it started, {changed}", place=row.name)
        work = prepare(session, execution, row.step, run.project)
        secrets = secret_values(RunSpec(**run.spec["run"]), Path(run.project), os.environ)
        task = task_of(execution, row.step, work, env=row.step.env, secrets=secrets)
        reach("loop.before_submit")
        handle = session.executors[execution.executor].submit(task)
        reach("loop.after_submit")
    except OSError as error:
        raise explained(error, session.home.work(execution.id)) from error
    return handle


def _give_up(session: Session, execution: Execution, token: str, state: ExecutionState, error: OnejobError) -> None:
    """End an execution that never started; if it has, all the same, note its handle: the next pass goes on with it."""
    executor, work = session.executors[execution.executor], session.home.work(execution.id)
    if executor.revoke(work):
        session.ledger.finish_execution(execution.id, token, state, error=dict(error.to_json()))
        session.drop("execution", execution.id)
        return
    handle = executor.adopt(work)
    assert handle is not None, "a folder that can't be revoked holds a task"
    session.ledger.start_execution(execution.id, token, handle)


def _changed(session: Session, step: Step, execution: Execution, project: Path) -> str:
    """What is no longer what the execution's key says: somebody edited the code, or a source."""
    for name, value in step.inputs.items():
        if isinstance(value, Source) and source_artifact(value)[0].digest != execution.inputs.get(name):
            return f"source {name} changed"
    try:
        now = key_of(step, execution.inputs, project).key
    except OnejobError as error:
        return f"its code became unreadable ({error})"
    if now.digest == execution.key:
        return ""
    changes = explain(StepKey(session.ledger.get_key(execution.key)), now)
    return "; ".join(change.sentence() for change in changes)


# ---- end ---------------------------------------------------------------------------------------------------------


def _end(session: Session, row: StepRow, execution: Execution, token: str, status: Status) -> None:
    """Ingest what it left, or say why it left nothing."""
    work = session.home.work(execution.id)
    if status.state == "exited" and status.code == 0:
        _keep(session, row, execution, token, work)
        return
    _tell_warnings(session, execution, work)
    state, error = verdict(status, error_of(work), place=row.name)
    session.ledger.finish_execution(execution.id, token, state, measured=measured(work), error=error)


def verdict(
    status: Status, reported: Mapping[str, Json] | None, *, place: str
) -> tuple[ExecutionState, dict[str, Json]]:
    """What a task that didn't end well means: failed for good, lost and worth another try, or stopped (pure).

    Being asked to stop is no failed attempt, whatever it said at its end: a run that still wants it starts again.
    """
    if status.state == "exited" and status.cause == "stopped":
        return ExecutionState.CANCELLED, dict(StepError("it was asked to stop", place=place).to_json())
    if status.cause in ("timeout", "memory") or not reported:
        return _silent(status, place)
    state = ExecutionState.LOST if reported.get("retryable") else ExecutionState.FAILED
    return state, dict(reported)


def _silent(status: Status, place: str) -> tuple[ExecutionState, dict[str, Json]]:
    """The verdict on a task that didn't say itself what was wrong."""
    if known := FOR_GOOD.get(status.cause):
        kind, cure = known
        return ExecutionState.FAILED, dict(kind(status.reason, place=place, cure=cure).to_json())
    if status.state == "exited" and status.code == STOPPED:
        return ExecutionState.LOST, dict(StepError("it stopped by itself, and saved its state", place=place).to_json())
    reason = status.reason or "its processes are gone without a word"
    error = StepError(reason, place=place) if status.rank is None else RankError(reason, place=place)
    return ExecutionState.LOST, dict(error.to_json())


def _keep(session: Session, row: StepRow, execution: Execution, token: str, work: Path) -> None:
    """Make what it left count. A full disk is no fault of the step: its folder stays, and is ingested later."""
    ledger = session.ledger
    if changed := _changed_meanwhile(session, row, execution, work):
        error = StepError(f"while it ran, {changed}; so it isn't known what its result was made by", place=row.name)
        ledger.finish_execution(execution.id, token, ExecutionState.LOST, error=dict(error.to_json()))
        return
    try:
        outputs = ingest(session.blobs, work, row.step.outputs)
    except StepError as error:
        ledger.finish_execution(execution.id, token, ExecutionState.FAILED, error=dict(error.to_json()))
        return
    _tell_warnings(session, execution, work)
    _tell_other_bytes(session, execution, {name: artifact.digest for name, artifact in outputs.items()})
    # What it could have resumed from goes while its key is still ours: later it may be the next execution's.
    if not ledger.renew("execution", execution.id, token, session.ttl):
        raise LeaseLostError("another supervisor went on with it", place=f"execution {execution.id}")
    shutil.rmtree(session.home.scratch(execution.key), ignore_errors=True)
    ledger.finish_execution(execution.id, token, ExecutionState.DONE, outputs=outputs, measured=measured(work))
    reach("loop.after_finish")
    shutil.rmtree(work / "out", ignore_errors=True)
    shutil.rmtree(work / "in", ignore_errors=True)


def _changed_meanwhile(session: Session, row: StepRow, execution: Execution, work: Path) -> str:
    """What of the step's code was edited while it ran, in the project that it ran in (which may be another run's)."""
    try:
        project = json.loads((work / "task.json").read_bytes())["project"]
        now = key_of(row.step, execution.inputs, Path(project)).key
    except (OSError, ValueError):
        return "its task.json went away"
    except OnejobError as error:
        return f"its code became unreadable ({error})"
    if now.digest == execution.key:
        return ""
    changes = explain(StepKey(session.ledger.get_key(execution.key)), now)
    return "; ".join(change.sentence() for change in changes)


def _tell_warnings(session: Session, execution: Execution, work: Path) -> None:
    for line in read_lines(work / "warnings.jsonl"):
        session.ledger.add_event(f"execution/{execution.id}", "warning", line)


def _tell_other_bytes(session: Session, execution: Execution, outputs: Mapping[str, str]) -> None:
    """The same key with other bytes means that the step isn't deterministic: worth an event, not a failure."""
    earlier = session.ledger.list_executions(states=[ExecutionState.DONE], key=execution.key, limit=1)
    if not earlier:
        return
    other = [name for name, digest in outputs.items() if earlier[0].outputs.get(name) not in (None, digest)]
    if other:
        data = {"outputs": other, "earlier": earlier[0].id}
        session.ledger.add_event(f"execution/{execution.id}", "same key, other bytes", data)


# ---- the rest ----------------------------------------------------------------------------------------------------


def tend_rest(session: Session, live: Mapping[str, Execution], tended: set[str]) -> None:
    """Executions that no supervisor looks after: cancelled ones, and those that a dead one has left.

    `live` is what the ledger said at the beginning of the pass; `tended` are those that this pass has seen to.
    """
    for execution in live.values():
        if execution.id not in tended and _ours(session, execution):
            session.troubles.guard(f"execution/{execution.id}", partial(_tend_left, session, execution))


def _tend_left(session: Session, execution: Execution) -> None:
    executor = session.executors[execution.executor]
    wanted_by = session.ledger.attached_runs(execution.id)
    if wanted_by and execution.handle is not None and executor.poll([execution.handle])[0].state not in OVER:
        return  # it goes on by itself, and whoever continues its run takes it over
    token = session.hold("execution", execution.id)
    if token is None:
        return
    try:
        now = session.ledger.get_execution(execution.id)  # as it is under our lease
        if now.handle is None:
            _give_up(session, now, token, ExecutionState.CANCELLED, StepError(UNSTARTED, place=now.step))
        elif wanted_by:
            run, status = wanted_by[0], executor.poll([now.handle])[0]
            rows = [row for row in session.ledger.list_steps(run) if row.execution == now.id]
            if rows and status.state in OVER:
                _end(session, rows[0], now, token, status)
        else:
            _end_unwanted(session, now, token)
    except LeaseLostError:
        session.drop("execution", execution.id)


def _end_unwanted(session: Session, execution: Execution, token: str) -> None:
    """Ask it to stop; once it has, it is cancelled."""
    executor = session.executors[execution.executor]
    assert execution.handle is not None
    if executor.poll([execution.handle])[0].state not in OVER:
        executor.cancel(execution.handle)
        return
    error = dict(StepError("cancelled", place=execution.step).to_json())
    session.ledger.finish_execution(execution.id, token, ExecutionState.CANCELLED, error=error)
    session.drop("execution", execution.id)
