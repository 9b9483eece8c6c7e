"""Append-only files that another process takes over once they are sealed; whole and durable whatever dies when.

A writer makes its file aside, locks it, and gives it its name in `open/`; the lock is the kernel's, so it ends with the
writer. Sealing makes the file durable and renames it to `sealed/`, where nothing changes any more. A file in `open/`
without a lock is that of a dead writer: `rescue` cuts off what was half written, and seals it. A write that fails is
taken back, so a file holds whole pieces only.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from onejob.core.faults import reach
from onejob.core.traffic import OPEN, SEALED

Mend = Callable[[Path], tuple[int, bytes]]
"""How many bytes at the beginning of a dead writer's file are whole (0: none), and what must follow them."""


class Spool:
    """The one file that a writer has open; for one thread at a time."""

    def __init__(
        self,
        folder: Path,
        suffix: str,
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        self._folder = folder
        self._suffix = suffix
        self._clock = clock
        self._steady = steady
        self._write = write
        self._file = -1
        self._path = folder
        self._opened = 0.0
        self._count = 0
        self.size = 0
        """Bytes of the open file; 0 when there is none."""

    @property
    def age(self) -> float:
        """Seconds since the file was opened, by a clock that doesn't jump."""
        return self._steady() - self._opened if self._file >= 0 else 0.0

    def append(self, data: bytes, *, durable: bool = False) -> None:
        """Write a piece whole, or raise OSError and leave the file as it was."""
        if self._file < 0:
            self._open()
        written = 0
        try:
            while written < len(data):
                written += self._write(self._file, data[written:])
            if durable:
                os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self.size)
            if not self.size:
                self._abandon()
            raise
        self.size += written

    def seal(self, ending: bytes = b"") -> Path | None:
        """Make the file durable and hand it over; gives its new path. OSError leaves it open, to be tried again."""
        if self._file < 0:
            return None
        size = self.size
        try:
            self.append(ending)
            os.fsync(self._file)
            reach("spool.before_seal")
            sealed = _hand_over(self._path, self._folder)
        except OSError:
            os.ftruncate(self._file, size)
            self.size = size
            raise
        os.close(self._file)
        self._file, self.size = -1, 0
        return sealed

    def close(self) -> None:
        """Let go of the file; it stays in `open/`, for `rescue`."""
        if self._file >= 0:
            os.close(self._file)
            self._file, self.size = -1, 0

    def _open(self) -> None:
        folder = self._folder / OPEN
        folder.mkdir(parents=True, exist_ok=True)
        self._count += 1
        name = f"{int(self._clock() * 1000):013d}-{os.getpid()}-{self._count}{self._suffix}"
        aside = folder / f".{name}"
        file = os.open(aside, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            # locked before it has its name: nobody can take it for a dead writer's
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(aside, folder / name)
        except OSError:
            os.close(file)
            raise
        self._file, self._path, self._opened, self.size = file, folder / name, self._steady(), 0

    def _abandon(self) -> None:
        self._path.unlink(missing_ok=True)
        self.close()


def rescue(folder: Path, mend: Mend) -> list[Path]:
    """Seal what dead writers have left in `open/`; gives the new paths. Safe beside living writers, and repeatable."""
    sealed: list[Path] = []
    for path in sorted((folder / OPEN).glob("*")):
        with _owned(path) as file:
            if file is None:
                continue
            whole, ending = (0, b"") if path.name.startswith(".") else mend(path)
            if not whole:
                path.unlink(missing_ok=True)
                continue
            os.ftruncate(file, whole)
            os.pwrite(file, ending, whole)
            os.fsync(file)
            reach("spool.before_rescue")
            sealed.append(_hand_over(path, folder))
    return sealed


def sealed_in(folder: Path) -> list[Path]:
    """Sealed files, the oldest first."""
    return sorted(path for path in (folder / SEALED).glob("*") if not path.name.startswith("."))


@contextmanager
def _owned(path: Path) -> Iterator[int | None]:
    """The file, locked; None if its writer lives, or has sealed it meanwhile."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = os.stat(path).st_ino == os.fstat(file).st_ino
        except OSError:
            same = False
        yield file if same else None
    finally:
        os.close(file)


def _hand_over(path: Path, folder: Path) -> Path:
    (folder / SEALED).mkdir(parents=True, exist_ok=True)
    sealed = folder / SEALED / path.name
    os.rename(path, sealed)
    for place in (sealed.parent, path.parent):
        file = os.open(place, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    return sealed
