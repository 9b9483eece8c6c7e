"""Commands that look: ps, show, trace. Nothing changes."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from pathlib import Path

from onejob.core.artifact import Json, short
from onejob.core.records import Endpoint, Execution, Run
from onejob.core.state import EndpointState, RunState
from onejob.errors import NotFoundError, UsageError
from onejob.loop.commands.run import load_job
from onejob.loop.lineage import lineage, producer
from onejob.loop.reconcile import OPEN
from onejob.loop.resolve import Target, resolve
from onejob.loop.session import Session
from onejob.loop.snapshots import (
    artifact_view,
    endpoint_view,
    execution_view,
    metrics_of,
    run_view,
)
from onejob.loop.story import outlook, story
from onejob.loop.traffic import labels_of, told_of
from onejob.loop.views import ListView, Node, ShowView, TraceView
from onejob.monitor.collect import series_of, summary_of

NEWEST = 10


def ps(session: Session, all: bool = False) -> ListView:
    """What goes on: open runs and endpoints that are up; with `all`, everything that was, and runs that monitor too."""
    ledger = session.ledger
    runs = ledger.list_runs() if all else [*filter(_shown, ledger.list_runs(states=OPEN)), *_recent(session)]
    endpoints = [e for e in ledger.list_endpoints() if all or e.state != EndpointState.STOPPED]
    return ListView(tuple(run_view(session, run) for run in runs), tuple(endpoint_view(session, e) for e in endpoints))


def _recent(session: Session) -> list[Json]:
    ended = [state for state in RunState if state not in OPEN]
    return [run for run in session.ledger.list_runs(states=ended, limit=NEWEST) if _shown(run)][:3]


def _shown(run: Run) -> bool:
    """A run that monitors comes every day, and its findings are shown with the endpoint."""
    return run.cause.get("kind") != "monitor"


def show(session: Session, ref: str) -> ShowView:
    """All that is known of a run, step, artifact, endpoint, request, or of a job's newest run."""
    target = resolve(session, ref)
    match target.kind:
        case "run" | "job":
            return _show_run(session, ref, target)
        case "step" | "execution":
            return _show_step(session, ref, target)
        case "endpoint":
            return _show_endpoint(session, ref, target)
        case "request":
            return _show_request(session, ref, target)
    assert target.digest
    made = session.ledger.producers(target.digest)
    return ShowView(
        ref,
        "artifact",
        artifacts=(artifact_view(session, target.digest),),
        executions=tuple(execution_view(session, e) for e in made),
        lineage=tuple(lineage(session, target.digest, target.ref.execution if target.ref else None)),
        metrics={e.step: m for e in made[:1] if (m := metrics_of(session, e.id))},
    )


def _show_run(session: Session, ref: str, target: Target) -> ShowView:
    run = target.run or newest_run(session, target.path)
    rows = session.ledger.list_steps(run.id)
    made = [session.ledger.get_execution(row.execution) for row in rows if row.execution]
    digests = dict.fromkeys(digest for e in made for digest in e.outputs.values())
    return ShowView(
        ref,
        "run",
        run=run_view(session, run),
        artifacts=tuple(artifact_view(session, digest) for digest in digests),
        executions=tuple(execution_view(session, e) for e in made),
        metrics={e.step: m for e in made if (m := metrics_of(session, e.id))},
    )


def newest_run(session: Session, path: Path | None) -> Json:
    """The newest run of the job that a file describes."""
    assert path is not None
    job = load_job(path)
    runs = [run for run in session.ledger.list_runs(job=job.name) if _shown(run)]
    if not runs:
        raise NotFoundError(f"job {job.name!r} has not run yet", place=str(path), cure=f"`onejob run {path}` runs it.")
    return runs[0]


