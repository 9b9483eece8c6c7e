"""The tables of the ledger, as SQLAlchemy sees them; migrate.py makes them.

Values that are JSON lie in text columns, written with ASCII only, so that both databases take any text (SQLite would
take a NUL character, PostgreSQL would not). Names are compared byte by byte on both: PostgreSQL's columns have
collation "C".
"""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import BigInteger, Column, Dialect, Float, ForeignKey, Integer, MetaData, Table, Text
from sqlalchemy.types import TypeDecorator


class JsonText(TypeDecorator[Any]):
    """JSON in a text column; NULL is None."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


class Line(TypeDecorator[str]):
    """A line for a person; what a database can't keep (NUL, lone surrogates) is shown as a replacement mark."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else value.replace("\0", "\ufffd").encode(errors="replace").decode()


metadata = MetaData()


def _lease() -> list[Column[Any]]:
    """Who works on it: the token stays when the work has ended, so that ending it twice is ending it once."""
    return [
        Column("lease_owner", Text),
        Column("lease_token", Text),
        Column("lease_expires", Float),
        Column("lease_ttl", Float),
    ]


MIGRATION = Table(
    "migration",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("name", Text, nullable=False),
    Column("applied", Float, nullable=False),
)

MUTEX = Table(
    "mutex",
    metadata,
    Column("name", Text, primary_key=True),
    Column("turns", BigInteger, nullable=False),
)

RUN = Table(
    "run",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("job", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("project", JsonText, nullable=False),
    Column("spec", JsonText, nullable=False),
    Column("plan", JsonText, nullable=False),
    Column("cause", JsonText, nullable=False),
    Column("forced", JsonText, nullable=False),
    Column("created", Float, nullable=False),
    Column("finished", Float),
    Column("error", JsonText),
    *_lease(),
)

EXECUTION = Table(
    "execution",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("id", Text, nullable=False, unique=True),
    Column("key", Text, nullable=False),
    Column("step", Text, nullable=False),
    Column("job", Text, nullable=False),
    Column("run", BigInteger, ForeignKey("run.id"), nullable=False),
    Column("state", Text, nullable=False),
    Column("created", Float, nullable=False),
    Column("started", Float),
    Column("finished", Float),
    Column("needs", JsonText, nullable=False),
    Column("executor", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("handle", JsonText),
    Column("inputs", JsonText, nullable=False),
    Column("outputs", JsonText, nullable=False),
    Column("measured", JsonText, nullable=False),
    Column("error", JsonText),
    Column("forgotten", Line),
    Column("asked", Float, nullable=False),
    *_lease(),
)
"""`number` counts up in the order of the claims; `asked` is the last time that a claim asked for the key."""

STEP = Table(
    "step",
    metadata,
    Column("run", BigInteger, ForeignKey("run.id"), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("name", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("step", JsonText, nullable=False),
    Column("key", Text),
    Column("execution", Text, ForeignKey("execution.id")),
    Column("cached", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("reason", Line, nullable=False),
)

STEP_KEY = Table(
    "step_key",
    metadata,
    Column("key", Text, primary_key=True),
    Column("components", JsonText, nullable=False),
    Column("created", Float, nullable=False),
)

ARTIFACT = Table(
    "artifact",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("manifest", JsonText, nullable=False),
    Column("locations", JsonText, nullable=False),
    Column("seen", Float, nullable=False),
    Column("touched", Float, nullable=False),
)
"""`seen` is the first time that it was added, `touched` the last: gc leaves alone what was touched of late."""

OUTPUT = Table(
    "output",
    metadata,
    Column("artifact", Text, primary_key=True),
    Column("execution", Text, ForeignKey("execution.id"), primary_key=True),
    Column("name", Text, primary_key=True),
)
"""From an artifact back to the executions that left it."""

REF = Table(
    "ref",
    metadata,
    Column("name", Text, primary_key=True),
    Column("digest", Text, nullable=False),
    Column("execution", Text, ForeignKey("execution.id")),
    Column("updated", Float, nullable=False),
)

ENDPOINT = Table(
    "endpoint",
    metadata,
    Column("name", Text, primary_key=True),
    Column("state", Text, nullable=False),
    Column("artifact", Text, nullable=False),
    Column("execution", Text, ForeignKey("execution.id")),
    Column("options", JsonText, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("port", Integer, nullable=False),
    Column("handle", JsonText),
    Column("created", Float, nullable=False),
    Column("updated", Float, nullable=False),
    Column("error", JsonText),
    *_lease(),
)

SEGMENT = Table(
    "segment",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("endpoint", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("begins", Float, nullable=False),
    Column("ends", Float, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("added", Float, nullable=False),
)
"""What came back from an endpoint: artifacts of kind `traffic` and `labels`, in the order in which they were sealed."""

SIGNAL = Table(
    "signal",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("endpoint", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("champion", Text),
    Column("block", Text, nullable=False),
    Column("value", Float),
    Column("threshold", Float),
    Column("evidence", JsonText, nullable=False),
    Column("report", Text),
    Column("place", Integer, nullable=False),
    Column("created", Float, nullable=False),
    Column("event_time", Float, nullable=False),
    Column("run", BigInteger, ForeignKey("run.id")),
)
"""What was found about an endpoint; of one engine, the same finding of the same block once."""

TURN = Table(
    "turn",
    metadata,
    Column("run", BigInteger, ForeignKey("run.id"), primary_key=True, autoincrement=False),
    Column("endpoint", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("event_time", Float, nullable=False),
    Column("champion", Text, nullable=False),
    Column("facts", JsonText, nullable=False),
    Column("taken", Float),
    Column("outcome", Line, nullable=False),
)
"""The runs that an endpoint's loop has added by itself."""

DECISION = Table(
    "decision",
    metadata,
    Column("run", BigInteger, ForeignKey("run.id"), primary_key=True, autoincrement=False),
    Column("endpoint", Text, nullable=False),
    Column("verdict", Text, nullable=False),
    Column("reasons", JsonText, nullable=False),
    Column("missing", JsonText, nullable=False),
    Column("champion", Text, nullable=False),
    Column("challenger", Text, nullable=False),
    Column("execution", Text, ForeignKey("execution.id")),
    Column("artifact", Text, nullable=False),
    Column("look", Integer, nullable=False),
    Column("created", Float, nullable=False),
    Column("event_time", Float, nullable=False),
    Column("applied", Float),
    Column("outcome", Line, nullable=False),
)
"""What the gate said of a challenger; `applied` when something came of it."""

PROMOTION = Table(
    "promotion",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("endpoint", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("execution", Text, ForeignKey("execution.id")),
    Column("former", Text, nullable=False),
    Column("former_execution", Text, ForeignKey("execution.id")),
    Column("cause", JsonText, nullable=False),
    Column("created", Float, nullable=False),
    Column("event_time", Float, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Line, nullable=False),
    Column("ended", Float),
    Column("decision", BigInteger, ForeignKey("decision.run"), unique=True),
)
"""An engine that took another's place at an endpoint; a decision leads to one at most."""

EVENT = Table(
    "event",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("time", Float, nullable=False),
    Column("subject", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("data", JsonText, nullable=False),
)
