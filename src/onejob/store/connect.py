"""The door to the database: engines, transactions, and errors in words that name place and cure.

Two kinds of transaction, the same on both databases. A *read* sees one state. A *write* is alone: on SQLite it begins
with BEGIN IMMEDIATE, so that it never has to turn a read lock into a write lock ("database is locked"); on PostgreSQL
it first updates the one row of `mutex`. Numbers that count up (runs, events) are thus given out in the order of the
commits, and a reader that asks for the events after a number misses none.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, update
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from onejob.errors import OnejobError, StorageFullError, StoreError
from onejob.store.schema import MUTEX

BUSY_SECONDS = 60
"""How long a writer waits for its turn before it says that the ledger is stuck."""
WAL_TRIES = 200
WRITER = "onejob_writer"


class Database:
    """One database by URL: `sqlite:///path` (all after the slashes is the path), `postgresql://...`, or a path."""

    def __init__(self, url: str) -> None:
        self._url = parse_url(url)
        self.is_postgres = self._url.get_backend_name() == "postgresql"
        self.place = show_url(self._url)
        self.engine = self._open()
        self._writer = self.engine.execution_options(**{WRITER: True})

    def _open(self) -> Engine:
        if self.is_postgres:
            return _open_postgres(self._url, self.place)
        path = Path(str(self._url.database))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"the ledger's folder can't be made ({error.strerror})", place=self.place, cure=_CURE_PLACE
            ) from error
        return _open_sqlite(self._url)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads, and sees one state of the ledger."""
        with self._translated(), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def write(self, *, mutex: bool = True) -> Iterator[Connection]:
        """A transaction that is the only writer while it lasts."""
        with self._translated(), self._writer.begin() as connection:
            if mutex and self.is_postgres:
                connection.execute(update(MUTEX).where(MUTEX.c.name == "writer").values(turns=MUTEX.c.turns + 1))
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A long read of one state, while others write."""
        with self._translated(), self.engine.connect() as connection:
            if self.is_postgres:
                connection.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                yield connection

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OnejobError:
            raise
        except (DBAPIError, sqlite3.Error, PoolTimeoutError) as error:
            raise translate(error, self.place) from error


def parse_url(url: str) -> URL:
    """The URL with its driver; a text without `://` is the path of an SQLite file, and so is all after `sqlite:///`."""
    if "://" not in url or url.startswith("sqlite:"):
        path = url.removeprefix("sqlite:///") if url.startswith("sqlite:") else url
        if not path or path.startswith("sqlite:"):
            raise StoreError("the ledger's URL names no file", place=url, cure="Write sqlite:////absolute/path.")
        return URL.create("sqlite", database=path)
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StoreError("the ledger's URL can't be read", cure=_CURE_URL) from error
    if parsed.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    raise StoreError(f"a ledger can't be kept in {parsed.drivername!r}", place=show_url(parsed), cure=_CURE_URL)


def show_url(url: URL) -> str:
    """The URL for a person: without the password, wherever it stands."""
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    return url.difference_update_query(["password", "sslpassword"]).render_as_string(hide_password=True)


def translate(error: Exception, place: str) -> StoreError:
    """The database's error as one of ours: what is wrong, where, and what would help."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    code = getattr(cause, "sqlite_errorname", None) or getattr(cause, "sqlstate", None) or ""
    words = " ".join(str(cause).split()) or type(cause).__name__
    for prefix, (what, cure, kind) in _KNOWN.items():
        if code.startswith(prefix):
            return kind(f"{what} ({words})", place=place, cure=cure)
    if isinstance(error, PoolTimeoutError) or not code:
        return StoreError(f"the ledger can't be reached ({words})", place=place, cure=_CURE_REACH)
    return StoreError(f"the ledger answered with an error ({code}: {words})", place=place)


