"""HTTP/1.1 on a socket: one `Connection` frames requests and writes answers in order; what they mean is `http_api`'s.

httptools parses. This file bounds what a client may send (head, body, inflated body, requests in flight) and what all
may together, keeps the order of pipelined answers though they may be ready in another, does nothing for a client that
doesn't read, and drains: an answer given while draining says `Connection: close`, so that a kept-alive client comes
back on a new connection, to a new replica.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any, cast

import httptools

from onejob.serve.protocols.exchange import Exchange, Handler, Lane

MAX_HEAD = 64 << 10
MAX_BODY = 64 << 20
MAX_RECEIVED = 512 << 20
"""Bytes of bodies, unanswered ones, that all clients together may have sent."""
SMALL_BODY = 64 << 10
"""A body up to here is always welcome: those who send large ones don't keep others out."""
MAX_IN_FLIGHT = 32
"""Requests of one connection that are worked on at once; others wait, and reading from it stops."""
LINGER = 1.0
"""Seconds for a refused client to read its answer before the connection is closed on it."""
SLOW_SECONDS = 60.0
"""Longest pause within a request, and in reading an answer."""
LEAST_RATE = 4 << 10
"""Bytes a second, after the first SLOW_SECONDS, in which a request must arrive."""

_KEPT = frozenset(
    (
        b"content-length",
        b"content-type",
        b"accept-encoding",
        b"content-encoding",
        b"expect",
        b"x-request-id",
        b"x-request-key",
        b"inference-header-content-length",
        b"transfer-encoding",
    )
)


class Room:
    """How many bytes of unanswered bodies there may still be: one for all connections of a replica."""

    def __init__(self, most: int = MAX_RECEIVED) -> None:
        self.most = self.left = most
        self.taken = 0
        """Bytes that have been received, over all time."""


