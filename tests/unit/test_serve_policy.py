"""When the batcher runs what: the fit, the choice of size and wait, and who goes into a batch."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onejob.serve.policy import Choice, Fit, Limits, choose, due, take

MS = 1_000_000


def fitted(fixed: float, each: float, sizes: list[int] | None = None) -> Fit:
    fit = Fit()
    for rows in sizes or [1, 8, 64, 3, 30, 17, 64, 1] * 20:
        fit.add(rows, int(fixed + each * rows))
    return fit


def test_the_fit_finds_what_a_batch_and_a_row_cost() -> None:
    fit = fitted(3 * MS, 0.2 * MS)
    assert fit.fixed == pytest.approx(3 * MS, rel=1e-3)
    assert fit.each == pytest.approx(0.2 * MS, rel=1e-3)
    assert fit.predict(10) == pytest.approx(5 * MS, rel=1e-3)


def test_the_fit_follows_an_engine_that_becomes_slower() -> None:
    fit = fitted(1 * MS, 0.1 * MS)
    for rows in [1, 9, 33, 64] * 60:
        fit.add(rows, int(5 * MS + 0.4 * MS * rows))
    assert fit.predict(20) == pytest.approx(13 * MS, rel=0.03)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 10**9)), min_size=1, max_size=50))
def test_the_fit_is_never_negative(batches: list[tuple[int, int]]) -> None:
    fit = Fit()
    for rows, took in batches:
        fit.add(rows, took)
        assert fit.fixed >= 0
        assert fit.each >= 0


def test_batches_of_one_size_give_half_to_each() -> None:
    fit = fitted(0, 0.5 * MS, [4] * 30)
    assert fit.predict(4) == pytest.approx(2 * MS)
    assert 0 < fit.each < 0.5 * MS


@pytest.mark.parametrize(
    ("fixed", "each", "limits", "expected"),
    [
        (0.02, 0.001, Limits(64, 2 * MS), Choice(64, 0)),  # quick: a wait would cost more than a batch
        (3.0, 3.0, Limits(64, 2 * MS), Choice(16, 2 * MS)),  # a row is hardly cheaper beyond; the wait has its bound
        (1.0, 3.0, Limits(64, 2 * MS), Choice(16, 1 * MS)),  # never longer than the fixed cost
        (3.0, 3.0, Limits(64, 2 * MS, goal_ns=100 * MS), Choice(15, 2 * MS)),  # two batches within the goal
        (3.0, 3.0, Limits(8, 2 * MS, goal_ns=100 * MS), Choice(8, 2 * MS)),
        (30.0, 3.0, Limits(64, 2 * MS, goal_ns=20 * MS), Choice(1, 0)),  # it can't be kept: as near as can be
    ],
)
def test_size_and_wait(fixed: float, each: float, limits: Limits, expected: Choice) -> None:
    found = choose(fitted(fixed * MS, each * MS), limits)
    assert (found.size, found.wait_ns) == (expected.size, pytest.approx(expected.wait_ns, rel=0.01))


@pytest.mark.parametrize(
    ("rows", "requests", "age", "recent", "expected"),
    [
        (1, 1, 0, 1, True),  # alone last time, alone now: no wait
        (1, 1, 0, 2, False),  # there were two: the other may come
        (1, 1, 1000, 2, True),  # it didn't come in time
        (2, 2, 0, 2, True),
        (8, 2, 0, 9, True),  # full
    ],
)
def test_due(rows: int, requests: int, age: int, recent: int, expected: bool) -> None:
    assert due(rows, requests, age, recent, Choice(8, 1000)) is expected


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ([(1, 0)], [(0, 1)]),
        ([(4, 0), (4, 0), (1, 0)], [(0, 4), (1, 4)]),
        ([(1, 0), (1, 1), (1, 0)], [(0, 1), (2, 1)]),  # other shapes wait
        ([(20, 0)], [(0, 8)]),  # a large one alone takes all
        ([(20, 0), (1, 0), (1, 0)], [(0, 6), (1, 1), (2, 1)]),  # the small ones go with it
        ([(1, 0), (20, 0), (1, 0)], [(0, 1), (1, 6), (2, 1)]),
        ([(20, 0), (20, 0)], [(0, 8)]),
        ([(6, 0), (6, 0)], [(0, 6), (1, 2)]),  # what one leaves, the next begins
        ([(3, 0), (4, 0), (4, 0)], [(0, 3), (1, 4)]),  # a small one isn't cut
    ],
)
def test_take(waiting: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    assert take(waiting, 8) == expected


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=60), st.integers(1, 64))
def test_a_batch_holds_one_shape_and_no_more_than_its_size(waiting: list[tuple[int, int]], size: int) -> None:
    taken = take(waiting, size)
    assert taken
    assert taken[0][0] == 0 or waiting[0][1] == waiting[taken[0][0]][1]
    assert sum(rows for _, rows in taken) <= size
    assert {waiting[at][1] for at, _ in taken} == {waiting[0][1]}
    assert all(0 < rows <= waiting[at][0] for at, rows in taken)
    assert len({at for at, _ in taken}) == len(taken)


def test_nobody_waits_for_ever_beside_a_stream_of_small_and_large_ones() -> None:
    """Rounds of batches with new requests coming in between: each is done after no more rows than came before it, and
    a few batches."""
    chance = random.Random(7)
    queue: list[list[int]] = []
    done: dict[int, int] = {}
    came: dict[int, int] = {}
    name = 0
    for batch in range(3000):
        for _ in range(chance.choice((0, 0, 0, 1, 1, 3))):
            queue.append([name, chance.choice((1, 1, 1, 1, 60)), 0])
            came[name] = batch + sum(rows for _, rows, _ in queue) // 16
            name += 1
        for at, rows in take([(left, 0) for _, left, _ in queue], 16) if queue else ():
            queue[at][1] -= rows
            if not queue[at][1]:
                done[queue[at][0]] = batch
        queue = [each for each in queue if each[1]]
    late = [done[each] - came[each] for each in done]
    assert max(late) <= 12
    assert len(done) > name - 20


def test_a_size_beyond_which_rows_get_no_cheaper_is_enough() -> None:
    fit = Fit()
    for _ in range(20):
        for rows, each in ((1, 6.4), (2, 5.0), (4, 4.1), (8, 3.4), (16, 3.05), (32, 3.04), (64, 3.2)):
            fit.add(rows, int(each * rows * MS))
    assert choose(fit, Limits(64, 0)).size == 16
    assert choose(fit, Limits(12, 0)).size == 12, "the job's bound"
    quick = fitted(0.02 * MS, 0.0005 * MS, [1, 2, 4, 8, 16, 32, 64] * 9)
    assert choose(quick, Limits(64, 0)).size == 64


def test_what_a_size_costs_is_learnt_anew() -> None:
    fit = Fit()
    for each, times in ((3.0, 60), (6.0, 400)):
        for _ in range(times):
            fit.add(16, int(16 * each * MS))
            fit.add(4, int(4 * 4.0 * MS))
    assert choose(fit, Limits(64, 0)).size == 4


def test_neighbours_that_hold_batches_up_decide_nothing() -> None:
    chance = random.Random(3)
    fit = Fit()
    for _ in range(300):
        for rows, each in ((1, 6.4), (4, 4.1), (16, 3.05), (64, 3.2)):
            fit.add(rows, int(each * rows * MS * (1 if chance.random() < 0.5 else 1 + 4 * chance.random())))
    assert choose(fit, Limits(64, 0)).size in (16, 64)
