"""Answers at an endpoint's door while none of its replicas can: what asks how it is hears the truth within a second.

The host accepts then. Probes (`/v2/health/…`, `…/ready`) are answered at once: alive, and not ready. Everybody else
waits, and is handed to a replica, socket and all, as soon as one is well again; who has waited `PATIENCE` seconds hears
503. Nothing that a client has sent is read before: it is only looked at (MSG_PEEK).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from onejob.core.artifact import Json, canonical

PATIENCE = 5.0
REST = 0.5
"""Seconds in which nobody is let in, once there is no room."""
MOST = 1024
"""Connections that may wait here; more of them wait in the kernel's queue."""
LOOK = 4096
MOST_LEFT = 64
"""Pieces of 64 KiB that are read of what a visitor who was answered has sent."""
_PROBES = (b"/v2/health/ready", b"/v2/health/started")


class Replica(Protocol):
    """As far as the door needs one."""

    unready: str

    @property
    def ready(self) -> bool: ...
    def is_well(self, now: float) -> bool: ...
    def give(self, sock: socket.socket) -> bool: ...


@dataclass(eq=False)
class Visitor:
    """A connection that nobody has answered yet."""

    sock: socket.socket
    since: float
    asked: bool = False
    """It has sent something that is no probe."""
    begun: bool = False
    """It has sent a part of something; looked at now and then."""


class Doorman:
    """Connections that were accepted while no replica was well."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._visitors: list[Visitor] = []
        self._listener: socket.socket | None = None
        self._rests_until = 0.0
        self._why = "no replica has started yet"
        """Why no replica is well."""

    def keep(self, listener: socket.socket, replicas: Sequence[Replica], now: float, last_words: str = "") -> None:
        """Stand at the door while none of the replicas is well; then hand over who waits. `last_words`: of one that
        couldn't start."""
        well = [replica for replica in replicas if replica.is_well(now)]
        if not well:
            told = next((replica.unready for replica in replicas if replica.unready), "")
            silent = any(replica.ready for replica in replicas)
            self._why = told or ("the engine hangs" if silent else last_words or "no replica has started yet")
            if now >= self._rests_until:
                self.stand(listener)
            self.tend(now)
        else:
            self.leave()
            turns = itertools.cycle(well)
            self.hand_over(lambda sock: next(turns).give(sock))

    def stand(self, listener: socket.socket) -> None:
        """Accept from now on."""
        if self._listener is listener:
            return
        self.leave()
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self)

    def leave(self) -> None:
        """Accept no more; those who wait go on waiting."""
        if self._listener is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._listener)
            self._listener = None

    def _rest(self) -> None:
        """Let nobody in for a moment: who knocks would wake us again and again."""
        self.leave()
        self._rests_until = time.monotonic() + REST

    def accept(self) -> None:
        """Let in who knocks."""
        while self._listener is not None:
            if len(self._visitors) >= MOST:
                self._rest()  # until some have gone
                return
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._rest()  # it would wake us again and again
                return
            sock.setblocking(False)
            visitor = Visitor(sock, time.monotonic())
            self._visitors.append(visitor)
            self._selector.register(sock, selectors.EVENT_READ, visitor)

    def look(self, visitor: Visitor) -> None:
        """See what a visitor asks, and answer a probe."""
        try:
            data = visitor.sock.recv(LOOK, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(visitor)
            return
        end = data.find(b"\r\n\r\n")
        target = data.split(b" ", 2)[1] if data.count(b" ", 0, 256) >= 2 else b""
        path = target.partition(b"?")[0].rstrip(b"/")
        is_probe = data.startswith((b"GET ", b"HEAD ")) and (path in _PROBES or path.endswith(b"/ready"))
        if end >= 0 and data.startswith((b"GET ", b"HEAD ")) and path == b"/v2/health/live":
            self._answer(visitor, 200, {"live": True})
        elif end >= 0 and is_probe:
            self._answer(visitor, 503, {"error": f"not ready: {self._why}"})
        elif end >= 0 or len(data) == LOOK:
            visitor.asked, visitor.begun = True, False
            self._ignore(visitor)  # it waits: nothing that it sends changes anything
        else:
            visitor.begun = True
            self._ignore(visitor)  # what lies there unread would wake us again and again

    def tend(self, now: float) -> None:
        """Look whether who had begun to ask has gone on; tell those who have waited long enough."""
        for visitor in [one for one in self._visitors if one.begun]:
            self.look(visitor)
        for visitor in [one for one in self._visitors if now - one.since > PATIENCE]:
            self._answer(visitor, 503, {"error": f"not ready: {self._why}"})

    def hand_over(self, give: Callable[[socket.socket], bool]) -> None:
        """Give everybody who waits to a replica; who can't be given waits on."""
        for visitor in list(self._visitors):
            if not give(visitor.sock):
                return
            self._drop(visitor)

    def close(self) -> None:
        self.leave()
        for visitor in list(self._visitors):
            self._answer(visitor, 503, {"error": "the endpoint is being stopped"})

    def _answer(self, visitor: Visitor, status: int, body: Mapping[str, Json]) -> None:
        text = canonical(body)
        line = b"HTTP/1.1 200 OK" if status == 200 else b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1"
        head = b"%b\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        with contextlib.suppress(OSError):
            visitor.sock.send(head % (line, len(text)) + text)
            visitor.sock.shutdown(socket.SHUT_WR)
            for _ in range(MOST_LEFT):  # what lies unread would reset the connection under the answer
                if not visitor.sock.recv(1 << 16):
                    break
        self._drop(visitor)

    def _drop(self, visitor: Visitor) -> None:
        self._visitors.remove(visitor)
        self._ignore(visitor)
        visitor.sock.close()

    def _ignore(self, visitor: Visitor) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(visitor.sock)