class Connection(asyncio.Protocol):
    """One client. Every callback is the event loop's; the parser's callbacks come from within `data_received`."""

    def __init__(
        self, handler: Handler, connections: set[Connection], *, max_body: int = MAX_BODY, room: Room | None = None
    ) -> None:
        self.handler = handler
        self.draining = False
        self.last = time.monotonic()
        """When something last arrived or was answered."""
        self._since = self.last
        """When the request that is arriving began to."""
        self.lane: Lane | None = None
        """How its last request looked."""
        self._connections = connections
        self._max_body = max_body
        self._room = room or Room()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._parser: Any = httptools.HttpRequestParser(self)
        self.exchanges: deque[Exchange] = deque()
        self._held: deque[Exchange] = deque()
        """Those of them that nobody works on yet."""
        self._taking = False
        self._current: Exchange | None = None
        self._in_body = False
        self._head_bytes = 0
        self._field_bytes = 0
        self._body: bytes | bytearray = b""
        self._upgrading: Exchange | None = None
        self._piece = b""
        """What was read when the request that is arriving began."""
        self._begun: list[bytes] = []
        """A request that seems to be one for the lane, as far as it has arrived."""
        self._missing = 0
        self._deaf = False
        """No more requests are taken from this client."""
        self._writable = True
        self._reading = True
        self._unread = 0
        """Bytes of answers that the client had not read when it was last looked at."""

    @property
    def idle(self) -> bool:
        """No request has begun to arrive and none is unanswered."""
        return self._current is None and not self.exchanges and not self._begun

    def stalls(self, now: float) -> bool:
        """Whether it is the client's move, and has been for too long: within a request, or in reading its answers."""
        unread = self._transport.get_write_buffer_size()
        if unread < self._unread:
            self.last = now
        self._unread = unread
        if not self._writable:
            return now - self.last > SLOW_SECONDS
        if (self._current is None and not self._begun) or not self._reading:
            return False
        received = self._field_bytes + len(self._body) + sum(map(len, self._begun))
        return now - self.last > SLOW_SECONDS or now - self._since > SLOW_SECONDS + received / LEAST_RATE

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def ends_with(self, exchange: Exchange) -> bool:
        """Whether nothing that the client has sent comes after this request."""
        waits = self._current is None and not self._begun
        return waits and (not self.exchanges or self.exchanges[-1] is exchange)

    # ---- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._forsake()
        self._parser, self._body = None, b""  # they know each other: without that, the collector's work

    def _forsake(self) -> None:
        """Nobody waits for these answers any more."""
        for exchange in self.exchanges:
            exchange.gone = True
            if not exchange.is_answered:
                exchange.leave()
        self._room.left += sum([exchange.weight for exchange in self.exchanges])
        self.exchanges.clear()
        self._held.clear()
        self._current = None

    def data_received(self, data: bytes) -> None:
        self.last = time.monotonic()
        if self._deaf:
            return
        if self._begun:
            self._begun.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return
            data, self._begun = b"".join(self._begun), []
        between = self._current is None and not self._in_body and not self._head_bytes
        lane = self.lane
        if lane is not None and between:
            fits = lane.length in (0, len(data)) and data.startswith(lane.prefix)
            if fits and lane.ask(self, data):
                if len(self.exchanges) >= MAX_IN_FLIGHT:
                    self._set_reading()
                return
            self._missing = lane.missing(data)
            if self._missing:
                self._begun, self._since = [data], self.last
                return
            if fits:
                self.lane = None
        if between:
            self._piece = data
        if not self._in_body:
            self._head_bytes += len(data)
        while data:
            data = self._parse(data)
        if between and self._piece:
            self._piece = self._piece[: self._piece.find(b"\r\n\r\n") + 4]  # its body is kept elsewhere
        if not self._in_body and self._current is None:
            self._head_bytes = 0
        elif not self._in_body and self._head_bytes > MAX_HEAD:
            self._refuse_head()

    def _parse(self, data: bytes) -> bytes:
        """Take in what has been read; gives what is still to be parsed."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._stay(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(400, f"malformed HTTP request: {error}")
        return b""

    def _stay(self, rest: bytes) -> bytes:
        """An upgrade to another protocol (curl --http2 asks for one) is ignored: gives the request again without it.

        The parser itself would take the body for the other protocol's bytes.
        """
        exchange, self._upgrading = self._upgrading, None
        if exchange is None or self._deaf:
            return b""
        if not exchange.expects:
            exchange.headers.pop(b"expect", None)  # it has been told to continue
        lines = [b"%b %b HTTP/1.%d" % (exchange.method, exchange.url, 0 if exchange.old else 1)]
        lines += [b"%b: %b" % pair for pair in exchange.headers.items()]
        self._parser = httptools.HttpRequestParser(self)
        return b"\r\n".join((*lines, b"", rest))

    def eof_received(self) -> bool:
        self._deaf = True
        self._begun = []
        if self._current is not None:  # half a request: nobody waits for its answer
            if self._current in self.exchanges:
                self.exchanges.remove(self._current)
                self._room.left += self._current.weight
            self._current = None
        return bool(self.exchanges)  # True keeps the writing side open for the answers that are due

    def pause_writing(self) -> None:
        self._writable = False
        self._set_reading()

    def resume_writing(self) -> None:
        self._writable = True
        self._take()
        self._set_reading()

    # ---- the parser's side

    def on_message_begin(self) -> None:
        if not self._deaf:
            self._current = Exchange(self, time.perf_counter_ns(), {})
            self._body, self._field_bytes, self._in_body, self._since = b"", 0, False, self.last

    def on_url(self, url: bytes) -> None:
        if self._current is not None:
            self._current.url += url
            self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._current is None:
            return
        self._count_head(len(name) + len(value) + 4)
        if (name := name.lower()) in _KEPT and not self._in_body and self._current is not None:  # else it is a trailer
            self._current.headers[name] = value

    def on_headers_complete(self) -> None:
        exchange = self._current
        if exchange is None:
            return
        exchange.method = self._parser.get_method()
        version = self._parser.get_http_version()
        exchange.old = version == "1.0"
        self._in_body = True
        self.exchanges.append(exchange)
        length = exchange.headers.get(b"content-length", b"0")
        if not exchange.old and version != "1.1":
            self._refuse(505, "HTTP/1.1 is wanted")
        elif exchange.method == b"CONNECT":
            self._refuse(405, "Method Not Allowed")
        elif length.isdigit() and int(length) > self._max_body:
            self._refuse(413, f"the body is larger than {self._max_body} bytes")
        elif exchange.headers.get(b"expect", b"").lower() == b"100-continue" and not exchange.old:
            exchange.expects = True
            self._continue()

    def on_body(self, body: bytes) -> None:
        if self._current is None:
            return
        exchange = self._current
        exchange.expects = False
        if self._body:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += body  # not a list of pieces: a chunk of one byte would cost fifty
        else:
            self._body = body
        exchange.weight += len(body)
        self._room.left -= len(body)
        self._room.taken += len(body)
        if len(self._body) > self._max_body:
            self._refuse(413, f"the body is larger than {self._max_body} bytes")
        elif self._room.left < 0 and len(self._body) > SMALL_BODY:
            self._refuse(503, "too many bytes of requests are under way", b"Retry-After: 1\r\n")

    def on_message_complete(self) -> None:
        exchange = self._current
        if exchange is None:
            return
        self._current, self._in_body, self._head_bytes = None, False, 0
        if self._parser.should_upgrade():
            exchange.headers[b"connection"] = b"keep-alive" if self._parser.should_keep_alive() else b"close"
            self._upgrading = exchange
            self.exchanges.remove(exchange)
            return
        exchange.expects = False
        exchange.keep_alive = bool(self._parser.should_keep_alive()) and not self._deaf
        if not exchange.keep_alive:
            self._deaf = True
        exchange.body, self._body = bytes(self._body), b""
        if self._piece:
            exchange.head, self._piece = _head_of(self._piece, exchange), b""
        if not self._held and self._writable and len(self.exchanges) <= MAX_IN_FLIGHT:
            self.handler.handle(exchange)
        else:
            self._held.append(exchange)
        self._set_reading()

    def _take(self) -> None:
        """Work on requests that had to wait, as far as the client reads what it is told."""
        if self._taking:
            return  # from within an answer to one of them
        self._taking = True
        try:
            while self._held and self._writable and len(self.exchanges) - len(self._held) < MAX_IN_FLIGHT:
                self.handler.handle(self._held.popleft())
        finally:
            self._taking = False

    # ---- answers

    def write(self, out: bytes) -> None:
        """Write the answer to the only request under way."""
        self._transport.write(out)
        if not self._reading:
            self._set_reading()
        if self._deaf:
            self._end()

    def flush(self) -> None:
        """Write every answer that is ready and whose turn it is, at once."""
        ready: list[bytes] = []
        keep = True
        while keep and self.exchanges and self.exchanges[0].is_answered:
            exchange = self.exchanges.popleft()
            ready.append(exchange.take_out())
            keep = exchange.keep_alive
            self._room.left += exchange.weight
        if not ready:
            return
        self.last = time.monotonic()
        self._transport.write(ready[0] if len(ready) == 1 else b"".join(ready))
        if not keep:
            self._end()
        else:
            self._continue()
            if self._held:
                self._take()
            self._set_reading()
            if self._deaf and not self.exchanges:
                self._end()

    def _count_head(self, size: int) -> None:
        self._field_bytes += size
        if self._field_bytes > MAX_HEAD:
            self._refuse_head()

    def _refuse_head(self) -> None:
        self._refuse(431, f"the request's head is larger than {MAX_HEAD} bytes")

    def _refuse(self, status: int, message: str, extra: bytes = b"") -> None:
        """Answer what is wrong with the stream itself, in its turn, and listen no more."""
        if self._deaf:
            return
        self._deaf = True
        exchange, self._current = self._current or Exchange(self, time.perf_counter_ns(), {}), None
        self._body = b""
        if exchange not in self.exchanges:
            self.exchanges.append(exchange)
        exchange.keep_alive = False
        exchange.fail(status, message, extra)

    def _continue(self) -> None:
        if self.exchanges and self.exchanges[0].expects:
            self.exchanges[0].expects = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _end(self) -> None:
        """Close so that the last answer is read: a close with unread input would reset the connection under it."""
        self._deaf = True
        self._forsake()
        transport = self._transport
        if transport.is_closing():
            return
        if transport.can_write_eof():
            transport.write_eof()
        if not self._reading:
            self._reading = True
            transport.resume_reading()
        asyncio.get_running_loop().call_later(LINGER, transport.close)

    def _set_reading(self) -> None:
        reading = self._writable and len(self.exchanges) < MAX_IN_FLIGHT
        if reading != self._reading and not self._transport.is_closing():
            self._reading = reading
            if reading:
                self.last = self._since = time.monotonic()  # the pause was ours
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()


def _head_of(piece: bytes, exchange: Exchange) -> bytes:
    """The request line and headers, if they are in a piece that holds nothing before this request and nothing after."""
    end = piece.find(b"\r\n\r\n") + 4
    alone = 3 < end <= len(piece) <= end + len(exchange.body) and piece.startswith(exchange.method)
    plain = exchange.keep_alive and not exchange.old and b"transfer-encoding" not in exchange.headers
    return piece[:end] if alone and plain else b""
