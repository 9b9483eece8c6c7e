"""The connections of one process in one turn: asyncio protocols on raw sockets, each with one request under way.

The path of an answer is short, for what it costs is load that can't be sent: the parser counts bytes in C and calls
back once, when an answer is whole; the pace notes a number and sends the next. Everything rare is elsewhere: other
statuses, lost connections, time-outs, connecting again.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from itertools import cycle
from time import monotonic_ns
from typing import Any, cast

import httptools

from onejob.serve.bench.pace import TIMEOUT, Pace
from onejob.serve.bench.target import Address

AT_ONCE = 128
"""Connections that are opened at the same time: a listener's queue is short."""
SOONEST, LATEST = 0.01, 0.25
"""Seconds between two tries to connect again."""
SAMPLE = 300
"""Characters of an error's text that are kept."""


class Connection(asyncio.Protocol):
    """One connection, made again whenever it is lost; with at most one request under way."""

    __slots__ = (
        "_answered",
        "_client",
        "_data",
        "_feed",
        "_keep",
        "_next",
        "_parser",
        "_sent",
        "_status",
        "_tally",
        "_transport",
        "_write",
        "dropped",
        "due",
        "live",
        "opening",
    )

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tally = client.pace.tally
        self._answered = client.pace.answered
        self._next = client.next_request
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._parser: Any = None
        self._data = b""
        self._sent = 0
        self.due = 0
        """When the request under way was due; 0 if there is none."""
        self.live = False
        self.opening = False
        self.dropped = False
        """We have ended it ourselves."""

    def send(self, due: int) -> None:
        self.due = due
        self._sent = monotonic_ns()
        request = self._next()
        self._tally.sent += len(request)
        self._write(request)

    def close(self) -> None:
        self.dropped = True
        if self._transport is not None:
            self._transport.abort()

    # ---- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._write = self._transport.write
        self._parser = httptools.HttpResponseParser(self)
        self._feed = self._parser.feed_data
        self._status = self._parser.get_status_code
        self._keep = self._parser.should_keep_alive
        self._data, self.due = b"", 0
        self.live, self.dropped = True, False

    def data_received(self, data: bytes) -> None:
        self._tally.received += len(data)
        self._data = data
        try:
            self._feed(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail("malformed answer", str(error))
            self._lose()

    def connection_lost(self, exc: Exception | None) -> None:
        was, self.live = self.live, False
        if self.due:
            if exc is None and self._client.until_eof and self._parser.get_status_code():
                self._end_of_answer(monotonic_ns())
            else:
                reset = isinstance(exc, OSError)
                self._fail("connection reset" if reset else "connection closed", str(exc or ""))
        if was:
            self._client.pace.gone(self)
        self._client.lost(self)

    # ---- the parser's side

    def on_message_complete(self) -> None:
        now = monotonic_ns()
        due = self.due
        if self._status() == 200 and due and self._keep():
            self.due = 0
            self._answered(self, due, self._sent, now)
        else:
            self._unusual(now)

    # ---- what is rare

    def _unusual(self, now: int) -> None:
        """Any answer but a good one on a connection that stays."""
        status, due = self._status(), self.due
        if 100 <= status < 200:
            return  # the answer proper comes yet
        if not due:
            self._lose()  # nobody has asked: such as 408 on an idle connection
            return
        keep = self._keep()
        self._end_of_answer(now)
        if keep:
            self._client.pace.ready(self, now)
        else:
            self._lose()

    def _end_of_answer(self, now: int) -> None:
        status, due = self._status(), self.due
        self.due = 0
        if 200 <= status < 300:
            self._client.pace.taken(due, self._sent, now)
        else:
            text = self._data.rpartition(b"\r\n\r\n")[2].decode("utf-8", "replace")
            self._client.pace.failed(due, f"status {status}", text[:SAMPLE])

    def _fail(self, kind: str, sample: str) -> None:
        due, self.due = self.due, 0
        if due:
            self._client.pace.failed(due, kind, sample[:SAMPLE])

    def expire(self, now: int, timeout: int) -> None:
        """Give up a request that has had its time; its connection is of no more use."""
        if self.due and now - self.due > timeout:
            self._fail(TIMEOUT, f"no answer in {timeout / 1e9:g} s")
            self._lose()

    def give_up(self) -> bool:
        """Forget the request under way; whether there was one."""
        due, self.due = self.due, 0
        return bool(due) and due >= self._client.pace.begin

    def _lose(self) -> None:
        """End the connection; another is made when it has ended."""
        if self.live:
            self.live = False
            self._client.pace.gone(self)
            self._transport.abort()


class Client:
    """All connections of one process in one turn."""

    def __init__(
        self,
        address: Address,
        requests: Sequence[bytes],
        pace: Pace,
        *,
        timeout: float,
        until_eof: bool = False,
    ) -> None:
        self.pace = pace
        pace.timeout = round(timeout * 1e9)
        self.next_request = cycle(requests).__next__
        self.until_eof = until_eof
        """Answers end with their connection, and nothing else."""
        self._address = address
        self._ssl = ssl.create_default_context() if address.tls else None
        self._timeout = timeout
        self._connections: list[Connection] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def open(self, count: int) -> None:
        """Make connections; those that can't be made yet are made later."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def make(connection: Connection) -> bool:
            async with gate:
                return not await self._open(connection)

        self._connections = [Connection(self) for _ in range(count)]
        failed = await asyncio.gather(*map(make, self._connections))
        for connection in (one for one, bad in zip(self._connections, failed, strict=True) if bad):
            self._again(connection)

    def begin(self) -> None:
        """Let every connection send."""
        for connection in self._connections:
            if connection.live and not connection.opening:
                self.pace.ready(connection, monotonic_ns())

    def sweep(self) -> None:
        """Give up what has waited longer than the timeout."""
        now = monotonic_ns()
        for connection in self._connections:
            connection.expire(now, self.pace.timeout)
        self.pace.sweep(now)

    @property
    def busy(self) -> bool:
        return any(connection.due for connection in self._connections)

    def close(self) -> None:
        """End all connections; requests under way are counted as unfinished."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for connection in self._connections:
            self.pace.tally.unfinished += connection.give_up()
            connection.close()

    def lost(self, connection: Connection) -> None:
        """A connection has ended: have it made again."""
        if not (self._closed or connection.dropped or connection.opening):
            self.pace.tally.reconnects += 1
            self._again(connection)

    def _again(self, connection: Connection) -> None:
        connection.opening = True
        task = asyncio.get_running_loop().create_task(self._reopen(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reopen(self, connection: Connection) -> None:
        delay = SOONEST
        while not await self._open(connection):
            await asyncio.sleep(delay)
            delay = min(delay * 2, LATEST)
        if monotonic_ns() >= self.pace.start_at:
            self.pace.ready(connection, monotonic_ns())

    async def _open(self, connection: Connection) -> bool:
        """Try to connect; a request that can't be sent therefore has failed."""
        connection.opening = True
        loop, at = asyncio.get_running_loop(), self._address
        try:
            async with asyncio.timeout(self._timeout):
                if at.socket:
                    await loop.create_unix_connection(
                        lambda: connection, at.socket, ssl=self._ssl, server_hostname=at.host if at.tls else None
                    )
                else:
                    await loop.create_connection(
                        lambda: connection, at.ip, at.port, ssl=self._ssl, server_hostname=at.host if at.tls else None
                    )
        except TimeoutError:
            self.pace.refused("no connection", f"none within {self._timeout:g} s", monotonic_ns())
            return False
        except OSError as error:
            kind = "connection refused" if isinstance(error, ConnectionRefusedError) else "no connection"
            self.pace.refused(kind, str(error), monotonic_ns())
            return False
        finally:
            connection.opening = False
        self.pace.connected()
        return connection.live
