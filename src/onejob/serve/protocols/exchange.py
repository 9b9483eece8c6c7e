"""A request and its answer, as a connection and who answers know them; and the short ways that requests may take."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

from onejob.core.artifact import canonical

if TYPE_CHECKING:
    from onejob.serve.protocols.http import Connection

_LINES = {int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n".encode() for status in HTTPStatus}
JSON = b"application/json"


class Handler(Protocol):
    """Who gives the answers: calls `exchange.reply` once, now or later."""

    def handle(self, exchange: Exchange) -> None: ...
    def head_of(self, exchange: Exchange) -> bytes:
        """Header lines that every answer carries."""
        ...


class Lane(Protocol):
    """A request as a client sends it again and again, but for its last bytes: known by its first ones, it isn't parsed.

    Right because equal bytes mean the same: whatever differs takes the long way.
    """

    prefix: bytes
    length: int
    """Of the whole request; 0: any."""

    def ask(self, connection: Connection, data: bytes) -> bool:
        """Take the request; False if it must take the long way (what it was learnt from has changed)."""
        ...

    def missing(self, data: bytes) -> int:
        """How many bytes such a request lacks, if this is its head and perhaps some of its body; 0 otherwise."""
        ...


class Exchange:
    """One request and its answer. Made for each request: only what differs from the defaults is set."""

    method = b""
    url = b""
    body = b""
    head = b""
    """The bytes of the request line and the headers, if they came as one piece, and no other request with them."""
    keep_alive = True
    old = False
    """HTTP/1.0: a kept-alive answer must say so."""
    expects = False
    """Waits for `100 Continue` before it sends its body."""
    gone = False
    on_gone: Callable[[], None] | None = None
    """Called if the client goes away before the answer."""
    request_id = ""
    engine = ""
    """Digest of the engine that answers; empty where it doesn't matter which."""
    weight = 0
    """Bytes of its body that count among those of all clients, until it is answered."""
    _out: bytes | None = None

    def __init__(self, connection: Connection, received: int, headers: dict[bytes, bytes]) -> None:
        self.connection = connection
        self.received = received
        self.headers = headers

    @property
    def is_answered(self) -> bool:
        return self._out is not None

    def reply(self, status: int, body: bytes, content_type: bytes = JSON, extra: bytes = b"") -> None:
        """Give the answer; it is written when those before it on the connection are."""
        if self._out is not None or self.gone:
            return
        connection = self.connection
        keep = self.keep_alive and not (connection.draining and connection.ends_with(self))
        self.keep_alive = keep
        close = b"Connection: close\r\n" if not keep else b"Connection: keep-alive\r\n" if self.old else b""
        head = connection.handler.head_of(self) + close + extra
        self._out = answer(status, content_type, head, body, bare=self.method == b"HEAD")
        connection.flush()

    def fail(self, status: int, message: str, extra: bytes = b"") -> None:
        """Give an error as `{"error": message}`."""
        self.reply(status, canonical({"error": message}), extra=extra)

    def leave(self) -> None:
        """The client has gone away before the answer."""
        told, self.on_gone = self.on_gone, None
        if told:
            told()

    def give(self, out: bytes) -> None:
        """Give the answer as it goes over the wire, to a request that came on a lane."""
        if self.gone:
            return
        connection = self.connection
        exchanges = connection.exchanges
        if connection.draining and connection.ends_with(self):
            self.keep_alive = False
            head, _, body = out.partition(b"\r\n\r\n")
            out = b"%b\r\nConnection: close\r\n\r\n%b" % (head, body)
        if exchanges[0] is self and len(exchanges) == 1 and self.keep_alive:
            exchanges.popleft()
            connection.write(out)
        else:
            self._out = out
            connection.flush()

    def take_out(self) -> bytes:
        return self._out or b""


def answer(status: int, content_type: bytes, head: bytes, body: bytes, *, bare: bool = False) -> bytes:
    """An answer as it goes over the wire; `head` are further lines, a `bare` one has no body."""
    return b"%bContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n%b" % (
        _LINES[status],
        content_type,
        len(body),
        head,
        b"" if bare else body,
    )
