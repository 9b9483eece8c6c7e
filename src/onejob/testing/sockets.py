"""Clients of an endpoint on real sockets: hostile ones, and those who must not notice them."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from onejob.testing.api import Answer, take_apart
from onejob.testing.hostile import ask, infer

PATIENCE = 30.0


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def exchange(port: int, pieces: Sequence[bytes], *, pause: float = 0.0) -> bytes:
    """Send it, hang up that side, and give all that comes until the server hangs up; TimeoutError if it doesn't."""
    with connect(port) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        heard, left, open_ = bytearray(), [memoryview(piece) for piece in pieces], True
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            readable, writable, _ = select.select([sock], [sock] if open_ else [], [], 1.0)
            try:
                if readable:
                    piece = sock.recv(1 << 18)
                    if not piece:
                        return bytes(heard)
                    heard += piece
                elif writable and left:
                    sent = sock.send(left[0])
                    left[0] = left[0][sent:]
                    if not left[0]:
                        del left[0]
                        time.sleep(pause)
                elif writable:
                    open_ = False
                    sock.shutdown(socket.SHUT_WR)
            except (ConnectionError, BlockingIOError):
                if not open_ or readable:
                    return bytes(heard)  # it was reset
                open_, left = False, []
        raise TimeoutError(f"the server neither answers nor hangs up; it has said {bytes(heard)[:200]!r}")


class Neighbour:
    """A client that asks `m` again and again what nobody else knows, on a thread of its own, and checks each answer."""

    def __init__(self, port: int, number: int, *, path: bytes = b"/v2/models/m/infer", scale: float = 2.0) -> None:
        self.asked = 0
        self.wrong: list[str] = []
        self.worst = 0.0
        """Seconds of the slowest answer."""
        self.lost = 0
        """Connections that ended before the answer to a request that was sent; only where `reconnect` allows it."""
        self.refused = 0
        """Connections that could not be made, then."""
        self.reconnect = False
        self._port, self._number, self._path, self._scale = port, number, path, np.float32(scale)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"neighbour-{number}", daemon=True)

    def start(self) -> Neighbour:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._over.set()
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self.wrong.append("it still waits for an answer")

    def values(self, turn: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """Of the request of that turn: nobody else's, of this neighbour or of another."""
        made: np.ndarray[tuple[int], np.dtype[np.float32]] = np.random.default_rng((self._number, turn)).random(2, "f4")
        return made + np.float32(self._number)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                sock = connect(self._port)
            except OSError as error:
                self.refused += 1
                if not self.reconnect:
                    self.wrong.append(f"{type(error).__name__}: {error}")
                    return
                time.sleep(0.02)
                continue
            with sock:
                try:
                    self._keep_asking(sock)
                except (OSError, EOFError) as error:
                    self.lost += 1
                    if not self.reconnect:
                        self.wrong.append(f"{type(error).__name__}: {error}")
                        return

    def _keep_asking(self, sock: socket.socket) -> None:
        while not self._over.is_set():
            x = self.values(self.asked)
            body, length = infer("m", {"x": x}, binary=self._number % 2 == 0)
            begun = time.perf_counter()
            sock.sendall(ask(self._path, body, length))
            answer = read_answer(sock)
            self.worst = max(self.worst, time.perf_counter() - begun)
            y = x * self._scale + np.float32(1)
            if answer.status != 200 or not np.array_equal(numbers_of(answer), y):
                self.wrong.append(f"asked {x}, heard {answer}")
            self.asked += 1
            if answer.headers.get("connection") == "close":
                return


def read_answer(sock: socket.socket) -> Answer:
    """The next answer; EOFError if the server hangs up before."""
    heard = b""
    while True:
        piece = sock.recv(1 << 16)
        if not piece:
            raise EOFError("the server hung up")
        heard += piece
        head, end, rest = heard.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        if end and length and len(rest) >= int(length[1]):
            (answer,) = take_apart(heard)
            return answer


def numbers_of(answer: Answer) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The FP32 numbers of an answer with one output."""
    if text := answer.headers.get("inference-header-content-length"):
        return np.frombuffer(answer.body[int(text) :], "<f4")
    data = re.search(rb'"data":\[([^]]*)\]', answer.body)
    return np.array([float(number) for number in data[1].split(b",")] if data else [], np.float32)


def memory_of(pid: int) -> float:
    """What a process holds that is no file's, in MiB."""
    with contextlib.suppress(OSError):
        found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) / 1024 if found else 0.0
    return 0.0
