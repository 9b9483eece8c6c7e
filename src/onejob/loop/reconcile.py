"""One level-triggered pass: look at every run in scope, and do the next thing that its state asks for.

A pass can be repeated, interrupted at any line and run by several processes at once: runs, executions and endpoints are
leased, state changes are guarded by the lease's token, and work happens outside any transaction. What each state asks
for is a table at the end of this page; the functions above it are its rows. docs/design/loop.md tells how it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from pathlib import Path

from onejob.core.artifact import Json
from onejob.core.faults import reach
from onejob.core.key import StepKey, explain
from onejob.core.plan import Output, Step
from onejob.core.records import ClaimRequest, Execution, Run, StepRow
from onejob.core.state import EndpointState, ExecutionState, RunState, StepState
from onejob.errors import (
    CancelledError,
    DamagedError,
    LeaseLostError,
    OnejobError,
    StepError,
    StoreError,
)
from onejob.loop.champion import keeps_champion
from onejob.loop.closing import close
from onejob.loop.endpoints import tend_endpoint, want_serving
from onejob.loop.executions import LIVE, tend_execution, tend_rest
from onejob.loop.keys import key_of
from onejob.loop.results import error_text, input_digests, missing_outputs
from onejob.loop.session import Full, Session
from onejob.loop.traffic import seal_traffic

NEWEST = 20
"""Done runs of a job that are looked at to find a newer one."""

ENDED = frozenset({StepState.DONE, StepState.FAILED, StepState.CANCELLED, StepState.SKIPPED})
OPEN = (RunState.QUEUED, RunState.RUNNING)
TURNS_A_PASS = 4
ASK_AGAIN = 5.0
"""Seconds after which a step that waits for slots asks, even if the same executions seem to hold them."""
TELL_AGAIN = 10.0
"""Seconds between two changes of the reason for which a step waits."""


class Outlook(IntEnum):
    """What a pass expects of the next one: the higher, the sooner it should come."""

    WAITING = 0  # for slots, or for what others do
    WORKING = 1  # tasks of ours are going on
    MOVED = 2  # something has changed: there may be more to do at once


@dataclass
class Held:
    """A run that we hold, with its steps as they stand: nobody else changes them while our token is right."""

    session: Session
    run: Run
    token: str
    rows: dict[str, StepRow]
    live: Mapping[str, Execution]
    """Every live execution, as it was when the pass began."""
    tended: set[str]
    outlook: Outlook = Outlook.WAITING
    errors: dict[str, Json] = field(default_factory=dict)
    """Step -> the error that made it fail in this pass, where no execution tells it."""

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
        told = {"key": key, "execution": execution, "cached": cached, "attempt": attempt, "reason": reason}
        told = {name: value for name, value in told.items() if value is not None}
        self.session.ledger.set_step(self.run.id, row.name, state, token=self.token, **told)  # type: ignore[arg-type]
        self.rows[row.name] = replace(row, state=state, **told)  # type: ignore[arg-type]
        if state != row.state:
            self.expect(Outlook.MOVED)

    def expect(self, outlook: Outlook) -> None:
        self.outlook = max(self.outlook, outlook)


def reconcile(session: Session, scope: Sequence[int] | None = None) -> Outlook:
    """One pass over the runs in scope (None: all, and the endpoints), and over executions that nobody looks after.

    What goes wrong with a run of the scope is raised; where there is none, it is logged, and the others go on.
    """
    with session.renewing():
        ledger = session.ledger
        runs = ledger.list_runs(states=OPEN) if scope is None else [ledger.get_run(run) for run in scope]
        live = {execution.id: execution for execution in ledger.list_executions(states=LIVE)}
        tended: set[str] = set()
        outlooks = [Outlook.WAITING]
        for run in sorted((run for run in runs if run.state in OPEN), key=lambda run: run.id):
            advance = partial(_advance_if_ours, session, run, live, tended, outlooks)
            if scope is None:
                session.troubles.guard(f"run/{run.id}", advance)
            else:
                advance()
        tend_rest(session, live, tended)
        for endpoint in ledger.list_endpoints() if scope is None else ():
            session.troubles.guard(f"endpoint/{endpoint.name}", partial(tend_endpoint, session, endpoint.name))
            session.troubles.guard(f"traffic/{endpoint.name}", partial(seal_traffic, session, endpoint.name))
            session.troubles.guard(f"closing/{endpoint.name}", partial(close, session, endpoint.name))
    return max(outlooks)


def _advance_if_ours(
    session: Session, run: Run, live: Mapping[str, Execution], tended: set[str], outlooks: list[Outlook]
) -> None:
    if not session.is_free(run.lease):
        return
    token = session.hold("run", run.id)
    if token is None:
        return
    try:
        outlooks.append(advance_run(session, run, token, live, tended))
    except LeaseLostError:
        # Cancelled, or another supervisor went on with it: what we did under the old lease is dropped.
        session.drop("run", run.id)


def advance_run(session: Session, run: Run, token: str, live: Mapping[str, Execution], tended: set[str]) -> Outlook:
    """Move every step of a run that can move, then the run itself."""
    if run.state is RunState.QUEUED:
        session.ledger.set_run(run.id, RunState.RUNNING, token=token)
    rows = {row.name: row for row in session.ledger.list_steps(run.id)}
    held = Held(session, run, token, rows, live, tended)
    for name in rows:
        # A step may take several turns in one pass: waiting -> ready -> running, or -> done from the cache.
        for _ in range(TURNS_A_PASS):
            row = held.rows[name]
            if row.state in ENDED:
                break
            _turn(held, row)
            if held.rows[name].state == row.state:
                break
    if all(row.state in ENDED for row in held.rows.values()):
        _end_run(held)
    return held.outlook


def _turn(held: Held, row: StepRow) -> None:
    """Do what the step's state asks for; it fails by what is wrong with it, not by what is wrong with our disk."""
    try:
        TURNS[row.state](held, row)
    except OnejobError as error:
        if isinstance(error, StoreError) and not isinstance(error, DamagedError):
            raise
        held.errors[row.name] = error.to_json()
        held.set(row, StepState.FAILED, reason=str(error))


