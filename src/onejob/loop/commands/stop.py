"""The command `stop`: ends a run or an endpoint, and waits until nothing of it is left."""

from __future__ import annotations

import time

from onejob.core.records import Endpoint
from onejob.core.state import EndpointState, ExecutionState
from onejob.errors import ConflictError, NotFoundError, UnavailableError, UsageError
from onejob.loop.commands.run import QUICK, cancel, leftovers, load_job
from onejob.loop.endpoints import newest_host, tend_endpoint
from onejob.loop.reconcile import OPEN, reconcile
from onejob.loop.resolve import resolve
from onejob.loop.session import Session
from onejob.loop.snapshots import ended
from onejob.loop.views import StopView


def stop(session: Session, ref: str, now: bool = False) -> StopView:
    """Stop a run or an endpoint, and wait until it has stopped; steps save what they have, requests are answered."""
    target = resolve(session, ref)
    if target.kind == "endpoint" and target.endpoint:
        return _stop_endpoint(session, target.endpoint.name, now)
    stopped = target.run
    if target.kind == "job" and target.path:
        job = load_job(target.path)
        runs = session.ledger.list_runs(job=job.name, states=OPEN)
        stopped = next((run for run in runs if run.cause.get("kind") != "monitor"), None)
        if stopped is None:
            if session.ledger.get_endpoint(job.name):
                return _stop_endpoint(session, job.name, now)
            raise NotFoundError(f"nothing of {job.name!r} is running", place=ref)
    if stopped is None:
        raise UsageError(f"{target.noun} can't be stopped", place=ref, cure="Name a run or an endpoint.")
    if ended(stopped):
        return StopView(str(stopped.id), "run", stopped.state, "it had ended already")
    cancel(session, stopped.id)
    if now:
        _kill(session, stopped.id)
    while leftovers(session, stopped.id):
        reconcile(session, [])
        time.sleep(QUICK)
    return StopView(str(stopped.id), "run", session.ledger.get_run(stopped.id).state)


def _kill(session: Session, run: int) -> None:
    """SIGKILL to what a cancelled run has started, and nobody else wants."""
    for execution in session.ledger.list_executions(states=[ExecutionState.CLAIMED, ExecutionState.RUNNING]):
        if execution.run == run and execution.handle and not session.ledger.attached_runs(execution.id):
            session.executors[execution.executor].cancel(execution.handle, now=True)


def _stop_endpoint(session: Session, name: str, now: bool = False) -> StopView:
    endpoint = session.ledger.get_endpoint(name)
    assert endpoint is not None
    if endpoint.state == EndpointState.STOPPED:
        return StopView(name, "endpoint", endpoint.state, "it had stopped already")
    session.ledger.set_endpoint(name, EndpointState.STOPPING)
    host, _ = newest_host(session.home.endpoint(name))
    if now and host is not None:
        session.executors["local"].cancel(host, now=True)
    while (endpoint := tend_endpoint(session, name)).state == EndpointState.STOPPING:
        _check_reach(session, endpoint)
        time.sleep(QUICK)
    if endpoint.state != EndpointState.STOPPED:
        raise ConflictError(f"endpoint {name} was started again meanwhile", place=name)
    return StopView(name, "endpoint", endpoint.state)


def _check_reach(session: Session, endpoint: Endpoint) -> None:
    """Waiting for another machine makes sense only while a supervisor there answers."""
    where = (endpoint.handle or {}).get("host", "")
    if not session.is_here(where) and session.is_free(endpoint.lease):
        cure = f"Run `onejob up`, or `onejob stop {endpoint.name}`, on {where}."
        raise UnavailableError(f"it runs on {where}, and nobody there looks after it", place=endpoint.name, cure=cure)
