"""Executions in the ledger: at most one live one for each key, and never more slots given out than there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, and_, insert, select, update

from onejob.core.artifact import Artifact, Json
from onejob.core.faults import reach
from onejob.core.records import Claim, ClaimRequest, Execution, Lease, Owner
from onejob.core.state import EXECUTION, ExecutionState, StepState, final
from onejob.errors import ConflictError, NotFoundError
from onejob.store.catalog import SqlCatalog
from onejob.store.leases import TOKEN_BYTES, lease_values
from onejob.store.rows import LIVE, NO_LEASE, OPEN, change, check_change, check_token, execution_of, next_number
from onejob.store.schema import EXECUTION as TABLE
from onejob.store.schema import OUTPUT, RUN, STEP, STEP_KEY
from onejob.store.slots import Full, Granted, Held, choose

ID_BYTES = 6
OVER = (StepState.DONE, StepState.FAILED, StepState.CANCELLED, StepState.SKIPPED)


class SqlExecutions(SqlCatalog):
    """The tables `execution` and `step_key`; ending an execution also indexes what it left."""

    def claim(self, request: ClaimRequest, owner: Owner, ttl: float) -> Claim:
        """One transaction, alone: so no two claims see the same key, or the same slot, free."""
        now = self._clock()
        with self._db.write() as connection:
            for answer, known in (("done", _done(request)), ("busy", _live(request))):
                row = connection.execute(known).first()
                if row is not None:
                    # That it was asked for keeps what it left out of the way of gc.
                    connection.execute(update(TABLE).where(TABLE.c.id == row.id).values(asked=now))
                    return Claim(answer, execution_of(row))
            slots = choose(request.needs, request.capacity, _held(connection, request))
            if isinstance(slots, Full):
                return Claim("full", reason=slots.reason)
            lease = Lease(str(owner), self._token(TOKEN_BYTES), now + ttl)
            new = self._insert(connection, request, slots, lease, ttl)
            reach("claim.before_commit")
        return Claim("won", new)

    def _insert(
        self, connection: Connection, request: ClaimRequest, slots: Granted, lease: Lease, ttl: float
    ) -> Execution:
        now, new = self._clock(), self._token(ID_BYTES)
        needs = {**request.needs, "gpu_ids": list(slots.gpu_ids)}
        values = {"id": new, "key": request.key, "step": request.step, "job": request.job, "run": request.run}
        values |= {"state": ExecutionState.CLAIMED, "created": now, "asked": now, "needs": needs}
        values |= {"executor": request.executor, "host": request.host, "inputs": dict(request.inputs)}
        values |= {"outputs": {}, "measured": {}, **lease_values(lease, ttl)}
        connection.execute(insert(TABLE).values(number=next_number(TABLE.c.number), **values))
        data = {"key": request.key, "step": request.step, "job": request.job, "run": request.run}
        self._event(connection, f"execution/{new}", ExecutionState.CLAIMED, {**data, "owner": lease.owner})
        return execution_of(_execution(connection, new))

    def get_execution(self, execution: str) -> Execution:
        with self._db.read() as connection:
            return execution_of(_execution(connection, execution))

    def list_executions(
        self,
        *,
        states: Sequence[ExecutionState] | None = None,
        key: str | None = None,
        job: str | None = None,
        limit: int | None = None,
    ) -> list[Execution]:
        query = select(TABLE).order_by(TABLE.c.number.desc()).limit(limit)
        if states is not None:
            query = query.where(TABLE.c.state.in_(states))
        if key is not None:
            query = query.where(TABLE.c.key == key)
        if job is not None:
            query = query.where(TABLE.c.job == job)
        with self._db.read() as connection:
            return [execution_of(row) for row in connection.execute(query)]

    def start_execution(self, execution: str, token: str, handle: Json) -> None:
        what = f"execution {execution}"
        with self._db.write() as connection:
            row = _execution(connection, execution)
            check_token(row, token, what)
            check_change(EXECUTION, ExecutionState(row.state), ExecutionState.RUNNING, what)
            if row.state == ExecutionState.RUNNING and row.handle == handle:
                return
            values = {"state": ExecutionState.RUNNING, "handle": handle}
            if row.started is None:
                values["started"] = self._clock()
            change(connection, TABLE, _under(execution, token), values)
            data = {"from": row.state, "handle": handle}
            self._event(connection, f"execution/{execution}", ExecutionState.RUNNING, data)
            reach("executions.before_commit")

    def finish_execution(
        self,
        execution: str,
        token: str,
        state: ExecutionState,
        *,
        outputs: Mapping[str, Artifact] | None = None,
        measured: Mapping[str, Json] | None = None,
        error: Json | None = None,
    ) -> None:
        assert final(EXECUTION, state), f"{state} is no end"
        what = f"execution {execution}"
        with self._db.write() as connection:
            row = _execution(connection, execution)
            check_token(row, token, what)
            old = ExecutionState(row.state)
            check_change(EXECUTION, old, state, what)
            if old is state:
                return
            left = {}
            for name, artifact in (outputs or {}).items():
                left[name] = self._add_artifact(connection, artifact)
                link = {"artifact": left[name], "execution": execution, "name": name}
                connection.execute(insert(OUTPUT).values(**link))
            values = {"state": state, "finished": self._clock(), "outputs": left, "measured": dict(measured or {})}
            # The token stays, so that the same ending under it is known; the lease itself is over.
            change(connection, TABLE, _under(execution, token), {**values, "error": error, **NO_LEASE})
            data = {"from": old, "outputs": left} if error is None else {"from": old, "error": error}
            self._event(connection, f"execution/{execution}", state, data)
            reach("executions.before_commit")

    def forget_execution(self, execution: str, reason: str) -> None:
        with self._db.write() as connection:
            row = _execution(connection, execution)
            if row.state != ExecutionState.DONE:
                raise ConflictError(f"it is {row.state}, so there is nothing to forget", place=f"execution {execution}")
            if row.forgotten is None:
                self._forget(connection, execution, reason)

    def forget_unused(self, execution: str, reason: str, before: float) -> bool:
        """Forget a done execution unless somebody asked for its key since, or a run that goes on is attached to it."""
        with self._db.write() as connection:
            row = _execution(connection, execution)
            if row.state != ExecutionState.DONE or row.asked >= before or row.finished >= before:
                return False
            if connection.execute(_attached(execution)).first() is not None:
                return False
            if row.forgotten is None:
                self._forget(connection, execution, reason)
            return True

    def _forget(self, connection: Connection, execution: str, reason: str) -> None:
        change(connection, TABLE, TABLE.c.id == execution, {"forgotten": reason})
        self._event(connection, f"execution/{execution}", "forgotten", {"reason": reason})
        reach("executions.before_commit")

    def add_key(self, key: str, components: Mapping[str, Json]) -> None:
        with self._db.write() as connection:
            if connection.scalar(select(STEP_KEY.c.key).where(STEP_KEY.c.key == key)) is None:
                values = {"key": key, "components": dict(components), "created": self._clock()}
                connection.execute(insert(STEP_KEY).values(**values))

    def get_key(self, key: str) -> Mapping[str, Json]:
        with self._db.read() as connection:
            row = connection.execute(select(STEP_KEY.c.components).where(STEP_KEY.c.key == key)).one_or_none()
        if row is None:
            raise NotFoundError(f"there is no step key {key}")
        found: Mapping[str, Json] = row.components
        return found

    def attached_runs(self, execution: str) -> list[int]:
        query = _attached(execution).where(STEP.c.state.not_in(OVER))
        with self._db.read() as connection:
            return list(connection.scalars(query))


def _done(request: ClaimRequest) -> Any:
    counts = and_(TABLE.c.key == request.key, TABLE.c.state == ExecutionState.DONE, TABLE.c.forgotten.is_(None))
    query = select(TABLE).where(counts).order_by(TABLE.c.number.desc()).limit(1)
    return query if request.fresh_from is None else query.where(TABLE.c.run >= request.fresh_from)


def _live(request: ClaimRequest) -> Any:
    return select(TABLE).where(TABLE.c.key == request.key, TABLE.c.state.in_(LIVE))


def _held(connection: Connection, request: ClaimRequest) -> list[Held]:
    query = select(TABLE).where(TABLE.c.executor == request.executor, TABLE.c.host == request.host)
    rows = connection.execute(query.where(TABLE.c.state.in_(LIVE)).order_by(TABLE.c.number))
    return [_held_by(row) for row in rows]


def _held_by(row: Row[Any]) -> Held:
    cpus, gpus = float(row.needs.get("cpus", 0.0)), float(row.needs.get("gpus", 0.0))
    return Held(row.id, f"{row.step} of {row.job}", cpus, gpus, tuple(row.needs.get("gpu_ids", ())))


def _attached(execution: str) -> Any:
    """Runs that go on, with a step on this execution, whatever the step's state."""
    return (
        select(RUN.c.id)
        .join(STEP, STEP.c.run == RUN.c.id)
        .where(STEP.c.execution == execution, RUN.c.state.in_(OPEN))
        .order_by(RUN.c.id)
        .distinct()
    )


def _execution(connection: Connection, execution: str) -> Row[Any]:
    row = connection.execute(select(TABLE).where(TABLE.c.id == execution)).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no execution {execution}")
    return row


def _under(execution: str, token: str) -> Any:
    return and_(TABLE.c.id == execution, TABLE.c.lease_token == token)