def _waiting(held: Held, row: StepRow) -> None:
    """Find the step's key, once every input is there."""
    earlier = [held.rows[i.step] for i in row.step.inputs.values() if isinstance(i, Output)]
    if broken := [r for r in earlier if r.state in ENDED and r.state is not StepState.DONE]:
        held.set(row, StepState.SKIPPED, reason=f"{broken[0].name} {broken[0].state}")
        return
    if any(r.state is not StepState.DONE for r in earlier):
        return
    keyed = key_of(row.step, input_digests(held.session, row.step, held.rows), Path(held.run.project))
    ledger = held.session.ledger
    ledger.add_key(keyed.key.digest, keyed.key.components)
    for warning in keyed.warnings:
        ledger.add_event(f"step/{held.run.id}/{row.name}", "warning", {"text": warning})
    forced = row.name in held.run.forced
    reason = "forced" if forced else _why(held, row, keyed.key.digest)
    held.set(row, StepState.READY, key=keyed.key.digest, reason=reason)


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
    if _still_full(held, row):
        return
    answer = ledger.claim(_request(held, row), session.owner, session.ttl)
    if answer.answer == "full":
        _note_full(held, row, answer.reason)
        return
    session.full.pop((held.run.id, row.name), None)
    assert answer.execution is not None
    found = answer.execution
    if answer.answer == "done":
        if lost := missing_outputs(session, found):
            ledger.forget_execution(found.id, f"its output {lost} is gone from the blobs")
            held.expect(Outlook.MOVED)
            return
        cached = found.run != held.run.id
        reason = f"the same key as in run {found.run}" if cached else row.reason
        held.set(row, StepState.DONE, execution=found.id, cached=cached, reason=reason)
        return
    if answer.answer == "won":
        session.keep("execution", found.id, found.lease)
    reach("loop.after_claim")
    held.set(row, StepState.RUNNING, execution=found.id, cached=False)


def _request(held: Held, row: StepRow) -> ClaimRequest:
    session, name = held.session, "local"
    assert row.key is not None
    return ClaimRequest(
        key=row.key,
        step=row.name,
        job=held.run.job,
        run=held.run.id,
        inputs=session.ledger.get_key(row.key)["inputs"],
        needs=_needs(row.step),
        capacity=session.executors[name].capacity(),
        executor=name,
        host=session.owner.host,
        fresh_from=held.run.id if row.name in held.run.forced else None,
    )


def _still_full(held: Held, row: StepRow) -> bool:
    """Whether asking for slots again would be a write in vain: nothing has started or ended since the last time."""
    full = held.session.full.get((held.run.id, row.name))
    if full is None or full.live != frozenset(held.live):
        return False
    return 0 <= held.session.clock() - full.asked < ASK_AGAIN


