"""What it costs to count: microseconds a request, of a batch that is answered together, and of one alone.

    taskset -c 0 python bench/serve/counting.py

The least of several rounds, so that neighbours don't count. Requests of a batch came a few microseconds apart. "The
page" is what a scrape costs, and "a snapshot" what each second costs, by the number of models that were all asked.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onejob.core.tensor import TensorSpec
from onejob.serve.item import Item
from onejob.serve.journal import RequestLog
from onejob.serve.metrics import Reading, render
from onejob.serve.model import ServedModel
from onejob.serve.policy import Limits
from onejob.serve.registry import Registry
from onejob.serve.router import Router
from onejob.serve.rows import Arrays
from onejob.serve.service import Identity, Service

ROUNDS = 100
APART_NS = 3_000


class Echo:
    inputs = (TensorSpec("x", "FP32", (-1, 64)),)
    outputs = (TensorSpec("y", "FP32", (-1, 10)),)

    def run(self, arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
        return {"y": arrays["x"][:, :10]}


def least(what: Callable[[], object]) -> float:
    """Microseconds of a call."""
    number = max(1, int(0.002 / max(timeit.timeit(what, number=3) / 3, 1e-9)))
    return min(timeit.repeat(what, number=number, repeat=ROUNDS)) / number * 1e6


def make_service(folder: Path, name: str = "mlp") -> Service:
    identity = Identity(name, f"{name}-digest", 1, {"engine": "onnxruntime"}, None, "1:1.0")
    return Service(ServedModel(Echo()), identity, Limits(), RequestLog(folder / "requests"), folder / "metrics")


def make_items(amount: int, now: int) -> list[Item]:
    items = []
    for number in range(amount):
        received = now - 200_000 - number * APART_NS
        item = Item({}, 1, lambda item: None, received, now + 10**9)
        item.queued = received + 2_000
        items.append(item)
    items[0].started, items[0].finished = now - 100_000, now - 60_000
    return items


def counting(folder: Path) -> None:
    now = time.perf_counter_ns()
    for amount in (1, 8, 64):
        service, items = make_service(folder), make_items(amount, now)
        pieces = [(item, 0, 1) for item in items]
        requests = least(partial(service._count_answered, items, now))
        batch = least(partial(service._count_batch, pieces, amount, 40_000))
        each = (requests + batch) / amount
        print(f"batch of {amount:2}: {each:6.3f} us a request; {requests:6.2f} us its requests, {batch:5.2f} us itself")
    service, item = make_service(folder), make_items(1, now)[0]
    service._log_line = lambda *told: None  # type: ignore[method-assign]
    alone = least(partial(service.answered, "id", item, None, 200, item.received))
    print(f"alone:       {alone:6.3f} us a request")


def reading(folder: Path) -> None:
    now = time.perf_counter_ns()
    for amount in (1, 100):
        registry = Registry("digest", "1:1.0", 1)
        serving = {}
        for name in [f"m{number}" for number in range(amount)]:
            service = make_service(folder, name)
            for rows in (1, 3, 8, 64):
                items = make_items(rows, now)
                service._count_answered(items, now)
                service._count_batch([(item, 0, 1) for item in items], rows, 40_000 * rows)
            registry.put(name, {"1": Router(service)})
            serving[f"{name}/1"] = service.identity.digest
        snapshot, found = least(registry.snapshot) / 1000, registry.all_snapshots()
        page = least(lambda found=found, serving=serving: render(Reading.of(found, serving))) / 1000
        size = len(render(Reading.of(found, serving))) / 1024
        print(f"{amount:3} models: a snapshot {snapshot:5.2f} ms, the page {page:5.2f} ms, {size:5.0f} KiB")


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        counting(Path(folder))
        reading(Path(folder))


if __name__ == "__main__":
    asyncio.run(main())
