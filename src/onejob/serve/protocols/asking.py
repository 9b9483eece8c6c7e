"""Who is asked, the engine that serves or one that is tried, and how its answer or its failure comes to the client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from onejob.serve.item import Item
from onejob.serve.model import Column
from onejob.serve.protocols.exchange import Exchange
from onejob.serve.protocols.kserve import NORMAL
from onejob.serve.registry import Found
from onejob.serve.router import Router
from onejob.serve.rows import Arrays
from onejob.serve.service import Service

Encode = Callable[[Exchange, Arrays, Service], None]
Fault = Callable[[Exchange, Exception], int]
"""Answers with an error; gives the status."""
TRIAL_PART = 2
"""A new engine gets this part of a request's time: the rest is for the old one, if it must answer instead."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A decoded request, and how its answer is encoded."""

    columns: Mapping[str, Column]
    timeout_ns: int
    encode: Encode
    priority: int = NORMAL


Decode = Callable[[Service], Asked]
Find = Callable[[], Found]


class Direct(Item):
    """A request to the one engine that answers: answered together with its batch."""

    quick = True

    def __init__(self, exchange: Exchange, asked: Asked, service: Service, fault: Fault) -> None:
        self.exchange = exchange
        self.own_id = exchange.request_id
        self._encode = asked.encode
        self._service = service
        self._fault = fault
        self.received = exchange.received
        self.priority = asked.priority

    def answer(self, outputs: Arrays, start: int, stop: int, name: str) -> bool:
        exchange = self.exchange
        exchange.on_gone = None
        if exchange.gone:
            return True
        exchange.request_id = name
        self.outputs = {output: array[start:stop] for output, array in outputs.items()}
        try:
            self._encode(exchange, self.outputs, self._service)
        except Exception as error:
            self._fail(error)
            return False
        return True

    def done(self, item: Item) -> None:
        """It didn't run as part of a whole batch of its kind; or it failed."""
        self.exchange.on_gone = None
        if self.error is not None:
            self._fail(self.error)
            return
        assert self.outputs is not None
        name = self.own_id or self._service.ids.make()
        if self.answer(self.outputs, 0, 1 << 62, name):
            self._service.answered(name, self, None, 200, self.received)

    def _fail(self, error: Exception) -> None:
        status = self._fault(self.exchange, error)
        self._service.answered(self.exchange.request_id, self, error, status, self.received)


