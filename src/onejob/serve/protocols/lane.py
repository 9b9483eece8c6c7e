"""The short way of a binary v2 request: known by its first bytes, it is queued as bytes and answered with its batch.

A client asks the same model in the same way again and again: the same headers, the same JSON before the tensors. What
that means was worked out once, the long way; here the tensors' bytes are cut out of the next such message, joined with
others of the same layout into one array, and the answers cut out of the outputs' bytes. Only requests without an id of
their own, of tensors of fixed size, to an engine without an encoding, come this way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from onejob.core.tensor import DATATYPES
from onejob.errors import OnejobError
from onejob.serve.item import Item
from onejob.serve.protocols.compression import LEAST, compress
from onejob.serve.protocols.exchange import Exchange
from onejob.serve.protocols.http import Connection
from onejob.serve.protocols.kserve import NORMAL
from onejob.serve.protocols.plan import Head, Plan
from onejob.serve.router import Router
from onejob.serve.rows import Arrays, Layout, Raw
from onejob.serve.service import Service

Wire = Callable[[Arrays, Head, Service, str], bytes]
"""(outputs, what the request asked for, service, request id) -> an answer as it goes over the wire."""
Fault = Callable[[Exchange, Exception], int]
MAX_LAYOUTS = 1024
"""Of a model whose tensors vary in size."""
LONGEST_WAIT = 64 << 10
"""A longer request isn't kept until it is whole: the parser takes it as it comes, and its bytes are counted."""
MARK = "@" * 26
"""Stands for the id in an answer that is a pattern; as long as one that a replica makes."""


class Quick(Exchange, Item, Raw):
    """A request on a lane: what the connection, the batcher and the joining of rows know of it, as one object.

    Three objects that know each other would be a cycle for the collector, and would cost a microsecond more.
    """

    quick = alike = True
    headers: dict[bytes, bytes] = {}  # noqa: RUF012 - none of its own

    def __init__(self, connection: Connection, received: int, lane: Lane, data: bytes) -> None:
        self.connection = connection
        self.received = received
        self.lane = lane
        self.pieces = [data[cut] for cut in lane.cuts]

    @property
    def arrays(self) -> Raw:  # type: ignore[override]
        return self

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        return self.lane.layout

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
    def size(self) -> int:  # type: ignore[override]
        return self.lane.length

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


