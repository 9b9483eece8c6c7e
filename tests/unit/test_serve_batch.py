"""The batcher: when it runs what, and that every request gets its own answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onejob.errors import DeadlineError, InferenceError, OverloadedError
from onejob.serve.batch import Batcher, Item, Limits, decide, split

LIMITS = Limits(rows=8, wait_ns=1000, queue=16)


@pytest.mark.parametrize(
    ("waiting", "age", "recent", "expected"),
    [
        ([], 0, 1, None),
        ([(1, 0)], 0, 1, 1),  # alone last time, alone now: no wait
        ([(1, 0)], 0, 2, None),  # there were two: the other may come
        ([(1, 0)], 1000, 2, 1),  # it didn't come in time
        ([(1, 0), (1, 0)], 0, 2, 2),
        ([(4, 0), (4, 0), (1, 0)], 0, 9, 2),  # full
        ([(5, 0), (4, 0)], 0, 9, 1),  # the next doesn't fit: no use in waiting
        ([(1, 0), (1, 1)], 0, 9, 1),  # other shapes can't join
        ([(20, 0), (1, 0)], 0, 9, 1),  # bigger than a batch: alone
    ],
)
def test_decide(waiting: list[tuple[int, int]], age: int, recent: int, expected: int | None) -> None:
    assert decide(waiting, age, recent, LIMITS) == expected


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 1)), min_size=1), st.integers(0, 2000), st.integers(1, 9))
def test_a_batch_never_exceeds_its_rows_nor_mixes_groups(waiting: list[tuple[int, int]], age: int, recent: int) -> None:
    taken = decide(waiting, age, recent, LIMITS)
    if taken is None:
        assert age < LIMITS.wait_ns
        return
    batch = waiting[:taken]
    assert len({group for _, group in batch}) == 1
    assert taken == 1 or sum(rows for rows, _ in batch) <= LIMITS.rows


def test_split_refuses_outputs_of_other_rows() -> None:
    with pytest.raises(InferenceError, match=r"\[2, 1\] for 3 rows"):
        split({"y": np.zeros((2, 1))}, [1, 2])


class Engine:
    """Doubles; keeps the sizes of its batches, fails on negative numbers, may be held."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, arrays: Any) -> Any:
        self.gate.wait(10)
        self.sizes.append(len(arrays["x"]))
        if (arrays["x"] < 0).any():
            raise ValueError("negative")
        return {"y": arrays["x"] * 2}


def item(values: list[float], done: Callable[[Item], None], deadline: int = 1 << 62, width: int = 1) -> Item:
    array = np.array(values, np.float32).reshape(-1, width)
    return Item({"x": array}, len(array), done, 0, deadline, ((width,),))


def run(requests: list[list[float]], *, inline: bool, limits: Limits = LIMITS) -> tuple[list[Item], Engine]:
    engine = Engine()

    async def work() -> list[Item]:
        batcher = Batcher(engine, limits, inline=inline)
        answers: list[Item] = []
        arrived = asyncio.Event()

        def done(finished: Item) -> None:
            answers.append(finished)
            if len(answers) == len(requests):
                arrived.set()

        for values in requests:
            batcher.submit(item(values, done))
        await asyncio.wait_for(arrived.wait(), 10)
        batcher.close()
        return answers

    return asyncio.run(work()), engine


@pytest.mark.parametrize("inline", [True, False])
def test_requests_that_arrive_together_run_together(inline: bool) -> None:
    answers, engine = run([[1], [2, 3], [4]], inline=inline)
    assert engine.sizes == [4]
    assert [answer.outputs["y"].reshape(-1).tolist() for answer in answers if answer.outputs] == [[2], [4, 6], [8]]


@pytest.mark.parametrize("inline", [True, False])
def test_a_request_that_the_engine_refuses_fails_alone(inline: bool) -> None:
    answers, _ = run([[1], [-1], [3]], inline=inline)
    assert [answer.outputs is not None for answer in answers] == [True, False, True]
    assert "negative" in str(answers[1].error)