_CURE_URL = "Write sqlite:////absolute/path or postgresql://user@host/database."
_CURE_PLACE = "Name another home with --home, or make this one writable."
_CURE_REACH = "See that the server runs, and that host, user and database in config.toml are right."
_CURE_FULL = "Free some space, for example with `onejob gc`."
_CURE_DAMAGED = "Restore a backup into a new home with `onejob restore`."
_KNOWN: dict[str, tuple[str, str, type[StoreError]]] = {
    "SQLITE_READONLY": ("the ledger is on a read-only disk, or may not be written", _CURE_PLACE, StoreError),
    "SQLITE_CANTOPEN": ("the ledger can't be opened", _CURE_PLACE, StoreError),
    "SQLITE_PERM": ("the ledger may not be opened", _CURE_PLACE, StoreError),
    "SQLITE_CORRUPT": ("the ledger is damaged", _CURE_DAMAGED, StoreError),
    "SQLITE_NOTADB": ("the file is not a ledger", _CURE_DAMAGED, StoreError),
    "SQLITE_FULL": ("no space is left for the ledger", _CURE_FULL, StorageFullError),
    "SQLITE_IOERR": ("the disk of the ledger failed", "See `dmesg`, and the free space.", StoreError),
    "SQLITE_BUSY": (
        f"another process has kept the ledger locked for {BUSY_SECONDS} s",
        "See which one with `lsof`, and end it.",
        StoreError,
    ),
    "08": ("the ledger's server can't be reached", _CURE_REACH, StoreError),
    "28": ("the ledger's server refused the user", _CURE_REACH, StoreError),
    "3D": ("the ledger's database isn't there", "Make it with `createdb`.", StoreError),
    "42501": ("the ledger's server forbids it", "Give the user the right to create tables.", StoreError),
    "53100": ("no space is left for the ledger", _CURE_FULL, StorageFullError),
    "53": ("the ledger's server has no room", "See its log and its `max_connections`.", StoreError),
    "55P03": (
        f"another process has kept the ledger locked for {BUSY_SECONDS} s",
        "See `select * from pg_stat_activity`.",
        StoreError,
    ),
    "25006": ("the ledger's server only reads", "Name the primary server in the URL.", StoreError),
    "57": ("the ledger's server is going down", "Try again when it is up.", StoreError),
}


# ---- SQLite --------------------------------------------------------------------------------------------------------


def _open_sqlite(url: URL) -> Engine:
    engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS}, pool_size=4, max_overflow=-1)
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, record: Any) -> None:
    # The driver begins no transactions by itself: `_begin_sqlite` says how each begins.
    connection.isolation_level = None
    _switch_to_wal(connection)
    # FULL: a commit is on the disk before we act on it; what we told the world survives a power cut.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _switch_to_wal(connection: Any) -> None:
    """WAL is a property of the file; SQLite doesn't wait for its turn when it changes it, so we do."""
    for attempt in range(WAL_TRIES):
        try:
            if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] == "wal":
                return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or attempt == WAL_TRIES - 1:
                raise
        time.sleep(0.01)
    # A file system without shared memory (some network disks): the old journal is slower, and as safe.


def _begin_sqlite(connection: Connection) -> None:
    writer = connection.get_execution_options().get(WRITER)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writer else "BEGIN")


# ---- PostgreSQL ----------------------------------------------------------------------------------------------------


def _open_postgres(url: URL, place: str) -> Engine:
    # A client that hangs inside a transaction must not hold up all others for ever.
    settings = f"-c lock_timeout={BUSY_SECONDS}s -c idle_in_transaction_session_timeout={BUSY_SECONDS}s"
    arguments = {"connect_timeout": 10, "keepalives_idle": 30, "options": settings}
    try:
        return create_engine(url, connect_args=arguments, pool_size=4, max_overflow=-1, pool_pre_ping=True)
    except (ModuleNotFoundError, ImportError, NoSuchModuleError) as error:
        cure = "Install it with `pip install 'onejob[postgres]'`."
        raise StoreError("the driver psycopg is not installed", place=place, cure=cure) from error
