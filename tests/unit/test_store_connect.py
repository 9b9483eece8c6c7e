"""URLs of the ledger, and the databases' errors in our words: with the place, without the password."""

from __future__ import annotations

import sqlite3

import pytest
from sqlalchemy.exc import OperationalError

from onejob.errors import StorageFullError, StoreError
from onejob.store.connect import parse_url, show_url, translate


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/a b/c'd?e#f%20.db", "/a b/c'd?e#f%20.db"),
        ("sqlite:////a b/c'd?e#f%20.db", "/a b/c'd?e#f%20.db"),
        ("sqlite:///ledger.db", "ledger.db"),
    ],
)
def test_a_path_is_taken_as_it_is(url: str, path: str) -> None:
    assert parse_url(url).database == path
    assert show_url(parse_url(url)) == path


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_postgres_is_reached_with_psycopg_and_its_password_not_shown(scheme: str) -> None:
    url = parse_url(f"{scheme}://ann:s3cret@db.example/onejob?password=s3cret&sslmode=require")
    assert url.drivername == "postgresql+psycopg"
    assert url.password == "s3cret"
    assert show_url(url) == "postgresql+psycopg://ann:***@db.example/onejob?sslmode=require"


@pytest.mark.parametrize("url", ["mysql://x/y", "sqlite://", "", "://"])
def test_other_urls_are_refused_with_a_cure(url: str) -> None:
    with pytest.raises(StoreError) as caught:
        parse_url(url)
    assert "sqlite:////absolute/path" in str(caught.value)


def sqlite_error(name: str) -> OperationalError:
    error = sqlite3.OperationalError("some words")
    error.sqlite_errorname = name
    return OperationalError("SELECT secret", {"a": 1}, error)


def postgres_error(state: str) -> OperationalError:
    class PsycopgError(Exception):
        sqlstate = state

    return OperationalError("SELECT secret", {}, PsycopgError("some words"))


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (sqlite_error("SQLITE_READONLY"), StoreError, "read-only"),
        (sqlite_error("SQLITE_READONLY_DIRECTORY"), StoreError, "read-only"),
        (sqlite_error("SQLITE_CANTOPEN"), StoreError, "--home"),
        (sqlite_error("SQLITE_CORRUPT"), StoreError, "restore"),
        (sqlite_error("SQLITE_NOTADB"), StoreError, "not a ledger"),
        (sqlite_error("SQLITE_FULL"), StorageFullError, "onejob gc"),
        (sqlite_error("SQLITE_BUSY"), StoreError, "locked for 60 s"),
        (sqlite_error("SQLITE_IOERR_WRITE"), StoreError, "disk of the ledger failed"),
        (postgres_error("08006"), StoreError, "can't be reached"),
        (postgres_error("28P01"), StoreError, "refused the user"),
        (postgres_error("3D000"), StoreError, "createdb"),
        (postgres_error("53100"), StorageFullError, "onejob gc"),
        (postgres_error("53300"), StoreError, "max_connections"),
        (postgres_error("55P03"), StoreError, "locked for 60 s"),
        (postgres_error("57P01"), StoreError, "going down"),
        (postgres_error("23505"), StoreError, "23505"),
        (postgres_error(""), StoreError, "can't be reached"),
    ],
)
def test_errors_name_place_and_cure(error: OperationalError, kind: type[StoreError], words: str) -> None:
    told = translate(error, "/home/ledger.db")
    assert type(told) is kind
    assert told.place == "/home/ledger.db"
    assert words in str(told)
    assert "some words" in str(told)
    assert "secret" not in str(told)
