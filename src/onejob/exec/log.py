"""The log of a task: bounded in size, line by line, with each rank's name before its lines and secrets taken out."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from onejob.exec.redact import Redactor, Stream

LIMIT = 64 << 20
LONGEST_LINE = 64 << 10


class Log:
    """An append-only file that keeps its head and its tail once it grows beyond `limit` bytes.

    When it is full, it is written anew: the first quarter, a line that says how much was left out, the last quarter.
    Each byte is thus copied once on average, and a reader always finds one ordinary file (a new one: `tail -F`).
    """

    def __init__(self, path: Path, limit: int = LIMIT) -> None:
        self.path = path
        self.limit = limit
        self.file = path.open("ab", buffering=0)
        self.size = os.fstat(self.file.fileno()).st_size
        self.at_line_start = True
        self.left_out = 0
        self.tail_from = 0
        """Where the head and the notice end, once something was left out."""

    def write(self, data: bytes) -> None:
        """Append; a full disk costs lines of the log, never the task."""
        if not data:
            return
        with contextlib.suppress(OSError):
            self.size += self.file.write(data)
            self.at_line_start = data.endswith(b"\n")
            if self.size > self.limit:
                self._compact()

    def note(self, text: str) -> None:
        """A line of our own, marked as such."""
        self.write((b"" if self.at_line_start else b"\n") + f"[onejob] {text}\n".encode(errors="replace"))

    def close(self) -> None:
        self.file.close()

    def _compact(self) -> None:
        keep = self.limit // 4
        with self.path.open("rb") as old:
            head = old.read(self.tail_from) if self.tail_from else _to_line_end(old.read(keep))
            old.seek(-keep, os.SEEK_END)
            tail = old.read()
        tail = tail[tail.find(b"\n") + 1 :]
        if self.tail_from:
            head = head[: head.rindex(b"\n", 0, -1) + 1]  # without the former notice
            self.left_out += self.size - self.tail_from - len(tail)
        else:
            self.left_out = self.size - len(head) - len(tail)
        head += f"[onejob] … {self.left_out:,} bytes of the log were left out here …\n".encode()
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        aside.write_bytes(head + tail)
        aside.replace(self.path)
        self.file.close()
        self.file = self.path.open("ab", buffering=0)
        self.size, self.tail_from = len(head) + len(tail), len(head)


class RankOutput:
    """What one rank prints, on its way into the log.

    A single rank's output goes through as it comes, so that a prompt or a bar shows at once; the ranks of a gang are
    told apart line by line.
    """

    def __init__(self, log: Log, redactor: Redactor, prefix: bytes = b"") -> None:
        self.log = log
        self.stream = Stream(redactor)
        self.prefix = prefix
        self.line = b""

    def feed(self, data: bytes) -> None:
        self._say(self.stream.feed(data))

    def end(self) -> None:
        self._say(self.stream.end())
        if self.line:
            self.log.write(self.prefix + self.line + b"\n")
            self.line = b""

    def _say(self, data: bytes) -> None:
        if not self.prefix:
            self.log.write(data)
            return
        *lines, self.line = (self.line + data).split(b"\n")
        if len(self.line) > LONGEST_LINE:
            lines.append(self.line)
            self.line = b""
        self.log.write(b"".join(self.prefix + line + b"\n" for line in lines))


def _to_line_end(data: bytes) -> bytes:
    end = data.rfind(b"\n") + 1
    return data[:end] if end else data + b"\n"
