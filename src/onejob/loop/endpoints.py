"""Endpoints: keep the host of each served name alive, and tell it what to serve.

The loop writes `desired.json` and watches `state.json`; the host (serve/host.py) owns the socket and the replicas, and
changes versions by itself. A host runs as a task under a shim, in a folder `host-<n>` of the endpoint's folder; the
newest of these is the one that counts, so a supervisor that died while starting it is followed by one that adopts it.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from onejob.core.artifact import Json
from onejob.core.context import write_json
from onejob.core.faults import reach
from onejob.core.ports import Task
from onejob.core.records import Endpoint, Run, StepRow
from onejob.core.state import EndpointState
from onejob.errors import StepError, from_json
from onejob.loop.session import Session
from onejob.loop.tasks import lay_out

TRIES = 3
MINUTE = 60.0
"""Hosts that fail this often in a row within a minute are not started again by themselves."""


def want_serving(session: Session, run: Run, rows: Mapping[str, StepRow]) -> Endpoint:
    """Say what a finished run's endpoint should serve, and tend it."""
    wish = run.plan["serving"]
    if "step" in wish["artifact"]:
        execution = session.ledger.get_execution(rows[wish["artifact"]["step"]].execution or "")
        digest, made_by = execution.outputs[wish["artifact"]["output"]], execution.id
    else:
        digest, made_by = wish["artifact"]["digest"], ""
    wanted = session.ledger.want_endpoint(
        wish["name"],
        artifact=digest,
        execution=made_by or None,
        options={**wish["options"], "project": run.project, "monitor": run.spec.get("monitor") or {}},
    )
    if wanted.state in (EndpointState.STOPPED, EndpointState.FAILED):
        forget_hosts(session, wish["name"])
        session.ledger.set_endpoint(wish["name"], EndpointState.STARTING)
    return tend_endpoint(session, wish["name"])


def tend_endpoint(session: Session, name: str) -> Endpoint:
    """Bring one endpoint a step closer to what it should be; gives how it stands."""
    ledger = session.ledger
    endpoint = _known(session, name)
    if session.is_here((endpoint.handle or {}).get("host", "")) and session.hold("endpoint", name) is not None:
        endpoint = _known(session, name)
        match endpoint.state:
            case EndpointState.STARTING | EndpointState.READY:
                _keep_up(session, endpoint)
            case EndpointState.STOPPING:
                _stop(session, endpoint)
    found = ledger.get_endpoint(name)
    assert found is not None
    return found


def _keep_up(session: Session, endpoint: Endpoint) -> None:
    folder = session.home.endpoint(endpoint.name)
    _write_desired(session, endpoint, folder)
    host, number = newest_host(folder)
    executor = session.executors["local"]
    if host is not None:
        status = executor.poll([host])[0]
        if status.state in ("starting", "running"):
            _take_over_state(session, endpoint, folder, host)
            return
        if error := _gave_up(folder, number, session.clock()):
            session.ledger.set_endpoint(endpoint.name, EndpointState.FAILED, error=error)
            return
    (folder / "state.json").unlink(missing_ok=True)
    reach("endpoint.before_submit")
    handle = executor.submit(_host_task(endpoint, folder, number + 1))
    reach("endpoint.after_submit")
    session.ledger.set_endpoint(endpoint.name, EndpointState.STARTING, handle=handle)


def _write_desired(session: Session, endpoint: Endpoint, folder: Path) -> None:
    """What the host should serve, with the engine's files beside it; written only when it changes."""
    path = folder / "desired.json"
    known = json.loads(path.read_bytes()) if path.exists() else {}
    if known.get("generation") == endpoint.generation:
        return
    artifact = session.ledger.get_artifact(endpoint.artifact)
    files = folder / "engines" / endpoint.artifact
    lay_out(session, artifact, files)
    meta = dict(artifact.meta)
    engine = {"digest": endpoint.artifact, "execution": endpoint.execution, "meta": meta, "dir": str(files)}
    options = dict(endpoint.options)
    write_json(
        path,
        {
            "name": endpoint.name,
            "generation": endpoint.generation,
            "host": options.get("host", "127.0.0.1"),
            "port": options.get("port") or endpoint.port,
            "project": options.get("project"),
            "options": options,
            "engine": engine,
        },
    )