def test_a_request_bigger_than_a_batch_runs_in_pieces_and_comes_back_whole() -> None:
    answers, engine = run([[float(n) for n in range(20)]], inline=True, limits=Limits(rows=8, queue=64))
    assert engine.sizes == [8, 8, 4]
    assert answers[0].outputs is not None
    assert answers[0].outputs["y"].reshape(-1).tolist() == [2 * n for n in range(20)]


@given(st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=11), min_size=1, max_size=12))
def test_everyone_gets_their_own_rows(requests: list[list[int]]) -> None:
    answers, _ = run([[float(v) for v in r] for r in requests], inline=True, limits=Limits(8, 1000, 1000))
    for answer, request in zip(answers, requests, strict=True):
        assert answer.outputs is not None
        assert answer.outputs["y"].reshape(-1).tolist() == [2 * value for value in request]


def test_full_queue_cancelled_and_late_requests_while_the_engine_is_busy() -> None:
    engine = Engine()
    now = [0]

    async def work() -> None:
        answers: dict[str, Item] = {}
        batcher = Batcher(engine, Limits(rows=8, wait_ns=0, queue=4), clock=lambda: now[0])
        first_done, last_done = asyncio.Event(), asyncio.Event()
        engine.gate.clear()

        def keep(name: str, event: asyncio.Event) -> Callable[[Item], None]:
            def done(finished: Item) -> None:
                answers[name] = finished
                event.set()

            return done

        batcher.submit(item([1], keep("first", first_done)))
        while not batcher.stuck_ns():
            now[0] += 1
            await asyncio.sleep(0)
        gone = item([2], lambda i: answers.__setitem__("gone", i))
        late = item([3], lambda i: answers.__setitem__("late", i), deadline=50)
        batcher.submit(gone)
        batcher.submit(late)
        with pytest.raises(OverloadedError, match="2 rows wait already"):
            batcher.submit(item([1, 2, 3], lambda i: None))
        batcher.submit(item([4], keep("last", last_done)))
        batcher.cancel(gone)
        now[0] = 100
        batcher.expire()
        assert isinstance(answers["late"].error, DeadlineError)
        assert batcher.stuck_ns() > 0
        engine.gate.set()
        await asyncio.wait_for(first_done.wait(), 10)
        await asyncio.wait_for(last_done.wait(), 10)
        assert "gone" not in answers
        assert batcher.pending == 0
        assert engine.sizes == [1, 1]  # neither the cancelled nor the late one was computed
        batcher.close()

    asyncio.run(work())


def test_a_slow_engine_moves_from_the_loop_to_a_thread() -> None:
    ticks = iter(range(0, 10**12, 2_000_000))  # every look at the clock is 2 ms later

    async def work() -> None:
        done = asyncio.Event()
        batcher = Batcher(Engine(), LIMITS, inline=True, clock=lambda: next(ticks))
        assert batcher.inline
        batcher.submit(item([1], lambda i: done.set()))
        await asyncio.wait_for(done.wait(), 10)
        assert not batcher.inline
        batcher.close()

    asyncio.run(work())


def test_other_shapes_are_never_joined() -> None:
    engine = Engine()

    async def work() -> list[list[int]]:
        answers: list[list[int]] = []
        all_there = asyncio.Event()
        batcher = Batcher(engine, LIMITS, inline=True)

        def done(finished: Item) -> None:
            assert finished.outputs is not None
            answers.append(list(finished.outputs["y"].shape))
            if len(answers) == 3:
                all_there.set()

        for width in (1, 2, 1):
            batcher.submit(item([1.0] * width, done, width=width))
        await asyncio.wait_for(all_there.wait(), 10)
        batcher.close()
        return answers

    assert asyncio.run(work()) == [[1, 1], [1, 2], [1, 1]]
    assert engine.sizes == [1, 1, 1]
