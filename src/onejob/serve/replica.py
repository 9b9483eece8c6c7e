"""A replica: one process that holds the model and answers requests on the socket that it inherits from its host.

    python -m onejob.serve.replica LISTENER CONTROL HOST_PID

CONTROL is a socket to the host: it sends one line, what to serve; the replica sends JSON lines back: `{"ready":
true}` once a warm-up inference has succeeded, `{"beat": n}` from the event loop each second, `{"unready": why}`
when the engine fails or hangs, `{"error": …}` if it can't start. On SIGTERM it drains briefly, on `{"drain":
seconds}` at leisure (others answer by then). It dies with its host, whatever the host dies of.

While a new engine is tried, a replica holds it beside the one that serves (serve/router.py). Its beats then say how the
requests of both went, `{"faulty": why}` that the new one fails or hangs, and the host ends it with `{"settle": "new"}`
or `{"settle": "former"}`. Models of a repository come and go while it runs: see serve/loader.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from typing import Any

import uvloop

from onejob.core.artifact import Json, canonical
from onejob.core.faults import reach
from onejob.errors import OnejobError, UnavailableError
from onejob.serve.folder import REQUESTS
from onejob.serve.journal import Journal, RequestLog
from onejob.serve.load import Opened, Options, Told, open_all
from onejob.serve.loader import Loader, give_back_memory
from onejob.serve.protocols.http import Connection, Room
from onejob.serve.protocols.http_api import Api

BEAT_SECONDS = 0.25
TICK_SECONDS = 0.1
HELD_SECONDS = 1.0
"""A round that comes so much later than it should tells that this process was held up."""
QUIET_SECONDS = 0.3
"""When stopped: how long a kept-alive connection without a request is left open."""
IDLE_SECONDS = 600.0
"""How long a connection may be kept alive without a request."""
SWEEP_SECONDS = 2.0
MUCH = 32 << 20
"""Bytes of bodies after which memory is given back to the system."""
YOUNG = 20_000
"""So many more objects must have been made than freed before cycles are looked for."""
PR_SET_PDEATHSIG = 1
MOST_SOCKETS = 64


class Control:
    """The replica's end of the socket to its host."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = b""
        self.sockets: list[int] = []
        """Connections that the host has accepted and handed over: file descriptors."""

    def receive(self) -> Json:
        """The next line, waiting for it; EOFError when the host is gone."""
        while b"\n" not in self._rest:
            piece, sockets, _, _ = socket.recv_fds(self._sock, 1 << 16, MOST_SOCKETS)
            if not piece:
                raise EOFError("the host is gone")
            self._rest += piece
            self.sockets += sockets
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def receive_all(self) -> list[Json]:
        """The next line, waiting for it, and those that came with it."""
        messages = [self.receive()]
        while b"\n" in self._rest:
            messages.append(self.receive())
        return messages

    def send(self, message: Json) -> None:
        try:
            self._sock.sendall(canonical(message) + b"\n")
        except OSError:
            os._exit(0)  # the host is gone, and with it the reason to be

    def fileno(self) -> int:
        return self._sock.fileno()