def _take_over_state(session: Session, endpoint: Endpoint, folder: Path, handle: Json) -> None:
    """What the host says of itself, as the endpoint's state in the ledger."""
    state = read_state(folder)
    pid = state.get("pid")
    if not pid:
        return
    if state.get("generation") == endpoint.generation and state.get("state") == "ready":
        if endpoint.state is not EndpointState.READY or endpoint.port != state["port"]:
            session.ledger.set_endpoint(endpoint.name, EndpointState.READY, port=state["port"], handle=handle, error={})
    elif error := _refused(state, endpoint.generation):
        session.ledger.set_endpoint(endpoint.name, EndpointState.FAILED, error=error, handle=handle)


def _refused(state: Mapping[str, Json], generation: int) -> Json | None:
    """The error with which the host gave up on the generation that is wanted (an older one may go on serving)."""
    error = state.get("error")
    if not error or state.get("failed_generation", generation) != generation:
        return None
    return error if isinstance(error, dict) else from_json({"error": "StepError", "message": str(error)}).to_json()


def _gave_up(folder: Path, number: int, now: float) -> Json | None:
    """Why not to start another host: the last one reported an error, or the last few all failed within a minute."""
    state = read_state(folder)
    if state.get("state") == "failed" and state.get("error"):
        return _refused(state, state.get("failed_generation", 0))
    last = [_exit_of(folder / f"host-{n}") for n in range(max(1, number - TRIES + 1), number + 1)]
    failed = [end for end in last if end and end.get("code") != 0 and now - end.get("time", 0) < MINUTE]
    if len(failed) < TRIES:
        return None
    cure = f"See {folder / f'host-{number}' / 'log'}."
    return dict(StepError(f"its host failed {TRIES} times in a row: {failed[-1].get('reason')}", cure=cure).to_json())


def _exit_of(work: Path) -> dict[str, Json]:
    try:
        end: dict[str, Json] = json.loads((work / "exit.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return end


def forget_hosts(session: Session, name: str) -> None:
    """Clear away the folders of hosts that have ended, and what the last one said: a new wish starts afresh."""
    folder = session.home.endpoint(name)
    host, _ = newest_host(folder)
    if host is not None and session.executors["local"].poll([host])[0].state in ("starting", "running"):
        return
    (folder / "state.json").unlink(missing_ok=True)
    for work in folder.glob("host-*"):
        shutil.rmtree(work, ignore_errors=True)


def _host_task(endpoint: Endpoint, folder: Path, number: int) -> Task:
    work = folder / f"host-{number}"
    work.mkdir(parents=True, exist_ok=True)
    return Task(
        id=f"endpoint-{endpoint.name}-{number}",
        argv=(sys.executable, "-m", "onejob.serve.host", str(folder)),
        work=work,
        env={},
        arrive=None,
        grace=float(endpoint.options.get("grace", 10.0)) + 2.0,
    )


def _stop(session: Session, endpoint: Endpoint) -> None:
    host, _ = newest_host(session.home.endpoint(endpoint.name))
    executor = session.executors["local"]
    if host is not None and executor.poll([host])[0].state in ("starting", "running"):
        executor.cancel(host)
        return
    session.ledger.set_endpoint(endpoint.name, EndpointState.STOPPED)


def newest_host(folder: Path) -> tuple[Json | None, int]:
    """Handle and number of the host that was started last; (None, 0) if there was none."""
    numbers = sorted(int(path.name[5:]) for path in folder.glob("host-*") if path.name[5:].isdigit())
    for number in reversed(numbers):
        work = folder / f"host-{number}"
        try:
            started = json.loads((work / "started.json").read_bytes())
        except (OSError, ValueError):
            continue
        if not started.get("revoked"):
            return {"dir": str(work), **started}, number
    return None, numbers[-1] if numbers else 0


def read_state(folder: Path) -> dict[str, Json]:
    """`state.json` of an endpoint's folder, or nothing."""
    try:
        state: dict[str, Json] = json.loads((folder / "state.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return state


def _known(session: Session, name: str) -> Endpoint:
    endpoint = session.ledger.get_endpoint(name)
    assert endpoint is not None
    return endpoint
