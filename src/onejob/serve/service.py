"""One model being served: what every protocol of a replica shares, so that none has a batcher or counters of its own.

A protocol decodes a message into arrays, calls `submit`, and is called back with the finished item, which it
encodes. It then calls `answered`, which counts and logs. Everything here belongs to the loop's thread.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onejob.core.artifact import Json
from onejob.core.counters import BOUNDS_NS, EDGES_NS, Counters
from onejob.errors import (
    BadRequestError,
    DeadlineError,
    InferenceError,
    OnejobError,
    OverloadedError,
)
from onejob.serve.batch import INLINE_NS, Batcher, Piece
from onejob.serve.capture import Capture, Record
from onejob.serve.health import OWN, Health
from onejob.serve.identify import Roles, Told, identify
from onejob.serve.item import Item
from onejob.serve.journal import RequestLog
from onejob.serve.labels import LabelLog
from onejob.serve.model import Column, ServedModel
from onejob.serve.policy import Fit, Limits
from onejob.serve.rows import Arrays, Layout, join

REASONS: tuple[tuple[type[Exception], str], ...] = (
    (BadRequestError, "REJECTED"),
    (OverloadedError, "REJECTED"),
    (DeadlineError, "OTHER"),
    (InferenceError, "BACKEND"),
)
"""Error -> the word that Triton's nv_inference_request_failure has for it."""


@dataclass(frozen=True)
class Identity:
    """Which model, of which engine, in which process."""

    name: str
    digest: str
    generation: int
    meta: Mapping[str, Json]
    execution: str | None
    process: str
    """`<pid>:<start>`; a reused pid is another process."""
    version: str = "1"
    """Of the model, as clients name it."""

    @property
    def roles(self) -> Roles:
        return Roles.of(self.meta)


@dataclass(frozen=True)
class Recorders:
    """What [monitor] brings: what is asked is captured, and labels are taken; None without it."""

    capture: Capture | None = None
    labels: LabelLog | None = None


