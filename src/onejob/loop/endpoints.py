"""Endpoints: keep the host of each served name alive, and tell it what to serve.

The loop writes `desired.json` and watches `state.json`; the host (serve/host.py) owns the socket and the replicas, and
changes versions by itself. A host runs as a task under a shim, in a folder `host-<n>` of the endpoint's folder; the
newest of these is the one that counts, so a supervisor that died while starting it is followed by one that adopts it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from onejob.core.artifact import Json
from onejob.core.context import write_json
from onejob.core.faults import reach
from onejob.core.ports import Task
from onejob.core.records import Endpoint, Run, StepRow
from onejob.core.state import EndpointState, PromotionState
from onejob.errors import ConflictError, DamagedError, StepError, from_json
from onejob.loop.champion import event_now, keeps_champion
from onejob.loop.session import Session
from onejob.loop.tasks import explained, lay_out
from onejob.serve.listener import forget

logger = logging.getLogger("onejob.loop")

TRIES = 3
MINUTE = 60.0
"""Hosts that fail this often in a row within a minute are not started again by themselves."""
UP = ("starting", "running")
DOWN = (EndpointState.STOPPED, EndpointState.FAILED)


def want_serving(session: Session, run: Run, rows: Mapping[str, StepRow]) -> Endpoint | None:
    """Say what a finished run's endpoint should serve, and tend it; gives it once it is ready, or won't be.

    A run starts an endpoint that has failed or was stopped once; what happens to it after that is the run's own result.
    """
    name = run.plan["serving"]["name"]
    if run.id not in session.asked:
        wanted = _want(session, run, rows)
        if wanted.state in DOWN:
            if not _is_ours(session, wanted) or session.hold("endpoint", name) is None:
                return None
            forget_hosts(session, name)
            session.ledger.set_endpoint(name, EndpointState.STARTING)
        elif wanted.state is EndpointState.STOPPING:  # somebody has just stopped it: first it ends
            tend_endpoint(session, name)
            return None
        session.asked.add(run.id)
    endpoint = tend_endpoint(session, name)
    return None if endpoint.state is EndpointState.STARTING else endpoint


def _want(session: Session, run: Run, rows: Mapping[str, StepRow]) -> Endpoint:
    """The wish, in the ledger; written only where it is another one."""
    wish, ledger = run.plan["serving"], session.ledger
    made_by: str | None = None
    if "step" in wish["artifact"]:
        execution = ledger.get_execution(rows[wish["artifact"]["step"]].execution or "")
        digest, made_by = execution.outputs[wish["artifact"]["output"]], execution.id
    else:
        digest = wish["artifact"]["digest"]
    options = {**wish["options"], "project": run.project, "monitor": run.spec.get("monitor") or {}}
    known = ledger.get_endpoint(wish["name"])
    if known is not None:
        if kept := keeps_champion(session, run, known.name, digest):
            ledger.add_event(f"run/{run.id}", "warning", {"text": kept})
            digest, made_by = known.artifact, known.execution
        elif known.artifact != digest and ledger.list_promotions(known.name, limit=1):
            return _replace(session, run, known, digest, made_by, options)
        tries = int(known.options.get("tries", 0))
        # A host that goes on with an older version tries each generation once: the same wish again is a new one.
        if known.state is EndpointState.FAILED and _host_is_up(session, wish["name"]):
            tries += 1
        options |= {"tries": tries} if tries else {}
        if (known.artifact, known.execution, dict(known.options)) == (digest, made_by, options):
            return known
    return ledger.want_endpoint(wish["name"], artifact=digest, execution=made_by, options=options)


def _replace(
    session: Session, run: Run, known: Endpoint, digest: str, made_by: str | None, options: Mapping[str, Json]
) -> Endpoint:
    """A person's run puts its engine in the place of one that was promoted: kept among the promotions too."""
    session.ledger.promote(
        known.name,
        digest=digest,
        execution=made_by,
        cause={"kind": "run", "run": run.id},
        event_time=event_now(session, known.name) or 0.0,
        state=PromotionState.KEPT,
        options=options,
    )
    return _known(session, known.name)


def tend_endpoint(session: Session, name: str) -> Endpoint:
    """Bring one endpoint a step closer to what it should be; gives how it stands."""
    endpoint = _known(session, name)
    if endpoint.state in DOWN or not _is_ours(session, endpoint) or session.hold("endpoint", name) is None:
        return endpoint
    endpoint = _known(session, name)
    try:
        match endpoint.state:
            case EndpointState.STARTING | EndpointState.READY:
                _keep_up(session, endpoint)
            case EndpointState.STOPPING:
                _stop(session, endpoint)
    except ConflictError:
        pass  # somebody asked for something else meanwhile: the next pass sees to it
    return _known(session, name)


