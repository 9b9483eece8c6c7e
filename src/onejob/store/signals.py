"""What is found about endpoints, in the ledger, and the runs that an endpoint's loop adds because of it.

A finding is stored once, however many reports tell it and however often they are read. A run is added in the
transaction in which it consumes the signals that cause it, and only while no run of its kind is open: so a signal
causes one run at most, and a thousand signals cause one run, whoever is killed at whichever line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from onejob.core.artifact import Json
from onejob.core.faults import reach
from onejob.core.records import NewRun, NewSignal, NewTurn, Run, Signal, Turn
from onejob.errors import NotFoundError
from onejob.store.rows import OPEN, next_number
from onejob.store.runs import SqlRuns
from onejob.store.schema import ENDPOINT, SIGNAL, TURN
from onejob.store.schema import RUN as RUN_TABLE


class SqlSignals(SqlRuns):
    """The tables `signal` and `turn`."""

    def add_signals(
        self,
        endpoint: str,
        signals: Sequence[NewSignal],
        *,
        event_time: float,
        champion: str | None = None,
        report: str | None = None,
        turn: int | None = None,
        facts: Mapping[str, Json] | None = None,
    ) -> list[Signal]:
        with self._db.write() as connection:
            if connection.scalar(select(ENDPOINT.c.name).where(ENDPOINT.c.name == endpoint)) is None:
                raise NotFoundError(f"there is no endpoint {endpoint!r}", cure="`onejob ps` lists the endpoints.")
            made = self._add_signals(connection, endpoint, signals, event_time, champion, report)
            if turn is not None:
                self._end_turn(connection, turn, f"{len(made)} new signals", facts)
            reach("signals.before_commit")
            return made

    def _add_signals(
        self,
        connection: Connection,
        endpoint: str,
        signals: Sequence[NewSignal],
        event_time: float,
        champion: str | None = None,
        report: str | None = None,
        run: int | None = None,
    ) -> list[Signal]:
        """Those that are new; the log tells of each of them."""
        made = []
        for place, signal in enumerate(signals):
            same = {"endpoint": endpoint, "champion": champion, "kind": signal.kind, "block": signal.block}
            if champion is not None and connection.scalar(select(SIGNAL.c.id).filter_by(**same)) is not None:
                continue
            number = connection.execute(select(next_number(SIGNAL.c.id))).scalar_one()
            values: dict[str, Any] = {**same, "run": run}
            values |= {"value": signal.value, "threshold": signal.threshold, "evidence": dict(signal.evidence)}
            values |= {"report": report, "place": place, "created": self._clock(), "event_time": event_time}
            connection.execute(insert(SIGNAL).values(id=number, **values))
            told: dict[str, Json] = {"id": number, "block": signal.block, "value": signal.value}
            self._event(connection, f"endpoint/{endpoint}/signal", signal.kind, told)
            made.append(_signal_of(connection.execute(select(SIGNAL).where(SIGNAL.c.id == number)).one()))
        return made

    def list_signals(self, endpoint: str, *, fresh: bool = False, limit: int | None = None) -> list[Signal]:
        query = select(SIGNAL).where(SIGNAL.c.endpoint == endpoint).order_by(SIGNAL.c.id.desc()).limit(limit)
        if fresh:
            query = query.where(SIGNAL.c.run.is_(None))
        with self._db.read() as connection:
            return [_signal_of(row) for row in connection.execute(query)]

    def add_turn(
        self, new: NewRun, turn: NewTurn, *, signals: Sequence[int] = (), raised: Sequence[NewSignal] = ()
    ) -> Run | None:
        with self._db.write() as connection:
            if _is_open(connection, turn) or _consumed(connection, signals):
                return None
            run = self._add_run(connection, new)
            values: dict[str, Any] = {"endpoint": turn.endpoint, "kind": turn.kind, "event_time": turn.event_time}
            values |= {"champion": turn.champion, "facts": dict(turn.facts), "outcome": ""}
            connection.execute(insert(TURN).values(run=run.id, **values))
            for signal in signals:
                connection.execute(update(SIGNAL).where(SIGNAL.c.id == signal).values(run=run.id))
            made = self._add_signals(connection, turn.endpoint, raised, turn.event_time, run=run.id)
            caused = [*signals, *(signal.id for signal in made)]
            told = {"run": run.id, "signals": caused}
            self._event(connection, f"endpoint/{turn.endpoint}/turn", turn.kind, told)
            reach("turns.before_commit")
            return run

    def list_turns(
        self, endpoint: str, *, kind: str | None = None, taken: bool | None = None, limit: int | None = None
    ) -> list[Turn]:
        query = select(TURN).where(TURN.c.endpoint == endpoint).order_by(TURN.c.run.desc()).limit(limit)
        if kind is not None:
            query = query.where(TURN.c.kind == kind)
        if taken is not None:
            query = query.where(TURN.c.taken.is_not(None) if taken else TURN.c.taken.is_(None))
        with self._db.read() as connection:
            return [_turn_of(row) for row in connection.execute(query)]

    def end_turn(self, run: int, outcome: str) -> None:
        with self._db.write() as connection:
            self._end_turn(connection, run, outcome)
            reach("turns.before_commit")

    def _end_turn(
        self, connection: Connection, run: int, outcome: str, facts: Mapping[str, Json] | None = None
    ) -> None:
        row = connection.execute(select(TURN).where(TURN.c.run == run)).one_or_none()
        if row is None:
            raise NotFoundError(f"run {run} is none that a loop has added")
        if row.taken is not None:
            return
        values = {"taken": self._clock(), "outcome": outcome, "facts": {**row.facts, **(facts or {})}}
        connection.execute(update(TURN).where(TURN.c.run == run).values(**values))
        self._event(connection, f"endpoint/{row.endpoint}/turn", f"{row.kind} ended", {"run": run, "outcome": outcome})


def _is_open(connection: Connection, turn: NewTurn) -> bool:
    """Whether a run of this kind goes on, or its result was not taken over yet."""
    query = select(TURN.c.run).join(RUN_TABLE, RUN_TABLE.c.id == TURN.c.run)
    query = query.where(TURN.c.endpoint == turn.endpoint, TURN.c.kind == turn.kind)
    return connection.scalar(query.where(RUN_TABLE.c.state.in_(OPEN) | TURN.c.taken.is_(None)).limit(1)) is not None


def _consumed(connection: Connection, signals: Sequence[int]) -> bool:
    """Whether one of them has caused a run already (or isn't there)."""
    query = select(SIGNAL.c.run).where(SIGNAL.c.id.in_(signals))
    runs = connection.scalars(query).all()
    return len(runs) != len(set(signals)) or any(run is not None for run in runs)


def _signal_of(row: Row[Any]) -> Signal:
    return Signal(
        id=row.id,
        endpoint=row.endpoint,
        kind=row.kind,
        champion=row.champion,
        block=row.block,
        value=row.value,
        threshold=row.threshold,
        evidence=row.evidence,
        report=row.report,
        place=row.place,
        created=row.created,
        event_time=row.event_time,
        run=row.run,
    )


def _turn_of(row: Row[Any]) -> Turn:
    return Turn(row.run, row.endpoint, row.kind, row.event_time, row.champion, row.facts, row.taken, row.outcome)
