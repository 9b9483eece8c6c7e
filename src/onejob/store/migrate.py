"""Numbered migrations: each is a list of statements, applied once, in order, in one transaction with its number.

The statements are frozen text: what has been released never changes, a new table or column is a new number. Several
processes may open a new database at once: one applies, the others wait and then find it done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection, insert, inspect, select, text

from onejob.core.faults import reach
from onejob.errors import StoreError
from onejob.store.connect import Database
from onejob.store.schema import MIGRATION

ADVISORY_LOCK = 0x6F6E656A6F62  # "onejob": the tables can't hold the lock before they are there


@dataclass(frozen=True, slots=True)
class Migration:
    """One step from one version of the tables to the next; NAME stands for a text that is compared byte by byte."""

    number: int
    name: str
    statements: tuple[str, ...]


_LEASE = "lease_owner TEXT, lease_token TEXT, lease_expires DOUBLE PRECISION, lease_ttl DOUBLE PRECISION"

MIGRATIONS = (
    Migration(
        1,
        "the first tables",
        (
            "CREATE TABLE mutex (name TEXT PRIMARY KEY, turns BIGINT NOT NULL)",
            "INSERT INTO mutex (name, turns) VALUES ('writer', 0)",
            f"""CREATE TABLE run (id BIGINT PRIMARY KEY, job NAME NOT NULL, state TEXT NOT NULL, project TEXT NOT NULL,
                spec TEXT NOT NULL, plan TEXT NOT NULL, cause TEXT NOT NULL, forced TEXT NOT NULL,
                created DOUBLE PRECISION NOT NULL, finished DOUBLE PRECISION, error TEXT, {_LEASE})""",
            "CREATE INDEX run_job ON run (job, id)",
            "CREATE INDEX run_open ON run (id) WHERE state IN ('queued', 'running')",
            f"""CREATE TABLE execution (number BIGINT PRIMARY KEY, id NAME NOT NULL UNIQUE, "key" NAME NOT NULL,
                step NAME NOT NULL, job NAME NOT NULL, run BIGINT NOT NULL REFERENCES run (id), state TEXT NOT NULL,
                created DOUBLE PRECISION NOT NULL, started DOUBLE PRECISION, finished DOUBLE PRECISION,
                needs TEXT NOT NULL, executor TEXT NOT NULL, host TEXT NOT NULL, handle TEXT, inputs TEXT NOT NULL,
                outputs TEXT NOT NULL, measured TEXT NOT NULL, error TEXT, forgotten TEXT,
                asked DOUBLE PRECISION NOT NULL, {_LEASE})""",
            # At most one live execution for each key, whatever the code above says.
            """CREATE UNIQUE INDEX execution_live ON execution ("key") WHERE state IN ('claimed', 'running')""",
            'CREATE INDEX execution_key ON execution ("key", number)',
            "CREATE INDEX execution_job ON execution (job, number)",
            """CREATE INDEX execution_slots ON execution (executor, host) WHERE state IN ('claimed', 'running')""",
            """CREATE TABLE step (run BIGINT NOT NULL REFERENCES run (id), position INTEGER NOT NULL,
                name NAME NOT NULL, state TEXT NOT NULL, step TEXT NOT NULL, "key" NAME,
                execution NAME REFERENCES execution (id), cached INTEGER NOT NULL, attempt INTEGER NOT NULL,
                reason TEXT NOT NULL, PRIMARY KEY (run, position), UNIQUE (run, name))""",
            "CREATE INDEX step_execution ON step (execution)",
            """CREATE TABLE step_key ("key" NAME PRIMARY KEY, components TEXT NOT NULL,
                created DOUBLE PRECISION NOT NULL)""",
            """CREATE TABLE artifact (digest NAME PRIMARY KEY, kind NAME NOT NULL, manifest TEXT NOT NULL,
                locations TEXT NOT NULL, seen DOUBLE PRECISION NOT NULL, touched DOUBLE PRECISION NOT NULL)""",
            """CREATE TABLE output (artifact NAME NOT NULL, execution NAME NOT NULL REFERENCES execution (id),
                name NAME NOT NULL, PRIMARY KEY (artifact, execution, name))""",
            """CREATE TABLE ref (name NAME PRIMARY KEY, digest NAME NOT NULL, execution NAME REFERENCES execution (id),
                updated DOUBLE PRECISION NOT NULL)""",
            f"""CREATE TABLE endpoint (name NAME PRIMARY KEY, state TEXT NOT NULL, artifact NAME NOT NULL,
                execution NAME REFERENCES execution (id), options TEXT NOT NULL, generation INTEGER NOT NULL,
                port INTEGER NOT NULL, handle TEXT, created DOUBLE PRECISION NOT NULL,
                updated DOUBLE PRECISION NOT NULL, error TEXT, {_LEASE})""",
            """CREATE TABLE event (seq BIGINT PRIMARY KEY, time DOUBLE PRECISION NOT NULL, subject NAME NOT NULL,
                kind TEXT NOT NULL, data TEXT NOT NULL)""",
            "CREATE INDEX event_subject ON event (subject, seq)",
        ),
    ),
    Migration(
        2,
        "what comes back from endpoints",
        (
            """CREATE TABLE segment (number BIGINT PRIMARY KEY, endpoint NAME NOT NULL, digest NAME NOT NULL,
                kind NAME NOT NULL, begins DOUBLE PRECISION NOT NULL, ends DOUBLE PRECISION NOT NULL,
                rows BIGINT NOT NULL, added DOUBLE PRECISION NOT NULL, UNIQUE (endpoint, digest))""",
            "CREATE INDEX segment_digest ON segment (digest)",
        ),
    ),
    Migration(
        3,
        "signals, turns, decisions and promotions",
        (
            """CREATE TABLE signal (id BIGINT PRIMARY KEY, endpoint NAME NOT NULL, kind NAME NOT NULL,
                champion NAME, block NAME NOT NULL, value DOUBLE PRECISION, threshold DOUBLE PRECISION,
                evidence TEXT NOT NULL, report NAME, place INTEGER NOT NULL, created DOUBLE PRECISION NOT NULL,
                event_time DOUBLE PRECISION NOT NULL, run BIGINT REFERENCES run (id),
                UNIQUE (endpoint, champion, kind, block))""",
            "CREATE INDEX signal_fresh ON signal (endpoint, id) WHERE run IS NULL",
            """CREATE TABLE turn (run BIGINT PRIMARY KEY REFERENCES run (id), endpoint NAME NOT NULL,
                kind NAME NOT NULL, event_time DOUBLE PRECISION NOT NULL, champion NAME NOT NULL, facts TEXT NOT NULL,
                taken DOUBLE PRECISION, outcome TEXT NOT NULL)""",
            "CREATE INDEX turn_endpoint ON turn (endpoint, run)",
            """CREATE TABLE decision (run BIGINT PRIMARY KEY REFERENCES run (id), endpoint NAME NOT NULL,
                verdict NAME NOT NULL, reasons TEXT NOT NULL, missing TEXT NOT NULL, champion NAME NOT NULL,
                challenger NAME NOT NULL, execution NAME REFERENCES execution (id), artifact NAME NOT NULL,
                look INTEGER NOT NULL, created DOUBLE PRECISION NOT NULL, event_time DOUBLE PRECISION NOT NULL,
                applied DOUBLE PRECISION, outcome TEXT NOT NULL)""",
            "CREATE INDEX decision_endpoint ON decision (endpoint, run)",
            """CREATE TABLE promotion (id BIGINT PRIMARY KEY, endpoint NAME NOT NULL, digest NAME NOT NULL,
                execution NAME REFERENCES execution (id), former NAME NOT NULL,
                former_execution NAME REFERENCES execution (id), cause TEXT NOT NULL,
                created DOUBLE PRECISION NOT NULL, event_time DOUBLE PRECISION NOT NULL, state NAME NOT NULL,
                reason TEXT NOT NULL, ended DOUBLE PRECISION, decision BIGINT UNIQUE REFERENCES decision (run))""",
            "CREATE INDEX promotion_endpoint ON promotion (endpoint, id)",
            "CREATE INDEX promotion_digest ON promotion (digest)",
            "CREATE INDEX promotion_former ON promotion (former)",
        ),
    ),
)


def newest() -> int:
    """The version of the tables that this code works with."""
    return MIGRATIONS[-1].number


def migrate(database: Database, clock: Callable[[], float], *, upto: int | None = None) -> None:
    """Bring the tables up to a version (None: the newest); StoreError if they are newer than this code knows."""
    upto = newest() if upto is None else upto
    with database.read() as connection:
        if _version(connection, database.place) >= upto:
            return
    with _alone(database) as connection:
        done = _version(connection, database.place)
        for migration in MIGRATIONS:
            if done < migration.number <= upto:
                _apply(connection, migration, clock())
        reach("migrate.before_commit")


def version(database: Database) -> int:
    """The number of the newest migration that the database has; 0 for an empty one."""
    with database.read() as connection:
        return _version(connection, database.place)


@contextmanager
def _alone(database: Database) -> Iterator[Connection]:
    """A transaction that no other migration runs beside."""
    with database.write(mutex=False) as connection:
        if database.is_postgres:
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": ADVISORY_LOCK})
        yield connection


def _version(connection: Connection, place: str) -> int:
    if not inspect(connection).has_table("migration"):
        return 0
    numbers = connection.scalars(select(MIGRATION.c.number)).all()
    found = max(numbers, default=0)
    if found > newest():
        raise StoreError(
            f"the ledger is of version {found}, and this onejob knows versions up to {newest()}",
            place=place,
            cure="Install the newer onejob that wrote it, or name another home with --home.",
        )
    return found


def _apply(connection: Connection, migration: Migration, now: float) -> None:
    name = 'TEXT COLLATE "C"' if connection.dialect.name == "postgresql" else "TEXT"
    if migration.number == 1:
        connection.exec_driver_sql(
            "CREATE TABLE migration (number INTEGER PRIMARY KEY, name TEXT NOT NULL, applied DOUBLE PRECISION NOT NULL)"
        )
    for statement in migration.statements:
        connection.exec_driver_sql(statement.replace("NAME", name))
    connection.execute(insert(MIGRATION), {"number": migration.number, "name": migration.name, "applied": now})