def _is_ours(session: Session, endpoint: Endpoint) -> bool:
    """Whether it may be tended from here: its host runs on this machine, or no longer runs on another."""
    if not session.is_free(endpoint.lease):
        return False
    if session.is_here((endpoint.handle or {}).get("host", "")):
        return True
    return session.executors["local"].poll([endpoint.handle])[0].state not in UP


def _keep_up(session: Session, endpoint: Endpoint) -> None:
    folder, ledger = session.home.endpoint(endpoint.name), session.ledger
    try:
        _write_desired(session, endpoint, folder)
    except OSError as error:
        raise explained(error, folder) from error
    except DamagedError as error:
        ledger.set_endpoint(endpoint.name, EndpointState.FAILED, error=dict(error.to_json()))
        return
    host, number = newest_host(folder)
    executor = session.executors["local"]
    if host is not None:
        if executor.poll([host])[0].state in UP:
            _take_over_state(session, endpoint, folder, host)
            return
        if why := _gave_up(folder, number, session.clock(), endpoint.generation):
            ledger.set_endpoint(endpoint.name, EndpointState.FAILED, error=why)
            return
    (folder / "state.json").unlink(missing_ok=True)
    if endpoint.state is not EndpointState.STARTING:
        ledger.set_endpoint(endpoint.name, EndpointState.STARTING, expect=endpoint.state)
    _clear_hosts(folder, number - TRIES)
    reach("endpoint.before_submit")
    handle = executor.submit(_host_task(endpoint, folder, number + 1))
    reach("endpoint.after_submit")
    # Not if it was asked to stop meanwhile: then its host is found in its folder, and ended.
    ledger.set_endpoint(endpoint.name, EndpointState.STARTING, handle=handle, expect=EndpointState.STARTING)


def _write_desired(session: Session, endpoint: Endpoint, folder: Path) -> None:
    """What the host should serve, with the engine's files beside it; written only when it changes."""
    path = folder / "desired.json"
    known = _read(path)
    files = folder / "engines" / endpoint.artifact
    if known.get("generation") == endpoint.generation and known.get("engine", {}).get("digest") == endpoint.artifact:
        _mend(session, endpoint, files, known, path)
        return
    artifact = session.ledger.get_artifact(endpoint.artifact)
    lay_out(session, artifact, files)
    meta = dict(artifact.meta)
    digests = {entry.path: entry.digest for entry in artifact.files}
    engine = {
        "digest": endpoint.artifact,
        "execution": endpoint.execution,
        "meta": meta,
        "dir": str(files),
        "files": digests,
        "laid": {entry.path: _stamp(files / entry.path) for entry in artifact.files},
    }
    options = dict(endpoint.options)
    desired: dict[str, Json] = {
        "name": endpoint.name,
        "generation": endpoint.generation,
        "host": options.get("host", "127.0.0.1"),
        # 0: the host takes the one it had, if nobody else has it by now
        "port": options.get("port", 0),
        "project": options.get("project"),
        "options": options,
        "engine": engine,
    }
    if "models" in meta:  # a repository
        desired |= {
            "models": [_told(model, files, digests) for model in meta["models"]],
            "repository": options.get("repository"),
        }
    write_json(path, desired)


def _stamp(path: Path) -> list[int]:
    """By what a file that somebody has changed is known without reading it: size and time; nothing if it is gone."""
    try:
        stat = path.stat()
    except OSError:
        return []
    return [stat.st_size, stat.st_mtime_ns]


def _mend(session: Session, endpoint: Endpoint, files: Path, desired: Mapping[str, Json], path: Path) -> None:
    """Lay files out again that somebody has changed: replicas that start would refuse them. Tried once a change."""
    laid: Mapping[str, Json] = desired["engine"].get("laid") or {}
    if all(_stamp(files / name) == stamp for name, stamp in laid.items()):
        return
    logger.warning("%s: files of its engine were changed; they are laid out again", endpoint.name)
    with contextlib.suppress(DamagedError):  # those that serve go on
        lay_out(session, session.ledger.get_artifact(endpoint.artifact), files)
    now = {name: _stamp(files / name) for name in laid}
    write_json(path, {**desired, "engine": {**desired["engine"], "laid": now}})


