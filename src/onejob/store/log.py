"""The append-only log: events, oldest first, in the order in which their changes were committed."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sqlalchemy import and_, func, or_, select
from sqlalchemy.sql.elements import ColumnElement

from onejob.core.artifact import Json
from onejob.core.records import Event
from onejob.store.rows import Part, event_of
from onejob.store.schema import EVENT


class SqlLog(Part):
    """Reads the log, and adds lines that tell of no change of state."""

    def events(self, *, after: int = 0, subject: str | None = None, limit: int | None = None) -> list[Event]:
        query = select(EVENT).where(EVENT.c.seq > after).order_by(EVENT.c.seq).limit(limit)
        if subject is not None:
            query = query.where(_about(subject))
        with self._db.read() as connection:
            return [event_of(row) for row in connection.execute(query)]

    def newest_event(self) -> int:
        with self._db.read() as connection:
            return connection.scalar(select(func.max(EVENT.c.seq))) or 0

    def add_event(self, subject: str, kind: str, data: Mapping[str, Json]) -> None:
        with self._db.write() as connection:
            self._event(connection, subject, kind, data)


def _about(subject: str) -> ColumnElement[bool]:
    """The subject itself and all below it; what is below a run is named `step/<run>/...` too."""
    found = [EVENT.c.subject == subject, _below(subject)]
    if re.fullmatch(r"run/\d+", subject):
        found.append(_below(subject.replace("run/", "step/")))
    return or_(*found)


def _below(subject: str) -> ColumnElement[bool]:
    # A range, not LIKE: it uses the index, and SQLite's LIKE doesn't tell a from A. "0" follows "/" in ASCII.
    return and_(EVENT.c.subject > f"{subject}/", EVENT.c.subject < f"{subject}0")
