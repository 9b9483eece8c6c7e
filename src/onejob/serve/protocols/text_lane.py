"""The short way of a v2 request in JSON: all of it but the numbers and the length is known by heart.

What surrounds the array of one input's `data` is the same from request to request. If the bytes before it and after it
are those of a request that was understood the long way, and what stands between is one JSON array, then the whole means
the same with other numbers. Whatever doesn't fit, or isn't a number that the model takes, goes the long way, which says
what is wrong. The answers of a batch are written at once, too.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import orjson

from onejob.errors import BadRequestError, OnejobError
from onejob.serve.item import Item
from onejob.serve.protocols import tensors
from onejob.serve.protocols.exchange import Exchange
from onejob.serve.protocols.http import Connection
from onejob.serve.protocols.kserve import NORMAL
from onejob.serve.protocols.lane import MARK, Fault, packed
from onejob.serve.protocols.plan import Head, Plan
from onejob.serve.router import Router
from onejob.serve.rows import Arrays
from onejob.serve.service import Service

Encode = Callable[[Arrays, Head, Service, str], bytes]
"""(outputs, what the request asked for, service, request id) -> the body of an answer."""
_LENGTH = re.compile(rb"(?i)\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n")
_DATA = re.compile(rb'"data"\s*:\s*(\[[\[\]\s,\-+.0-9eEa-z]*\])')
MOST = 65_536
"""Longer requests come in pieces anyway."""


class TextQuick(Exchange, Item):
    """A request on a lane: what the connection and the batcher know of it, as one object."""

    quick = alike = True
    headers: dict[bytes, bytes] = {}  # noqa: RUF012 - none of its own

    def __init__(self, connection: Connection, received: int, lane: TextLane, arrays: Arrays) -> None:
        self.connection = connection
        self.received = received
        self.lane = lane
        self.arrays = arrays

    @property
    def signature(self) -> Hashable:  # type: ignore[override]
        return self.lane.signature

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.lane.rows

    @property
    def deadline(self) -> int:  # type: ignore[override]
        return self.received + self.lane.budget

    @property
    def priority(self) -> int:  # type: ignore[override]
        return self.lane.priority

    def done(self, item: Item) -> None:
        self.lane.settle(self)

    def answer_all(self, items: Sequence[Item], outputs: Arrays, ids: Sequence[str]) -> None:
        self.lane.answer(items, outputs, ids)

    def answer(self, outputs: Arrays, start: int, stop: int, name: str) -> bool:
        self.outputs = {output: array[start:stop] for output, array in outputs.items()}
        self.lane.answer([self], self.outputs, [name])
        return True

    def leave(self) -> None:
        self.lane.gone(self)


class TextLane:
    """Requests in JSON that look alike."""

    length = 0
    """Any."""

    def __init__(
        self,
        skeleton: Skeleton,
        plan: Plan,
        router: Router,
        encode: Encode,
        head: Callable[[str], bytes],
        fault: Fault,
        accepted: bytes = b"",
    ) -> None:
        self._accepted = accepted
        self.prefix = skeleton.before_length
        self.rows = plan.rows
        self.priority = plan.head.priority or NORMAL
        self.signature = plan.signature
        self._skeleton, self._asked = skeleton, plan.head
        self._router, self._service = router, router.main
        self._encode, self._head, self._fault = encode, head, fault
        limit = self._service.limits.timeout_ns
        self.budget = min(plan.head.timeout_us * 1000 or limit, limit)
        (self._spec,) = self._service.model.inputs.values()
        self._shape = (plan.rows, *plan.signature[0])
        self._output = plan.head.outputs[0].name
        self._dtype = tensors.DTYPES[self._service.model.outputs[self._output].datatype]
        self._dims: tuple[int, ...] | None = None
        self._pattern: list[bytes] = []

    def leads_to(self, service: Service) -> bool:
        """Whether this engine would answer."""
        return self._service is service

    def ask(self, connection: Connection, data: bytes) -> bool:
        """Queue a request; False if it must take the long way."""
        service, router = self._service, self._router
        if router.main is not service or router.new is not None or router.gone:
            return False
        numbers = self._skeleton.numbers(data)
        if numbers is None:
            return False
        received = time.perf_counter_ns()
        try:
            values = orjson.loads(numbers)
            array = tensors.from_json(values, self._spec.datatype, self._shape, "")
        except (ValueError, BadRequestError):
            return False
        request = TextQuick(connection, received, self, {self._spec.name: array})
        request.size = len(data)
        connection.exchanges.append(request)
        try:
            service.batcher.submit(request)
        except OnejobError as error:
            self.refuse(request, error)
        return True

    def missing(self, data: bytes) -> int:
        """How many bytes such a request lacks, if this is its head and perhaps some of its body; 0 otherwise."""
        return self._skeleton.missing(data)

    def answer(self, items: Sequence[Item], outputs: Arrays, ids: Sequence[str]) -> None:
        """Answer all requests of a batch: their numbers are written at once, and cut where a row ends."""
        array = outputs[self._output]
        table = np.ascontiguousarray(array.reshape(len(array), -1), self._dtype)
        rows = [b""] * len(table)
        if table.shape[1]:
            rows = orjson.dumps(table, option=orjson.OPT_SERIALIZE_NUMPY)[2:-2].split(b"],[")
        at = 0
        for item, name in zip(items, ids, strict=True):
            assert isinstance(item, TextQuick)
            lane = item.lane
            if lane._dims != array.shape[1:]:
                lane._fit(outputs, array.shape[1:])
            first, second, third = lane._pattern
            text = rows[at] if lane.rows == 1 else b",".join(rows[at : at + lane.rows])
            body = b"".join((first, name.encode(), second, text, third))
            answer = b"%bContent-Length: %d\r\n\r\n%b" % (lane._head(name), len(body), body)
            item.give(packed(answer, lane._accepted) if lane._accepted else answer)
            at += lane.rows

    def refuse(self, request: TextQuick, error: Exception) -> None:
        """Answer a request with an error, unless it has been answered."""
        if request not in request.connection.exchanges:
            return
        request.request_id = self._service.ids.make()
        status = self._fault(request, error)
        self._service.answered(request.request_id, request, error, status, request.received)

    def settle(self, request: TextQuick) -> None:
        """Answer a request that didn't run as part of a whole batch of its kind."""
        if request.error is not None:
            self.refuse(request, request.error)
            return
        assert request.outputs is not None
        (name,) = self._service.ids.make_many(1)
        self.answer([request], request.outputs, [name])
        self._service.answered(name, request, None, 200, request.received)

    def gone(self, request: TextQuick) -> None:
        """The client went away before its answer."""
        self._service.cancelled(request, self._service.ids.make())

    def _fit(self, outputs: Arrays, dims: tuple[int, ...]) -> None:
        """The pattern of an answer: what stands before the id, between id and numbers, and after them."""
        example = {name: array[:1].repeat(self.rows, axis=0) for name, array in outputs.items()}
        text = self._encode(example, self._asked, self._service, MARK)
        match = _DATA.search(text)
        assert match is not None
        before, after = text[: match.start(1) + 1], text[match.end(1) - 1 :]
        first, second = before.split(MARK.encode())
        self._pattern, self._dims = [first, second, after], dims


