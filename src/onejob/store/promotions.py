"""What the gate said of challengers, and which engines took others' places, in the ledger.

Whatever belongs together is one transaction: a promotion changes the endpoint's wish, the champion's ref, the promotion
before it and the decision that led to it, or nothing at all. So it is carried out once, whoever is killed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from onejob.core.artifact import Json, short
from onejob.core.faults import reach
from onejob.core.records import Decision, Promotion
from onejob.core.state import PROMOTION as CHANGES
from onejob.core.state import EndpointState, PromotionState
from onejob.errors import ConflictError, NotFoundError
from onejob.store.catalog import SqlCatalog
from onejob.store.endpoints import SqlEndpoints
from onejob.store.rows import check_change, next_number
from onejob.store.schema import DECISION, ENDPOINT, PROMOTION
from onejob.store.signals import SqlSignals


class SqlPromotions(SqlSignals, SqlEndpoints, SqlCatalog):
    """The tables `decision` and `promotion`."""

    # ---- decisions

    def add_decision(self, decision: Decision) -> Decision:
        with self._db.write() as connection:
            known = connection.execute(select(DECISION).where(DECISION.c.run == decision.run)).one_or_none()
            if known is not None:
                return _decision_of(known)
            values: dict[str, Any] = {
                "run": decision.run,
                "endpoint": decision.endpoint,
                "verdict": decision.verdict,
                "reasons": list(decision.reasons),
                "missing": list(decision.missing),
                "champion": decision.champion,
                "challenger": decision.challenger,
                "execution": decision.execution,
                "artifact": decision.artifact,
                "look": decision.look,
                "created": self._clock(),
                "event_time": decision.event_time,
                "outcome": "",
            }
            connection.execute(insert(DECISION).values(**values))
            told = {"run": decision.run, "challenger": decision.challenger, "reasons": list(decision.reasons)}
            self._event(connection, f"endpoint/{decision.endpoint}/decision", decision.verdict, told)
            self._end_turn(connection, decision.run, decision.verdict)
            reach("decisions.before_commit")
            return _decision_of(_decision(connection, decision.run))

    def list_decisions(self, endpoint: str, *, limit: int | None = None) -> list[Decision]:
        query = select(DECISION).where(DECISION.c.endpoint == endpoint).order_by(DECISION.c.run.desc()).limit(limit)
        with self._db.read() as connection:
            return [_decision_of(row) for row in connection.execute(query)]

    def settle_decision(self, run: int, outcome: str) -> None:
        with self._db.write() as connection:
            self._settle(connection, run, outcome)
            reach("decisions.before_commit")

    def _settle(self, connection: Connection, run: int, outcome: str) -> None:
        row = _decision(connection, run)
        if row.applied is not None:
            return
        connection.execute(update(DECISION).where(DECISION.c.run == run).values(applied=self._clock(), outcome=outcome))
        self._event(connection, f"endpoint/{row.endpoint}/decision", "settled", {"run": run, "outcome": outcome})

    # ---- promotions

    def promote(
        self,
        endpoint: str,
        *,
        digest: str,
        execution: str | None,
        cause: Mapping[str, Json],
        event_time: float,
        state: PromotionState,
        options: Mapping[str, Json] | None = None,
        expect: str | None = None,
        decision: int | None = None,
        ref: str | None = None,
    ) -> Promotion:
        with self._db.write() as connection:
            if decision is not None and (done := _of_decision(connection, decision)):
                return done
            served = _endpoint(connection, endpoint)
            if expect is not None and served.artifact != expect:
                raise ConflictError(f"it serves {short(served.artifact)} by now", place=f"endpoint {endpoint}")
            self._keep_earlier(connection, endpoint, event_time)
            number = connection.execute(select(next_number(PROMOTION.c.id))).scalar_one()
            values: dict[str, Any] = {"endpoint": endpoint, "digest": digest, "execution": execution}
            values |= {"former": served.artifact, "former_execution": served.execution, "cause": dict(cause)}
            values |= {"created": self._clock(), "event_time": event_time, "state": state, "reason": ""}
            connection.execute(insert(PROMOTION).values(id=number, decision=decision, **values))
            told = {"id": number, "digest": digest, "former": served.artifact, "cause": dict(cause)}
            self._event(connection, f"endpoint/{endpoint}/promotion", "promoted", told)
            self._serve(connection, served, digest, execution, options, ref)
            if decision is not None:
                self._settle(connection, decision, "promoted")
            reach("promotions.before_commit")
            return _promotion_of(_promotion(connection, number))

    def roll_back(
        self, promotion: int, *, reason: str, cause: Mapping[str, Json], event_time: float, ref: str | None = None
    ) -> Promotion:
        with self._db.write() as connection:
            row = _promotion(connection, promotion)
            if row.state == PromotionState.ROLLED_BACK:
                return _promotion_of(row)
            served = _endpoint(connection, row.endpoint)
            if served.artifact != row.digest:
                raise ConflictError(f"it serves {short(served.artifact)} by now", place=f"endpoint {row.endpoint}")
            self._end(connection, row, PromotionState.ROLLED_BACK, reason, event_time, cause)
            self._serve(connection, served, row.former, row.former_execution, None, ref)
            reach("promotions.before_commit")
            return _promotion_of(_promotion(connection, promotion))

    def keep_promotion(self, promotion: int, *, reason: str, event_time: float) -> None:
        with self._db.write() as connection:
            self._end(connection, _promotion(connection, promotion), PromotionState.KEPT, reason, event_time, {})
            reach("promotions.before_commit")

    def list_promotions(self, endpoint: str, *, limit: int | None = None) -> list[Promotion]:
        query = select(PROMOTION).where(PROMOTION.c.endpoint == endpoint).order_by(PROMOTION.c.id.desc()).limit(limit)
        with self._db.read() as connection:
            return [_promotion_of(row) for row in connection.execute(query)]

    def _serve(
        self,
        connection: Connection,
        served: Row[Any],
        digest: str,
        execution: str | None,
        options: Mapping[str, Json] | None,
        ref: str | None,
    ) -> None:
        """Want it, and name it; an endpoint that had failed (with the engine that goes) starts again."""
        # A host that goes on with an older version tries each generation once: `tries` belonged to the old wish.
        wish = {name: value for name, value in (options or served.options).items() if name != "tries"}
        self._want(connection, served.name, digest, execution, wish)
        if served.state == EndpointState.FAILED:
            where = ENDPOINT.c.name == served.name
            connection.execute(update(ENDPOINT).where(where).values(state=EndpointState.STARTING, error=None))
            told = {"from": EndpointState.FAILED}
            self._event(connection, f"endpoint/{served.name}", EndpointState.STARTING, told)
        if ref is not None:
            self._set_ref(connection, ref, digest, execution)

    def _keep_earlier(self, connection: Connection, endpoint: str, event_time: float) -> None:
        """Only the newest is on probation."""
        where = (PROMOTION.c.endpoint == endpoint) & (PROMOTION.c.state == PromotionState.PROBATION)
        for row in connection.execute(select(PROMOTION).where(where)).all():
            self._end(connection, row, PromotionState.KEPT, "another engine took its place", event_time, {})

    def _end(
        self,
        connection: Connection,
        row: Row[Any],
        state: PromotionState,
        reason: str,
        event_time: float,
        cause: Mapping[str, Json],
    ) -> None:
        old = PromotionState(row.state)
        check_change(CHANGES, old, state, f"promotion {row.id} of endpoint {row.endpoint}")
        if old is state:
            return
        values = {"state": state, "reason": reason, "ended": event_time}
        connection.execute(update(PROMOTION).where(PROMOTION.c.id == row.id).values(**values))
        told = {"id": row.id, "digest": row.digest, "reason": reason, "cause": dict(cause)}
        self._event(connection, f"endpoint/{row.endpoint}/promotion", state, told)


def _decision(connection: Connection, run: int) -> Row[Any]:
    row = connection.execute(select(DECISION).where(DECISION.c.run == run)).one_or_none()
    if row is None:
        raise NotFoundError(f"the gate has not decided in run {run}")
    return row


def _promotion(connection: Connection, number: int) -> Row[Any]:
    row = connection.execute(select(PROMOTION).where(PROMOTION.c.id == number)).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no promotion {number}")
    return row


def _of_decision(connection: Connection, decision: int) -> Promotion | None:
    row = connection.execute(select(PROMOTION).where(PROMOTION.c.decision == decision)).one_or_none()
    return None if row is None else _promotion_of(row)


def _endpoint(connection: Connection, name: str) -> Row[Any]:
    row = connection.execute(select(ENDPOINT).where(ENDPOINT.c.name == name)).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no endpoint {name!r}", cure="`onejob ps` lists the endpoints.")
    return row


def _decision_of(row: Row[Any]) -> Decision:
    return Decision(
        run=row.run,
        endpoint=row.endpoint,
        verdict=row.verdict,
        reasons=tuple(row.reasons),
        missing=tuple(row.missing),
        champion=row.champion,
        challenger=row.challenger,
        execution=row.execution,
        artifact=row.artifact,
        event_time=row.event_time,
        look=row.look,
        created=row.created,
        applied=row.applied,
        outcome=row.outcome,
    )


def _promotion_of(row: Row[Any]) -> Promotion:
    return Promotion(
        id=row.id,
        endpoint=row.endpoint,
        digest=row.digest,
        execution=row.execution,
        former=row.former,
        former_execution=row.former_execution,
        cause=row.cause,
        created=row.created,
        event_time=row.event_time,
        state=PromotionState(row.state),
        reason=row.reason,
        ended=row.ended,
    )
