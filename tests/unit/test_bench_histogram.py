"""Histograms of latency: exact to a thousandth, never too low, mergeable, and corrected as HdrHistogram does it."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onejob.serve.bench.histogram import COARSE, SIZE, TOP_BITS, Histogram, index_of, upper_of

NANOSECONDS = st.integers(0, (1 << TOP_BITS) - 1)


def of(*values: int) -> Histogram:
    made = Histogram()
    made.record(values)
    return made


@given(NANOSECONDS)
def test_a_bucket_holds_its_value_and_is_a_thousandth_wide(value: int) -> None:
    index = int(index_of(np.array([value]))[0])
    assert 0 <= index < SIZE
    upper = upper_of(index)
    assert value <= upper <= value * (1 + 1 / 1024)
    assert index == 0 or upper_of(index - 1) < value


@given(st.lists(NANOSECONDS, min_size=1, max_size=300), st.floats(0, 1))
def test_a_quantile_is_that_of_the_values_or_a_thousandth_more(values: list[int], share: float) -> None:
    exact = sorted(values)[max(math.ceil(share * len(values) * (1 - 1e-12)), 1) - 1]
    found = of(*values).quantile(share)
    assert found is not None
    assert exact <= found <= exact * (1 + 1 / 1024)
    assert of(*values).quantile(1.0) == max(values), "the largest is exact"


@given(st.lists(st.lists(NANOSECONDS, max_size=50), max_size=5))
def test_histograms_that_are_added_are_the_histogram_of_all(parts: list[list[int]]) -> None:
    whole, merged = of(*(value for part in parts for value in part)), Histogram()
    for part in parts:
        merged.add(Histogram.from_json(of(*part).to_json()))  # as it comes from another process
    assert merged.to_json() == whole.to_json()
    assert merged.mean == whole.mean


def test_ranks_are_not_off_by_one() -> None:
    hundred = of(*range(1, 101))
    assert [hundred.quantile(share) for share in (0.5, 0.55, 0.9, 0.99, 0.999, 1.0)] == [50, 55, 90, 99, 100, 100]
    assert Histogram().quantile(0.5) is None
    assert Histogram().mean is None


def test_what_lies_beyond_the_last_bucket_is_counted_and_what_is_below_zero_is_zero() -> None:
    made = of(1 << 60, -5)
    assert made.total == 2
    assert made.quantile(0.5) == 0
    assert made.highest == 1 << 60


@given(st.integers(1, 50), st.integers(1, 50_000_000))
def test_a_stall_is_filled_in_by_the_requests_that_were_not_sent(times: int, interval: int) -> None:
    """A latency of n intervals stands for n requests: itself, and n-1 that waited less and less."""
    made = of(times * interval).corrected(interval)
    expected = of(*(number * interval for number in range(1, times + 1)))
    shift = np.flatnonzero(made.counts) - np.flatnonzero(expected.counts)
    assert made.total == times
    assert (np.abs(shift) <= 1).all(), "a value is known to a thousandth"


def test_correcting_leaves_what_was_quick_enough_and_the_original() -> None:
    quick = of(1000, 2000, 3000)
    assert quick.corrected(3000).to_json() == quick.to_json()
    assert quick.corrected(0).to_json() == quick.to_json()
    slow = of(10_000)
    slow.corrected(1000)
    assert slow.total == 1


def test_what_came_since_is_told_in_coarse_buckets() -> None:
    made = of(1_000_000)
    earlier = made.counts.copy()
    made.record([2_000_000] * 5)
    since = Histogram.from_json(made.since(earlier).to_json())
    assert since.total == 5
    median = since.quantile(0.5)
    assert median is not None
    assert 2_000_000 <= median <= 2_000_000 * (1 + 2**COARSE / 1024)
