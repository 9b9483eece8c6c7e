"""What a replica leaves on disk beside answering: a line for each request, and snapshots of its counters.

All of it happens on one thread, off the request path. The path only appends to a bounded buffer; when the disk is
slow or full, lines are dropped and counted, and serving goes on. Files are rotated by size, and the oldest ones
deleted.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from onejob.core.artifact import Json, canonical
from onejob.core.faults import reach

FLUSH_SECONDS = 0.2
SNAPSHOT_SECONDS = 1.0
MAX_LINES = 100_000
MAX_BYTES = 8 << 20
MAX_FILES = 16


class RequestLog:
    """Append-only lines in rotated files of one folder: `<milliseconds>-<pid>.jsonl`, so that names sort by time."""

    def __init__(
        self,
        folder: Path,
        *,
        max_lines: int = MAX_LINES,
        max_bytes: int = MAX_BYTES,
        max_files: int = MAX_FILES,
        clock: Callable[[], float] = time.time,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        self._folder = folder
        self._lines: deque[dict[str, Json]] = deque()
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._clock = clock
        self._write = write
        self._file = -1
        self._size = 0
        self.dropped = 0
        self.fault = ""
        """Why the last write failed; empty while all is well."""

    def add(self, line: dict[str, Json]) -> None:
        """Remember a line for the next flush; dropped and counted when the buffer is full."""
        if len(self._lines) >= self._max_lines:
            self.dropped += 1
        else:
            self._lines.append(line)

    def flush(self) -> None:
        """Write what is buffered; what can't be written is dropped and counted. Never raises."""
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        if not lines:
            return
        data = b"".join(canonical(line) + b"\n" for line in lines)
        try:
            self._append(data)
            self.fault = ""
        except OSError as error:
            self.dropped += len(lines)
            self.fault = str(error)
            self.close()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self, data: bytes) -> None:
        if self._file < 0 or self._size + len(data) > self._max_bytes:
            self._rotate()
        reach("replica.before_log")
        written = 0
        try:
            while written < len(data):
                written += self._write(self._file, data[written:])
        except OSError:
            os.ftruncate(self._file, self._size)  # take back half a line: the file holds whole ones only
            raise
        self._size += written

    def _rotate(self) -> None:
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        old = sorted(self._folder.glob("*.jsonl"))
        for path in old[: max(0, len(old) - self._max_files + 1)]:
            path.unlink(missing_ok=True)
        path = self._folder / f"{int(self._clock() * 1000):013d}-{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._file).st_size


class Journal:
    """The thread that flushes the request log and leaves the snapshots."""

    def __init__(self, log: RequestLog, leave: Callable[[], None]) -> None:
        self._log = log
        self._leave = leave
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, patience: float = 5.0) -> None:
        """Write the rest and end; give up on a disk that doesn't answer."""
        self._ending.set()
        self._thread.join(patience)

    def _run(self) -> None:
        last = 0.0
        while not self._ending.wait(FLUSH_SECONDS):
            self._log.flush()
            if time.monotonic() - last >= SNAPSHOT_SECONDS:
                last = time.monotonic()
                self._leave_snapshot()
        self._log.flush()
        self._leave_snapshot()
        self._log.close()

    def _leave_snapshot(self) -> None:
        try:
            self._leave()
        except OSError as error:
            self._log.fault = str(error)  # the next one holds everything: counters only count up
