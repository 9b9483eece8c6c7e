"""What a replica answers over HTTP: the KServe v2 protocol with Triton's extensions, v1's plain records, and /metrics.

Routes are a table from path and method to a function; one endpoint serves one model. Every answer carries the
request's id and the engine's digest, so that `onejob trace` can walk from an answer to its sources.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, unquote_to_bytes

import numpy as np

from onejob.core.artifact import Json, canonical
from onejob.core.counters import Snapshots
from onejob.errors import (
    BadRequestError,
    NotFoundError,
    OnejobError,
    OverloadedError,
    StorageFullError,
    StoreError,
)
from onejob.serve import describe, metrics
from onejob.serve.batch import Item
from onejob.serve.labels import Batch, parse
from onejob.serve.protocols import kserve
from onejob.serve.protocols.asking import Asked, Asking
from onejob.serve.protocols.http import MAX_BODY, Exchange, TooLargeError, answer, inflate
from onejob.serve.protocols.lane import Lane, layout_of
from onejob.serve.router import Router
from onejob.serve.rows import Arrays
from onejob.serve.service import VERSION, Service, status_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
Route = Callable[[Exchange], None]
PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"
OCTETS = b"application/octet-stream"
MAX_ID = 128
MAX_LANES = 1024
_LENGTH = b"Inference-Header-Content-Length: %d\r\n"
_OWN = frozenset((b"x-request-id", b"x-request-key", b"content-encoding", b"expect"))
"""Headers of requests that take the long way."""
RETRY_AFTER = b"Retry-After: 1\r\n"


class Api:
    """The routes of one endpoint; a `Handler` for connections."""

    def __init__(self, router: Router, *, max_body: int = MAX_BODY) -> None:
        self._router = router
        self._asking = Asking(router, self._fault)
        self._max_body = max_body
        self._lanes: dict[bytes, Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._routes = self._make_routes()

    def handle(self, exchange: Exchange) -> None:
        """Answer a request, now or when its inference is done; never raises."""
        self._name(exchange)
        path = exchange.url.partition(b"?")[0]
        methods = self._routes.get(path) or self._routes.get(unquote_to_bytes(path))
        if methods is None:
            self._unknown(exchange, unquote_to_bytes(path).decode("utf-8", "replace"))
            return
        route = methods.get(b"GET" if exchange.method == b"HEAD" else exchange.method)
        if route is None:
            allowed = ", ".join(sorted(method.decode() for method in methods))
            exchange.fail(405, "Method Not Allowed", f"Allow: {allowed}\r\n".encode())
            return
        try:
            route(exchange)
        except Exception as error:
            self._fault(exchange, error)

    def head_of(self, exchange: Exchange) -> bytes:
        if not exchange.request_id:
            self._name(exchange)
        engine = exchange.engine or self._service.identity.digest
        return _names(exchange.request_id, engine)

    @property
    def _service(self) -> Service:
        """What speaks for the endpoint: the engine that serves."""
        return self._router.main

    # ---- routes

    def _make_routes(self) -> dict[bytes, dict[bytes, Route]]:
        routes: dict[bytes, dict[bytes, Route]] = {
            b"/v2": {b"GET": self._give(lambda: describe.server_metadata())},
            b"/v2/health/live": {b"GET": lambda exchange: exchange.reply(200, b"{}")},
            b"/v2/health/ready": {b"GET": self._health_ready},
            b"/v2/models/stats": {b"GET": self._statistics},
            b"/v2/repository/index": {b"POST": self._give(lambda: describe.repository_index(self._service))},
            b"/metrics": {b"GET": self._metrics},
        }
        name = self._service.identity.name
        for base in (f"/v2/models/{name}", f"/v2/models/{name}/versions/{VERSION}"):
            routes |= {
                f"{base}".encode(): {b"GET": self._give(lambda: describe.model_metadata(self._service))},
                f"{base}/ready".encode(): {b"GET": self._health_ready},
                f"{base}/config".encode(): {b"GET": self._give(lambda: describe.model_config(self._service))},
                f"{base}/stats".encode(): {b"GET": self._statistics},
                f"{base}/infer".encode(): {b"POST": self._infer},
            }
        for verb in ("load", "unload"):
            routes[f"/v2/repository/models/{name}/{verb}".encode()] = {b"POST": self._no_load}
        routes[f"/v1/models/{name}/labels".encode()] = {b"POST": self._labels}
        routes[f"/v1/models/{name}:predict".encode()] = {b"POST": self._predict}
        routes[f"/v1/models/{name}".encode()] = {b"GET": self._v1_ready}
        return routes | {path + b"/": methods for path, methods in routes.items() if path == b"/v2"}

    def _give(self, make: Callable[[], Json]) -> Route:
        return lambda exchange: exchange.reply(200, canonical(make()))

    def _health_ready(self, exchange: Exchange) -> None:
        service = self._service
        if service.ready:
            exchange.reply(200, b"{}")
        else:
            exchange.fail(503, f"model '{service.identity.name}' is not ready: {service.unready_reason}")

    def _v1_ready(self, exchange: Exchange) -> None:
        exchange.reply(200, canonical({"name": self._service.identity.name, "ready": self._service.ready}))

    def _no_load(self, exchange: Exchange) -> None:
        exchange.fail(400, "explicit model load / unload is not allowed: the job file says what this endpoint serves")

    def _statistics(self, exchange: Exchange) -> None:
        def answer(found: Snapshots) -> None:
            exchange.reply(200, canonical(describe.statistics(self._service, found.total())))

        self._aside(exchange, self._router.all_snapshots, answer)

    def _metrics(self, exchange: Exchange) -> None:
        def answer(found: Snapshots) -> None:
            identity = self._service.identity
            text = metrics.render(
                identity.name,
                identity.digest,
                found.total(),
                engines=found.by_engine(),
                pending=sum(int(snapshot.get("pending", 0)) for snapshot in found.live.values()),
                replicas=len(found.live),
            )
            exchange.reply(200, text.encode(), PROMETHEUS)

        self._aside(exchange, self._router.all_snapshots, answer)

    def _labels(self, exchange: Exchange) -> None:
        """Take labels; on a thread of its own, since it waits for the disk."""
        log = self._service.labels
        if log is None:
            raise NotFoundError("this endpoint takes no labels", cure="Add a [monitor] table to its job.")
        kind = exchange.headers.get(b"content-type", b"").decode("latin-1")
        strict = b"strict=true" in exchange.url.partition(b"?")[2].split(b"&")
        data = self._body(exchange)

        def take() -> Batch:
            rows, text = parse(data, kind)
            return log.take(rows, text=text, strict=strict)

        def answer(batch: Batch) -> None:
            status = 422 if strict and batch.refused else 200
            exchange.reply(status, canonical(batch.to_json(accepted=len(batch.labels))))

        self._aside(exchange, take, answer)

    def _aside(self, exchange: Exchange, work: Callable[[], T], answer: Callable[[T], None]) -> None:
        """Do what waits for a disk on another thread, and answer then."""

        async def run() -> None:
            try:
                answer(await asyncio.to_thread(work))
            except OSError as error:
                self._fault(exchange, _disk(error))
            except Exception as error:
                self._fault(exchange, error)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- inference

    def _infer(self, exchange: Exchange) -> None:
        def decode(service: Service) -> Asked:
            body, length = self._body(exchange), _header_length(exchange)
            model, name = service.model, service.identity.name
            extras = service.identity.roles.extras
            request = kserve.decode_infer(body, length, name, model.inputs, model.outputs, raw=model.raw, extras=extras)
            if request.id and b"x-request-id" not in exchange.headers and _proper_id(request.id):
                exchange.request_id = request.id
            if length is not None and exchange.head and service is self._router.main:
                self._learn(exchange, request, body, length)
            encode = partial(self._answer_infer, request=request)
            return Asked(request.arrays, request.timeout_us * 1000, encode, request.priority)

        self._asking.run(exchange, decode)

    def _learn(self, exchange: Exchange, request: kserve.InferRequest, body: bytes, length: int) -> None:
        """Requests that begin like this one may take the short way (protocols/lane.py)."""
        if exchange.headers.keys() & _OWN or self._router.new is not None:
            return
        prefix = exchange.head + body[:length]
        lane = self._lanes.get(prefix)
        if lane is None or not lane.leads_to(self._router.main):
            layout = layout_of(request, body, length, self._router.main)
            if layout is None:
                return
            if len(self._lanes) >= MAX_LANES:
                self._lanes.clear()
            lane = self._lanes[prefix] = Lane(prefix, request, layout, self._router, _wire_infer, self._fault)
        exchange.connection.lane = lane

    def _predict(self, exchange: Exchange) -> None:
        def decode(service: Service) -> Asked:
            model, extras = service.model, service.identity.roles.extras
            columns = kserve.decode_predict(self._body(exchange), model.inputs, raw=model.raw, extras=extras)
            return Asked(columns, 0, self._answer_predict)

        self._asking.run(exchange, decode)

    def _answer_infer(self, exchange: Exchange, item: Item, service: Service, *, request: kserve.InferRequest) -> None:
        body, length = _encode_infer(_outputs(item), request, service, exchange.request_id)
        if length is None:
            exchange.reply(200, body)
        else:
            exchange.reply(200, body, OCTETS, _LENGTH % length)

    def _answer_predict(self, exchange: Exchange, item: Item, service: Service) -> None:
        exchange.reply(200, kserve.encode_predict(_outputs(item), service.model.outputs))

    def _body(self, exchange: Exchange) -> bytes:
        encoding = exchange.headers.get(b"content-encoding", b"").strip().lower()
        if encoding in (b"", b"identity"):
            return exchange.body
        try:
            exchange.body = inflate(exchange.body, encoding, self._max_body)
            return exchange.body
        except TooLargeError:
            raise
        except ValueError as error:
            raise BadRequestError(str(error)) from None

    # ---- errors and names

    def _fault(self, exchange: Exchange, error: Exception) -> int:
        """Answer with an error; returns the status."""
        if isinstance(error, TooLargeError):
            status, message = 413, str(error)
        elif isinstance(error, OnejobError):
            status, message = status_of(error), str(error)
        else:
            status, message = 500, f"internal error: {type(error).__name__}: {error}"
            logger.error("request %s failed", exchange.request_id, exc_info=error)
        exchange.fail(status, message, RETRY_AFTER if isinstance(error, OverloadedError) else b"")
        return status

    def _unknown(self, exchange: Exchange, path: str) -> None:
        parts = path.strip("/").split("/")
        known = self._service.identity.name
        if parts[:2] == ["v2", "models"] and len(parts) > 2 and parts[2] != known:
            exchange.fail(404, f"Request for unknown model: '{parts[2]}' is not found")
        elif parts[:2] == ["v1", "models"] and len(parts) == 3 and parts[2].partition(":")[0] != known:
            exchange.fail(404, f"Request for unknown model: '{parts[2].partition(':')[0]}' is not found")
        elif parts[:4] == ["v2", "models", known, "versions"] and len(parts) > 4 and parts[4] != VERSION:
            exchange.fail(404, f"Request for unknown model: '{known}' version {parts[4]} is not found")
        else:
            exchange.fail(404, f"Not Found: {quote(path)}")

    def _name(self, exchange: Exchange) -> None:
        given = exchange.headers.get(b"x-request-id", b"").decode("latin-1")
        exchange.request_id = given if _proper_id(given) else self._service.ids.make()


def _encode_infer(
    outputs: Arrays, request: kserve.InferRequest, service: Service, request_id: str
) -> tuple[bytes, int | None]:
    identity = service.identity
    head: dict[str, Json] = {"id": request.id} if request.id else {}
    head |= {"model_name": identity.name, "model_version": VERSION}
    head["parameters"] = {"engine": identity.digest, "request_id": request_id}
    return kserve.encode_infer(outputs, service.model.outputs, request.outputs, head)


def _wire_infer(outputs: Arrays, request: kserve.InferRequest, service: Service, request_id: str) -> bytes:
    """An answer in bytes as it goes over the wire."""
    body, length = _encode_infer(outputs, request, service, request_id)
    head = _names(request_id, service.identity.digest) + _LENGTH % length
    return answer(200, OCTETS, head, body)


def _names(request_id: str, engine: str) -> bytes:
    return f"x-request-id: {request_id}\r\nx-onejob-engine: {engine}\r\n".encode()


def _disk(error: OSError) -> StoreError:
    """The system's words for a disk that is full or broken, as an error that the client understands."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFullError(
            "no space is left for this", place="disk", cure="Nothing was kept; send it again later."
        )
    return StoreError(f"it can't be written: {error.strerror}", place="disk", cure="Nothing was kept.")


def _outputs(item: Item) -> Mapping[str, np.ndarray[Any, Any]]:
    assert item.outputs is not None
    return item.outputs


def _header_length(exchange: Exchange) -> int | None:
    text = exchange.headers.get(b"inference-header-content-length")
    if text is None:
        return None
    if not text.isdigit() or len(text) > 12:
        raise BadRequestError(f"Inference-Header-Content-Length is a number of bytes, not {text.decode('latin-1')!r}")
    return int(text)


def _proper_id(text: str) -> bool:
    """An id that can go into a header and a log line: visible ASCII, not too long."""
    return 0 < len(text) <= MAX_ID and text.isascii() and text.isprintable() and " " not in text
