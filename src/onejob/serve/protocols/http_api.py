"""What a replica answers over HTTP: the KServe v2 protocol with Triton's extensions, v1's plain records, and /metrics.

Routes are a table from what a path names (`paths`) and the method to a function. Every answer carries the request's id
and the engine's digest, so that `onejob trace` can walk from an answer to its sources.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Protocol, TypeVar
from urllib.parse import quote, unquote_to_bytes
from weakref import WeakKeyDictionary

from onejob.core.artifact import Json, canonical
from onejob.core.counters import Counters, Snapshots
from onejob.errors import (
    BadRequestError,
    NotFoundError,
    OnejobError,
    OverloadedError,
    StorageFullError,
    StoreError,
)
from onejob.serve import describe, metrics
from onejob.serve.labels import Batch, parse
from onejob.serve.protocols import kserve
from onejob.serve.protocols.asking import Asked, Asking, Decode
from onejob.serve.protocols.compression import TooLargeError, compress, inflate
from onejob.serve.protocols.exchange import JSON, Exchange
from onejob.serve.protocols.generate import EVENT_STREAM, encode_event, encode_generate, parse_generate
from onejob.serve.protocols.http import MAX_BODY
from onejob.serve.protocols.lanes import LENGTH, OCTETS, Lanes, names
from onejob.serve.protocols.paths import Path, parse_path
from onejob.serve.protocols.plan import Plan, header_length
from onejob.serve.protocols.repository import parse_index, parse_load, parse_unload
from onejob.serve.protocols.spoken import Words
from onejob.serve.registry import Found, Registry
from onejob.serve.rows import Arrays
from onejob.serve.service import Ids, Service, status_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
Route = Callable[[Exchange, Path], None]
PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"
MAX_ID = 128
MAX_PATHS = 4096
LONGEST_PATH = 256
"""Bytes of a path that is remembered."""
LARGE, LARGE_PACKED = 256 << 10, 4 << 10
"""A message with more bytes of JSON or text, or of what is packed, is read on a thread of its own."""
RETRY_AFTER = b"Retry-After: 1\r\n"


class Repository(Protocol):
    """Whom to ask for other models."""

    def load(self, name: str, config: Mapping[str, Json] | None, files: Mapping[str, bytes]) -> Awaitable[None]:
        """Load a model in every replica; raises why it can't be."""
        ...

    def unload(self, name: str) -> Awaitable[None]:
        """Unload a model in every replica; raises why it can't be."""
        ...


