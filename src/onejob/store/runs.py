"""Runs and their steps: each change of state under the run's lease, with its event, in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, and_, insert, select, update

from onejob.core.artifact import Json
from onejob.core.faults import reach
from onejob.core.plan import Existing, Output, Plan
from onejob.core.records import NewRun, Run, StepRow
from onejob.core.state import RUN, STEP, RunState, StepState, final
from onejob.errors import ConflictError, NotFoundError
from onejob.store.rows import NO_LEASE, Part, change, check_change, check_token, next_number, run_of, step_of
from onejob.store.schema import RUN as RUN_TABLE
from onejob.store.schema import STEP as STEP_TABLE


class SqlRuns(Part):
    """The tables `run` and `step`."""

    def add_run(self, new: NewRun) -> Run:
        """Add a run with all its steps waiting; runs are numbered from 1."""
        with self._db.write() as connection:
            made = self._add_run(connection, new)
            reach("runs.before_commit")
            return made

    def _add_run(self, connection: Connection, new: NewRun) -> Run:
        """The same in the transaction of the caller."""
        number = connection.execute(select(next_number(RUN_TABLE.c.id))).scalar_one()
        values = {
            "job": new.job,
            "state": RunState.QUEUED,
            "project": new.project,
            "spec": dict(new.spec),
            "plan": plan_to_json(new.plan),
            "cause": dict(new.cause),
            "forced": list(new.forced),
            "created": self._clock(),
        }
        connection.execute(insert(RUN_TABLE).values(id=number, **values))
        self._event(connection, f"run/{number}", RunState.QUEUED, {"job": new.job, "cause": dict(new.cause)})
        for position, step in enumerate(new.plan.steps):
            row = {"run": number, "position": position, "name": step.name, "step": step.to_json()}
            row |= {"state": StepState.WAITING, "cached": 0, "attempt": 0, "reason": ""}
            connection.execute(insert(STEP_TABLE).values(**row))
            self._event(connection, f"step/{number}/{step.name}", StepState.WAITING, {})
        return run_of(_run(connection, number))

    def get_run(self, run: int) -> Run:
        with self._db.read() as connection:
            return run_of(_run(connection, run))

    def list_runs(
        self, *, job: str | None = None, states: Sequence[RunState] | None = None, limit: int | None = None
    ) -> list[Run]:
        query = select(RUN_TABLE).order_by(RUN_TABLE.c.id.desc()).limit(limit)
        if job is not None:
            query = query.where(RUN_TABLE.c.job == job)
        if states is not None:
            query = query.where(RUN_TABLE.c.state.in_(states))
        with self._db.read() as connection:
            return [run_of(row) for row in connection.execute(query)]

    def set_run(self, run: int, state: RunState, *, token: str, error: Json | None = None) -> None:
        with self._db.write() as connection:
            row = _run(connection, run)
            check_token(row, token, f"run {run}")
            old = RunState(row.state)
            check_change(RUN, old, state, f"run {run}")
            if old is state:
                return
            values: dict[str, Any] = {"state": state, "error": error}
            if final(RUN, state):
                values["finished"] = self._clock()
            change(connection, RUN_TABLE, _held(run, token), values)
            data = {"from": old} if error is None else {"from": old, "error": error}
            self._event(connection, f"run/{run}", state, data)
            reach("runs.before_commit")

    def cancel_run(self, run: int) -> None:
        """Cancel it and all of its steps that haven't ended; its holder loses the lease. Twice is once.

        ConflictError if it has ended otherwise.
        """
        with self._db.write() as connection:
            row = _run(connection, run)
            old = RunState(row.state)
            if old is RunState.CANCELLED:
                return
            if final(RUN, old):
                raise ConflictError(f"it is {old} already", place=f"run {run}")
            values = {"state": RunState.CANCELLED, "finished": self._clock(), "lease_token": None, **NO_LEASE}
            connection.execute(update(RUN_TABLE).where(RUN_TABLE.c.id == run).values(**values))
            self._event(connection, f"run/{run}", RunState.CANCELLED, {"from": old})
            for step in connection.execute(_steps(run)).all():
                if not final(STEP, StepState(step.state)):
                    where = and_(STEP_TABLE.c.run == run, STEP_TABLE.c.position == step.position)
                    change(connection, STEP_TABLE, where, {"state": StepState.CANCELLED})
                    self._event(connection, f"step/{run}/{step.name}", StepState.CANCELLED, {"from": step.state})
            reach("runs.before_commit")

    def list_steps(self, run: int) -> list[StepRow]:
        """In the order of the plan."""
        with self._db.read() as connection:
            _run(connection, run)
            return [step_of(row) for row in connection.execute(_steps(run))]

    def set_step(
        self,
        run: int,
        name: str,
        state: StepState,
        *,
        token: str,
        key: str | None = None,
        execution: str | None = None,
        cached: bool | None = None,
        attempt: int | None = None,
        reason: str | None = None,
    ) -> None:
        wished = {"key": key, "execution": execution, "attempt": attempt, "reason": reason}
        wished["cached"] = None if cached is None else int(cached)
        what = f"step {name} of run {run}"
        with self._db.write() as connection:
            check_token(_run(connection, run), token, f"run {run}")
            where = and_(STEP_TABLE.c.run == run, STEP_TABLE.c.name == name)
            row = connection.execute(select(STEP_TABLE).where(where)).one_or_none()
            if row is None:
                raise NotFoundError(f"there is no {what}")
            check_change(STEP, StepState(row.state), state, what)
            told = {n: v for n, v in wished.items() if v is not None and v != row._mapping[n]}
            if row.state == state and not told:
                return
            change(connection, STEP_TABLE, where, {"state": state, **told})
            self._event(connection, f"step/{run}/{name}", state, {"from": row.state, **told})
            reach("runs.before_commit")

    def last_step_with_other_key(self, job: str, step: str, key: str, before_run: int) -> StepRow | None:
        query = (
            select(STEP_TABLE)
            .join(RUN_TABLE, RUN_TABLE.c.id == STEP_TABLE.c.run)
            .where(RUN_TABLE.c.job == job, RUN_TABLE.c.id < before_run)
            .where(STEP_TABLE.c.name == step, STEP_TABLE.c.key.is_not(None), STEP_TABLE.c.key != key)
            .order_by(RUN_TABLE.c.id.desc())
            .limit(1)
        )
        with self._db.read() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else step_of(row)


def plan_to_json(plan: Plan) -> dict[str, Json]:
    """`{"steps", "serving": {"name", "artifact", "options"} or None, "refs": {name: {"step", "output"}}}`."""
    serving = None
    if plan.serving is not None:
        artifact = _wish_to_json(plan.serving.artifact)
        serving = {"name": plan.serving.name, "artifact": artifact, "options": dict(plan.serving.options)}
    refs = {name: _wish_to_json(output) for name, output in plan.refs.items()}
    return {"steps": [step.to_json() for step in plan.steps], "serving": serving, "refs": refs}


def _wish_to_json(value: Output | Existing) -> dict[str, Json]:
    match value:
        case Output(step, name):
            return {"step": step, "output": name}
        case Existing(digest):
            return {"digest": digest}


def _run(connection: Connection, run: int) -> Row[Any]:
    row = connection.execute(select(RUN_TABLE).where(RUN_TABLE.c.id == run)).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no run {run}", cure="`onejob ps --all` lists the runs.")
    return row


def _held(run: int, token: str) -> Any:
    return and_(RUN_TABLE.c.id == run, RUN_TABLE.c.lease_token == token)


def _steps(run: int) -> Any:
    return select(STEP_TABLE).where(STEP_TABLE.c.run == run).order_by(STEP_TABLE.c.position)
