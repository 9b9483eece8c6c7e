"""The short way of a binary v2 request: known by its first bytes, it is queued as bytes and answered with its batch.

A client asks the same model in the same way again and again: the same headers, the same JSON before the tensors. What
that means was worked out once, the long way; here the tensors' bytes are cut out of the next such message, joined with
others of the same layout into one array, and the answers cut out of the outputs' bytes. Only requests without an id of
their own, of tensors of fixed size, to an engine without an encoding, come this way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from onejob.core.tensor import DATATYPES
from onejob.errors import OnejobError
from onejob.serve.batch import Item
from onejob.serve.protocols.http import Exchange
from onejob.serve.protocols.kserve import InferRequest
from onejob.serve.router import Router
from onejob.serve.rows import Arrays, Layout, Raw
from onejob.serve.service import Service

Wire = Callable[[Arrays, InferRequest, Service, str], bytes]
"""(outputs, request, service, request id) -> an answer as it goes over the wire."""
Fault = Callable[[Exchange, Exception], int]
MARK = "@" * 26
"""Stands for the id in an answer that is a pattern; as long as one that a replica makes."""


class Lane:
    """Requests that look alike."""

    def __init__(
        self, prefix: bytes, request: InferRequest, layout: Layout, router: Router, wire: Wire, fault: Fault
    ) -> None:
        self.prefix = prefix
        self._request = request
        self._layout = layout
        self._router, self._service = router, router.main
        self._wire, self._fault = wire, fault
        self._rows = len(next(iter(request.arrays.values())))
        self._signature = tuple(request.arrays[name].shape[1:] for name in self._service.model.inputs)
        self._cuts: list[slice] = []
        at = len(prefix)
        for name in layout.names:
            size = request.arrays[name].nbytes
            self._cuts.append(slice(at, at + size))
            at += size
        self.length = at
        limit = self._service.limits.timeout_ns
        self._budget = min(request.timeout_us * 1000 or limit, limit)
        self._outputs = [name for name, _ in request.outputs]
        self._shapes: list[tuple[int, ...]] = []
        self._pattern: list[bytes] = []

    def leads_to(self, service: Service) -> bool:
        """Whether this engine would answer."""
        return self._service is service

    def ask(self, exchange: Exchange, data: bytes) -> bool:
        """Queue a request; False if another engine has come to answer since."""
        service, router = self._service, self._router
        if router.main is not service or router.new is not None or router.gone:
            return False
        received = exchange.received
        item = Item(
            Raw(self._layout, [data[cut] for cut in self._cuts]),
            self._rows,
            _settled,
            received,
            received + self._budget,
            self._signature,
        )
        item.quick, item.size, item.priority = exchange, self.length, self._request.priority
        exchange.lane, exchange.item = self, item
        try:
            service.batcher.submit(item)
        except OnejobError as error:
            self.refuse(item, error)
        return True

    def answer(self, items: Sequence[Item], outputs: Arrays, ids: Sequence[str]) -> None:
        """Answer all requests of a batch, each by its own lane."""
        cut: dict[str, tuple[bytes, int]] = {}
        known: Lane | None = None
        row = 0
        for item, name in zip(items, ids, strict=True):
            exchange = item.quick
            lane: Lane = exchange.lane
            if lane is not known:
                lane._fit(outputs, cut)
                known = lane
            request_id = name.encode()
            first, second, third = lane._pattern
            parts = [first, request_id, second, request_id, third]
            for output in lane._outputs:
                data, width = cut[output]
                parts.append(data[row * width : (row + item.rows) * width])
            exchange.give(b"".join(parts))
            row += item.rows

    def refuse(self, item: Item, error: Exception) -> None:
        """Answer a request with an error."""
        exchange = item.quick
        exchange.request_id = self._service.ids.make()
        status = self._fault(exchange, error)
        self._service.answered(exchange.request_id, item, error, status, item.received)

    def settle(self, item: Item) -> None:
        """Answer a request that didn't run as part of a whole batch of its kind."""
        if item.error is not None:
            self.refuse(item, item.error)
            return
        assert item.outputs is not None
        (name,) = self._service.ids.make_many(1)
        self.answer([item], item.outputs, [name])
        self._service.answered(name, item, None, 200, item.received)

    def gone(self, item: Item) -> None:
        """The client went away before its answer."""
        self._service.cancelled(item, self._service.ids.make())

    def _fit(self, outputs: Arrays, cut: dict[str, tuple[bytes, int]]) -> None:
        """Have the outputs as bytes, and the pattern of an answer for their shapes."""
        for name in self._outputs:
            if name not in cut:
                array = outputs[name]
                dtype = np.dtype(DATATYPES[self._service.model.outputs[name].datatype]).newbyteorder("<")
                data = array.astype(dtype, copy=False).tobytes()
                cut[name] = (data, len(data) // len(array))
        shapes = [outputs[name].shape[1:] for name in self._outputs]
        if shapes != self._shapes:
            self._shapes = shapes
            example = {name: outputs[name][:1].repeat(self._rows, axis=0) for name in self._outputs}
            text = self._wire(example, self._request, self._service, MARK)
            size = sum(cut[name][1] * self._rows for name in self._outputs)
            self._pattern = text[: len(text) - size].split(MARK.encode())


def _settled(item: Item) -> None:
    item.quick.lane.settle(item)


def layout_of(request: InferRequest, size: int, service: Service) -> Layout | None:
    """How a request with so many bytes of tensors lies in them, if it may take the short way."""
    model, arrays = service.model, request.arrays
    if model.raw or not model.batchable or request.id or arrays.keys() != model.inputs.keys():
        return None
    fixed = all(array.dtype.kind != "O" for array in arrays.values())
    if not fixed or sum(array.nbytes for array in arrays.values()) != size:
        return None
    if not all(binary and model.outputs[name].datatype != "BYTES" for name, binary in request.outputs):
        return None
    key = tuple((name, array.dtype.str, array.shape[1:]) for name, array in arrays.items())
    if key not in service.layouts:
        service.layouts[key] = Layout(
            tuple(arrays),
            tuple(array.dtype for array in arrays.values()),
            tuple(array.shape[1:] for array in arrays.values()),
            tuple(array.nbytes // len(array) for array in arrays.values()),
        )
    return service.layouts[key]