class Lane:
    """Requests that look alike."""

    def __init__(
        self,
        opening: tuple[bytes, bytes],
        plan: Plan,
        layout: Layout,
        router: Router,
        wire: Wire,
        fault: Fault,
        accepted: bytes = b"",
    ) -> None:
        """`opening` are the request's own head and the JSON before its tensors; `accepted` are the encodings that its
        client likes answers in."""
        self._opens, text = opening
        self.prefix = prefix = self._opens + text
        self._accepted = accepted
        self.layout = layout
        self.rows = plan.rows
        self.priority = plan.head.priority or NORMAL
        self._head = plan.head
        self._router, self._service = router, router.main
        self._wire, self._fault = wire, fault
        self.signature = layout.dims
        self.cuts: list[slice] = []
        at = len(prefix)
        for size in layout.row_bytes:
            self.cuts.append(slice(at, at + size * plan.rows))
            at += size * plan.rows
        self.length = at
        limit = self._service.limits.timeout_ns
        self.budget = min(plan.head.timeout_us * 1000 or limit, limit)
        outputs = self._service.model.outputs
        self._outputs = [wanted.name for wanted in plan.head.outputs]
        self._dtypes = {name: np.dtype(DATATYPES[outputs[name].datatype]).newbyteorder("<") for name in self._outputs}
        self._shapes: list[tuple[int, ...]] = []
        self._pattern: list[bytes] = []

    def leads_to(self, service: Service) -> bool:
        """Whether this engine would answer."""
        return self._service is service

    def ask(self, connection: Connection, data: bytes) -> bool:
        """Queue a request; False if another engine has come to answer since."""
        service, router = self._service, self._router
        if router.main is not service or router.new is not None or router.gone:
            return False
        request = Quick(connection, time.perf_counter_ns(), self, data)
        connection.exchanges.append(request)
        try:
            service.batcher.submit(request)
        except OnejobError as error:
            self.refuse(request, error)
        return True

    def missing(self, data: bytes) -> int:
        """How many bytes such a request lacks, if this is its head and perhaps some of its body; 0 otherwise."""
        lacks = self.length - len(data)
        return lacks if lacks > 0 and self.length <= LONGEST_WAIT and data.startswith(self._opens) else 0

    def answer(self, items: Sequence[Item], outputs: Arrays, ids: Sequence[str]) -> None:
        """Answer all requests of a batch, each by its own lane."""
        cut: dict[str, tuple[bytes, int]] = {}
        known: Lane | None = None
        row = 0
        first = second = third = data = b""
        width = 0
        for item, name in zip(items, ids, strict=True):
            assert isinstance(item, Quick)
            lane = item.lane
            if lane is not known:
                lane._fit(outputs, cut)
                known = lane
                first, second, third = lane._pattern
                if len(lane._outputs) == 1:
                    data, width = cut[lane._outputs[0]]
            request_id, stop = name.encode(), row + lane.rows
            if len(lane._outputs) == 1:
                answer = b"".join((first, request_id, second, request_id, third, data[row * width : stop * width]))
            else:
                parts = [cut[output][0][row * cut[output][1] : stop * cut[output][1]] for output in lane._outputs]
                answer = b"".join((first, request_id, second, request_id, third, *parts))
            item.give(packed(answer, lane._accepted) if lane._accepted else answer)
            row = stop

    def refuse(self, request: Quick, error: Exception) -> None:
        """Answer a request with an error, unless it has been answered."""
        if request not in request.connection.exchanges:
            return
        request.request_id = self._service.ids.make()
        status = self._fault(request, error)
        self._service.answered(request.request_id, request, error, status, request.received)

    def settle(self, request: Quick) -> None:
        """Answer a request that didn't run as part of a whole batch of its kind."""
        if request.error is not None:
            self.refuse(request, request.error)
            return
        assert request.outputs is not None
        (name,) = self._service.ids.make_many(1)
        self.answer([request], request.outputs, [name])
        self._service.answered(name, request, None, 200, request.received)

    def gone(self, request: Quick) -> None:
        """The client went away before its answer."""
        self._service.cancelled(request, self._service.ids.make())

    def _fit(self, outputs: Arrays, cut: dict[str, tuple[bytes, int]]) -> None:
        """Have the outputs as bytes, and the pattern of an answer for their shapes."""
        shapes = []
        for name in self._outputs:
            array = outputs[name]
            if name not in cut:
                dtype = self._dtypes[name]
                data = (array if array.dtype == dtype else array.astype(dtype)).tobytes()
                cut[name] = (data, len(data) // len(array))
            shapes.append(array.shape[1:])
        if shapes != self._shapes:
            self._shapes = shapes
            example = {name: outputs[name][:1].repeat(self.rows, axis=0) for name in self._outputs}
            text = self._wire(example, self._head, self._service, MARK)
            size = sum(cut[name][1] * self.rows for name in self._outputs)
            self._pattern = text[: len(text) - size].split(MARK.encode())


def packed(answer: bytes, accepted: bytes) -> bytes:
    """An answer as it goes over the wire, compressed if the client likes that and it is worth it."""
    if len(answer) < LEAST:
        return answer
    head, _, body = answer.partition(b"\r\n\r\n")
    data, how = compress(body, accepted)
    if not how:
        return answer
    length = b"\r\nContent-Length: %d"
    return b"%b\r\n%b\r\n%b" % (head.replace(length % len(body), length % len(data), 1), how, data)


def layout_of(plan: Plan, arrays: Arrays, service: Service) -> Layout | None:
    """How such requests lie in bytes, if they may take the short way."""
    model = service.model
    if model.raw or not model.batchable or plan.id or list(arrays) != list(model.inputs):
        return None
    if sum(array.nbytes for array in arrays.values()) != plan.size:
        return None  # text, or what isn't kept as it is sent
    at = [array.ctypes.data for array in arrays.values()]
    if at != sorted(at):
        return None  # the client sends them in another order than the model has them
    for wanted in plan.head.outputs:
        if not wanted.binary or wanted.classes or model.outputs[wanted.name].datatype in ("BYTES", "BF16"):
            return None
    key = tuple((name, array.dtype.str, array.shape[1:]) for name, array in arrays.items())
    if key not in service.layouts:
        if len(service.layouts) >= MAX_LAYOUTS:
            service.layouts.clear()
        service.layouts[key] = Layout(
            tuple(arrays),
            tuple(array.dtype for array in arrays.values()),
            tuple(array.shape[1:] for array in arrays.values()),
            tuple(array.nbytes // len(array) for array in arrays.values()),
        )
    return service.layouts[key]
