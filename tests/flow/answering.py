"""A server of known behaviour for the tests of the load generator: one process that answers as it is told to.

    python answering.py PORT|SOCKET [--stall N SECONDS] [--delay SECONDS] [--status N CODE] [--end close|eof|chunked]

It stops for a time at its N-th request, takes a time for each, answers each N-th with another status, and ends
answers in other ways than by their length.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import httptools

BODY = b'{"ok":true}'
BAD = b'{"error":"the queue is full"}'


class Answering(asyncio.Protocol):
    """One connection; requests are counted over all of them."""

    options: Any
    number = count(1)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        options, number = self.options, next(self.number)
        at, seconds = options.stall
        if number == at:
            time.sleep(seconds)
        if options.delay:
            asyncio.get_running_loop().call_later(options.delay, self.answer, number)
        else:
            self.answer(number)

    def answer(self, number: int) -> None:
        options = self.options
        every, code = options.status
        bad = every and number % every == 0
        status, body = (b"%d Other" % code, BAD) if bad else (b"200 OK", BODY)
        head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\n" % status
        if options.end == "eof":
            self.transport.write(head + b"Connection: close\r\n\r\n" + body)
        elif options.end == "chunked":
            if number > 1:  # the first is the standard library's, which takes it for the answer
                self.transport.write(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n")
            self.transport.write(head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        else:
            close = b"Connection: close\r\n" if options.end == "close" else b""
            self.transport.write(head + close + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        if options.end in ("eof", "close"):
            self.transport.close()


async def serve(place: str) -> None:
    loop = asyncio.get_running_loop()
    if place.isdigit():
        server = await loop.create_server(Answering, "127.0.0.1", int(place))
    else:
        server = await loop.create_unix_server(Answering, place)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("place")
    parser.add_argument("--stall", nargs=2, type=float, default=(0, 0))
    parser.add_argument("--status", nargs=2, type=int, default=(0, 0))
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--end", default="")
    Answering.options = parser.parse_args()
    asyncio.run(serve(Answering.options.place))


class Server:
    """The process, and where it listens."""

    def __init__(self, *args: object, place: str = "") -> None:
        self.place = place or str(_free_port())
        self._command = [sys.executable, __file__, self.place, *map(str, args)]
        self.process = self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.place}/x"

    def start(self) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen(self._command)
        deadline = time.monotonic() + 30
        while not self.answers():
            assert time.monotonic() < deadline, "it never listened"
            time.sleep(0.02)
        return self.process

    def answers(self) -> bool:
        unix = not self.place.isdigit()
        with socket.socket(socket.AF_UNIX if unix else socket.AF_INET) as sock, contextlib.suppress(OSError):
            sock.connect(self.place if unix else ("127.0.0.1", int(self.place)))
            return True
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def answering(*args: object, place: str = "") -> Iterator[Server]:
    """A server with these options, for as long as it is used."""
    server = Server(*args, place=place)
    try:
        yield server
    finally:
        server.kill()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    main()