def _told(model: Mapping[str, Json], files: Path, digests: Mapping[str, str]) -> dict[str, Json]:
    """One model of a repository, as a replica is told of it."""
    inside = f"{model['name']}/{model['version']}/"
    engine = {
        "digest": model["digest"],
        "meta": model["meta"],
        "dir": str(files / model["name"] / model["version"]),
        "files": {name.removeprefix(inside): each for name, each in digests.items() if name.startswith(inside)},
    }
    return {"name": model["name"], "version": model["version"], "engine": engine, "options": model["options"]}


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
        if state.get("state") == "failed":
            session.executors["local"].cancel(handle)  # it serves nothing, not even an older version


def _refused(state: Mapping[str, Json], generation: int) -> Json | None:
    """The error with which the host gave up on the generation that is wanted (an older one may go on serving)."""
    error = state.get("error")
    if not error or state.get("failed_generation", generation) != generation:
        return None
    return error if isinstance(error, dict) else from_json({"error": "StepError", "message": str(error)}).to_json()


def _gave_up(folder: Path, number: int, now: float, generation: int) -> Json | None:
    """Why not to start another host: the last one reported an error, or the last few all failed within a minute."""
    state = read_state(folder)
    if state.get("state") == "failed" and (error := _refused(state, generation)):
        return error
    last = [_exit_of(folder / f"host-{n}") for n in range(max(1, number - TRIES + 1), number + 1)]
    failed = [end for end in last if end and end.get("code") != 0 and abs(now - end.get("time", 0)) < MINUTE]
    if len(failed) < TRIES:
        return None
    cure = f"See {folder / f'host-{number}' / 'log'}."
    return dict(StepError(f"its host failed {TRIES} times in a row: {failed[-1].get('reason')}", cure=cure).to_json())


def _exit_of(work: Path) -> dict[str, Json]:
    """How a host ended; a shim that was killed too has no last word, but it touched its folder until then."""
    if end := _read(work / "exit.json"):
        return end
    try:
        return {"code": None, "time": (work / "started.json").stat().st_mtime, "reason": "its processes were killed"}
    except OSError:
        return {}


def forget_hosts(session: Session, name: str) -> None:
    """Clear away the folders of hosts that have ended, and what the last one said: a new wish starts afresh."""
    if _host_is_up(session, name):
        return
    folder = session.home.endpoint(name)
    (folder / "state.json").unlink(missing_ok=True)
    _clear_hosts(folder, newest_host(folder)[1])


def _host_is_up(session: Session, name: str) -> bool:
    host, _ = newest_host(session.home.endpoint(name))
    return host is not None and session.executors["local"].poll([host])[0].state in UP


def _clear_hosts(folder: Path, last: int) -> None:
    """Remove the folders of the hosts up to a number."""
    for number, work in _host_folders(folder):
        if number <= last:
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
    folder, executor = session.home.endpoint(endpoint.name), session.executors["local"]
    host, number = newest_host(folder)
    if host is not None and executor.poll([host])[0].state in UP:
        executor.cancel(host)
        return
    coming = folder / f"host-{number + 1}"
    if coming.is_dir() and not executor.revoke(coming):
        return  # one was just starting: now it is the newest, and is ended at the next pass
    forget(str(endpoint.options.get("host", "")))  # a host that was killed has left its socket's file
    session.ledger.set_endpoint(endpoint.name, EndpointState.STOPPED, expect=EndpointState.STOPPING)


def newest_host(folder: Path) -> tuple[Json | None, int]:
    """Handle and number of the host that was started last, (None, 0) if there was none.

    A folder without `started.json` belongs to a host that is only just starting, or never did: it counts as the next.
    """
    number = 0
    for at, work in reversed(_host_folders(folder)):
        started = _read(work / "started.json")
        if not started:
            continue
        number = number or at
        if not started.get("revoked"):
            return {"dir": str(work), **started}, number
    return None, number


def _host_folders(folder: Path) -> list[tuple[int, Path]]:
    found = [(path.name[5:], path) for path in folder.glob("host-*")]
    return sorted((int(number), path) for number, path in found if number.isdigit())


def read_state(folder: Path) -> dict[str, Json]:
    """`state.json` of an endpoint's folder, or nothing."""
    return _read(folder / "state.json")


def served_digest(folder: Path) -> str | None:
    """The engine that a host falls back on while another is tried, and after it went back."""
    digest: str | None = _read(folder / "rollout.json").get("serving", {}).get("engine", {}).get("digest")
    return digest


def _read(path: Path) -> dict[str, Json]:
    try:
        data: Json = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _known(session: Session, name: str) -> Endpoint:
    endpoint = session.ledger.get_endpoint(name)
    assert endpoint is not None
    return endpoint
