"""Backups: all rows of one state and every blob that they name, from either database into either."""

from __future__ import annotations

import itertools
import os
import stat
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from onejob.core.artifact import Artifact, FileEntry
from onejob.core.faults import VARIABLE
from onejob.core.records import NewSignal
from onejob.core.state import EndpointState, ExecutionState, PromotionState, StepState
from onejob.errors import ConflictError, DamagedError, NotFoundError, StorageFullError, StoreError
from onejob.store import backup as module
from onejob.store import migrate
from onejob.store.backup import backup, restore
from onejob.store.blobs import DirBlobs
from onejob.store.collect import plan_gc, sweep
from onejob.store.ledger import SqlLedger
from onejob.store.verify import verify_lineage
from onejob.testing.ledger_samples import TTL, A, Clock, OpenLedger, leave, new_run, request, some_artifact, won
from onejob.testing.postgres import PostgresServer

NUMBERS = itertools.count(1)
NewUrl = Callable[[str], str]


@pytest.fixture
def blobs(tmp_path: Path) -> DirBlobs:
    return DirBlobs(tmp_path / "home" / "blobs", tmp_path / "home" / "tmp")


@pytest.fixture
def other_blobs(tmp_path: Path) -> DirBlobs:
    return DirBlobs(tmp_path / "other" / "blobs", tmp_path / "other" / "tmp")


@pytest.fixture
def ledger(open_ledger: OpenLedger) -> SqlLedger:
    ledger = open_ledger(clock=Clock(1e9))
    assert isinstance(ledger, SqlLedger)
    return ledger


@pytest.fixture
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NewUrl]:
    """A new, empty database of a kind."""
    made: list[tuple[PostgresServer, str]] = []

    def new(kind: str) -> str:
        if kind == "sqlite":
            return str(tmp_path / "other" / f"{next(NUMBERS)}.db")
        server: PostgresServer = request.getfixturevalue("postgres")
        made.append((server, f"restored{next(NUMBERS)}"))
        return server.database(made[-1][1])

    yield new
    for server, name in made:
        server.drop(name)


def keep(blobs: DirBlobs, text: str) -> Artifact:
    artifact = Artifact("dataset", (FileEntry("a.txt", *blobs.put(text.encode())),), {"naïve\0": [1, 0.1]})
    blobs.put(artifact.manifest_bytes())
    return artifact


def fill(ledger: SqlLedger, blobs: DirBlobs) -> Artifact:
    """A run that goes on, with a done step, a live one, a source, a ref and an endpoint."""
    run = ledger.add_run(new_run())
    source = some_artifact("elsewhere", "source")
    blobs.put(source.manifest_bytes())
    ledger.add_artifact(source, locations={"a.txt": "/data/a b.txt"})
    made = keep(blobs, "rows")
    ledger.add_key("k1", {"lr": 0.1})
    done = leave(ledger, run.id, "k1", {"out": made}, inputs={"source": source.digest})
    lease = ledger.lease("run", run.id, A, TTL)
    assert lease is not None
    live, token = won(ledger.claim(request(run.id, "k2", inputs={"in": made.digest}), A, TTL))
    ledger.start_execution(live.id, token, {"pid": 1})
    ledger.set_step(run.id, "data", StepState.READY, token=lease.token, key="k1", reason="first\0time")
    ledger.set_step(run.id, "data", StepState.DONE, token=lease.token, execution=done.id)
    ledger.set_ref("flights/data@newest", made.digest, done.id)
    ledger.want_endpoint("flights", artifact=made.digest, execution=done.id, options={"port": 0})
    ledger.set_endpoint("flights", EndpointState.READY, port=8000, handle={"pid": 2})
    ledger.add_segment("flights", made, begins=1.0, ends=2.0, rows=3)
    ledger.add_signals("flights", [NewSignal("harm", "2013-03-10")], event_time=1.0)
    ledger.promote(
        "flights", digest=made.digest, execution=done.id, cause={}, event_time=1.0, state=PromotionState.KEPT
    )
    return made


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_backup_restores_into_either_database(
    ledger: SqlLedger, blobs: DirBlobs, other_blobs: DirBlobs, new_url: NewUrl, tmp_path: Path, kind: str
) -> None:
    made = fill(ledger, blobs)
    target, url = tmp_path / "my 'backup'.tar", new_url(kind)
    saved = backup(ledger, blobs, target)
    assert saved.blobs == 3, "the source's file lies elsewhere"
    restored = restore(target, url, other_blobs, tmp_path / "other", clock=Clock(2e9))
    assert (restored.rows, restored.blobs, restored.size) == (some_rows(saved.rows), 3, saved.size)
    other = SqlLedger(url)
    try:
        check_same(ledger, other)
        report = verify_lineage(other, other_blobs, made.digest)
        assert [(f.what, f.place) for f in report.findings] == [("source gone", "/data/a b.txt")]
        assert other.add_run(new_run()).id == 2, "numbers go on where they were"
    finally:
        other.close()


