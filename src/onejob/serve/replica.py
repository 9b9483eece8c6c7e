"""A replica: one process that holds the model and answers requests on the socket that it inherits from its host.

    python -m onejob.serve.replica LISTENER CONTROL HOST_PID

CONTROL is a socket to the host: it sends one line, what to serve; the replica sends JSON lines back: `{"ready":
true}` once a warm-up inference has succeeded, `{"beat": n}` from the event loop each second, `{"unready": why}`
when the engine fails or hangs, `{"error": …}` if it can't start. On SIGTERM it drains briefly, on `{"drain":
seconds}` at leisure (others answer by then). It dies with its host, whatever the host dies of.
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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import uvloop

from onejob.core.artifact import Json, canonical
from onejob.core.faults import reach
from onejob.errors import OnejobError, UnavailableError
from onejob.serve.batch import Limits
from onejob.serve.capture import Capture, Rules, Signature
from onejob.serve.folder import METRICS, REQUESTS
from onejob.serve.identify import Roles
from onejob.serve.journal import Journal, RequestLog
from onejob.serve.labels import LabelLog
from onejob.serve.model import ServedModel, open_served
from onejob.serve.protocols.http import Connection
from onejob.serve.protocols.http_api import Api
from onejob.serve.service import Identity, Recorders, Service

BEAT_SECONDS = 1.0
TICK_SECONDS = 0.1
QUIET_SECONDS = 0.3
"""When stopped: how long a kept-alive connection without a request is left open."""
SLOW_SECONDS = 60.0
"""Longest pause within a request."""
IDLE_SECONDS = 600.0
"""How long a connection may be kept alive without a request."""
YOUNG = 20_000
"""So many more objects must have been made than freed before cycles are looked for."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Options:
    """What the host tells a replica."""

    folder: Path
    desired: Mapping[str, Json]

    @property
    def limits(self) -> Limits:
        options = self.desired.get("options", {})
        batch = options.get("batch", {})
        return Limits(
            rows=int(batch.get("max", 64)),
            wait_ns=int(float(batch.get("wait_ms", 2.0)) * 1e6),
            queue=int(options.get("queue", 1024)),
            timeout_ns=int(float(options.get("timeout") or 30.0) * 1e9),
        )

    @property
    def grace(self) -> float:
        return float(self.desired.get("options", {}).get("grace", 10.0))