class Skeleton:
    """A request but for its length and its numbers."""

    def __init__(self, head: bytes, body: bytes, length: re.Match[bytes], data: re.Match[bytes]) -> None:
        self.before_length, self._after_length = head[: length.start(1)], head[length.end(1) :]
        self._before, self._after = body[: data.start(1)], body[data.end(1) :]
        self._start = self._after_length + self._before

    @classmethod
    def of(cls, head: bytes, body: bytes) -> Skeleton | None:
        """None if it isn't clear where the numbers stand."""
        length, data = _LENGTH.search(head), _DATA.search(body)
        if len(body) > MOST or body.count(b'"data"') != 1 or length is None or data is None:
            return None
        return cls(head, body, length, data)

    def numbers(self, data: bytes) -> bytes | None:
        """What stands where the numbers are, in a whole request that is like this one elsewhere."""
        at = len(self.before_length)
        end = data.find(b"\r", at, at + 8)
        start = end + len(self._start)
        if end < 0 or not data.startswith(self._start, end) or not data.endswith(self._after):
            return None
        digits = data[at:end]
        if not digits.isdigit() or int(digits) != len(data) - end - len(self._after_length):
            return None
        numbers = data[start : len(data) - len(self._after)]
        return numbers if numbers[:1] == b"[" else None

    def missing(self, data: bytes) -> int:
        """How many bytes a request like this one lacks, if this is its head and perhaps some of its body."""
        at = len(self.before_length)
        end = data.find(b"\r", at, at + 8)
        if end < 0 or not data.startswith(self.before_length) or not data.startswith(self._after_length, end):
            return 0
        digits = data[at:end]
        if not digits.isdigit() or int(digits) > MOST:
            return 0
        return max(0, end + len(self._after_length) + int(digits) - len(data))

    def __len__(self) -> int:
        return len(self.before_length) + len(self._start) + len(self._after)

    @property
    def key(self) -> tuple[bytes, bytes, bytes]:
        return self.before_length, self._start, self._after


def text_lane_fits(plan: Plan, arrays: Arrays, service: Service) -> bool:
    """Whether such requests may take the short way: one input of numbers, one output of numbers, nothing else."""
    model = service.model
    if model.raw or not model.batchable or plan.id or list(arrays) != list(model.inputs) or len(arrays) != 1:
        return False
    (spec,) = model.inputs.values()
    if spec.datatype in ("BYTES", "BOOL") or len(plan.head.outputs) != 1:
        return False
    wanted: Any = plan.head.outputs[0]
    datatype = model.outputs[wanted.name].datatype
    return not wanted.binary and not wanted.classes and datatype in ("FP32", "FP64", "INT32", "INT64")
