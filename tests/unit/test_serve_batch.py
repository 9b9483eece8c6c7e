"""The batcher: when it runs what, and that every request gets its own answer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onejob.errors import DeadlineError, InferenceError, OverloadedError
from onejob.serve.batch import Batcher
from onejob.serve.item import Item
from onejob.serve.policy import Fit, Limits
from onejob.serve.rows import Layout, Raw, check_rows, join

LIMITS = Limits(rows=8, wait_ns=1000, queue=16)


def test_outputs_of_other_rows_are_refused() -> None:
    with pytest.raises(InferenceError, match=r"\[2, 1\] for 3 rows"):
        check_rows({"y": np.zeros((2, 1))}, 3)


class Engine:
    """Doubles; keeps the sizes of its batches, fails on negative numbers, may be held."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def __call__(self, arrays: Any) -> Any:
        self.entered.set()
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

        for number, values in enumerate(requests):
            one = item(values, done)
            one.asked = number
            batcher.submit(one)
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
    for answer, request in zip(sorted(answers, key=lambda each: each.asked), requests, strict=True):
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


def test_one_slow_batch_moves_nothing_and_a_quick_engine_comes_back() -> None:
    now = [0]
    takes = [100_000]

    class Timed(Engine):
        def __call__(self, arrays: Any) -> Any:
            now[0] += takes[0]
            return super().__call__(arrays)

    async def work() -> list[bool]:
        batcher = Batcher(Timed(), LIMITS, inline=True, clock=lambda: now[0])
        places = []
        for took, times in ((100_000, 60), (5_000_000, 1), (100_000, 1), (5_000_000, 200), (100_000, 600)):
            takes[0] = took
            for _ in range(times):
                done = asyncio.Event()
                batcher.submit(item([1], lambda i, done=done: done.set()))  # type: ignore[misc]
                await asyncio.wait_for(done.wait(), 10)
            places.append(batcher.inline)
        batcher.close()
        return places

    assert asyncio.run(work()) == [True, True, True, False, True]


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

    assert asyncio.run(work()) == [[1, 1], [1, 1], [1, 2]]
    assert engine.sizes == [2, 1]


def test_small_requests_go_with_a_large_one() -> None:
    answers, engine = run([[float(n) for n in range(20)], [100], [101]], inline=True, limits=Limits(rows=8, queue=64))
    assert engine.sizes == [8, 8, 6]
    order = [len(answer.outputs["y"]) for answer in answers if answer.outputs]
    assert order == [1, 1, 20], "they don't wait for all of it"
    assert answers[-1].outputs is not None
    assert answers[-1].outputs["y"].reshape(-1).tolist() == [2 * n for n in range(20)]


def test_the_urgent_ones_go_first() -> None:
    engine = Engine()

    async def work() -> list[float]:
        order: list[float] = []
        end = asyncio.Event()
        batcher = Batcher(engine, Limits(rows=2, queue=64), inline=True)

        def done(finished: Item) -> None:
            assert finished.outputs is not None
            order.append(float(finished.outputs["y"][0, 0]))
            if len(order) == 6:
                end.set()

        for value, priority in ((1, 0), (2, 2), (3, 1), (4, 2), (5, 0), (6, 1)):
            one = item([value], done)
            one.priority = priority
            batcher.submit(one)
        await asyncio.wait_for(end.wait(), 10)
        batcher.close()
        return order

    assert asyncio.run(work()) == [2, 10, 6, 12, 4, 8]


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("boom"), "boom"),
        (ValueError(), "ValueError"),
        (SystemExit("enough"), "SystemExit: enough"),
        (SilentError(), "SilentError"),
    ],
)
def test_whatever_an_engine_raises_is_told(inline: bool, error: BaseException, says: str) -> None:
    async def work() -> list[Item]:
        def infer(arrays: Any) -> Any:
            raise error

        batcher = Batcher(infer, LIMITS, inline=inline)
        answers: list[Item] = []
        for _ in range(2):
            batcher.submit(item([1], answers.append))
        while len(answers) < 2:
            await asyncio.sleep(0.001)
        assert not batcher.pending
        batcher.close()
        return answers

    assert [str(each.error) for each in asyncio.run(work())] == [f"engine: {says}"] * 2