class Control:
    """The replica's end of the socket to its host."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = b""

    def receive(self) -> Json:
        """The next line, waiting for it; EOFError when the host is gone."""
        while b"\n" not in self._rest:
            piece = self._sock.recv(1 << 16)
            if not piece:
                raise EOFError("the host is gone")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def send(self, message: Json) -> None:
        try:
            self._sock.sendall(canonical(message) + b"\n")
        except OSError:
            os._exit(0)  # the host is gone, and with it the reason to be

    def fileno(self) -> int:
        return self._sock.fileno()


class Replica:
    """Accepts, beats, watches the engine, and drains."""

    def __init__(self, service: Service, listener: socket.socket, control: Control, grace: float) -> None:
        self._service = service
        self._listener = listener
        self._control = control
        self._grace = grace
        self._connections: set[Connection] = set()
        self._api = Api(service)
        self._stop_at: float | None = None
        self._quiet = 0.0
        self._changed = asyncio.Event()
        self._told_unready = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(self._api, self._connections), sock=self._listener, backlog=4096
        )
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._stop, self._grace, QUIET_SECONDS)
        loop.add_reader(self._control.fileno(), self._hear)
        self._control.send({"ready": True})
        reach("replica.ready")
        beat = 0.0
        while self._stop_at is None:
            if loop.time() - beat >= BEAT_SECONDS:
                beat = loop.time()
                self._control.send({"beat": 1})
            self._watch()
            self._sweep()
            await self._pause()
        server.close()
        reach("replica.draining")
        await self._drain(loop)

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), TICK_SECONDS)

    def _hear(self) -> None:
        try:
            message = self._control.receive()
        except (EOFError, OSError):
            os._exit(0)
        if "drain" in message:
            self._stop(float(message["drain"]), float(message["drain"]))

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
        while self._connections and self._stop_at is not None and time.monotonic() < self._stop_at:
            self._control.send({"beat": 1})
            self._service.batcher.expire()
            for connection in list(self._connections):
                connection.draining = True
                if connection.idle and time.monotonic() - max(connection.last, begun) >= self._quiet:
                    connection.close()
            await asyncio.sleep(0.02)
        for connection in list(self._connections):
            connection.close()

    def _watch(self) -> None:
        """Notice an engine that hangs, and tell the host once when the model stops being ready."""
        service = self._service
        service.batcher.expire()
        if service.ready and service.batcher.stuck_ns() > service.limits.timeout_ns:
            service.ready, service.unready_reason = False, "the engine hangs"
        if not service.ready and not self._told_unready:
            self._told_unready = True
            self._control.send({"unready": service.unready_reason})

    def _sweep(self) -> None:
        now = time.monotonic()
        for connection in list(self._connections):
            pause = now - connection.last
            if (connection.stalled and pause > SLOW_SECONDS) or (connection.idle and pause > IDLE_SECONDS):
                connection.close()


def main(argv: list[str]) -> int:
    """Run one replica; returns its exit code."""
    listener_fd, control_fd, host = (int(text) for text in argv)
    die_with(host)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s replica %(process)d %(message)s")
    control = Control(socket.socket(fileno=control_fd))
    try:
        options = Options(**_told(control.receive()))
        model, warm_ns = open_warm(options)
        recorders = open_recorders(options, model)
    except EOFError:
        return 0
    except Exception as error:
        told = (
            error
            if isinstance(error, OnejobError)
            else UnavailableError(f"{type(error).__name__}: {error}", place="model")
        )
        logging.exception("the replica can't start")
        control.send({"error": told.to_json()})
        return told.exit_code
    spare_the_collector()
    listener = socket.socket(fileno=listener_fd)
    uvloop.run(serve(options, model, warm_ns, recorders, listener, control))
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


def open_warm(options: Options) -> tuple[ServedModel, int]:
    """The model, after warm-up inferences of one row and of a whole batch; and how long a whole batch took, in ns."""
    engine = options.desired["engine"]
    project = options.desired.get("project")
    if project:
        sys.path.insert(0, str(project))  # a family of the user's own lives there
    threads = int(options.desired.get("options", {}).get("threads", 1))
    model = open_served(Path(engine["dir"]), engine.get("meta", {}), threads=threads)
    reach("replica.before_warm_up")
    rows = options.limits.rows
    model.warm_up(1)
    model.warm_up(rows)
    begun = time.perf_counter_ns()
    model.warm_up(rows)
    return model, time.perf_counter_ns() - begun


def open_recorders(options: Options, model: ServedModel) -> Recorders:
    """Capture and labels as [monitor] has them; nothing without it."""
    monitor: Mapping[str, Json] = options.desired.get("options", {}).get("monitor") or {}
    if not monitor:
        return Recorders()
    engine, rules = options.desired["engine"], Rules.of(monitor.get("capture") or {})
    roles = Roles.of(engine.get("meta", {}))
    signature = Signature(model.inputs, model.outputs, model.batchable, roles)
    meta = {"endpoint": options.desired["name"], "engine": engine["digest"]}
    capture = Capture(options.folder, meta, signature, rules)
    labels = LabelLog(options.folder, roles, model.check_labels, private=rules.private, age=rules.age)
    return Recorders(capture if rules.rate > 0 else None, labels)


async def serve(
    options: Options,
    model: ServedModel,
    warm_ns: int,
    recorders: Recorders,
    listener: socket.socket,
    control: Control,
) -> None:
    """Everything of a replica that needs the event loop, until it has drained."""
    desired, engine = options.desired, options.desired["engine"]
    identity = Identity(
        name=desired["name"],
        digest=engine["digest"],
        generation=int(desired.get("generation", 0)),
        meta=engine.get("meta", {}),
        execution=engine.get("execution"),
        process=f"{os.getpid()}:{time.time():.3f}",
    )
    log = RequestLog(options.folder / REQUESTS)
    metrics = options.folder / METRICS
    service = Service(model, identity, options.limits, log, metrics, warm_ns=warm_ns, recorders=recorders)
    journal = Journal(log, metrics / f"{os.getpid()}.json", service.snapshot)
    journal.start()
    for recorder in (recorders.capture, recorders.labels):
        if recorder is not None:
            recorder.start()
    try:
        await Replica(service, listener, control, options.grace).run()
    finally:
        for recorder in (recorders.capture, recorders.labels):
            if recorder is not None:
                recorder.stop()
        journal.stop()
        service.batcher.close()


def _told(message: Json) -> dict[str, Json]:
    return {"folder": Path(message["folder"]), "desired": message["desired"]}


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # not sys.exit: it would wait for the thread of an engine that hangs
