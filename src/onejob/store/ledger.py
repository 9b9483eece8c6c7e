"""The ledger on SQLite or PostgreSQL: the same statements, each method one transaction.

The parts lie beside it: runs, executions, leases, catalog, endpoints, segments, signals, promotions, log;
docs/design/ledger.md tells how they hold together.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from onejob.core.records import Owner
from onejob.store.connect import Database
from onejob.store.executions import SqlExecutions
from onejob.store.leases import SqlLeases, alive
from onejob.store.log import SqlLog
from onejob.store.migrate import migrate
from onejob.store.promotions import SqlPromotions
from onejob.store.segments import SqlSegments


class SqlLedger(SqlPromotions, SqlExecutions, SqlLeases, SqlSegments, SqlLog):
    """Opens the database at a URL (see connect.Database), makes or brings up to date its tables, and remembers.

    `token(n)` gives 2n random hex digits; `alive` says whether the owner of a lease lives (None: can't be told).
    """

    def __init__(
        self,
        url: str,
        clock: Callable[[], float] = time.time,
        token: Callable[[int], str] = secrets.token_hex,
        alive: Callable[[Owner], bool | None] = alive,
    ) -> None:
        database = Database(url)
        try:
            migrate(database, clock)
        except BaseException:
            database.close()
            raise
        super().__init__(database, clock, token, alive)

    @property
    def place(self) -> str:
        """Where the ledger is kept, without the password."""
        return self._db.place

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """One state of all tables, to read at length while others write."""
        with self._db.snapshot() as connection:
            yield connection

    def close(self) -> None:
        self._db.close()
