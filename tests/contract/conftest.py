"""Fixtures of the contract tests: a real PostgreSQL of their own, and a fresh ledger on each database."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onejob.errors import UnavailableError
from onejob.store.ledger import SqlLedger
from onejob.testing.postgres import PostgresServer

NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A throw-away server; where checks must be complete (CI), it has to be there."""
    try:
        server = PostgresServer()
    except UnavailableError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))
    with server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a new, empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'ledger.db'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    name = f"test{next(NUMBERS)}"
    yield server.database(name)
    server.drop(name)


@pytest.fixture
def open_ledger(database_url: str) -> Iterator[Callable[..., SqlLedger]]:
    """Opens the same ledger as often as it is called; closes them all."""
    opened: list[SqlLedger] = []

    def open_one(**keywords: Any) -> SqlLedger:
        opened.append(SqlLedger(database_url, **keywords))
        return opened[-1]

    yield open_one
    for ledger in opened:
        ledger.close()