class Api:
    """What an endpoint answers; a `Handler` for connections. `load` and `unload` are None where the job says what is
    served."""

    def __init__(self, registry: Registry, *, max_body: int = MAX_BODY, repository: Repository | None = None) -> None:
        self._registry = registry
        self._repository = repository
        self._asking = Asking(self._fault)
        self._max_body = max_body
        self._lanes = Lanes(self._words, self._fault)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ids = Ids()
        self._known_words: WeakKeyDictionary[Service, Words] = WeakKeyDictionary()
        self._paths: dict[bytes, Path | None] = {}
        self._routes = self._make_routes()

    def handle(self, exchange: Exchange) -> None:
        """Answer a request, now or when its inference is done; never raises."""
        given = exchange.headers.get(b"x-request-id")
        if given is not None and _proper_id(text := given.decode("latin-1")):
            exchange.request_id = text
        path = self._path(exchange.url)
        methods = self._routes.get(path.route) if path else None
        if path is None or methods is None:
            exchange.fail(404, f"Not Found: {quote(unquote_to_bytes(exchange.url.partition(b'?')[0]))}")
            return
        route = methods.get(b"GET" if exchange.method == b"HEAD" else exchange.method)
        if route is None:
            allowed = ", ".join(sorted(method.decode() for method in methods))
            exchange.fail(405, "Method Not Allowed", f"Allow: {allowed}\r\n".encode())
            return
        try:
            route(exchange, path)
        except Exception as error:
            self._fault(exchange, error)

    def head_of(self, exchange: Exchange) -> bytes:
        if not exchange.request_id:
            exchange.request_id = self._ids.make()
        return names(exchange.request_id, exchange.engine or self._registry.digest)

    def _path(self, url: bytes) -> Path | None:
        if url in self._paths:
            return self._paths[url]
        path = parse_path(url)
        if len(url) <= LONGEST_PATH:
            if len(self._paths) >= MAX_PATHS:
                self._paths.clear()
            self._paths[url] = path
        return path

    # ---- routes

    def _make_routes(self) -> dict[str, dict[bytes, Route]]:
        return {
            "v2": {b"GET": self._give(lambda path: describe.server_metadata())},
            "": {b"GET": self._give(lambda path: {"status": "alive"})},
            "v2/health/live": {b"GET": self._give(lambda path: {"live": True})},
            "v2/health/started": {b"GET": self._give(lambda path: {"started": True})},
            "v2/health/ready": {b"GET": self._health_ready},
            "v2/models/stats": {b"GET": self._statistics},
            "v2/repository/index": {b"POST": self._index},
            "metrics": {b"GET": self._metrics},
            "model/": {b"GET": self._give(self._metadata)},
            "model/ready": {b"GET": self._model_ready},
            "model/config": {b"GET": self._give(lambda path: describe.model_config(self._find(path).service))},
            "model/stats": {b"GET": self._statistics},
            "model/infer": {b"POST": self._infer},
            "model/generate": {b"POST": partial(self._generate, stream=False)},
            "model/generate_stream": {b"POST": partial(self._generate, stream=True)},
            "repository/load": {b"POST": partial(self._change, "load")},
            "repository/unload": {b"POST": partial(self._change, "unload")},
            "v1": {b"GET": self._v1_ready},
            "v1/predict": {b"POST": self._predict},
            "v1/labels": {b"POST": self._labels},
        }

    def _find(self, path: Path) -> Found:
        return self._registry.find(path.model, path.version)

    def _give(self, make: Callable[[Path], Json]) -> Route:
        return lambda exchange, path: exchange.reply(200, canonical(make(path)))

    def _metadata(self, path: Path) -> Json:
        found = self._find(path)
        versions = [service.identity.version for service in self._registry.services(path.model)]
        return describe.model_metadata(found.service, versions)

    def _health_ready(self, exchange: Exchange, path: Path) -> None:
        if why := self._registry.unready:
            exchange.fail(503, f"not ready: {why}")
        else:
            exchange.reply(200, canonical({"ready": True}))

    def _model_ready(self, exchange: Exchange, path: Path) -> None:
        if path.model in self._registry.unavailable and path.version is None:
            exchange.fail(503, f"model '{path.model}' is not ready: {self._registry.unavailable[path.model]}")
            return
        service = self._find(path).service
        if service.ready:
            exchange.reply(200, canonical({"name": service.identity.name, "ready": True}))
        else:
            exchange.fail(503, f"model '{service.identity.name}' is not ready: {service.unready_reason}")

    def _v1_ready(self, exchange: Exchange, path: Path) -> None:
        service = self._find(path).service
        exchange.reply(200, canonical({"name": service.identity.name, "ready": service.ready}))

    def _index(self, exchange: Exchange, path: Path) -> None:
        registry, ready = self._registry, parse_index(self._body(exchange))
        told = describe.repository_index(registry.services(), registry.unavailable, ready)
        exchange.reply(200, canonical(told))

    def _change(self, verb: str, exchange: Exchange, path: Path) -> None:
        """Have a model loaded or unloaded in every replica; answered when it is."""
        if self._repository is None:
            message = "explicit model load / unload is not allowed: the job file says what this endpoint serves"
            exchange.fail(503, message)
            return
        change = self._load if verb == "load" else self._unload
        self._soon(exchange, change(exchange, path.model, self._repository), lambda done: exchange.reply(200, b""))

    async def _load(self, exchange: Exchange, name: str, repository: Repository) -> None:
        told = await asyncio.to_thread(lambda: parse_load(self._body(exchange), name))  # it may hold the model itself
        await repository.load(name, told.config, told.files)

    async def _unload(self, exchange: Exchange, name: str, repository: Repository) -> None:
        parse_unload(self._body(exchange))
        await repository.unload(name)

    def _statistics(self, exchange: Exchange, path: Path) -> None:
        services = [self._find(path).service] if path.version else self._registry.services(path.model or None)
        if path.model and not services:
            self._find(path)  # says that there is none

        def answer(found: Snapshots) -> None:
            counted = found.by("models")
            told = [
                describe.statistics(
                    service, counted.get(f"{service.identity.name}/{service.identity.version}", Counters())
                )
                for service in services
            ]
            exchange.reply(200, canonical({"model_stats": told}))

        self._aside(exchange, self._registry.all_snapshots, answer)

    def _metrics(self, exchange: Exchange, path: Path) -> None:
        identities = [service.identity for service in self._registry.services()]
        serving = {f"{one.name}/{one.version}": one.digest for one in identities}

        def render() -> bytes:
            return metrics.render(metrics.Reading.of(self._registry.all_snapshots(), serving)).encode()

        self._aside(exchange, render, lambda text: exchange.reply(200, text, PROMETHEUS))

    def _labels(self, exchange: Exchange, path: Path) -> None:
        """Take labels; on a thread of its own, since it waits for the disk."""
        log = self._find(path).router.main.labels
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
        self._soon(exchange, asyncio.to_thread(work), answer)

    def _soon(self, exchange: Exchange, work: Awaitable[T], answer: Callable[[T], None]) -> None:
        """Answer when something is done."""

        async def run() -> None:
            try:
                answer(await work)
            except OSError as error:
                self._fault(exchange, _disk(error))
            except Exception as error:
                self._fault(exchange, error)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- inference

    def _infer(self, exchange: Exchange, path: Path) -> None:
        found = self._find(path)

        def decode(service: Service) -> Asked:
            body = self._body(exchange)
            length = header_length(exchange.headers.get(b"inference-header-content-length"), len(body))
            words = self._words(service)
            plan, identifier, arrays = words.plans.read(body, length)
            words.encoder.check(plan.head.outputs)
            if identifier and not exchange.request_id and _proper_id(identifier):
                exchange.request_id = identifier
            if exchange.head and service is found.router.main and not identifier:
                self._lanes.learn(exchange, plan, arrays, found.router, body[:length] if length else None)
            encode = partial(self._answer_infer, plan=plan, identifier=identifier)
            return Asked(arrays, plan.head.timeout_us * 1000, encode, plan.head.priority or kserve.NORMAL)

        self._run(exchange, path, decode)

    def _run(self, exchange: Exchange, path: Path, decode: Decode) -> None:
        """Have it answered; what takes long to be read is read aside."""
        found = self._find(path)
        again = partial(self._find, path) if _is_large(exchange, found.service) else None
        self._asking.run(exchange, found, decode, again=again)

    def _generate(self, exchange: Exchange, path: Path, *, stream: bool) -> None:
        """Plain JSON fields for tensors; the answer as JSON, or as the one event of a stream."""

        def decode(service: Service) -> Asked:
            words = self._words(service)
            plan = parse_generate(self._body(exchange), words.interface)
            if plan.id and not exchange.request_id and _proper_id(plan.id):
                exchange.request_id = plan.id

            def encode(exchange: Exchange, outputs: Arrays, service: Service) -> None:
                text = encode_generate(outputs, words.interface, service.identity.version, plan.id)
                if stream:
                    exchange.reply(200, encode_event(text), EVENT_STREAM)
                else:
                    exchange.reply(200, text)

            arrays = plan.arrays(b"")
            return Asked(arrays, plan.head.timeout_us * 1000, encode, plan.head.priority or kserve.NORMAL)

        self._run(exchange, path, decode)

    def _predict(self, exchange: Exchange, path: Path) -> None:
        def decode(service: Service) -> Asked:
            model, extras = service.model, service.identity.roles.extras
            columns = kserve.decode_predict(self._body(exchange), model.inputs, raw=model.raw, extras=extras)
            return Asked(columns, 0, self._answer_predict)

        self._run(exchange, path, decode)

    def _words(self, service: Service) -> Words:
        """How the messages of an engine are read and written; made once."""
        words = self._known_words.get(service)
        if words is None:
            words = self._known_words[service] = Words.of(service)
        return words

    def _answer_infer(
        self, exchange: Exchange, outputs: Arrays, service: Service, *, plan: Plan, identifier: str
    ) -> None:
        encoder = self._words(service).encoder
        body, length = encoder.encode(outputs, plan.head.outputs, identifier, exchange.request_id)
        extra = b"" if length is None else LENGTH % length
        body, how = compress(body, exchange.headers.get(b"accept-encoding", b""))
        exchange.reply(200, body, JSON if length is None else OCTETS, extra + how)

    def _answer_predict(self, exchange: Exchange, outputs: Arrays, service: Service) -> None:
        exchange.reply(200, kserve.encode_predict(outputs, service.model.outputs))

    def _body(self, exchange: Exchange) -> bytes:
        encoding = exchange.headers.get(b"content-encoding", b"").strip().lower()
        if encoding in (b"", b"identity"):
            return exchange.body
        try:
            exchange.body = inflate(exchange.body, encoding, self._max_body)
            exchange.headers[b"content-encoding"] = b"identity"  # it may be read a second time, for another engine
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


def _is_large(exchange: Exchange, service: Service) -> bool:
    """Whether reading the message would keep the loop for long."""
    size = len(exchange.body)
    if size <= LARGE_PACKED:
        return False
    if exchange.headers.get(b"content-encoding", b"identity") != b"identity":
        return True
    told = exchange.headers.get(b"inference-header-content-length", b"")
    if told.isdigit() and len(told) < 7 and int(told) <= LARGE:
        return size > LARGE and any(spec.datatype in ("BYTES", "BF16") for spec in service.model.inputs.values())
    return size > LARGE


def _disk(error: OSError) -> StoreError:
    """The system's words for a disk that is full or broken, as an error that the client understands."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFullError(
            "no space is left for this", place="disk", cure="Nothing was kept; send it again later."
        )
    return StoreError(f"it can't be written: {error.strerror}", place="disk", cure="Nothing was kept.")


def _proper_id(text: str) -> bool:
    """An id that can go into a header and a log line: visible ASCII, not too long."""
    return 0 < len(text) <= MAX_ID and text.isascii() and text.isprintable() and " " not in text
