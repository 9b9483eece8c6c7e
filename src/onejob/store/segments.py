"""Segments in the ledger: what came back from each endpoint, in the order in which it was sealed.

A table and not refs: a year of traffic is many thousands of them, read by ranges of time and of numbers ("what is new
since?"), and none needs a name. gc keeps what a segment names until the segment is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, insert, select

from onejob.core.artifact import Artifact
from onejob.core.faults import reach
from onejob.core.records import Segment
from onejob.errors import NotFoundError
from onejob.store.catalog import SqlCatalog
from onejob.store.rows import next_number
from onejob.store.schema import ENDPOINT, SEGMENT


class SqlSegments(SqlCatalog):
    """The table `segment`."""

    def add_segment(self, endpoint: str, artifact: Artifact, *, begins: float, ends: float, rows: int) -> Segment:
        digest = artifact.digest
        query = select(SEGMENT).where(SEGMENT.c.endpoint == endpoint, SEGMENT.c.digest == digest)
        with self._db.write() as connection:
            if connection.scalar(select(ENDPOINT.c.name).where(ENDPOINT.c.name == endpoint)) is None:
                raise NotFoundError(f"there is no endpoint {endpoint!r}", cure="`onejob ps` lists the endpoints.")
            row = connection.execute(query).one_or_none()
            if row is None:
                self._add_artifact(connection, artifact)
                values = {"endpoint": endpoint, "digest": digest, "kind": artifact.kind, "added": self._clock()}
                values |= {"begins": begins, "ends": ends, "rows": rows}
                connection.execute(insert(SEGMENT).values(number=next_number(SEGMENT.c.number), **values))
                row = connection.execute(query).one()
                told = {"digest": digest, "rows": rows, "number": row.number}
                self._event(connection, f"endpoint/{endpoint}/{artifact.kind}", "sealed", told)
                reach("segments.before_commit")
            return _segment_of(row)

    def list_segments(
        self,
        endpoint: str,
        *,
        kind: str | None = None,
        after: int = 0,
        since: float | None = None,
        until: float | None = None,
        newest: int | None = None,
    ) -> list[Segment]:
        query = select(SEGMENT).where(SEGMENT.c.endpoint == endpoint, SEGMENT.c.number > after)
        if kind is not None:
            query = query.where(SEGMENT.c.kind == kind)
        if since is not None:
            query = query.where(SEGMENT.c.ends >= since)
        if until is not None:
            query = query.where(SEGMENT.c.begins < until)
        with self._db.read() as connection:
            found = connection.execute(query.order_by(SEGMENT.c.number.desc()).limit(newest)).all()
        return [_segment_of(row) for row in reversed(found)]

    def drop_segments(self, endpoint: str, numbers: Sequence[int]) -> int:
        dropped = 0
        with self._db.write() as connection:
            for number in numbers:
                found = delete(SEGMENT).where(SEGMENT.c.endpoint == endpoint, SEGMENT.c.number == number)
                dropped += connection.execute(found).rowcount
            if dropped:
                self._event(connection, f"endpoint/{endpoint}", "segments dropped", {"numbers": list(numbers)})
        return dropped


def _segment_of(row: Any) -> Segment:
    return Segment(row.number, row.endpoint, row.digest, row.kind, row.begins, row.ends, row.rows)