def some_rows(counts: Mapping[str, int]) -> dict[str, int]:
    """Of the tables that aren't empty."""
    return {table: count for table, count in counts.items() if count}


def check_same(ledger: SqlLedger, other: SqlLedger) -> None:
    """The same but for what the processes of the old home held."""
    assert [r.lease for r in other.list_runs()] == [None]
    assert other.list_steps(1) == ledger.list_steps(1)
    assert other.list_refs() == ledger.list_refs()
    assert other.list_segments("flights") == ledger.list_segments("flights")
    assert other.list_signals("flights") == ledger.list_signals("flights")
    assert other.list_promotions("flights") == ledger.list_promotions("flights")
    assert other.list_artifacts() == ledger.list_artifacts()
    assert other.get_key("k1") == {"lr": 0.1}
    live, done = ledger.list_executions()
    lost, same = other.list_executions()
    assert same == done
    assert (lost.id, lost.state, lost.finished, lost.lease) == (live.id, ExecutionState.LOST, 2e9, None)
    endpoint = other.list_endpoints()[0]
    assert (endpoint.state, endpoint.handle, endpoint.port) == (EndpointState.STARTING, None, 8000)
    events = other.events()
    assert events[:-1] == ledger.events()
    assert (events[-1].subject, events[-1].kind) == (f"execution/{live.id}", "lost")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_backup_goes_into_an_empty_home_only(
    ledger: SqlLedger, database_url: str, blobs: DirBlobs, tmp_path: Path
) -> None:
    fill(ledger, blobs)
    backup(ledger, blobs, tmp_path / "backup.tar")
    before = ledger.events()
    with pytest.raises(ConflictError, match="isn't empty"):
        restore(tmp_path / "backup.tar", database_url, blobs, tmp_path / "home")
    assert ledger.events() == before
    with pytest.raises(ConflictError, match="something already"):
        backup(ledger, blobs, tmp_path / "backup.tar")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_damaged_or_missing_blob_is_named_and_leaves_no_backup(
    ledger: SqlLedger, blobs: DirBlobs, tmp_path: Path
) -> None:
    digest = fill(ledger, blobs).files[0].digest
    blobs.path(digest).chmod(0o644)
    blobs.path(digest).write_bytes(b"rowz")
    with pytest.raises(DamagedError, match=digest):
        backup(ledger, blobs, tmp_path / "backup.tar")
    blobs.delete(digest)
    with pytest.raises(StoreError, match="missing"):
        backup(ledger, blobs, tmp_path / "backup.tar")
    assert sorted(path.name for path in tmp_path.glob("backup*")) == []