def _show_step(session: Session, ref: str, target: Target) -> ShowView:
    if target.execution is None and (target.step is None or target.step.execution is None):
        assert target.step is not None
        return ShowView(ref, "step", details={"state": target.step.state, "reason": target.step.reason})
    made = target.execution or session.ledger.get_execution(target.step.execution)  # type: ignore[union-attr, arg-type]
    return ShowView(
        ref,
        "step",
        artifacts=tuple(artifact_view(session, digest) for digest in made.outputs.values()),
        executions=(execution_view(session, made),),
        metrics={made.step: m} if (m := metrics_of(session, made.id)) else {},
        details={"state": target.step.state, "reason": target.step.reason} if target.step else {},
    )


def _show_endpoint(session: Session, ref: str, target: Target) -> ShowView:
    assert target.endpoint is not None
    endpoint = target.endpoint
    folder = session.home.endpoint(endpoint.name)
    return ShowView(
        ref,
        "endpoint",
        endpoint=endpoint_view(session, endpoint),
        artifacts=(artifact_view(session, endpoint.artifact),),
        executions=tuple(execution_view(session, e) for e in _makers(session, endpoint.artifact, endpoint.execution)),
        lineage=tuple(lineage(session, endpoint.artifact, endpoint.execution)),
        metrics={"requests": tuple(series_of(folder))},
        details={**summary_of(folder), **told_of(session, endpoint)},
        story=tuple(story(session, endpoint.name)),
        outlook=outlook(session, endpoint.name),
    )


def _makers(session: Session, digest: str, execution: str | None) -> Iterator[Execution]:
    """What tells of a served model in figures: the step that trained it, and the step that chose it."""
    made = producer(session, digest, execution)
    if made is None:
        return
    checkpoint = made.inputs.get("checkpoint")
    trained = producer(session, checkpoint) if checkpoint else None
    if trained:
        yield trained
    yield made


def _show_request(session: Session, ref: str, target: Target) -> ShowView:
    record: Mapping[str, Json] = target.request
    return ShowView(ref, "request", lineage=tuple(_request_chain(session, target)), details=record)


def trace(session: Session, ref: str) -> TraceView:
    """The chain from an answer, endpoint, artifact or run back to the files that its training data came from."""
    target = resolve(session, ref)
    match target.kind:
        case "request":
            return TraceView(ref, tuple(_request_chain(session, target)))
        case "endpoint":
            assert target.endpoint is not None
            name, digest = target.endpoint.name, target.endpoint.artifact
            head = Node(0, "endpoint", name, digest, f"generation {target.endpoint.generation}")
            return TraceView(ref, (head, *lineage(session, digest, target.endpoint.execution, 1)))
        case "artifact":
            return TraceView(ref, tuple(lineage(session, target.digest, target.ref.execution if target.ref else None)))
    shown = show(session, ref)
    if not shown.artifacts:
        raise UsageError("it has left no artifact yet", place=ref)
    return TraceView(ref, tuple(lineage(session, shown.artifacts[-1].digest)))


def _request_chain(session: Session, target: Target) -> list[Node]:
    assert target.endpoint is not None
    record = target.request
    rows = f"{record.get('rows', 1)} row{'s' if record.get('rows', 1) != 1 else ''}, status {record.get('status')}"
    head = Node(0, "request", str(record["id"]), record["digest"], f"{rows}, {record.get('ms')} ms")
    endpoint = Node(1, "endpoint", target.endpoint.name, record["digest"], f"answered by {short(record['digest'])}")
    made = target.endpoint.execution if record["digest"] == target.endpoint.artifact else None
    chain = lineage(session, record["digest"], record.get("execution") or made, 2)
    return [head, *_labels(session, target.endpoint, str(record["id"])), endpoint, *chain]


def _labels(session: Session, endpoint: Endpoint, request: str) -> list[Node]:
    """What turned out to be true about a request; nothing if its rows weren't captured."""
    found = labels_of(session, endpoint, request)
    nodes = []
    for row, label, when in found[:NEWEST]:
        known = f"known since {datetime.datetime.fromtimestamp(when).isoformat(' ', 'seconds')}" if when else "none yet"
        nodes.append(Node(1, "label", f"row {row}" if label is None else f"row {row}: {label}", "", known))
    if len(found) > NEWEST:
        nodes.append(Node(1, "label", f"and {len(found) - NEWEST} more rows"))
    return nodes
