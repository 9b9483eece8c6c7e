"""Commands that make things happen: check, run, up."""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

from onejob import plugins
from onejob.core.job import Job, parse_job
from onejob.core.key import StepKey, explain
from onejob.core.plan import Existing, Output, Plan, Source, Step
from onejob.core.ports import Support
from onejob.core.records import Execution, NewRun, Run
from onejob.core.state import ExecutionState, RunState
from onejob.errors import (
    CancelledError,
    ConflictError,
    JobFileError,
    OnejobError,
    UnavailableError,
    UsageError,
    from_json,
)
from onejob.loop.keys import Keyed, code_of, key_of, source_artifact
from onejob.loop.planning import RUN, STAGES, plan_job
from onejob.loop.reconcile import OPEN, Outlook, reconcile
from onejob.loop.results import missing_outputs
from onejob.loop.service import Service
from onejob.loop.session import Session
from onejob.loop.snapshots import ended, run_view
from onejob.loop.views import CheckView, PlannedStep, RunView
from onejob.runs.spec import secret_values

QUICK, SLOW, IDLE = 0.03, 0.25, 1.0
"""Seconds between passes: quick while something has just changed, slow after that, idle where only others can change
anything (fifty runs may be waiting for the same two slots)."""
LONGEST = {Outlook.MOVED: QUICK, Outlook.WORKING: SLOW, Outlook.WAITING: IDLE}


def load_job(path: str | Path, sets: Sequence[str] = ()) -> Job:
    """Read a job file, or the job.toml of a folder; JobFileError with all mistakes."""
    found = Path(path)
    if found.is_dir():
        found = found / "job.toml"
    return parse_job(found, STAGES, RUN, sets)


# ---- check -------------------------------------------------------------------------------------------------------


