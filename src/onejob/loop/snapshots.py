"""Snapshots for people: runs, endpoints, artifacts and executions of the ledger, as the frozen views of views.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from onejob.core.address import socket_path, url_of
from onejob.core.artifact import Json
from onejob.core.context import read_lines
from onejob.core.records import Endpoint, Execution, Run, StepRow
from onejob.core.state import RunState, StepState
from onejob.loop.endpoints import read_state
from onejob.loop.session import Session
from onejob.loop.views import ArtifactView, EndpointView, ExecutionView, RunView, StepView
from onejob.monitor.collect import summary_of

TAIL = 1 << 16


def run_view(session: Session, run: Run) -> RunView:
    """A run with its steps, as it stands now."""
    ledger, now = session.ledger, session.clock()
    serving = run.plan.get("serving")
    endpoint = ledger.get_endpoint(serving["name"]) if serving else None
    warnings = [e.data["text"] for e in ledger.events(subject=f"run/{run.id}") if e.kind == "warning"]
    return RunView(
        job=run.job,
        run=run.id,
        state=run.state,
        steps=tuple(step_view(session, run, row) for row in ledger.list_steps(run.id)),
        endpoint=endpoint_view(session, endpoint) if endpoint else None,
        created=run.created,
        seconds=(run.finished or now) - run.created,
        cause=run.cause,
        error=run.error,
        warnings=tuple(dict.fromkeys(warnings)),
    )


def step_view(session: Session, run: Run, row: StepRow) -> StepView:
    """A step, with its progress and newest metrics read from its work folder."""
    seconds, progress, metric = None, {}, {}
    if row.execution and not row.cached:
        execution = session.ledger.get_execution(row.execution)
        seconds = (execution.finished or session.clock()) - execution.created
        if row.state is StepState.RUNNING:
            work = session.home.work(execution.id)
            progress, metric = _last(work / "progress.jsonl"), _last(work / "metrics.jsonl")
    done, total = progress.get("done", 0), progress.get("total", 0)
    eta = seconds * (total - done) / done if seconds and done and total else None
    return StepView(
        name=row.name,
        state=row.state,
        cached=row.cached,
        reason=row.reason,
        done=done,
        total=total,
        unit=progress.get("unit", ""),
        seconds=seconds,
        eta=eta,
        metric=metric,
        execution=row.execution,
    )


def endpoint_view(session: Session, endpoint: Endpoint) -> EndpointView:
    """An endpoint, with what its host says of its replicas and what was counted."""
    folder = session.home.endpoint(endpoint.name)
    state = read_state(folder)
    replicas = state.get("replicas", [])
    host = endpoint.options.get("host", "127.0.0.1")
    up = endpoint.state in ("ready", "starting") and (endpoint.port or socket_path(host))
    return EndpointView(
        name=endpoint.name,
        state=endpoint.state,
        url=url_of(host, endpoint.port) if up else "",
        digest=endpoint.artifact,
        generation=endpoint.generation,
        ready=sum(1 for replica in replicas if replica.get("ready")),
        replicas=int(endpoint.options.get("replicas", 1)),
        requests=int(summary_of(folder).get("requests", 0)),
        error=endpoint.error or None,
        repository=endpoint.options.get("repository"),
    )


def execution_view(session: Session, execution: Execution) -> ExecutionView:
    """An execution, with where its log lies."""
    return ExecutionView(
        id=execution.id,
        step=execution.step,
        job=execution.job,
        run=execution.run,
        state=execution.state,
        executor=execution.executor,
        host=execution.host,
        created=execution.created,
        seconds=(execution.finished or session.clock()) - execution.created,
        key=execution.key,
        inputs=execution.inputs,
        outputs=execution.outputs,
        measured=execution.measured,
        error=execution.error,
        log=str(session.home.work(execution.id) / "log"),
    )


def artifact_view(session: Session, digest: str) -> ArtifactView:
    """An artifact: its files, metadata and the refs that name it."""
    ledger = session.ledger
    artifact = ledger.get_artifact(digest)
    made = ledger.producers(artifact.digest)
    return ArtifactView(
        digest=artifact.digest,
        kind=artifact.kind,
        size=artifact.size,
        files=tuple({"path": e.path, "digest": e.digest, "size": e.size} for e in artifact.files),
        meta=artifact.meta,
        refs=tuple(ref.name for ref in ledger.list_refs() if ref.digest == artifact.digest),
        created=made[-1].finished if made else None,
    )


def metrics_of(session: Session, execution: str) -> tuple[Mapping[str, Json], ...]:
    """The lines of metrics of an execution; of a step done twice (after a resume) the last line counts."""
    lines = read_lines(session.home.work(execution) / "metrics.jsonl")
    kept = {(line.get("split"), line.get("epoch"), line.get("step")): line for line in lines}
    return tuple(kept.values())


def ended(run: Run) -> bool:
    """Whether nothing more will happen to a run."""
    return run.state in (RunState.DONE, RunState.FAILED, RunState.CANCELLED)


def _last(path: Path) -> dict[str, Json]:
    """The newest whole line of an append-only file, from its last 64 KiB."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            found: dict[str, Json] = json.loads(line)
        except ValueError:
            continue
        return found
    return {}
