"""Blobs in a folder: content-addressed bytes as `<aa>/<digest>`, read-only, verified on read.

A blob is written aside in `tmp`, made durable, and renamed: a reader sees all of it or nothing. `put` always brings its
bytes in, also where a blob of that digest lies already: so a damaged one is healed, and the blob's time is that of the
last put. That time is what keeps `gc` away from bytes that are put but not yet named by the ledger; put renames under a
shared lock and gc deletes under an exclusive one, so gc sees either the fresh time, or no blob before the put.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onejob.core.artifact import CHUNK, digest_bytes, digest_file, short
from onejob.core.faults import reach
from onejob.errors import DamagedError, NotFoundError, OnejobError, StorageFullError, StoreError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ASIDE = "put-"
LOCK = ".lock"
LINK_TRIES = 3


class DirBlobs:
    """Blobs below `root`; `tmp` lies on the same file system.

    A file inside the folder that holds `root` (the home) is taken over by a hard link and becomes read-only; a file
    from anywhere else is copied, and never touched.
    """

    def __init__(self, root: Path, tmp: Path) -> None:
        self.root = root
        self.tmp = tmp
        self._verified: dict[str, tuple[int, int, int]] = {}
        with self._explained(root):
            root.mkdir(parents=True, exist_ok=True)
            tmp.mkdir(parents=True, exist_ok=True)

    def put(self, source: Path | bytes) -> tuple[str, int]:
        aside = self.tmp / f"{ASIDE}{os.getpid()}-{secrets.token_hex(8)}"
        with self._explained(aside):
            try:
                if isinstance(source, bytes):
                    digest, size = _write(aside, source)
                else:
                    digest, size = self._take(source, aside)
                reach("blobs.after_write")
                self._keep(aside, digest)
            finally:
                aside.unlink(missing_ok=True)
        return digest, size

    def get(self, digest: str) -> Path:
        path = self.path(digest)
        with self._explained(path):
            known = _identity(path)
            if self._verified.get(digest) == known:
                return path
            actual = digest_file(path)
        if actual != digest:
            raise damaged(digest, path, actual)
        self._verified[digest] = known
        return path

    def has(self, digest: str) -> bool:
        return self.path(digest).exists()

    def delete(self, digest: str) -> int:
        return self.delete_older(digest, float("inf"))

    def delete_older(self, digest: str, before: float) -> int:
        """Forget the bytes, unless they were put at or after a time; gives how many were freed."""
        path = self.path(digest)
        with self._explained(path), self._lock(fcntl.LOCK_EX):
            try:
                stat = path.stat()
            except FileNotFoundError:
                return 0
            if stat.st_mtime >= before:
                return 0
            path.unlink()
        self._verified.pop(digest, None)
        return stat.st_size

    def clean(self, before: float) -> int:
        """Remove what killed writers left aside before a time; gives how many bytes were freed."""
        freed = 0
        for path in self.tmp.glob(f"{ASIDE}*"):
            with self._explained(path):
                try:
                    stat = path.stat()
                    if stat.st_ctime < before:
                        path.unlink()
                        freed += stat.st_size
                except FileNotFoundError:
                    continue
        return freed

    def path(self, digest: str) -> Path:
        """Where the bytes of a digest lie, or would lie; unchecked."""
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise NotFoundError("that is no digest of a blob", place=digest or "''")
        return self.root / digest[:2] / digest

    def __iter__(self) -> Iterator[tuple[str, int, float]]:
        for folder in sorted(self.root.glob("[0-9a-f][0-9a-f]")):
            for path in sorted(folder.iterdir()):
                if not re.fullmatch(r"[0-9a-f]{64}", path.name):
                    continue
                try:
                    stat = path.stat()
                except FileNotFoundError:
                    continue  # deleted since it was listed
                yield path.name, stat.st_size, stat.st_mtime

    def _take(self, source: Path, aside: Path) -> tuple[str, int]:
        """Bring a file's bytes aside: by a link where the file is ours, and doesn't change while it is read."""
        try:
            real = source.resolve(strict=True)
            ours = self.root.parent.resolve() in real.parents and real.stat().st_uid == os.geteuid()
        except OSError as error:
            raise StoreError(f"the file can't be read ({error.strerror})", place=str(source)) from error
        if ours:
            for _ in range(LINK_TRIES):
                if found := _link(real, aside):
                    return found
        return _copy(real, aside)

    def _keep(self, aside: Path, digest: str) -> None:
        """Rename a complete file to its place, with the time of now, and make the name durable."""
        path = self.path(digest)
        new = not path.parent.is_dir()
        path.parent.mkdir(exist_ok=True)
        aside.chmod(0o444)
        with self._lock(fcntl.LOCK_SH):
            os.utime(aside)
            identity = _identity(aside)
            os.replace(aside, path)
            reach("blobs.after_rename")
        fsync(path.parent)
        if new:
            fsync(self.root)
        self._verified[digest] = identity

    @contextmanager
    def _lock(self, kind: int) -> Iterator[None]:
        file = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, kind)
            yield
        finally:
            os.close(file)

    @contextmanager
    def _explained(self, path: Path) -> Iterator[None]:
        """The system's errors in words that name the place and the cure."""
        try:
            yield
        except OnejobError:
            raise
        except FileNotFoundError as error:
            raise NotFoundError("the bytes are not there", place=str(path), cure=_CURE_GONE) from error
        except OSError as error:
            if error.errno in FULL:
                what = f"no space is left for blobs ({error.strerror})"
                raise StorageFullError(what, place=str(self.root), cure=_CURE_FULL) from error
            raise StoreError(
                f"blobs can't be kept here ({error.strerror})", place=str(path), cure=_CURE_PLACE
            ) from error


_CURE_FULL = "Free some space, for example with `onejob gc`."
_CURE_GONE = "`onejob verify` says what needs them; run the job again to make them anew."
_CURE_PLACE = "Name another home with --home, or make this one writable."


def damaged(digest: str, path: Path, actual: str) -> DamagedError:
    """The error for bytes that don't match their digest."""
    return DamagedError(
        f"the bytes of blob {digest} are damaged: they digest to {short(actual)}",
        place=str(path),
        cure="Remove the file and run the job again, or restore a backup.",
    )


def _identity(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _write(path: Path, data: bytes) -> tuple[str, int]:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return digest_bytes(data), len(data)


def _link(source: Path, aside: Path) -> tuple[str, int] | None:
    """Hard-link a file, digest it and make it durable; None if it can't be linked, or changed meanwhile."""
    try:
        os.link(source, aside)
    except OSError:
        return None  # another file system, or one without links
    # No more writing through the name; who has it open still can, so look whether somebody did.
    aside.chmod(0o444)
    before = _identity(aside)
    digest = digest_file(aside)
    fsync(aside)
    if _identity(aside) == before:
        return digest, before[1]
    aside.unlink()
    return None


def _copy(source: Path, aside: Path) -> tuple[str, int]:
    """Copy a file; the digest is that of the bytes written, whatever happens to the source meanwhile."""
    digest, size = hashlib.sha256(), 0
    with source.open("rb") as read, aside.open("xb") as write:
        while piece := read.read(CHUNK):
            digest.update(piece)
            size += len(piece)
            write.write(piece)
        write.flush()
        os.fsync(write.fileno())
    return digest.hexdigest(), size


def fsync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
