"""What the databases themselves do: tables, versions, locks, and bad days that get a clear error."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, insert, inspect, text
from sqlalchemy.exc import IntegrityError

from onejob.errors import StorageFullError, StoreError
from onejob.store import migrate
from onejob.store.connect import Database
from onejob.store.ledger import SqlLedger
from onejob.store.migrate import Migration, newest, version
from onejob.store.schema import EXECUTION, MIGRATION, metadata
from onejob.testing.ledger_samples import TTL, A, OpenLedger, new_run, request, won
from onejob.testing.postgres import PostgresServer

NOBODY = 65534


@pytest.fixture
def database(open_ledger: OpenLedger, database_url: str) -> Iterator[Database]:
    """A database with its tables."""
    open_ledger()
    found = Database(database_url)
    yield found
    found.close()


def test_the_migrations_make_the_tables_that_the_code_knows(database: Database) -> None:
    found = inspect(database.engine)
    assert set(found.get_table_names()) == set(metadata.tables)
    for name, table in metadata.tables.items():
        columns = {c["name"]: c["nullable"] for c in found.get_columns(name) if not c.get("primary_key")}
        known = {c.name: bool(c.nullable) for c in table.columns}
        assert set(known) == {c["name"] for c in found.get_columns(name)}
        keys = set(found.get_pk_constraint(name)["constrained_columns"])
        assert keys == {c.name for c in table.primary_key}
        assert {n: v for n, v in columns.items() if n not in keys} == {n: v for n, v in known.items() if n not in keys}
    assert version(database) == newest()


def test_a_newer_ledger_is_refused(database: Database, database_url: str) -> None:
    with database.write() as connection:
        connection.execute(insert(MIGRATION).values(number=newest() + 1, name="later", applied=0.0))
    with pytest.raises(StoreError, match=rf"version {newest() + 1}.*Install the newer onejob"):
        SqlLedger(database_url)


LATER = Migration(newest() + 1, "a note on runs", ("ALTER TABLE run ADD COLUMN note TEXT NOT NULL DEFAULT 'none'",))


def test_an_older_ledger_is_brought_up_to_date_with_all_that_it_holds(
    open_ledger: OpenLedger, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_ledger().add_run(new_run())
    monkeypatch.setattr(migrate, "MIGRATIONS", (*migrate.MIGRATIONS, LATER))
    for _ in range(2):
        assert open_ledger().get_run(run.id) == run
    assert version(database) == LATER.number
    with database.read() as connection:
        assert connection.scalar(text("SELECT note FROM run")) == "none"


def test_the_database_itself_refuses_two_live_executions_of_a_key(open_ledger: OpenLedger, database: Database) -> None:
    ledger = open_ledger()
    ledger.add_run(new_run())
    won(ledger.claim(request(1), A, TTL))
    with database.engine.begin() as connection:
        row = dict(connection.execute(EXECUTION.select()).one()._mapping)
    with pytest.raises(IntegrityError), database.engine.begin() as connection:
        connection.execute(insert(EXECUTION).values(**{**row, "number": 2, "id": "other"}))


def test_foreign_keys_hold(database: Database) -> None:
    with pytest.raises(IntegrityError), database.engine.begin() as connection:
        connection.execute(text("INSERT INTO ref (name, digest, execution, updated) VALUES ('a', 'b', 'nosuch', 0)"))


def test_threads_that_read_and_then_write_wait_for_their_turn(open_ledger: OpenLedger) -> None:
    ledger = open_ledger()
    ledger.add_run(new_run())
    capacity = {"cpus": 99.0, "gpus": []}
    answers: list[Any] = []

    def work(number: int) -> None:
        try:
            for key in range(10):
                answers.append(ledger.claim(request(1, f"k{key}", capacity=capacity), A, TTL).answer)
        except StoreError as error:
            answers.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == ["busy"] * 70 + ["won"] * 10


def test_a_reader_is_not_held_up_by_a_writer_and_sees_only_what_is_committed(
    open_ledger: OpenLedger, database: Database
) -> None:
    ledger = open_ledger()
    with database.write() as connection:
        connection.execute(text("INSERT INTO step_key VALUES ('k', '{}', 0)"))
        assert ledger.list_runs() == []
        assert ledger.events() == []


# ---- bad days: SQLite ------------------------------------------------------------------------------------------------


def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(b"no database at all " * 100)
    with pytest.raises(StoreError, match="not a ledger") as caught:
        SqlLedger(str(path))
    assert caught.value.place == str(path)
    assert path.read_bytes().startswith(b"no database"), "and left as it is"


def test_a_damaged_ledger_is_told_from_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = SqlLedger(str(path))
    for _ in range(20):
        ledger.add_run(new_run())
    ledger.close()
    data = bytearray(path.read_bytes())
    data[4096:] = b"\x5a" * (len(data) - 4096)
    path.write_bytes(bytes(data))
    with pytest.raises(StoreError, match=r"damaged.*onejob restore"):
        SqlLedger(str(path))


def test_a_folder_that_can_not_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="--home"):
        SqlLedger(str(tmp_path / "file" / "ledger.db"))


def test_a_folder_that_may_only_be_read_is_said() -> None:
    folder = Path(tempfile.mkdtemp(prefix="onejob-"))
    SqlLedger(str(folder / "ledger.db")).close()
    (folder / "ledger.db").chmod(0o444)
    folder.chmod(0o555)
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(NOBODY)
        for name in ("ledger.db", "new.db"):
            with pytest.raises(StoreError, match=r"ledger.*--home"):
                SqlLedger(str(folder / name)).add_run(new_run())
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_full_disk_is_said_and_nothing_is_half_written(tmp_path: Path) -> None:
    ledger = SqlLedger(str(tmp_path / "ledger.db"))
    ledger.add_run(new_run())
    before = ledger.events()

    def limit(connection: Any, record: Any) -> None:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages + 3}")

    ledger._db.close()
    event.listen(ledger._db.engine, "connect", limit)
    names = [f"step{n}" for n in range(500)]
    with pytest.raises(StorageFullError, match="onejob gc"):
        ledger.add_run(new_run("big", *names))
    assert [run.id for run in ledger.list_runs()] == [1]
    assert ledger.events() == before
    ledger.close()


# ---- bad days: PostgreSQL --------------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_said_without_the_password() -> None:
    with pytest.raises(StoreError, match=r"can't be reached.*See that the server runs") as caught:
        SqlLedger("postgresql://ann:s3cret@/onejob?host=/nonexistent")
    assert "s3cret" not in str(caught.value)
    assert "ann:***@" in caught.value.place


def test_a_database_that_is_not_there_is_said(postgres: PostgresServer) -> None:
    with pytest.raises(StoreError, match="nosuch"):
        SqlLedger(postgres.url("nosuch"))


def test_a_server_that_was_restarted_is_reached_again(postgres: PostgresServer) -> None:
    ledger = SqlLedger(postgres.database("restarted"))
    postgres._execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'restarted'")
    assert ledger.list_runs() == []
    ledger.close()
    postgres.drop("restarted")
