"""No request leaves what only the cycle collector can free: a replica runs that seldom, and bodies may be large."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onejob.core.tensor import TensorSpec
from onejob.errors import InferenceError
from onejob.serve.item import Item
from onejob.serve.policy import Limits
from onejob.serve.protocols.exchange import Exchange
from onejob.serve.protocols.http import Connection
from onejob.testing.api import Function, Replica
from onejob.testing.corpus import INFER, MESSAGES, STREAMS, UNFINISHED
from onejob.testing.hostile import ask, infer


def left_by(folder: Path, *works: Callable[[Replica], Awaitable[None]], **options: Any) -> dict[int, list[str]]:
    """What is still there of requests and clients after each of the works, though nobody has looked for cycles."""

    async def run() -> dict[int, list[str]]:
        replica, found = Replica(folder, **options), {}
        gc.collect()
        gc.freeze()  # what others have left
        gc.disable()
        try:
            for number, work in enumerate(works):
                await work(replica)
                left = there()
                for _ in range(100):  # a thread may be about to let go of it
                    await asyncio.sleep(0.01 if left else 0)
                    if not (left := there()):
                        break
                if left:
                    found[number] = left
                    gc.freeze()
            return found
        finally:
            gc.enable()
            gc.unfreeze()
            replica.close()

    return asyncio.run(run())


def there() -> list[str]:
    return [repr(each) for each in gc.get_objects() if isinstance(each, Exchange | Item | Connection)]


async def send(replica: Replica, data: bytes, *, stay: bool = True) -> None:
    client = replica.client()
    await client.send([data])
    if stay:
        await client.settle()
    client.leave()
    for service in replica.services.values():
        while service.batcher.pending:
            await asyncio.sleep(0)


def test_bad_and_good_ones(tmp_path: Path) -> None:
    cases = [*MESSAGES, *STREAMS]
    found = left_by(tmp_path, *[partial(send, data=case.data) for case in cases])
    assert {cases[number].name: left for number, left in found.items()} == {}


def test_clients_that_leave(tmp_path: Path) -> None:
    data = [*UNFINISHED[1:], MESSAGES[0].data, STREAMS[0].data]
    assert left_by(tmp_path, *[partial(send, data=each, stay=False) for each in data]) == {}


def fails(error: type[Exception] | None, output: Any = None) -> dict[str, Any]:
    def work(arrays: Any) -> dict[str, Any]:
        if error is not None:
            raise error("no")
        return {"y": output}

    return {"m": Function(work, [TensorSpec("x", "FP32", (-1, 2))], [TensorSpec("y", "FP32", (-1, 2))])}


@pytest.mark.parametrize(
    "models",
    [
        fails(InferenceError),
        fails(ValueError),
        fails(None, np.zeros((1, 2), "<f4")),
        fails(None, [1, 2]),
    ],
    ids=["its own words", "another error", "wrong rows", "no array"],
)
def test_engines_that_fail(tmp_path: Path, models: dict[str, Any]) -> None:
    async def work(replica: Replica) -> None:
        for binary in (True, False):
            body, length = infer("m", {"x": np.ones(6, "<f4")}, binary=binary)
            for data in (ask(INFER, body, length), ask(INFER, body, length) * 2):
                await send(replica, data)

    assert left_by(tmp_path, work, models=models) == {}


def test_large_ones_that_run_in_pieces(tmp_path: Path) -> None:
    async def work(replica: Replica) -> None:
        for binary in (True, False):
            body, length = infer("m", {"x": np.ones(200, "<f4")}, binary=binary)
            await send(replica, ask(INFER, body, length) * 2)

    assert left_by(tmp_path, work, limits=Limits(rows=8, queue=1000)) == {}