def test_a_request_larger_than_the_queue_keeps_nobody_out() -> None:
    async def work() -> list[int]:
        engine, order = Engine(), list[int]()
        batcher = Batcher(engine, Limits(rows=4, queue=10))
        end = asyncio.Event()

        def done(finished: Item) -> None:
            order.append(finished.rows)
            if len(order) == 13:
                end.set()

        engine.gate.clear()
        batcher.submit(item([0.5] * 50, done))
        await asyncio.sleep(0)
        for _ in range(10):
            batcher.submit(item([1], done))
        with pytest.raises(OverloadedError):
            batcher.submit(item([1], done))
        engine.gate.set()
        while batcher.waiting > 30:
            await asyncio.sleep(0.001)
        batcher.submit(item([2] * 2, done))
        with pytest.raises(OverloadedError):
            batcher.submit(item([0.5] * 11, done))
        late = item([3] * 50, done)
        while True:
            await asyncio.sleep(0.001)
            with contextlib.suppress(OverloadedError):
                batcher.submit(late)
                break
        batcher.cancel(late)
        batcher.submit(item([4] * 3, done))
        await asyncio.wait_for(end.wait(), 10)
        assert batcher._huge is None
        assert batcher.waiting == 0
        batcher.close()
        return order

    assert sorted(asyncio.run(work())) == [1] * 10 + [2, 3, 50]


def test_too_many_bytes_are_refused_though_the_rows_would_do() -> None:
    async def work() -> None:
        batcher = Batcher(Engine(), Limits(rows=8, queue=100, queue_bytes=1000), inline=True)
        first, second = item([1], lambda i: None), item([1], lambda i: None)
        first.size, second.size = 5000, 10
        batcher.submit(first)
        with pytest.raises(OverloadedError, match="of requests wait already"):
            batcher.submit(second)
        batcher.close()

    asyncio.run(work())


def test_what_is_past_its_deadline_is_not_computed() -> None:
    engine = Engine()

    async def work() -> list[Item]:
        answers: list[Item] = []
        both = asyncio.Event()

        def done(finished: Item) -> None:
            answers.append(finished)
            if len(answers) == 2:
                both.set()

        batcher = Batcher(engine, LIMITS, inline=True, clock=lambda: 100)
        batcher.submit(item([1], done, deadline=50))
        batcher.submit(item([2], done))
        await asyncio.wait_for(both.wait(), 10)
        batcher.close()
        return answers

    late, fine = asyncio.run(work())
    assert isinstance(late.error, DeadlineError)
    assert fine.outputs is not None
    assert engine.sizes == [1]


def test_a_large_one_that_fails_in_the_middle_is_computed_no_further() -> None:
    answers, engine = run([[1.0] * 8 + [-1.0] + [1.0] * 30], inline=True, limits=Limits(rows=8, queue=64))
    assert "negative" in str(answers[0].error)
    assert engine.sizes == [8, 8]


LAYOUT = Layout(("x",), (np.dtype("<f4"),), ((1,),), (4,))


def test_bytes_are_joined_with_bytes_and_with_arrays() -> None:
    def raw(*values: float) -> Raw:
        return Raw(LAYOUT, [np.array(values, "<f4").tobytes()])

    assert join([raw(1), raw(2, 3)])["x"].tolist() == [[1], [2], [3]]
    assert join([raw(1, 2, 3), raw(4)], [(1, 3), None])["x"].tolist() == [[2], [3], [4]]
    mixed = join([raw(1), {"x": np.array([[7.0]], np.float32)}], [None, None])
    assert mixed["x"].tolist() == [[1], [7]]


def test_an_engine_is_overdue_by_its_own_measure() -> None:
    now = [0]
    fit = Fit()
    for rows in (1, 8, 1, 8):
        fit.add(rows, 1_000_000 * rows)

    async def work() -> list[bool]:
        engine = Engine()
        engine.gate.clear()
        batcher = Batcher(engine, LIMITS, fit=fit, clock=lambda: now[0])
        batcher.submit(item([1], lambda i: None))
        while not engine.entered.is_set():
            now[0] += 1
            await asyncio.sleep(0.001)
        found = []
        for later in (500_000, 5_000_000, 50_000_000):
            now[0] = later
            found.append(batcher.overdue(2_000_000, 10))
        engine.gate.set()
        batcher.close()
        return found

    assert asyncio.run(work()) == [False, False, True]
