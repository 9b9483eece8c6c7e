"""The short ways of an endpoint: which requests have one is learnt from those that took the long way."""

from __future__ import annotations

from collections.abc import Callable

from onejob.serve.protocols.exchange import Exchange, answer
from onejob.serve.protocols.lane import Fault, Lane, layout_of
from onejob.serve.protocols.plan import Head, Plan
from onejob.serve.protocols.spoken import Words
from onejob.serve.protocols.text_lane import Skeleton, TextLane, text_lane_fits
from onejob.serve.router import Router
from onejob.serve.rows import Arrays
from onejob.serve.service import Service

MAX_LANES = 1024
LONGEST_LANE = 8192
"""Bytes of what is learnt of a request; of longer ones nothing is."""
OCTETS = b"application/octet-stream"
LENGTH = b"Inference-Header-Content-Length: %d\r\n"
_OK_JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
_OWN = frozenset((b"x-request-id", b"x-request-key", b"content-encoding", b"expect"))
"""Headers of requests that take the long way."""


class Lanes:
    """What has been learnt: shared by all connections."""

    def __init__(self, words: Callable[[Service], Words], fault: Fault) -> None:
        self._words, self._fault = words, fault
        self._known: dict[object, Lane | TextLane] = {}

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, exchange: Exchange, plan: Plan, arrays: Arrays, router: Router, head: bytes | None) -> None:
        """Requests that look like this one may take the short way; `head` is the JSON before its binary tensors."""
        if exchange.headers.keys() & _OWN or router.new is not None:
            return
        skeleton = None
        if head is None:
            skeleton = Skeleton.of(exchange.head, exchange.body)
            if skeleton is None or len(skeleton) > LONGEST_LANE:
                return
        elif len(exchange.head) + len(head) > LONGEST_LANE:
            return
        key: object = skeleton.key if skeleton else exchange.head + (head or b"")
        lane = self._known.get(key)
        if lane is None or not lane.leads_to(router.main):
            made = self._make(exchange, plan, arrays, router, skeleton, head or b"")
            if made is None:
                return
            if len(self._known) >= MAX_LANES:
                self._known.clear()
            lane = self._known[key] = made
        exchange.connection.lane = lane

    def _make(
        self, exchange: Exchange, plan: Plan, arrays: Arrays, router: Router, skeleton: Skeleton | None, head: bytes
    ) -> Lane | TextLane | None:
        main, accepted = router.main, exchange.headers.get(b"accept-encoding", b"")
        if skeleton is not None:
            if not text_lane_fits(plan, arrays, main):
                return None
            digest = main.identity.digest

            def opening(request_id: str) -> bytes:
                return _OK_JSON + names(request_id, digest)

            return TextLane(skeleton, plan, router, self._text, opening, self._fault, accepted)
        layout = layout_of(plan, arrays, main)
        if layout is None:
            return None
        return Lane((exchange.head, head), plan, layout, router, self._wire, self._fault, accepted)

    def _wire(self, outputs: Arrays, asked: Head, service: Service, request_id: str) -> bytes:
        """An answer in bytes as it goes over the wire."""
        body, length = self._words(service).encoder.encode(outputs, asked.outputs, "", request_id)
        return answer(200, OCTETS, names(request_id, service.identity.digest) + LENGTH % (length or 0), body)

    def _text(self, outputs: Arrays, asked: Head, service: Service, request_id: str) -> bytes:
        """The body of an answer in JSON."""
        return self._words(service).encoder.encode(outputs, asked.outputs, "", request_id)[0]


def names(request_id: str, engine: str) -> bytes:
    """The lines that say which request was answered, and by which engine."""
    return f"x-request-id: {request_id}\r\nx-onejob-engine: {engine}\r\n".encode()
