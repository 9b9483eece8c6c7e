"""Distances beside what chance gives: the formula against the draws, clustered rows, categories, nulls."""

from __future__ import annotations

import json

import numpy as np
import pytest

from onejob.monitor.describe import (
    BINS,
    describe_categories,
    describe_numbers,
    jensen_shannon,
    psi,
    psi_by_chance,
)


def test_distances_by_hand() -> None:
    same = np.array([500, 500])
    assert psi(same, same) == 0.0
    assert psi(np.array([5_000_000, 5_000_000]), np.array([8_000_000, 2_000_000])) == pytest.approx(0.41589, abs=1e-4)
    assert jensen_shannon(same, same) == 0.0
    assert jensen_shannon(np.array([10**9, 0]), np.array([0, 10**9])) == pytest.approx(1.0, abs=1e-3)


def test_the_formula_of_chance_agrees_with_the_draws() -> None:
    rng = np.random.default_rng(1)
    found = describe_numbers("x", rng.normal(size=10_000), rng.normal(size=500))
    assert found.psi is not None
    mean, high = psi_by_chance(BINS, 500, 10_000)
    assert found.by == "rows"
    assert found.psi.chance == pytest.approx(mean, rel=0.15)
    assert found.psi.chance_high == pytest.approx(high, rel=0.15)


def test_the_formula_predicts_how_often_a_small_window_exceeds_a_tenth() -> None:
    mean, _ = psi_by_chance(BINS, 100, 10_000)
    assert mean == pytest.approx(0.0909)
    rng = np.random.default_rng(2)
    reference = rng.normal(size=10_000)
    cuts = np.quantile(reference, np.linspace(0, 1, BINS + 1)[1:-1])
    old = np.bincount(np.searchsorted(cuts, reference), minlength=BINS)
    drawn = [psi(old, np.bincount(np.searchsorted(cuts, rng.normal(size=100)), minlength=BINS)) for _ in range(1000)]
    assert np.mean(drawn) == pytest.approx(mean, rel=0.1)
    assert np.mean(np.array(drawn) > psi_by_chance(BINS, 100, 10_000)[1]) == pytest.approx(0.05, abs=0.025)


def test_a_shift_stands_out_in_its_own_unit() -> None:
    rng = np.random.default_rng(3)
    found = describe_numbers("x", 10 * rng.normal(size=5000), 10 * rng.normal(size=5000) + 5)
    assert found.wasserstein is not None
    assert found.wasserstein.value == pytest.approx(0.5, abs=0.05)  # of a standard deviation
    for distance in (found.psi, found.jensen_shannon, found.wasserstein):
        assert distance is not None
        assert distance.value > 2 * distance.chance_high
        assert distance.chance_high > distance.chance > 0


def test_clustered_rows_need_whole_blocks_to_be_moved() -> None:
    """Each block has its own level, none has changed: rows call that a drift, blocks don't."""
    rng = np.random.default_rng(4)
    block, block_window = np.repeat(np.arange(40), 100), np.repeat(np.arange(40, 50), 100)
    level = rng.normal(size=50)
    reference = level[block] + 0.3 * rng.normal(size=len(block))
    window = level[block_window] + 0.3 * rng.normal(size=len(block_window))
    by_rows = describe_numbers("x", reference, window).psi
    by_blocks = describe_numbers("x", reference, window, blocks=(block, block_window))
    assert by_rows is not None
    assert by_blocks.psi is not None
    assert by_rows.value == by_blocks.psi.value > 2 * by_rows.chance_high
    assert by_blocks.psi.value < by_blocks.psi.chance_high
    assert by_blocks.by == "blocks"


def test_nulls_are_shares_and_count_in_no_distance() -> None:
    reference = np.array([1.0, 2.0, np.nan, 4.0] * 50)
    found = describe_numbers("x", reference, np.array([1.0, 2.0, 4.0, 4.0, np.nan, np.nan, np.nan, np.nan] * 25))
    assert (found.reference_null_share, found.null_share) == (0.25, 0.5)
    assert (found.reference_rows, found.rows) == (200, 200)
    empty = describe_numbers("x", reference, np.array([np.nan, np.nan]))
    assert (empty.null_share, empty.psi) == (1.0, None)
    assert describe_numbers("x", reference, np.array([])).null_share == 0.0


def test_a_constant_column_has_no_spread_to_measure_in() -> None:
    found = describe_numbers("x", np.ones(100), np.ones(50))
    assert found.wasserstein is None
    assert found.psi is not None
    assert found.psi.value == pytest.approx(0.0, abs=0.01)
    json.dumps(found.to_json(), allow_nan=False)


def test_unseen_categories_are_named_and_counted() -> None:
    reference = np.array(["a", "b", None, "a"] * 50, object)
    found = describe_categories("c", reference, np.array(["a", "z", "z", "y", None, "b"] * 20, object))
    assert found.unseen == ("z", "y")
    assert found.unseen_share == pytest.approx(3 / 5)
    assert (found.null_share, found.reference_null_share) == (pytest.approx(1 / 6), 0.25)
    assert found.psi is not None
    assert found.psi.value > found.psi.chance_high
    assert found.wasserstein is None
    json.dumps(found.to_json(), allow_nan=False)


def test_rare_categories_count_together_but_are_not_unseen() -> None:
    reference = np.array([f"tail{number}" for number in range(500)] * 2, object)
    found = describe_categories("c", reference, reference[:500])
    assert found.unseen_share == 0.0
    assert found.psi is not None
    assert found.psi.value < found.psi.chance_high
    thin = describe_categories("c", np.concatenate([reference, np.array(["often"] * 1000, object)]), reference[:50])
    assert thin.psi is not None
    assert thin.psi.chance < 0.8  # fifty and the rest; with each of the five hundred for itself, 0.89


def test_the_figures_of_chance_are_the_same_twice() -> None:
    rng = np.random.default_rng(5)
    reference, window = rng.normal(size=300), rng.normal(size=100)
    assert describe_numbers("x", reference, window) == describe_numbers("x", reference, window)


def test_no_column_at_all() -> None:
    nothing = np.array([], object)
    found = describe_categories("c", np.array(["a"], object), nothing)
    assert (found.rows, found.psi, found.unseen_share) == (0, None, 0.0)
    assert describe_categories("c", nothing, np.array(["a"], object)).unseen == ("a",)