def _note_full(held: Held, row: StepRow, reason: str) -> None:
    at, now = (held.run.id, row.name), held.session.clock()
    before = held.session.full.get(at)
    told = before.told if before else None
    if told is None or not 0 <= now - told < TELL_AGAIN:
        held.set(row, StepState.READY, reason=reason)
        told = now
    held.session.full[at] = Full(frozenset(held.live), now, told)


def _running(held: Held, row: StepRow) -> None:
    """Tend its execution, if nobody else does, and take over how it ended."""
    assert row.execution is not None
    session = held.session
    held.tended.add(row.execution)
    execution = held.live.get(row.execution) or session.ledger.get_execution(row.execution)
    if execution.state in LIVE:
        changed = tend_execution(session, held.run, row, execution)
        if ("execution", execution.id) in session.held:
            held.expect(Outlook.WORKING)
        if not changed:
            return
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
            held.set(row, StepState.WAITING, reason=f"again, since {error_text(execution)}")


TURNS: Mapping[StepState, Callable[[Held, StepRow], None]] = {
    StepState.WAITING: _waiting,
    StepState.READY: _ready,
    StepState.RUNNING: _running,
}


def _end_run(held: Held) -> None:
    """Every step has ended: failed, or set the refs, serve, and be done."""
    session, run = held.session, held.run
    if failed := [row for row in held.rows.values() if row.state is StepState.FAILED]:
        _finish(held, RunState.FAILED, _failure(held, failed[0]))
        return
    reach("loop.before_refs")
    if newer := _newer_done(held):
        text = f"run {newer} of this job ended first: its results stay the latest, and are what is served"
        session.ledger.add_event(f"run/{run.id}", "warning", {"text": text})
        _finish(held, RunState.DONE)
        return
    _set_refs(held)
    if run.plan["serving"]:
        held.expect(Outlook.WORKING)
        try:
            endpoint = want_serving(session, run, held.rows)
        except DamagedError as error:
            _finish(held, RunState.FAILED, error.to_json())
            return
        if endpoint is None:
            return
        if endpoint.state is not EndpointState.READY:
            stopped = CancelledError("it was stopped while the run waited for it", place=f"endpoint {endpoint.name}")
            _finish(held, RunState.FAILED, endpoint.error or stopped.to_json())
            return
    reach("loop.before_done")
    _finish(held, RunState.DONE)


def _newer_done(held: Held) -> int | None:
    """A later run of this job, by a person as this one, that is done already; results never go back in time."""
    run = held.run
    if run.id in held.session.asked:
        return None
    done = held.session.ledger.list_runs(job=run.job, states=[RunState.DONE], limit=NEWEST)
    later = [other.id for other in done if other.id > run.id and other.cause.get("kind") == run.cause.get("kind")]
    return max(later, default=None)


def _finish(held: Held, state: RunState, error: Json | None = None) -> None:
    held.session.ledger.set_run(held.run.id, state, token=held.token, error=error)
    held.session.drop("run", held.run.id)
    held.session.asked.discard(held.run.id)
    held.expect(Outlook.MOVED)


def _set_refs(held: Held) -> None:
    """Point the plan's refs once: what somebody points elsewhere while the run waits for its endpoint stays."""
    ledger, subject = held.session.ledger, f"run/{held.run.id}"
    if held.run.id in held.session.asked or not held.run.plan["refs"]:
        return
    if any(event.kind == "refs set" and event.subject == subject for event in ledger.events(subject=subject)):
        return
    for name, output in held.run.plan["refs"].items():
        execution = ledger.get_execution(held.rows[output["step"]].execution or "")
        digest = execution.outputs[output["output"]]
        serving = held.run.plan["serving"]
        if serving and name.endswith("@champion") and keeps_champion(held.session, held.run, serving["name"], digest):
            continue
        known = ledger.get_ref(name)
        if known is None or known.digest != digest or known.execution != execution.id:
            ledger.set_ref(name, digest, execution.id)
    ledger.add_event(subject, "refs set", {"refs": sorted(held.run.plan["refs"])})


def _failure(held: Held, row: StepRow) -> Json:
    """The error with which the run failed: that of the step's execution, or of its planning."""
    if row.name in held.errors:
        return {**held.errors[row.name], "step": row.name}
    if row.execution and (error := held.session.ledger.get_execution(row.execution).error):
        return {**error, "step": row.name}
    return {**StepError(row.reason, place=row.name).to_json(), "step": row.name}


def _needs(step: Step) -> dict[str, Json]:
    count = step.needs.processes
    return {"cpus": step.needs.cpus * count, "gpus": step.needs.gpus * count}
