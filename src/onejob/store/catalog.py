"""Artifacts and refs in the ledger: what there is, who made it, and what it is called."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, exists, insert, or_, select, update

from onejob.core.artifact import Artifact, short
from onejob.core.faults import reach
from onejob.core.records import Execution, Ref
from onejob.core.state import ExecutionState
from onejob.errors import ConflictError, NotFoundError, UsageError
from onejob.store.rows import LIVE, Part, execution_of, ref_of
from onejob.store.schema import ARTIFACT, ENDPOINT, EXECUTION, OUTPUT, PROMOTION, REF, SEGMENT

SHORTEST_PREFIX = 6


class SqlCatalog(Part):
    """The tables `artifact`, `output` and `ref`."""

    def add_artifact(self, artifact: Artifact, *, locations: Mapping[str, str] | None = None) -> None:
        with self._db.write() as connection:
            self._add_artifact(connection, artifact, locations)

    def _add_artifact(
        self, connection: Connection, artifact: Artifact, locations: Mapping[str, str] | None = None
    ) -> str:
        """Index an artifact in the transaction of the caller; adding it again only says that it is wanted still."""
        digest, now = artifact.digest, self._clock()
        known = connection.execute(select(ARTIFACT.c.digest).where(ARTIFACT.c.digest == digest)).one_or_none()
        if known is None:
            values: dict[str, Any] = {"digest": digest, "kind": artifact.kind, "manifest": artifact.manifest()}
            values |= {"locations": dict(locations or {}), "seen": now, "touched": now}
            connection.execute(insert(ARTIFACT).values(**values))
            self._event(connection, f"artifact/{digest}", "added", {"kind": artifact.kind})
            return digest
        again: dict[str, Any] = {"touched": now}
        if locations is not None:
            again["locations"] = dict(locations)
        connection.execute(update(ARTIFACT).where(ARTIFACT.c.digest == digest).values(**again))
        return digest

    def get_artifact(self, digest: str) -> Artifact:
        with self._db.read() as connection:
            full = _full_digest(connection, digest)
            manifest = connection.execute(select(ARTIFACT.c.manifest).where(ARTIFACT.c.digest == full)).scalar_one()
        return Artifact.from_manifest(manifest)

    def locations(self, digest: str) -> Mapping[str, str]:
        with self._db.read() as connection:
            full = _full_digest(connection, digest)
            found: Mapping[str, str] = connection.execute(
                select(ARTIFACT.c.locations).where(ARTIFACT.c.digest == full)
            ).scalar_one()
        return found

    def list_artifacts(self, *, kind: str | None = None) -> list[tuple[str, Artifact, float]]:
        query = select(ARTIFACT).order_by(ARTIFACT.c.seen.desc(), ARTIFACT.c.digest)
        if kind is not None:
            query = query.where(ARTIFACT.c.kind == kind)
        with self._db.read() as connection:
            return [(row.digest, Artifact.from_manifest(row.manifest), row.seen) for row in connection.execute(query)]

    def producers(self, digest: str) -> list[Execution]:
        made = select(OUTPUT.c.execution).where(OUTPUT.c.artifact == digest)
        query = select(EXECUTION).where(EXECUTION.c.id.in_(made)).order_by(EXECUTION.c.number.desc())
        with self._db.read() as connection:
            return [execution_of(row) for row in connection.execute(query)]

    def set_ref(self, name: str, digest: str, execution: str | None, *, expect: str | None = None) -> None:
        with self._db.write() as connection:
            self._set_ref(connection, name, digest, execution, expect)
            reach("catalog.before_commit")

    def _set_ref(
        self, connection: Connection, name: str, digest: str, execution: str | None, expect: str | None = None
    ) -> None:
        """The same in the transaction of the caller."""
        old = connection.execute(select(REF).where(REF.c.name == name)).one_or_none()
        was = None if old is None else old.digest
        if expect is not None and was != expect:
            points = f"points at {short(was)}" if was else "isn't there"
            raise ConflictError(f"it {points}, not at {short(expect)}", place=name, cure="Look again, then decide.")
        _full_digest(connection, digest)
        if old is not None and (old.digest, old.execution) == (digest, execution):
            return
        values: dict[str, Any] = {"digest": digest, "execution": execution, "updated": self._clock()}
        if old is None:
            connection.execute(insert(REF).values(name=name, **values))
        else:
            connection.execute(update(REF).where(REF.c.name == name).values(**values))
        self._event(connection, f"ref/{name}", "set", {"digest": digest, "execution": execution, "was": was})

    def get_ref(self, name: str) -> Ref | None:
        with self._db.read() as connection:
            row = connection.execute(select(REF).where(REF.c.name == name)).one_or_none()
        return None if row is None else ref_of(row)

    def list_refs(self, prefix: str = "") -> list[Ref]:
        query = select(REF).order_by(REF.c.name)
        if prefix:
            # A range, not LIKE: SQLite's LIKE doesn't tell a from A. No name holds the last character of Unicode.
            query = query.where(REF.c.name >= prefix, REF.c.name < prefix + "\U0010ffff")
        with self._db.read() as connection:
            return [ref_of(row) for row in connection.execute(query)]

    def drop_artifacts(self, digests: Sequence[str]) -> None:
        """ConflictError, and nothing is dropped, if something refers to one of them."""
        with self._db.write() as connection:
            for digest in digests:
                if user := _user(connection, digest):
                    raise ConflictError(f"{user} refers to it", place=f"artifact {short(digest)}")
                self._drop(connection, digest)
            reach("catalog.before_commit")

    def drop_unused(self, digests: Sequence[str], before: float) -> list[str]:
        """Forget those of the artifacts to which nothing refers and that nobody added since; gives their digests."""
        dropped = []
        with self._db.write() as connection:
            for digest in digests:
                touched = connection.scalar(select(ARTIFACT.c.touched).where(ARTIFACT.c.digest == digest))
                if touched is None or touched >= before or _user(connection, digest):
                    continue
                self._drop(connection, digest)
                dropped.append(digest)
            reach("catalog.before_commit")
        return dropped

    def _drop(self, connection: Connection, digest: str) -> None:
        if connection.execute(delete(ARTIFACT).where(ARTIFACT.c.digest == digest)).rowcount:
            self._event(connection, f"artifact/{digest}", "dropped", {})


def _user(connection: Connection, digest: str) -> str:
    """What refers to an artifact: a ref, an endpoint, a live execution that reads it, a done one that counts."""
    if name := connection.scalar(select(REF.c.name).where(REF.c.digest == digest).limit(1)):
        return f"the ref {name}"
    if name := connection.scalar(select(ENDPOINT.c.name).where(ENDPOINT.c.artifact == digest).limit(1)):
        return f"the endpoint {name}"
    if name := connection.scalar(select(SEGMENT.c.endpoint).where(SEGMENT.c.digest == digest).limit(1)):
        return f"what came back from the endpoint {name}"
    promoted = or_(PROMOTION.c.digest == digest, PROMOTION.c.former == digest)
    if name := connection.scalar(select(PROMOTION.c.endpoint).where(promoted).limit(1)):
        return f"a promotion of the endpoint {name}"
    made = exists().where(OUTPUT.c.execution == EXECUTION.c.id, OUTPUT.c.artifact == digest)
    done = (EXECUTION.c.state == ExecutionState.DONE) & EXECUTION.c.forgotten.is_(None) & made
    if found := connection.scalar(select(EXECUTION.c.id).where(done).limit(1)):
        return f"the execution {found}"
    live = connection.execute(select(EXECUTION.c.id, EXECUTION.c.inputs).where(EXECUTION.c.state.in_(LIVE)))
    return next((f"the execution {row.id}" for row in live.all() if digest in row.inputs.values()), "")


def _full_digest(connection: Connection, digest: str) -> str:
    if not re.fullmatch(rf"[0-9a-f]{{{SHORTEST_PREFIX},64}}", digest):
        cure = f"Write at least {SHORTEST_PREFIX} of its hex digits."
        raise UsageError("that is no digest of an artifact", place=digest or "''", cure=cure)
    # "g" follows the last hex digit.
    query = select(ARTIFACT.c.digest).where(ARTIFACT.c.digest >= digest, ARTIFACT.c.digest < digest + "g")
    found = list(connection.scalars(query.order_by(ARTIFACT.c.digest).limit(3)))
    if not found:
        raise NotFoundError(
            "there is no such artifact",
            place=short(digest),
            cure="`onejob show RUN` lists what a run has left; `onejob gc` may have freed it.",
        )
    if len(found) > 1:
        raise UsageError(
            f"several artifacts begin so: {', '.join(found[:2])} ...", place=digest, cure="Write more of its digits."
        )
    return str(found[0])