def check(session: Session, path: str | Path, sets: Sequence[str] = ()) -> CheckView:
    """Read and plan a job, and say for each step: cached or to run, and why; and what this machine lacks."""
    job = load_job(path, sets)
    plan = plan_job(job)
    done: dict[str, Execution] = {}
    steps: list[PlannedStep] = []
    missing: dict[str, Support] = {}
    warnings: list[str] = []
    for step in plan.steps:
        planned, keyed, execution = _look_ahead(session, job, step, done)
        steps.append(planned)
        if execution:
            done[step.name] = execution
        if keyed:
            warnings += [f"{step.name}: {text}" for text in keyed.warnings]
            missing |= {m: _lacking(m) for m in keyed.modules if _needed(m)}
    try:
        secret_values(job.run, job.project, os.environ)
    except OnejobError as error:
        missing["secrets"] = Support("secrets", "engine", False, error.message, error.cure)
    return CheckView(
        job=job.name,
        path=str(job.path),
        steps=tuple(steps),
        endpoint=plan.serving.name if plan.serving else "",
        missing=tuple(missing.values()),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _look_ahead(
    session: Session, job: Job, step: Step, done: dict[str, Execution]
) -> tuple[PlannedStep, Keyed | None, Execution | None]:
    """What would become of a step now; its key is known only if every earlier step is cached."""
    waits = [i.step for i in step.inputs.values() if isinstance(i, Output) and i.step not in done]
    if waits:
        code = code_of(step, job.project)
        keyed = Keyed(StepKey({}), code.warnings, code.modules)
        return PlannedStep(step.name, "unknown", f"{waits[0]} runs first"), keyed, None
    inputs = {}
    for name, value in step.inputs.items():
        match value:
            case Output(earlier, output):
                inputs[name] = done[earlier].outputs[output]
            case Source():
                inputs[name] = source_artifact(value)[0].digest
            case Existing(digest):
                inputs[name] = digest
    keyed = key_of(step, inputs, job.project)
    found = session.ledger.list_executions(states=[ExecutionState.DONE], key=keyed.key.digest, limit=1)
    if found and not missing_outputs(session, found[0]):
        text = f"the same key as in run {found[0].run}"
        return PlannedStep(step.name, "cached", text, keyed.key.digest), keyed, found[0]
    return (
        PlannedStep(step.name, "run", why_run(session, job.name, step.name, keyed.key), keyed.key.digest),
        keyed,
        None,
    )


def why_run(session: Session, job: str, step: str, key: StepKey) -> str:
    """Which component of its key makes a step run, against the newest run of it with another key."""
    other = session.ledger.last_step_with_other_key(job, step, key.digest, sys.maxsize >> 32)
    if other is None or other.key is None:
        return "first time"
    changes = explain(StepKey(session.ledger.get_key(other.key)), key)
    return "; ".join(change.sentence() for change in changes) or "its result is gone"


def _needed(module: str) -> bool:
    """Whether a missing module stops a step: one that an extra of onejob brings, not an optional one of a package."""
    return module in plugins.EXTRAS and plugins.is_missing(module)


def _lacking(module: str) -> Support:
    return Support(module, "engine", False, "is not installed", plugins.cure(module))


# ---- run ---------------------------------------------------------------------------------------------------------


def run(
    session: Session,
    path: str | Path,
    sets: Sequence[str] = (),
    force: bool = False,
    start_from: str | None = None,
    on_view: Callable[[RunView], None] | None = None,
    *,
    detach: bool = False,
) -> RunView:
    """Run a job to its end (or, detached, leave it to `onejob up`); raises the error with which a run failed.

    An interrupted run of the same job is gone on with; one of another version of the job is ended first.
    """
    return run_job(session, load_job(path, sets), force, start_from, on_view, detach=detach)


def run_job(
    session: Session,
    job: Job,
    force: bool = False,
    start_from: str | None = None,
    on_view: Callable[[RunView], None] | None = None,
    *,
    detach: bool = False,
) -> RunView:
    """The same with a job that was read already."""
    plan = plan_job(job)
    forced = forced_steps(plan, force, start_from)
    warnings = preflight(job, plan)
    made = (None if detach else _continue(session, job, plan, forced)) or _add(session, job, plan, forced, detach)
    for text in warnings:
        session.ledger.add_event(f"run/{made.id}", "warning", {"text": text})
    if detach:
        return run_view(session, made)
    drive(session, made.id, on_view)
    view = run_view(session, session.ledger.get_run(made.id))
    if view.state == RunState.CANCELLED:
        raise CancelledError(f"run {made.id} was stopped", cure="`onejob run` goes on where it was.")
    if view.error:
        raise from_json({k: str(v) for k, v in view.error.items()})
    return view


def forced_steps(plan: Plan, force: bool, start_from: str | None) -> tuple[str, ...]:
    """Names of the steps that must run even if their key is known: all, or a stage and those after it."""
    if not start_from:
        return tuple(step.name for step in plan.steps) if force else ()
    names = [step.name for step in plan.steps]
    places = [i for i, step in enumerate(plan.steps) if start_from in (step.stage, step.name)]
    if not places:
        stages = list(dict.fromkeys(step.stage for step in plan.steps))
        raise UsageError(f"no stage is called {start_from!r}", place="--from", cure=f"Stages: {', '.join(stages)}.")
    return tuple(names[places[0] :])


def preflight(job: Job, plan: Plan) -> list[str]:
    """What can be known before anything runs: missing packages and secrets (raised, all at once), warnings (given)."""
    missing: dict[str, str] = {}
    warnings: list[str] = []
    for step in plan.steps:
        code = code_of(step, job.project)
        missing |= {name: step.name for name in code.modules if _needed(name)}
        warnings += code.warnings
    if missing:
        text = ", ".join(f"{step} needs {name}" for name, step in missing.items())
        raise UnavailableError(text, place=str(job.path), cure=" && ".join(dict.fromkeys(map(plugins.cure, missing))))
    secret_values(job.run, job.project, os.environ)
    warnings = list(dict.fromkeys(warnings))
    if warnings and job.run.warnings == "error":
        raise JobFileError([f"{job.path} [run] warnings = 'error': {text}" for text in warnings])
    return warnings


def _continue(session: Session, job: Job, plan: Plan, forced: tuple[str, ...]) -> Run | None:
    """An interrupted run of this very job, if there is one; interrupted runs of other versions of it are ended.

    Runs that wait for `onejob up` are not interrupted: nobody has begun them, and each was asked for.
    """
    wanted, found = _fingerprint(job, plan), None
    for old in session.ledger.list_runs(job=job.name, states=OPEN):
        if old.project != str(job.project) or old.cause.get("detached") or not session.is_free(old.lease):
            continue
        if old.cause.get("kind", "person") != "person":
            continue  # a run of the endpoint's own loop: `onejob up` goes on with it
        if session.hold("run", old.id) is None:
            continue
        if found is None and old.cause.get("fingerprint") == wanted and old.forced == forced:
            found = old
        else:
            cancel(session, old.id)
    return found


def cancel(session: Session, run: int) -> None:
    """Ask for a run to be cancelled, unless it has just ended."""
    with contextlib.suppress(ConflictError):
        session.ledger.cancel_run(run)
    session.drop("run", run)


def _add(session: Session, job: Job, plan: Plan, forced: tuple[str, ...], detached: bool) -> Run:
    cause = {
        "kind": "person",
        "user": user(),
        "command": " ".join(sys.argv),
        "fingerprint": _fingerprint(job, plan),
        **({"detached": True} if detached else {}),
    }
    new = NewRun(job.name, str(job.project), job.to_json(), plan, cause, forced)
    return session.ledger.add_run(new)


def _fingerprint(job: Job, plan: Plan) -> str:
    return StepKey({"job": job.to_json(), "steps": [step.to_json() for step in plan.steps]}).digest


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def drive(session: Session, run: int, on_view: Callable[[RunView], None] | None) -> None:
    """Pass after pass until the run has ended; a signal cancels it, and its steps save what they have."""
    wait = QUICK
    with collected_signals() as asked:
        while True:
            if asked and not ended(session.ledger.get_run(run)):
                cancel(session, run)
            outlook = reconcile(session, [run])
            now = session.ledger.get_run(run)
            if on_view:
                on_view(run_view(session, now))
            if ended(now) and not leftovers(session, run):
                return
            wait = pause(outlook, wait, random.random())
            time.sleep(wait)


def pause(outlook: Outlook, before: float, chance: float) -> float:
    """Seconds to the next pass: ever longer while nothing changes; a little off the beat where many may wait (pure)."""
    longest = LONGEST[outlook]
    wait = min(longest, before * 1.3)
    return wait * (0.75 + chance / 2) if outlook is Outlook.WAITING else wait


def leftovers(session: Session, run: int) -> bool:
    """Whether executions are still ending that this run started, or that we were about to end (of a run before it)."""
    live = session.ledger.list_executions(states=[ExecutionState.CLAIMED, ExecutionState.RUNNING])
    ours = [e for e in live if session.is_here(e.host) and (e.run == run or ("execution", e.id) in session.held)]
    return any(not session.ledger.attached_runs(e.id) for e in ours)


@contextmanager
def collected_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying of them; a second SIGINT raises KeyboardInterrupt."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)

    old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


# ---- up ----------------------------------------------------------------------------------------------------------


def up(session: Session, on_view: Callable[[RunView], None] | None = None, *, passes: int | None = None) -> None:
    """The same loop for ever: every run, every endpoint; SIGTERM or Ctrl-C ends the loop, not what it looks after.

    Nothing that goes wrong ends it either: it is logged, and tried again ever more seldom.
    """
    service = Service(session)
    watched: set[int] = set()
    with collected_signals() as asked:
        while not asked and (passes is None or passes > 0):
            passes = passes - 1 if passes is not None else None
            session.troubles.guard("the loop", partial(reconcile, session))
            session.troubles.guard("the service", service.tend)
            if on_view:
                session.troubles.guard("showing", partial(_show_runs, session, watched, on_view))
            time.sleep(SLOW)
    session.troubles.guard("releasing", session.release)


def _show_runs(session: Session, watched: set[int], on_view: Callable[[RunView], None]) -> None:
    watched |= {run.id for run in session.ledger.list_runs(states=OPEN)}
    for run in sorted(watched):
        now = session.ledger.get_run(run)
        on_view(run_view(session, now))
        if ended(now):
            watched.discard(run)
