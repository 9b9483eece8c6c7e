"""Backup and restore: all tables and all blobs that they name, in one tar file, the same for both databases.

    onejob-backup.json     format, version of the tables, time, rows per table, digest of rows.jsonl, files of the home
    rows.jsonl             {"table", "row"}: every row as it lies in the database, parents before children
    home/<path>            files that are in no blob (backup_files.py)
    blobs/<digest>         the bytes, verified while they are copied

All rows come from one transaction, so a backup made while runs go on is consistent; blobs never change, and gc can
only have taken what it dropped from the ledger meanwhile: then the backup begins again. A backup is written aside and
renamed; only its owner may read it, since keys may be among the files. A restore brings files and blobs in first, and
then all rows in one transaction: interrupted, it can be repeated.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import IO, Any

from sqlalchemy import Connection, func, select, text

from onejob.core.artifact import CHUNK, Json, digest_file, short
from onejob.core.faults import reach
from onejob.core.state import EndpointState, ExecutionState
from onejob.errors import ConflictError, DamagedError, NotFoundError, StorageFullError, StoreError
from onejob.store.backup_files import PREFIX, Copy, Found, bring_back, copy_files
from onejob.store.blobs import FULL, DirBlobs, damaged, fsync
from onejob.store.connect import Database
from onejob.store.ledger import SqlLedger
from onejob.store.migrate import migrate, newest, version
from onejob.store.rows import LIVE
from onejob.store.schema import EVENT, MIGRATION, MUTEX, metadata

FORMAT = 2
HEADER, ROWS, BLOBS = "onejob-backup.json", "rows.jsonl", "blobs/"
TRIES = 3
BATCH = 500
LEASE = ("lease_owner", "lease_token", "lease_expires", "lease_ttl")


@dataclass(frozen=True, slots=True)
class Saved:
    """What a backup holds, or what was restored."""

    rows: Mapping[str, int]
    blobs: int
    size: int
    """Bytes of the blobs."""
    files: int
    """Files of the home that are in no blob."""


def backup(
    ledger: SqlLedger, blobs: DirBlobs, target: Path, clock: Callable[[], float] = time.time, files: Found = ()
) -> Saved:
    """Write one consistent tar file of ledger, blobs and some more files of the home.

    DamagedError names a blob that isn't what its digest says.
    """
    if target.exists():
        raise ConflictError("there is something already", place=str(target), cure="Name another file.")
    aside = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
    with ExitStack() as stack:
        stack.callback(aside.unlink, missing_ok=True)
        try:
            rows = stack.enter_context(tempfile.TemporaryFile(dir=target.parent))
            folder = tempfile.TemporaryDirectory(prefix=f"{target.name}.", suffix=".part", dir=target.parent)
            copies = copy_files(files, Path(stack.enter_context(folder)))
            for _ in range(TRIES):
                saved = _write(ledger, blobs, aside, rows, copies, clock())
                if saved is not None:
                    break
            else:
                cure = "`onejob verify` says which; run the job again to make them anew."
                raise StoreError("blobs that the ledger names are missing", place=str(blobs.root), cure=cure)
            reach("backup.before_rename")
            os.rename(aside, target)
            fsync(target.parent)
        except OSError as error:
            raise _explained(error, target) from error
    return saved


def restore(source: Path, url: str, blobs: DirBlobs, home: Path, clock: Callable[[], float] = time.time) -> Saved:
    """Bring a backup into an empty home, on either database; ConflictError if the ledger there isn't empty.

    Processes of the old home aren't ours: executions that were live are lost, endpoints start anew, leases are free.
    """
    try:
        with tarfile.open(source, "r:") as tar, tempfile.TemporaryDirectory(dir=blobs.tmp) as folder:
            header = _read_header(tar, source)
            database = Database(url)
            try:
                _make_empty(database, header["version"], clock)
                rows = Path(folder) / "rows"
                _extract(tar, ROWS, rows, source)
                if digest_file(rows) != header["digest"]:
                    raise DamagedError("its rows are damaged", place=str(source), cure="Take another backup.")
                files = header.get("files", {})  # the first format had none
                for name, about in files.items():
                    _extract(tar, PREFIX + name, Path(folder) / "file", source)
                    bring_back(name, about, Path(folder) / "file", home, source)
                count, size = _restore_blobs(tar, header["blobs"], blobs, Path(folder), source)
                reach("restore.before_rows")
                with rows.open("rb") as lines, database.write() as connection:
                    found = _load(connection, (json.loads(line) for line in lines), clock())
                migrate(database, clock)
            finally:
                database.close()
    except tarfile.TarError as error:
        raise StoreError(f"it is no backup, or a damaged one ({error})", place=str(source)) from error
    except OSError as error:
        raise _explained(error, source) from error
    return Saved(found, count, size, len(files))


# ---- writing -------------------------------------------------------------------------------------------------------


def _write(
    ledger: SqlLedger, blobs: DirBlobs, aside: Path, rows: IO[bytes], files: Mapping[str, Copy], now: float
) -> Saved | None:
    """One try; None if a blob went missing because gc dropped its artifact since the rows were read."""
    rows.seek(0)
    rows.truncate()
    counts, wanted = _dump(ledger, rows)
    header = {"format": FORMAT, "version": newest(), "created": now, "rows": counts, "blobs": len(wanted)}
    header["digest"] = _digest(rows)
    header["files"] = {name: copy.to_json() for name, copy in files.items()}
    size = 0
    aside.touch(0o600)
    with aside.open("wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            data = json.dumps(header, indent=1).encode()
            _add(tar, HEADER, io.BytesIO(data), len(data))
            _add(tar, ROWS, rows, rows.seek(0, os.SEEK_END))
            for name, copy in files.items():
                with copy.path.open("rb") as one:
                    _add(tar, PREFIX + name, one, os.fstat(one.fileno()).st_size, copy.mode)
            for digest, artifact in wanted.items():
                try:
                    size += _add_blob(tar, blobs, digest)
                except FileNotFoundError:
                    if _still_there(ledger, artifact):
                        raise _missing(blobs, digest, artifact) from None
                    return None
                reach("backup.after_blob")
        file.flush()
        os.fsync(file.fileno())
    return Saved(counts, len(wanted), size, len(files))


def _dump(ledger: SqlLedger, out: IO[bytes]) -> tuple[dict[str, int], dict[str, str]]:
    """Write every row, of one state; gives rows per table, and blob digest -> an artifact that names it."""
    counts: dict[str, int] = {}
    wanted: dict[str, str] = {}
    with ledger.snapshot() as connection:
        for table in metadata.sorted_tables:
            if table in (MIGRATION, MUTEX):
                continue
            counts[table.name] = 0
            found = connection.execution_options(yield_per=BATCH).execute(text(f"SELECT * FROM {table.name}"))
            for mapping in found.mappings():
                row: dict[str, Any] = {str(name): value for name, value in mapping.items()}
                out.write(json.dumps({"table": table.name, "row": row}).encode() + b"\n")
                counts[table.name] += 1
                if table.name == "artifact":
                    wanted.update(dict.fromkeys(_blobs_of(row), row["digest"]))
    out.flush()
    return counts, wanted


def _blobs_of(row: Mapping[str, Any]) -> Iterator[str]:
    """The manifest, and each file that doesn't lie outside as a source."""
    yield row["digest"]
    locations = json.loads(row["locations"])
    for entry in json.loads(row["manifest"])["files"]:
        if entry["path"] not in locations:
            yield entry["digest"]