class Ids:
    """Request ids that sort by time and are unique over processes: milliseconds, a random part, a counter, in hex."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._random = os.urandom(4).hex()
        self._count = 0

    def make(self) -> str:
        self._count = (self._count + 1) & 0xFFFFFF
        return f"{int(self._clock() * 1000):012x}{self._count:06x}{self._random}"

    def make_many(self, amount: int) -> list[str]:
        """So many at once, for the requests of a batch."""
        head, first = f"{int(self._clock() * 1000):012x}", self._count + 1
        self._count = (self._count + amount) & 0xFFFFFF
        return [f"{head}{number & 0xFFFFFF:06x}{self._random}" for number in range(first, first + amount)]


class Service:
    """The model, its batcher, its counters, its request log, and what it records."""

    def __init__(
        self,
        model: ServedModel,
        identity: Identity,
        limits: Limits,
        log: RequestLog,
        metrics: Path,
        *,
        fit: Fit | None = None,
        recorders: Recorders | None = None,
    ) -> None:
        self.model = model
        self.identity = identity
        self.limits = limits
        self.counters = Counters()
        self.ids = Ids()
        self.log = log
        self.labels = recorders.labels if recorders else None
        self._capture = recorders.capture if recorders else None
        self._roles = identity.roles
        self.metrics = metrics
        self.layouts: dict[Any, Layout] = {}
        """How requests lie in bytes that came as bytes (protocols/lane.py)."""
        self.shadow = False
        """Whether it is asked copies only: nobody sees its answers, so no line is logged."""
        self.batcher = Batcher(
            model.infer,
            limits,
            batchable=model.batchable,
            inline=fit is None or fit.predict(limits.rows) < INLINE_NS,
            apart=model.apart,
            fit=fit,
            on_batch=self._count_batch,
            on_quick=self._answer_quick,
            on_failure=self._suspect,
        )
        self.health = Health(model, self.batcher, limits)

    @property
    def ready(self) -> bool:
        """Whether this model answers."""
        return not self.health.reason

    @property
    def unready_reason(self) -> str:
        return self.health.reason

    def submit(
        self, columns: Mapping[str, Column], item: Item, *, timeout_ns: int | None = None, size: int = 0
    ) -> None:
        """Encode and queue a request; raises BadRequestError or OverloadedError, else `item.done` is called once.

        `columns` may hold the event time and the key beside the model's inputs; `size` is that of the message. Of the
        item, `received`, `done` and `priority` are there already.
        """
        inputs = self.model.inputs
        known = columns if columns.keys() == inputs.keys() else {name: columns[name] for name in inputs}
        item.arrays, item.rows, item.signature = self.model.prepare(known)
        told = identify(columns, self._roles, item.rows, time.time_ns() // 1000)
        item.deadline = item.received + min(timeout_ns or self.limits.timeout_ns, self.limits.timeout_ns)
        item.size = size
        if self._capture is not None:
            item.asked = Record((), (item.rows,), size, told, known, {})
        self.batcher.submit(item)

    def answered(self, request: str, item: Item | None, error: Exception | None, status: int, received: int) -> None:
        """Count and log one inference request, after its answer was encoded."""
        now = time.perf_counter_ns()
        took = now - received
        if error is None and item is not None:
            self._count_answered((item,), now)
            if self._capture is not None and item.outputs is not None:
                record: Record = item.asked or self._record_of(item)
                record.requests, record.outputs = (request,), item.outputs
                self._capture.add(record)
        else:
            self.counters.count(f"failure.{reason_of(error, item)}")
            self.counters.count("failure_ns", took)
            self.counters.observe(took)
        self._log_line(request, item.rows if item else 0, status, took)

    def _answer_quick(self, items: list[Item], inputs: Arrays, outputs: Arrays) -> None:
        """Have a batch answered, then count, record and log it as one."""
        ids = self.ids.make_many(len(items))
        for at, item in enumerate(items):
            if item.own_id:
                ids[at] = item.own_id
        if failed := self._answer_each(items, outputs, ids):
            finished, inputs = items[0].finished, {}  # the others' rows only are recorded, each on its own
            ids = [name for name, item in zip(ids, items, strict=True) if item not in failed]
            items = [item for item in items if item not in failed]
            if not items:
                return
            items[0].finished = finished
        self._count_answered(items, time.perf_counter_ns())
        rows = [item.rows for item in items]
        if self._capture is not None:
            self._record_batch(items, inputs, outputs, ids, rows)
        self._log_batch(items, ids, rows)

    def _answer_each(self, items: Sequence[Item], outputs: Arrays, ids: Sequence[str]) -> list[Item]:
        """Answer each with its rows; gives those for which that failed, and which have been told and counted."""
        kind = type(items[0])
        for item in items:
            if type(item) is not kind or not item.alike:
                break
        else:
            items[0].answer_all(items, outputs, ids)
            return []
        start, failed = 0, []
        for item, name in zip(items, ids, strict=True):
            stop = start + item.rows
            if not item.answer(outputs, start, stop, name):
                failed.append(item)
            start = stop
        return failed

    def _record_batch(
        self, items: Sequence[Item], inputs: Arrays, outputs: Arrays, ids: Sequence[str], rows: Sequence[int]
    ) -> None:
        """Record what was answered together: as one, if all came as bytes."""
        assert self._capture is not None
        if inputs and all(item.asked is None for item in items):
            told = Told(time.time_ns() // 1000)
            size = sum([array.nbytes for array in inputs.values()])  # numbers, all of them: text is no lane's
            self._capture.add(Record(ids, rows, size, told, inputs, outputs))
            return
        for item, name in zip(items, ids, strict=True):
            record: Record = item.asked or self._record_of(item)
            record.requests, record.outputs = (name,), item.outputs or {}
            self._capture.add(record)

    def _count_answered(self, items: Sequence[Item], now: int) -> None:
        """Count requests of one batch that were all answered. Each request passes here, so nothing is called for it."""
        counters, amount = self.counters, len(items)
        latency, parts = counters.latency, counters.parts or counters.make_parts()
        waits, decodes = parts["queue"], parts["input"]
        started, finished = items[0].started, items[0].finished
        all_received = all_queued = rows = 0
        for item in items:
            received, queued = item.received, item.queued
            all_received += received
            all_queued += queued
            rows += item.rows
            latency[bisect_left(BOUNDS_NS, now - received)] += 1
            waits[bisect_left(EDGES_NS, started - queued)] += 1
            decodes[bisect_left(EDGES_NS, queued - received)] += 1
        computed, encoded = finished - started, now - finished
        parts["infer"][bisect_left(EDGES_NS, computed)] += amount
        parts["output"][bisect_left(EDGES_NS, encoded)] += amount
        values = counters.values
        had = values.get
        values["success"] = had("success", 0) + amount
        values["rows"] = had("rows", 0) + rows
        values["request_ns"] = had("request_ns", 0) + amount * now - all_received
        values["queue_ns"] = had("queue_ns", 0) + amount * started - all_queued
        values["input_ns"] = had("input_ns", 0) + all_queued - all_received
        values["infer_ns"] = had("infer_ns", 0) + amount * computed
        values["output_ns"] = had("output_ns", 0) + amount * encoded
        counters.last = time.time_ns() // 1_000_000
        self.health.answered(now)

    def _log_batch(self, items: Sequence[Item], ids: Sequence[str], rows: Sequence[int]) -> None:
        now = time.perf_counter_ns()
        line: dict[str, Json] = {
            "ids": ids,
            "time": time.time(),
            "digest": self.identity.digest,
            "rows": rows,
            "status": 200,
            "ms": [(now - item.received) // 1000 / 1000 for item in items],
        }
        if self.identity.execution:
            line["execution"] = self.identity.execution
        self.log.add(line)

    def _record_of(self, item: Item) -> Record:
        """Of a request that came as bytes."""
        return Record((), (item.rows,), item.size, Told(time.time_ns() // 1000), join([item.arrays]), {})

    def cancelled(self, item: Item, request: str) -> None:
        """The client went away before its answer."""
        self.batcher.cancel(item)
        self.counters.count("failure.CANCELED")
        self._log_line(request, item.rows, 499, time.perf_counter_ns() - item.received)

    def counted(self) -> Counters:
        """The counters as they are now; may be called from another thread."""
        counters = self.counters.copy()
        counters.values |= self._capture.counts() if self._capture else {}
        counters.values |= self.labels.counts() if self.labels else {}
        return counters

    def close(self) -> None:
        """Free the engine; nothing may be pending."""
        self.batcher.close()
        if self.model.apart:  # its process may take seconds to end
            threading.Thread(target=self.model.close, name="close", daemon=True).start()
        else:
            self.model.close()

    def record(self, recorders: Recorders) -> None:
        """Record elsewhere from now on."""
        self._capture, self.labels = recorders.capture, recorders.labels

    def _log_line(self, request: str, rows: int, status: int, took: int) -> None:
        if self.shadow:
            return
        line: dict[str, Json] = {
            "id": request,
            "time": time.time(),
            "digest": self.identity.digest,
            "rows": rows,
            "status": status,
            "ms": round(took / 1e6, 3),
        }
        if self.identity.execution:
            line["execution"] = self.identity.execution
        self.log.add(line)

    def _count_batch(self, pieces: Sequence[Piece], rows: int, took: int) -> None:
        if len(pieces) == 1 and pieces[0][0].asked is OWN:
            return
        values = self.counters.values
        number, spent = f"batch.{rows}", f"batch_ns.{rows}"
        values["executions"] = values.get("executions", 0) + 1
        values[number] = values.get(number, 0) + 1
        values[spent] = values.get(spent, 0) + took
        parts = self.counters.parts or self.counters.make_parts()
        parts["batch"][bisect_left(EDGES_NS, took)] += 1

    def _suspect(self, error: Exception) -> None:
        if not isinstance(error, BadRequestError):
            self.health.failed()


def reason_of(error: Exception | None, item: Item | None = None) -> str:
    """The word for a failure in the metrics; what the engine was never given is rejected."""
    if isinstance(error, DeadlineError) and item is not None and not item.started:
        return "REJECTED"
    return next((word for kind, word in REASONS if isinstance(error, kind)), "OTHER")


def status_of(error: Exception) -> int:
    """The HTTP status of an error; 500 for what isn't one of ours."""
    return error.http_status if isinstance(error, OnejobError) else 500