class Replica:
    """Accepts, beats, watches the engine, and drains."""

    def __init__(self, loader: Loader, listener: socket.socket, control: Control, grace: float) -> None:
        self._loader = loader
        self._registry = loader.registry
        self._listener = listener
        self._control = control
        self._grace = grace
        self._connections: set[Connection] = set()
        self._room = Room()
        self._seen = self._tidied = 0
        """Bytes that it had taken when it was last looked at, and when memory was given back."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._api = Api(loader.registry, repository=loader if loader.is_repository else None)
        self._stop_at: float | None = None
        self._lets_in = False
        self._quiet = self._swept = 0.0
        self._looked = time.monotonic()
        self._changed = asyncio.Event()
        self._told_unready = self._told_faulty = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self._connection, sock=self._listener, backlog=4096)
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._end)
        loop.add_reader(self._control.fileno(), self._hear)
        self._control.send({"ready": True})
        reach("replica.ready")
        beat = 0.0
        while self._stop_at is None:
            if loop.time() - beat >= BEAT_SECONDS:
                beat = loop.time()
                self._beat()
            self._excuse(time.monotonic())
            self._watch()
            self._loader.close_idle()
            self._sweep()
            await self._pause()
        if self._lets_in:
            await asyncio.sleep(QUIET_SECONDS)
            self._let_in()
        server.close()
        reach("replica.draining")
        await self._drain(loop)

    def _connection(self) -> Connection:
        made = Connection(self._api, self._connections, room=self._room)
        made.draining = self._stop_at is not None
        return made

    def _excuse(self, now: float) -> None:
        """A process that was held up (stopped, frozen, starved) must not take that for its engines' silence."""
        held, self._looked = now - self._looked - TICK_SECONDS, now
        if held > HELD_SECONDS:
            for router in self._registry.routers():
                for service in (router.main, router.new):
                    if service is not None:
                        service.health.excuse(int(held * 1e9))

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), TICK_SECONDS)

    def _beat(self) -> None:
        only = self._registry.only
        tallies = only.tallies() if only else None
        self._control.send({"beat": 1, "tallies": tallies} if tallies else {"beat": 1})

    def _hear(self) -> None:
        try:
            messages = self._control.receive_all()
        except (EOFError, OSError):
            os._exit(0)
        for message in messages:
            if "settle" in message:
                reach("replica.before_settle")
                self._loader.settle(keep_new=message["settle"] == "new")
                self._grace = float(message.get("grace", self._grace))
            elif "take" in message:
                self._take()
            elif "drain" in message:
                self._stop(float(message["drain"]), float(message["drain"]))
            else:
                self._loader.hear(message)

    def _take(self) -> None:
        """Answer on connections that the host has accepted while no replica was well."""
        sockets, self._control.sockets = self._control.sockets, []
        for number in sockets:
            self._answer_on(socket.socket(fileno=number))

    def _let_in(self) -> None:
        """Answer on all connections that wait in the listener's queue: when it is closed, those are reset."""
        with contextlib.suppress(OSError):  # there are no more
            while True:
                sock, _ = self._listener.accept()
                self._answer_on(sock)

    def _answer_on(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(loop.connect_accepted_socket(self._connection, sock))
        self._tasks.add(task)
        task.add_done_callback(self._taken)

    def _taken(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logging.warning("a connection that was handed over is gone: %s", error)

    def _end(self) -> None:
        """Whoever sends SIGTERM may want no other replica to come: who has knocked already is let in before."""
        self._lets_in = True
        self._stop(self._grace, QUIET_SECONDS)

    def _stop(self, grace: float, quiet: float) -> None:
        """Take no more connections; finish what is begun within `grace`, close what has been idle for `quiet`."""
        stop_at = time.monotonic() + grace
        self._stop_at = min(stop_at, self._stop_at or stop_at)
        self._quiet = quiet
        for connection in self._connections:
            connection.draining = True
        self._changed.set()

    async def _drain(self, loop: asyncio.AbstractEventLoop) -> None:
        begun = time.monotonic()
        while (self._connections or self._tasks) and self._stop_at is not None and time.monotonic() < self._stop_at:
            self._control.send({"beat": 1})
            self._registry.expire()
            for connection in list(self._connections):
                connection.draining = True
                if connection.idle and time.monotonic() - max(connection.last, begun) >= self._quiet:
                    connection.close()
            await asyncio.sleep(0.02)
        for connection in list(self._connections):
            connection.close()

    def _watch(self) -> None:
        """Notice an engine that hangs, and tell the host once when a model stops being ready."""
        self._registry.expire()
        now = time.perf_counter_ns()
        for router in list(self._registry.routers()):
            for service in (router.main, router.new):
                if service is not None:
                    service.health.check(now)
            if router.main.health.fault and not self._told_unready:
                self._told_unready = True
                self._control.send({"unready": router.main.health.fault})
            if router.new is not None and router.new.health.fault and not self._told_faulty:
                self._told_faulty = True
                self._control.send({"faulty": router.new.health.fault})

    def _sweep(self) -> None:
        """Close what is idle or slow; not often, since there may be thousands."""
        now = time.monotonic()
        if now - self._swept < SWEEP_SECONDS:
            return
        self._swept = now
        self._tidy()
        for connection in list(self._connections):
            if connection.stalls(now) or (connection.idle and now - connection.last > IDLE_SECONDS):
                connection.close()

    def _tidy(self) -> None:
        """Give back what large requests have left in the allocator's hands, once there are none any more."""
        room, seen = self._room, self._seen
        self._seen = room.taken
        if room.taken == seen and room.left == room.most and room.taken - self._tidied > MUCH:
            self._tidied = room.taken
            give_back_memory()


def main(argv: list[str]) -> int:
    """Run one replica; returns its exit code."""
    listener_fd, control_fd, host = (int(text) for text in argv)
    die_with(host)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s replica %(process)d %(message)s")
    control = Control(socket.socket(fileno=control_fd))
    try:
        told = Told.of(control.receive())
        former = open_all(told.folder, told.former) if told.former else None
        opened = [open_all(told.folder, model, shadow=told.shadow) for model in told.models]
    except EOFError:
        return 0
    except Exception as error:
        why = (
            error
            if isinstance(error, OnejobError)
            else UnavailableError(f"{type(error).__name__}: {error}", place="model")
        )
        logging.exception("the replica can't start")
        control.send({"error": why.to_json()})
        return why.exit_code
    spare_the_collector()
    listener = socket.socket(fileno=listener_fd)
    uvloop.run(serve(opened, former, told, listener, control))
    return 0


def spare_the_collector() -> None:
    """Look for cycles seldom: a request leaves none, and what waits to be captured would be looked through in vain."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG)


def die_with(host: int) -> None:
    """End by SIGKILL when the host ends, even by kill -9."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != host:
        os._exit(0)  # it ended before the kernel was told


async def serve(
    opened: list[Opened], former: Opened | None, told: Told, listener: socket.socket, control: Control
) -> None:
    """Everything of a replica that needs the event loop, until it has drained."""
    log = RequestLog(told.folder / REQUESTS)
    loader = Loader(told, log, control.send)
    loader.begin(opened, former)
    journal = Journal(log, loader.registry.leave)
    journal.start()
    try:
        await Replica(loader, listener, control, Options(told.folder, told.former or told.desired).grace).run()
    finally:
        loader.stop()
        journal.stop()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # not sys.exit: it would wait for the thread of an engine that hangs