def _add_blob(tar: tarfile.TarFile, blobs: DirBlobs, digest: str) -> int:
    path = blobs.path(digest)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        hashed = _Hashing(file)
        _add(tar, BLOBS + digest, hashed, size)
    if hashed.digest.hexdigest() != digest:
        raise damaged(digest, path, hashed.digest.hexdigest())
    return size


class _Hashing(io.RawIOBase):
    """A file that is digested while it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        piece = self.file.read(size)
        self.digest.update(piece)
        return piece


def _add(tar: tarfile.TarFile, name: str, file: Any, size: int, mode: int = 0o444) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, mode
    if file.seekable():
        file.seek(0)
    tar.addfile(info, file)


def _digest(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while piece := file.read(CHUNK):
        digest.update(piece)
    return digest.hexdigest()


def _still_there(ledger: SqlLedger, artifact: str) -> bool:
    try:
        ledger.get_artifact(artifact)
    except NotFoundError:
        return False
    return True


def _missing(blobs: DirBlobs, digest: str, artifact: str) -> StoreError:
    cure = f"`onejob verify {short(artifact)}` says what is lost; run the job again to make it anew."
    return StoreError(f"a blob of artifact {short(artifact)} is missing", place=str(blobs.path(digest)), cure=cure)


# ---- reading -------------------------------------------------------------------------------------------------------


def _read_header(tar: tarfile.TarFile, source: Path) -> dict[str, Json]:
    member = tar.next()
    if member is None or member.name != HEADER:
        raise StoreError("it is no backup of onejob", place=str(source))
    file = tar.extractfile(member)
    assert file is not None
    try:
        header: dict[str, Json] = json.loads(file.read())
    except ValueError as error:
        raise DamagedError("its header is damaged", place=str(source), cure="Take another backup.") from error
    if header["format"] > FORMAT or header["version"] > newest():
        cure = "Install the newer onejob that wrote it."
        raise StoreError(
            f"the backup is of version {header['version']}, this knows {newest()}", place=str(source), cure=cure
        )
    return header


def _make_empty(database: Database, wanted: int, clock: Callable[[], float]) -> None:
    """Tables of the version that wrote the backup, without rows; ConflictError if there are any."""
    found = version(database)
    with database.read() as connection:
        for name in ("run", "artifact", "event") if found else ():
            if connection.scalar(select(func.count()).select_from(text(name))):
                cure = "Restore into a new home, with --home."
                raise ConflictError("the ledger there isn't empty", place=database.place, cure=cure)
    if found > wanted:
        with database.write() as connection:
            metadata.drop_all(connection)
    migrate(database, clock, upto=wanted)


def _extract(tar: tarfile.TarFile, name: str, target: Path, source: Path) -> None:
    try:
        file = tar.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise StoreError(f"the backup lacks {name}", place=str(source), cure="Take another backup.")
    with target.open("wb") as out:
        while piece := file.read(CHUNK):
            out.write(piece)


def _restore_blobs(tar: tarfile.TarFile, wanted: int, blobs: DirBlobs, folder: Path, source: Path) -> tuple[int, int]:
    count = size = 0
    for member in tar:
        if not member.name.startswith(BLOBS):
            continue
        digest, aside = member.name.removeprefix(BLOBS), folder / "blob"
        _extract(tar, member.name, aside, source)
        actual, length = blobs.put(aside)
        aside.unlink()
        if actual != digest:
            blobs.delete(actual)
            raise DamagedError(
                f"blob {digest} is damaged in the backup", place=str(source), cure="Take another backup."
            )
        count, size = count + 1, size + length
        reach("restore.after_blob")
    if count != wanted:
        raise DamagedError(
            f"the backup holds {count} of {wanted} blobs", place=str(source), cure="Take another backup."
        )
    return count, size


def _load(connection: Connection, lines: Iterable[Mapping[str, Json]], now: float) -> dict[str, int]:
    """Insert rows as they are, save what the processes of the old home held."""
    counts: dict[str, int] = {}
    lost: list[str] = []
    for name, group in groupby(lines, key=lambda line: line["table"]):
        rows = (line["row"] for line in group)
        while old := list(islice(rows, BATCH)):
            lost += [row["id"] for row in old if name == "execution" and row["state"] in LIVE]
            batch = [settled(name, row, now) for row in old]
            columns = list(batch[0])
            into, values = ", ".join(f'"{c}"' for c in columns), ", ".join(f":{c}" for c in columns)
            connection.execute(text(f"INSERT INTO {name} ({into}) VALUES ({values})"), batch)
            counts[name] = counts.get(name, 0) + len(batch)
    last = connection.scalar(select(func.max(EVENT.c.seq))) or 0
    for seq, execution in enumerate(lost, last + 1):
        data = {"why": "it ran in the home that was backed up"}
        event = {
            "seq": seq,
            "time": now,
            "subject": f"execution/{execution}",
            "kind": ExecutionState.LOST,
            "data": data,
        }
        connection.execute(EVENT.insert().values(**event))
    return counts


def settled(table: str, row: Mapping[str, Json], now: float) -> dict[str, Json]:
    """A row of the old home as it is in the new one: no leases, no processes."""
    new = {name: None if name in LEASE else value for name, value in row.items()}
    if table == "execution" and new["state"] in LIVE:
        error = {"error": "StepError", "place": new["step"], "message": "it ran in the home that was backed up"}
        new |= {"state": str(ExecutionState.LOST), "finished": now, "error": json.dumps(error)}
    if table == "endpoint":
        stopped = new["state"] in (EndpointState.STOPPING, EndpointState.STOPPED)
        new |= {"state": str(EndpointState.STOPPED if stopped else EndpointState.STARTING), "handle": None}
    return new


def _explained(error: OSError, place: Path) -> StoreError | NotFoundError:
    if error.errno in FULL:
        return StorageFullError(f"no space is left ({error.strerror})", place=str(place), cure="Name another disk.")
    if isinstance(error, FileNotFoundError):
        return NotFoundError("there is no such file or folder", place=str(place))
    return StoreError(f"it can't be read or written ({error.strerror})", place=str(place))
