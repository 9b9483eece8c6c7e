"""From rows of the tables to the records of core, and the small things that every part of the ledger shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, Table, Update, func, insert, select, update
from sqlalchemy.sql.elements import ColumnElement

from onejob.core.artifact import Json
from onejob.core.plan import Step
from onejob.core.records import Endpoint, Event, Execution, Lease, Owner, Ref, Run, StepRow
from onejob.core.state import EndpointState, ExecutionState, RunState, S, StepState, allowed
from onejob.errors import ConflictError, LeaseLostError
from onejob.store.connect import Database
from onejob.store.schema import EVENT

LIVE = (ExecutionState.CLAIMED, ExecutionState.RUNNING)
OPEN = (RunState.QUEUED, RunState.RUNNING)


@dataclass(frozen=True)
class Part:
    """What each part of the ledger works with: the database, the clock, and where tokens and life signs come from."""

    _db: Database
    _clock: Callable[[], float]
    _token: Callable[[int], str]
    _alive: Callable[[Owner], bool | None]

    def _event(self, connection: Connection, subject: str, kind: str, data: Mapping[str, Json]) -> None:
        """Append to the log, in the transaction of the change that it tells of."""
        values = {"time": self._clock(), "subject": subject, "kind": kind, "data": dict(data)}
        connection.execute(insert(EVENT).values(seq=next_number(EVENT.c.seq), **values))


def next_number(column: ColumnElement[int]) -> Any:
    """One more than the highest number there is; writers are alone, so nobody else takes it."""
    return select(func.coalesce(func.max(column), 0) + 1).scalar_subquery()


def change(connection: Connection, table: Table, where: ColumnElement[bool], values: Mapping[str, Any]) -> None:
    """Update the one row that `where` names, under its token where it has one; no such row: the lease is lost."""
    statement: Update = update(table).where(where).values(**values)
    if connection.execute(statement).rowcount != 1:
        raise LeaseLostError("somebody else went on with it meanwhile", place=table.name)


def check_change(table: Mapping[S, frozenset[S]], old: S, new: S, what: str) -> None:
    """Refuse a change of state that the table doesn't name."""
    if not allowed(table, old, new):
        raise ConflictError(f"it is {old} and can't become {new}", place=what)


def check_token(row: Row[Any], token: str, what: str) -> None:
    """LeaseLostError unless the row is held under this token."""
    if row.lease_token != token:
        holder = (
            f"{row.lease_owner} holds it by now" if row.lease_owner else "it was cancelled, or its lease was given up"
        )
        raise LeaseLostError(holder, place=what)


def lease_of(row: Row[Any]) -> Lease | None:
    if row.lease_owner is None:
        return None
    return Lease(row.lease_owner, row.lease_token, row.lease_expires)


NO_LEASE: Mapping[str, None] = {"lease_owner": None, "lease_expires": None, "lease_ttl": None}


def run_of(row: Row[Any]) -> Run:
    return Run(
        id=row.id,
        job=row.job,
        state=RunState(row.state),
        project=row.project,
        spec=row.spec,
        plan=row.plan,
        cause=row.cause,
        forced=tuple(row.forced),
        created=row.created,
        finished=row.finished,
        error=row.error,
        lease=lease_of(row),
    )


def step_of(row: Row[Any]) -> StepRow:
    return StepRow(
        run=row.run,
        position=row.position,
        name=row.name,
        state=StepState(row.state),
        step=Step.from_json(row.step),
        key=row.key,
        execution=row.execution,
        cached=bool(row.cached),
        attempt=row.attempt,
        reason=row.reason,
    )


def execution_of(row: Row[Any]) -> Execution:
    return Execution(
        id=row.id,
        key=row.key,
        step=row.step,
        job=row.job,
        run=row.run,
        state=ExecutionState(row.state),
        created=row.created,
        started=row.started,
        finished=row.finished,
        needs=row.needs,
        executor=row.executor,
        host=row.host,
        handle=row.handle,
        inputs=row.inputs,
        outputs=row.outputs,
        measured=row.measured,
        error=row.error,
        forgotten=row.forgotten or "",
        lease=lease_of(row),
    )


def endpoint_of(row: Row[Any]) -> Endpoint:
    return Endpoint(
        name=row.name,
        state=EndpointState(row.state),
        artifact=row.artifact,
        execution=row.execution,
        options=row.options,
        generation=row.generation,
        port=row.port,
        handle=row.handle,
        created=row.created,
        updated=row.updated,
        error=row.error,
        lease=lease_of(row),
    )


def ref_of(row: Row[Any]) -> Ref:
    return Ref(row.name, row.digest, row.execution, row.updated)


def event_of(row: Row[Any]) -> Event:
    return Event(row.seq, row.time, row.subject, row.kind, row.data)
