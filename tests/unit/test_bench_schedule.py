"""When requests are due: rates that are kept, shared among processes, and turns in which a drift meets all alike."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onejob.serve.bench.schedule import OPEN, PACED, Load, arrivals, share, turns


def times(load: Load, warmup: float, seconds: float, **more: int) -> np.ndarray:
    return np.concatenate(list(arrivals(load, warmup, seconds, **more)))


def test_even_arrivals_are_even_and_none_is_missing() -> None:
    found = times(Load(OPEN, 1, 100.0, arrivals="even"), 0.5, 1.0)
    np.testing.assert_allclose(found, np.arange(150) / 100)


@given(st.integers(1, 5), st.floats(1, 500))
def test_processes_together_send_what_one_would(parts: int, rate: float) -> None:
    load = Load(OPEN, 8, rate, arrivals="even")
    whole = times(load, 0.1, 1.0)
    shared = np.sort(np.concatenate([times(load, 0.1, 1.0, part=part, parts=parts) for part in range(parts)]))
    np.testing.assert_allclose(shared, whole)


@pytest.mark.parametrize("parts", [1, 3])
def test_random_arrivals_keep_the_rate_and_have_random_gaps(parts: int) -> None:
    load = Load(OPEN, 8, 1000.0)
    found = np.sort(np.concatenate([times(load, 0, 20, part=part, parts=parts, seed=1) for part in range(parts)]))
    assert abs(len(found) - 20_000) < 4 * 20_000**0.5, "four standard deviations of a Poisson count"
    gaps = np.diff(found)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05), "as exponential gaps have it"
    assert times(load, 0, 1, seed=1).tolist() == times(load, 0, 1, seed=1).tolist()
    assert times(load, 0, 1, seed=1).tolist() != times(load, 0, 1, seed=2).tolist()


@pytest.mark.parametrize(("begin", "end"), [(10.0, 200.0), (200.0, 10.0), (50.0, 50.0)])
def test_a_ramp_rises_evenly_after_the_warmup(begin: float, end: float) -> None:
    found = times(Load(OPEN, 8, begin, end, "even"), 2.0, 10.0)
    counts, _ = np.histogram(found, bins=np.arange(0, 12.5))
    expected = [begin, begin, *(begin + (end - begin) * (second + 0.5) / 10 for second in range(10))]
    assert np.abs(counts - expected).max() <= 1.5
    assert (np.diff(found) > 0).all()
    assert Load(OPEN, 8, begin, end).mean_rate == (begin + end) / 2


def test_without_an_end_arrivals_go_on() -> None:
    chunks = list(islice(arrivals(Load(OPEN, 1, 1e6, arrivals="even"), 0.0, None), 3))
    assert [len(chunk) for chunk in chunks] == [4096] * 3
    assert chunks[2][0] == pytest.approx(2 * 4096 / 1e6)


@given(st.integers(0, 1000), st.integers(1, 7))
def test_shares_add_up_and_differ_by_one_at_most(whole: int, parts: int) -> None:
    shares = [share(whole, part, parts) for part in range(parts)]
    assert sum(shares) == whole
    assert max(shares) - min(shares) <= 1


def test_targets_take_turns_and_each_goes_first_as_often() -> None:
    planned = turns(2, [Load("closed", 1), Load("closed", 2)], warmup=1, seconds=6, requests=10, rounds=3)
    assert [(turn.load.connections, turn.round, turn.target) for turn in planned] == [
        *((1, 0, 0), (1, 0, 1), (1, 1, 1), (1, 1, 0), (1, 2, 0), (1, 2, 1)),
        *((2, 0, 0), (2, 0, 1), (2, 1, 1), (2, 1, 0), (2, 2, 0), (2, 2, 1)),
    ]
    assert {turn.seconds for turn in planned} == {2.0}, "the time of all rounds together"
    assert {turn.requests for turn in planned} == {4}


def test_a_load_says_what_it_is() -> None:
    assert str(Load("closed", 1)) == "closed loop, 1 connection"
    assert str(Load(OPEN, 128, 2000.0)) == "open loop at 2,000/s (poisson), up to 128 connections"
    assert str(Load(OPEN, 2, 1.0, 9.5, "even")) == "open loop at 1/s to 9.5/s (even), up to 2 connections"
    paced = Load(PACED, 16, 1000.0, arrivals="even")
    assert str(paced) == "closed loop at 1,000/s, 16 connections"
    assert paced.interval == 0.016
    assert Load("closed", 4).interval is None
