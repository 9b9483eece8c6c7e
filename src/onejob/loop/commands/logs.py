"""The command `logs`: what steps and endpoints printed, and, when followed, what they print until they end.

What there is to read may change while one reads: the steps of a run start one after the other, a step is tried again,
an endpoint gets a new host. So each round asks anew which files there are, and goes on in each where it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from onejob.core.state import EndpointState, StepState
from onejob.errors import NotFoundError
from onejob.loop.commands.look import newest_run
from onejob.loop.endpoints import newest_host
from onejob.loop.lineage import producer
from onejob.loop.resolve import Target, resolve
from onejob.loop.session import Session
from onejob.loop.snapshots import ended

POLL = 0.2
"""Seconds between rounds."""
MARK = 4096
"""Bytes by which a reader finds its place again in a log that was shortened."""
OVER = (StepState.DONE, StepState.FAILED, StepState.CANCELLED, StepState.SKIPPED)


def logs(
    session: Session, ref: str, follow: bool = False, sleep: Callable[[float], object] = time.sleep
) -> Iterator[str]:
    """The lines that a step, every step of a run, or an endpoint's host printed; with `follow`, also those to come.

    NotFoundError if nothing was printed yet and nothing is waited for.
    """
    target = resolve(session, ref)
    readers: dict[Path, LogReader] = {}
    while True:
        over = not follow or _is_over(session, target)  # asked first: what it prints as it ends is read below
        paths = list(_paths(session, target))
        for name, path in paths:
            reader = readers.setdefault(path, LogReader(path))
            for line in reader.lines(last=over):
                yield f"{name} | {line}" if name else line
        if over:
            break
        sleep(POLL)
    if not any(path.exists() for path in readers):
        raise NotFoundError("there is no log", place=ref, cure="A step has a log once it has started.")


def _paths(session: Session, target: Target) -> Iterator[tuple[str, Path]]:
    """(name of the step where there are several, path) of all logs that there may be by now."""
    if target.endpoint:
        folder = session.home.endpoint(target.endpoint.name)
        _, number = newest_host(folder)
        yield "", folder / f"host-{number}" / "log"
        return
    made = target.execution or (producer(session, target.digest, _maker(target)) if target.digest else None)
    if made or target.digest:
        yield from [("", session.home.work(made.id) / "log")] if made else []
        return
    rows = session.ledger.list_steps(_run(session, target))
    for row in rows:
        if row.execution and (target.step is None or target.step.name == row.name):
            yield "" if target.step or len(rows) == 1 else row.name, session.home.work(row.execution) / "log"


def _is_over(session: Session, target: Target) -> bool:
    """Whether nothing more will be printed."""
    if target.endpoint:
        now = session.ledger.get_endpoint(target.endpoint.name)
        return now is None or now.state in (EndpointState.STOPPED, EndpointState.FAILED)
    if target.execution:
        return session.ledger.get_execution(target.execution.id).finished is not None
    if target.digest:
        return True
    run = session.ledger.get_run(_run(session, target))
    if target.step is None:
        return ended(run)
    rows = {row.name: row for row in session.ledger.list_steps(run.id)}
    return ended(run) or rows[target.step.name].state in OVER


def _maker(target: Target) -> str | None:
    return target.ref.execution if target.ref else None


def _run(session: Session, target: Target) -> int:
    """The run that was named; of a job file the one that was the newest, also while it is followed."""
    return (target.run or newest_run(session, target.path)).id


class LogReader:
    """Reads a growing log line by line; a log that was shortened meanwhile is gone on with after what was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inode, self.position = 0, 0
        self.rest, self.read = b"", b""
        """Half a line, and the last bytes that were read."""

    def lines(self, *, last: bool = False) -> Iterator[str]:
        """The whole lines that are new; with `last`, half a line at the end too."""
        *whole, self.rest = (self.rest + self._new()).split(b"\n")
        if last and self.rest:
            whole.append(self.rest)
            self.rest = b""
        for line in whole:
            yield line.rstrip(b"\r").decode(errors="replace")

    def _new(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if self.inode and inode != self.inode:  # rewritten, without its middle
                    self.position = _after(file.read(), self.read)
                file.seek(self.position)
                found = file.read()
        except FileNotFoundError:
            return b""
        self.inode, self.position = inode, self.position + len(found)
        self.read = (self.read + found)[-MARK:]
        return found


def _after(text: bytes, mark: bytes) -> int:
    """Where `mark` ends in a text; its beginning if it was cut out."""
    found = text.rfind(mark)
    return found + len(mark) if found >= 0 else 0