class Asking:
    """Chooses an engine for each request, and sees that every request is answered, counted and logged once."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._reader: ThreadPoolExecutor | None = None

    def run(self, exchange: Exchange, found: Found, decode: Decode, *, again: Find | None = None) -> None:
        """Decode, choose the engine, queue, and answer when it is done; every way out is counted and logged once.

        With `again` it is decoded on another thread, and that says once more who is asked if they have left meanwhile.
        """
        if again is not None:
            self._decode_aside(exchange, found, decode, again)
            return
        try:
            asked = decode(found.service)
        except Exception as error:
            self._refuse(exchange, found.service, error)
            return
        self._choose(exchange, found, asked, decode)

    def _refuse(self, exchange: Exchange, service: Service, error: Exception) -> None:
        status = self._fault(exchange, error)
        service.answered(exchange.request_id, None, error, status, exchange.received)

    def _decode_aside(self, exchange: Exchange, found: Found, decode: Decode, again: Find) -> None:
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="read")
        loop = asyncio.get_running_loop()

        def tell(asked: Asked | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits
                loop.call_soon_threadsafe(self._take_decoded, exchange, found, decode, again, asked)

        def read() -> None:  # no future of asyncio's: it would be in a cycle, and the message with it
            try:
                tell(decode(found.service))
            except Exception as error:
                tell(error)

        self._reader.submit(read)

    def _take_decoded(
        self, exchange: Exchange, found: Found, decode: Decode, again: Find, asked: Asked | Exception
    ) -> None:
        service, router = found.service, found.router
        if exchange.gone:
            service.counters.count("failure.CANCELED")
        elif isinstance(asked, Exception):
            self._refuse(exchange, service, asked)
        elif router.gone or service not in (router.main, router.new):
            try:
                self.run(exchange, again(), decode, again=again)
            except Exception as lost:
                self._fault(exchange, lost)
        else:
            self._choose(exchange, found, asked, decode)

    def _choose(self, exchange: Exchange, found: Found, asked: Asked, decode: Decode) -> None:
        main, router = found.service, found.router
        if router.new is None or found.pinned:
            self._ask_directly(exchange, asked, main)
            return
        if not exchange.request_id:
            exchange.request_id = main.ids.make()
        key = exchange.headers.get(b"x-request-key", b"").decode("latin-1")
        new = router.choose(asked.columns, key, exchange.request_id)
        if new is None:
            self._ask_directly(exchange, asked, main)
        elif new.shadow:
            self._ask_directly(exchange, asked, main)
            self._copy(exchange, asked, router, new, decode)
        else:
            self._try(exchange, asked, router, new, decode)

    def _ask_directly(self, exchange: Exchange, asked: Asked, service: Service) -> None:
        exchange.engine = service.identity.digest
        item = Direct(exchange, asked, service, self._fault)
        try:
            service.submit(asked.columns, item, timeout_ns=asked.timeout_ns, size=len(exchange.body))
        except Exception as error:
            status = self._fault(exchange, error)
            service.answered(exchange.request_id, None, error, status, exchange.received)
            return
        if not item.settled:
            exchange.on_gone = lambda: service.cancelled(item, item.own_id or service.ids.make())

    def _ask(self, exchange: Exchange, asked: Asked, service: Service, *, instead_of: Service) -> None:
        """Have it answered in another's place, whatever comes of it."""
        exchange.engine = service.identity.digest

        def settled(item: Item) -> None:
            exchange.on_gone = None
            error, status = self._encode(exchange, item, asked, service), 200
            if error is not None:
                status = self._fault(exchange, error)
            else:
                instead_of.counters.count("fallback")
            service.answered(exchange.request_id, item, error, status, exchange.received)

        item = made(exchange, settled, asked.priority)
        try:
            service.submit(asked.columns, item, timeout_ns=asked.timeout_ns, size=len(exchange.body))
        except Exception as error:
            status = self._fault(exchange, error)
            service.answered(exchange.request_id, None, error, status, exchange.received)
            return
        exchange.on_gone = lambda: service.cancelled(item, exchange.request_id)

    def _try(self, exchange: Exchange, asked: Asked, router: Router, new: Service, decode: Decode) -> None:
        """Have a new engine answer; the one that serves does, if that one can't."""
        exchange.engine = new.identity.digest

        def settled(item: Item) -> None:
            exchange.on_gone = None
            error = self._encode(exchange, item, theirs, new)
            if error is None:
                new.answered(exchange.request_id, item, None, 200, exchange.received)
            else:
                self._fall_back(exchange, asked, router, new, error)

        try:
            theirs = asked if router.same else decode(new)
            budget = (theirs.timeout_ns or new.limits.timeout_ns) // TRIAL_PART
            item = made(exchange, settled, theirs.priority)
            new.submit(theirs.columns, item, timeout_ns=budget, size=len(exchange.body))
        except Exception as error:
            self._fall_back(exchange, asked, router, new, error)
            return
        exchange.on_gone = lambda: new.cancelled(item, exchange.request_id)

    def _fall_back(self, exchange: Exchange, asked: Asked, router: Router, new: Service, error: Exception) -> None:
        main = router.main
        if main is not new:
            self._ask(exchange, asked, main, instead_of=new)
            return
        status = self._fault(exchange, error)  # it serves alone by now: there is nobody else to ask
        new.answered(exchange.request_id, None, error, status, exchange.received)

    def _copy(self, exchange: Exchange, asked: Asked, router: Router, new: Service, decode: Decode) -> None:
        """Ask a new engine the same; its answer is counted and recorded as its own, and sent to nobody."""
        request, begun = exchange.request_id, time.perf_counter_ns()

        def settled(item: Item) -> None:
            new.answered(request, item, item.error, 0, begun)

        try:
            theirs = asked if router.same else decode(new)
            item = made(exchange, settled, theirs.priority)
            item.received = begun
            new.submit(theirs.columns, item, size=len(exchange.body))
        except Exception as error:
            new.answered(request, None, error, 0, begun)

    def _encode(self, exchange: Exchange, item: Item, asked: Asked, service: Service) -> Exception | None:
        """Answer with what an engine gave; gives why it can't."""
        if item.error is None:
            assert item.outputs is not None
            try:
                asked.encode(exchange, item.outputs, service)
            except Exception as wrong:
                return wrong
        return item.error


def made(exchange: Exchange, done: Callable[[Item], None], priority: int) -> Item:
    """An item that its service will fill."""
    item = Item({}, 0, done, exchange.received, 0)
    item.priority = priority
    return item