def test_a_backup_made_while_runs_go_on_is_consistent(
    ledger: SqlLedger, blobs: DirBlobs, other_blobs: DirBlobs, new_url: NewUrl, tmp_path: Path
) -> None:
    run = ledger.add_run(new_run()).id
    stop = threading.Event()
    errors: list[Exception] = []

    def work() -> None:
        try:
            for number in itertools.count():
                leave(ledger, run, f"key{number}", {"out": keep(blobs, f"text {number}")})
                if stop.is_set():
                    return
        except Exception as error:
            errors.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    for number in range(3):
        backup(ledger, blobs, tmp_path / f"{number}.tar")
    stop.set()
    worker.join()
    assert errors == []
    for number in range(3):
        url = new_url("sqlite")
        restore(tmp_path / f"{number}.tar", url, other_blobs, tmp_path / "other")
        other = SqlLedger(url)
        for execution in other.list_executions(states=[ExecutionState.DONE]):
            assert verify_lineage(other, other_blobs, execution.outputs["out"]).findings == []
        kinds = [e.kind for e in other.events() if e.subject.startswith("execution/")]
        assert kinds.count("claimed") == len(other.list_executions())
        other.close()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_backup_begins_again_when_gc_took_a_blob_meanwhile(
    ledger: SqlLedger, blobs: DirBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(ledger, blobs)
    loose = keep(blobs, "soon gone")
    ledger.add_artifact(loose)

    def collect(point: str) -> None:
        sweep(ledger, blobs, plan_gc(ledger, blobs, 1e12, 1.0, 1))

    monkeypatch.setattr(module, "reach", collect)
    saved = backup(ledger, blobs, tmp_path / "backup.tar")
    with tarfile.open(tmp_path / "backup.tar") as tar:
        names = tar.getnames()
    assert len(names) == 2 + saved.blobs
    assert not blobs.has(loose.digest)
    assert f"blobs/{loose.digest}" not in names


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_backup_of_an_older_version_is_brought_up_to_date(
    ledger: SqlLedger,
    blobs: DirBlobs,
    other_blobs: DirBlobs,
    new_url: NewUrl,
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill(ledger, blobs)
    backup(ledger, blobs, tmp_path / "backup.tar")
    statement = "UPDATE run SET job = job || ' (older)'"
    later = migrate.Migration(migrate.newest() + 1, "mark what was there", (statement,))
    monkeypatch.setattr(migrate, "MIGRATIONS", (*migrate.MIGRATIONS, later))
    url = new_url(kind)
    SqlLedger(url).close()  # the newer tables are there already, and empty
    restore(tmp_path / "backup.tar", url, other_blobs, tmp_path / "other")
    other = SqlLedger(url)
    assert [run.job for run in other.list_runs()] == ["flights (older)"]
    other.close()


RESTORE = """
import sys
from pathlib import Path
from onejob.store.backup import restore
from onejob.store.blobs import DirBlobs
home = Path(sys.argv[3])
restore(Path(sys.argv[1]), sys.argv[2], DirBlobs(home / "blobs", home / "tmp"), home)
"""


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("point", ["migrate.before_commit", "restore.after_blob", "restore.before_rows"])
def test_a_killed_restore_is_simply_repeated(
    ledger: SqlLedger, blobs: DirBlobs, other_blobs: DirBlobs, new_url: NewUrl, tmp_path: Path, point: str
) -> None:
    made = fill(ledger, blobs)
    backup(ledger, blobs, tmp_path / "backup.tar")
    url = new_url("sqlite")
    arguments = [str(tmp_path / "backup.tar"), url, str(tmp_path / "other")]
    killed = subprocess.run([sys.executable, "-c", RESTORE, *arguments], env={**os.environ, VARIABLE: point})
    assert killed.returncode == -9
    restore(tmp_path / "backup.tar", url, other_blobs, tmp_path / "other")
    other = SqlLedger(url)
    assert verify_lineage(other, other_blobs, made.digest).sound
    other.close()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_files_that_are_in_no_blob_come_back_with_their_mode(
    ledger: SqlLedger, blobs: DirBlobs, other_blobs: DirBlobs, new_url: NewUrl, tmp_path: Path
) -> None:
    fill(ledger, blobs)
    key, old, gone = tmp_path / "key", tmp_path / "old", tmp_path / "gone"
    key.write_bytes(b"secret")
    key.chmod(0o600)
    old.write_text("half")

    def files() -> Iterator[tuple[str, Path]]:
        yield "endpoints/flights/private.key", key
        yield "endpoints/flights/open/1", old
        yield "endpoints/flights/open/2", gone
        key.unlink()  # what happens from here on is not in the backup
        old.write_text("half and the rest")
        yield "endpoints/flights/open/1", old

    saved = backup(ledger, blobs, tmp_path / "backup.tar", files=files())
    assert saved.files == 2
    assert stat.S_IMODE((tmp_path / "backup.tar").stat().st_mode) == 0o600
    other = tmp_path / "other"
    for _ in range(2):  # as after a restore that was killed: what is there already is the same
        restored = restore(tmp_path / "backup.tar", new_url("sqlite"), other_blobs, other)
        assert restored.files == 2
    found = other / "endpoints" / "flights"
    assert (found / "open" / "1").read_text() == "half and the rest"
    assert (found / "private.key").read_bytes() == b"secret"
    assert stat.S_IMODE((found / "private.key").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.glob("*backup*")] == ["backup.tar"], "no copy is left"
    (found / "private.key").write_bytes(b"another")
    with pytest.raises(ConflictError, match="the home has such a file already"):
        restore(tmp_path / "backup.tar", new_url("sqlite"), other_blobs, other)
    assert (found / "private.key").read_bytes() == b"another"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("name", ["../key", "/key", "a/../../key"])
def test_a_backup_writes_nothing_outside_of_the_home(
    ledger: SqlLedger, blobs: DirBlobs, other_blobs: DirBlobs, new_url: NewUrl, tmp_path: Path, name: str
) -> None:
    fill(ledger, blobs)
    (tmp_path / "file").write_text("x")
    backup(ledger, blobs, tmp_path / "backup.tar", files=[(name, tmp_path / "file")])
    with pytest.raises(DamagedError, match="outside"):
        restore(tmp_path / "backup.tar", new_url("sqlite"), other_blobs, tmp_path / "other")
    assert not (tmp_path / "key").exists()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("part", ["header", "rows", "file", "blob", "end"])
def test_a_damaged_backup_is_refused(
    ledger: SqlLedger, blobs: DirBlobs, other_blobs: DirBlobs, new_url: NewUrl, tmp_path: Path, part: str
) -> None:
    fill(ledger, blobs)
    path, url = tmp_path / "backup.tar", new_url("sqlite")
    (tmp_path / "file").write_text("text")
    backup(ledger, blobs, path, files=[("endpoints/flights/private.key", tmp_path / "file")])
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    data = bytearray(path.read_bytes())
    if part == "end":
        data = data[: members[-1].offset]
    else:
        data[members[{"header": 0, "rows": 1, "file": 2, "blob": 3}[part]].offset_data + 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(StoreError) as caught:
        restore(path, url, other_blobs, tmp_path / "other")
    assert str(path) in str(caught.value)
    other = SqlLedger(url)
    assert other.events() == []
    other.close()


def test_what_is_no_backup_is_said(other_blobs: DirBlobs, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tar\n" * 1000)
    with pytest.raises(StoreError, match="no backup"):
        restore(tmp_path / "text", str(tmp_path / "x.db"), other_blobs, tmp_path)
    with pytest.raises(NotFoundError):
        restore(tmp_path / "nosuch", str(tmp_path / "x.db"), other_blobs, tmp_path)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_full_disk_leaves_no_half_backup(
    ledger: SqlLedger, blobs: DirBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(ledger, blobs)

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFullError, match="Name another disk"):
        backup(ledger, blobs, tmp_path / "backup.tar")
    assert list(tmp_path.glob("backup*")) == []
