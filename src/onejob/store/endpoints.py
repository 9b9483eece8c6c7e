"""Served names in the ledger: what each should serve, and where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, insert, select

from onejob.core.artifact import Json
from onejob.core.faults import reach
from onejob.core.records import Endpoint
from onejob.core.state import ENDPOINT as CHANGES
from onejob.core.state import EndpointState
from onejob.errors import ConflictError, NotFoundError
from onejob.store.rows import Part, change, check_change, endpoint_of
from onejob.store.schema import ENDPOINT


class SqlEndpoints(Part):
    """The table `endpoint`."""

    def want_endpoint(
        self, name: str, *, artifact: str, execution: str | None, options: Mapping[str, Json]
    ) -> Endpoint:
        """Another wish counts the generation up, and a ready endpoint is starting again.

        One that has failed or stopped stays so: starting it anew is a decision (`set_endpoint`).
        """
        with self._db.write() as connection:
            self._want(connection, name, artifact, execution, options)
            reach("endpoints.before_commit")
            return endpoint_of(_endpoint(connection, name))

    def _want(
        self, connection: Connection, name: str, artifact: str, execution: str | None, options: Mapping[str, Json]
    ) -> None:
        """The same in the transaction of the caller."""
        wish = {"artifact": artifact, "execution": execution, "options": dict(options)}
        row = connection.execute(select(ENDPOINT).where(ENDPOINT.c.name == name)).one_or_none()
        if row is not None and all(row._mapping[field] == value for field, value in wish.items()):
            return
        now = self._clock()
        if row is None:
            generation, state = 1, EndpointState.STARTING
            new = {"state": state, "generation": generation, "port": 0, "created": now, "updated": now}
            connection.execute(insert(ENDPOINT).values(name=name, **new, **wish))
        else:
            generation, old = row.generation + 1, EndpointState(row.state)
            state = EndpointState.STARTING if old is EndpointState.READY else old
            values = {"state": state, "generation": generation, "updated": now, **wish}
            change(connection, ENDPOINT, ENDPOINT.c.name == name, values)
        self._event(connection, f"endpoint/{name}", "wanted", {"generation": generation, "state": state, **wish})

    def get_endpoint(self, name: str) -> Endpoint | None:
        with self._db.read() as connection:
            row = connection.execute(select(ENDPOINT).where(ENDPOINT.c.name == name)).one_or_none()
        return None if row is None else endpoint_of(row)

    def list_endpoints(self) -> list[Endpoint]:
        with self._db.read() as connection:
            return [endpoint_of(row) for row in connection.execute(select(ENDPOINT).order_by(ENDPOINT.c.name))]

    def set_endpoint(
        self,
        name: str,
        state: EndpointState,
        *,
        port: int | None = None,
        handle: Json | None = None,
        error: Json | None = None,
        expect: EndpointState | None = None,
    ) -> None:
        """Say where it stands; what is None stays as it is, save that a state without an error has none."""
        with self._db.write() as connection:
            row = _endpoint(connection, name)
            old = EndpointState(row.state)
            if expect is not None and old is not expect:
                raise ConflictError(f"it is {old} by now, not {expect}", place=f"endpoint {name}")
            check_change(CHANGES, old, state, f"endpoint {name}")
            wished: dict[str, Any] = {"port": port, "handle": handle}
            told = {
                field: value for field, value in wished.items() if value is not None and value != row._mapping[field]
            }
            if (error or None) != row.error and (error is not None or state is not old):
                told["error"] = error or None
            if state is old and not told:
                return
            change(connection, ENDPOINT, ENDPOINT.c.name == name, {"state": state, "updated": self._clock(), **told})
            self._event(connection, f"endpoint/{name}", state, {"from": old, **told})
            reach("endpoints.before_commit")


def _endpoint(connection: Connection, name: str) -> Any:
    row = connection.execute(select(ENDPOINT).where(ENDPOINT.c.name == name)).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no endpoint {name!r}", cure="`onejob ps` lists the endpoints.")
    return row
