"""The accuracy budget: what is accepted, what is not, and how sure that is."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onejob.families.tabular.metrics import score
from onejob.optimize.accept import (
    Comparison,
    Limit,
    churn,
    compare,
    difference,
    judge,
    resampled,
    rows_needed,
    statistic,
    worst_row,
)

AUC = Limit("auc", drop=0.01, confidence=0.95, higher_is_better=True)
LOSS = Limit("log_loss", drop=0.01, confidence=0.95, higher_is_better=False)


def held_out(rows: int, seed: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    chance = np.random.default_rng(seed)
    label = (chance.random(rows) < 0.3).astype(np.float32)
    logit = (chance.normal(size=rows) + 1.2 * label - 1).astype(np.float32)
    return label, {"logit": logit[:, None]}


def against(limit, label, reference, candidate, resamples=200) -> Comparison:
    values = resampled(statistic(limit.metric, label, reference, score), len(label), resamples)
    return compare(limit, label, reference, candidate, score, values)


def verdict(limit, label, reference, candidate, *, same_precision=False):
    return judge(limit, against(limit, label, reference, candidate), same_precision=same_precision)


def noisy(outputs, scale, seed=1):
    chance = np.random.default_rng(seed)
    return {"logit": outputs["logit"] + chance.normal(scale=scale, size=outputs["logit"].shape).astype(np.float32)}


def test_a_candidate_that_loses_little_is_accepted_with_its_bound() -> None:
    label, reference = held_out(5000)
    found = against(AUC, label, reference, noisy(reference, 0.02))
    assert found.drop <= found.bound < AUC.drop
    accepted = judge(AUC, found, same_precision=False)
    assert accepted.accepted
    assert "95% confidence" in accepted.reason


def test_a_candidate_that_loses_more_than_the_budget_is_rejected() -> None:
    label, reference = held_out(5000)
    rejected = verdict(AUC, label, reference, noisy(reference, 1.0))
    assert not rejected.accepted
    assert "loses" in rejected.reason
    assert "0.01 may be lost" in rejected.reason


def test_a_metric_where_bigger_is_worse_is_turned_round() -> None:
    label, reference = held_out(5000)
    worse = {"logit": reference["logit"] * 3}
    found = against(LOSS, label, reference, worse)
    assert found.metric > found.reference
    assert found.drop == pytest.approx(found.metric - found.reference)
    assert not judge(LOSS, found, same_precision=False).accepted
    better = against(LOSS, label, worse, reference)
    assert better.drop < 0
    assert judge(LOSS, better, same_precision=False).accepted


def test_a_drop_within_the_budget_that_the_rows_cannot_prove_is_rejected_with_the_rows_needed() -> None:
    label, reference = held_out(400)
    limit = Limit("auc", drop=0.015, confidence=0.95, higher_is_better=True)
    found = next(
        found
        for seed in range(50)
        if 0 < (found := against(limit, label, reference, noisy(reference, 0.3, seed))).drop < limit.drop < found.bound
    )
    rejected = judge(limit, found, same_precision=False)
    assert not rejected.accepted
    needed = rows_needed(limit, found)
    assert needed > 400
    assert rejected.reason == f"cannot be certified: needs about {needed:,} held-out rows, has 400"


def test_few_rows_cannot_rule_out_a_loss_however_well_they_go() -> None:
    perfect = Comparison(rows=100, reference=0.9, metric=0.9, drop=0.0, bound=0.0, difference=0.02)
    limit = Limit("accuracy", drop=0.01, confidence=0.95, higher_is_better=True)
    assert judge(limit, perfect, same_precision=False).reason == (
        "cannot be certified: needs about 299 held-out rows, has 100"
    )
    enough = Comparison(rows=299, reference=0.9, metric=0.9, drop=0.0, bound=0.0, difference=0.02)
    assert judge(limit, enough, same_precision=False).accepted


def test_the_same_outputs_need_no_certificate_but_only_in_the_same_precision() -> None:
    same = Comparison(rows=10, reference=0.9, metric=0.9, drop=0.0, bound=0.2, difference=3e-6)
    assert judge(AUC, same, same_precision=True).accepted
    assert not judge(AUC, same, same_precision=False).accepted


def test_a_metric_without_a_value_accepts_nothing() -> None:
    label = np.ones(50, np.float32)  # one class: no AUC
    outputs = {"logit": np.linspace(-1, 1, 50, dtype=np.float32)[:, None]}
    found = against(AUC, label, outputs, noisy(outputs, 0.1))
    assert not judge(AUC, found, same_precision=False).accepted


def test_the_bound_covers_the_drop_on_new_rows() -> None:
    """The guarantee itself: on samples of one distribution, the bound lies below the true drop in few of them."""
    label, reference = held_out(40_000)
    candidate = noisy(reference, 0.8)
    truth = score(label, reference)["auc"] - score(label, candidate)["auc"]
    below = 0
    for start in range(0, 40_000, 1000):
        part = slice(start, start + 1000)
        found = against(AUC, label[part], {"logit": reference["logit"][part]}, {"logit": candidate["logit"][part]}, 100)
        below += found.bound < truth
    assert below <= 6  # 40 samples at 95 %: two are expected, more than six come in 1 of 200 cases


def test_the_judgement_is_the_same_each_time() -> None:
    label, reference = held_out(1000)
    candidate = noisy(reference, 0.1)
    assert against(AUC, label, reference, candidate) == against(AUC, label, reference, candidate)


@pytest.mark.parametrize("metric", ["auc", "log_loss", "accuracy", "brier"])
@pytest.mark.parametrize("output", ["logit", "probability"])
def test_every_form_of_a_metric_gives_the_familys_value_on_resamples(metric: str, output: str) -> None:
    label, outputs = held_out(300)
    if output == "probability":
        outputs = {"probability": 1 / (1 + np.exp(-outputs["logit"]))}
    counts = np.bincount(np.random.default_rng(3).integers(0, 300, 300), minlength=300)
    rows = np.repeat(np.arange(300), counts)
    expected = score(label[rows], {name: values[rows] for name, values in outputs.items()})[metric]
    assert statistic(metric, label, outputs, score)(counts) == pytest.approx(expected, abs=1e-7)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=2, max_size=40))
def test_auc_by_ranks_agrees_with_counting_pairs(rows: list[tuple[bool, int]]) -> None:
    label = np.array([row[0] for row in rows], np.float32)
    scores = np.array([row[1] for row in rows], np.float32)
    pairs = [(p > n) + 0.5 * (p == n) for p in scores[label > 0] for n in scores[label < 1]]
    found = statistic("auc", label, {"logit": scores[:, None]}, score)(np.ones(len(rows), int))
    assert (math.isnan(found) and not pairs) or found == pytest.approx(np.mean(pairs))


def test_a_fast_form_that_is_not_the_familys_metric_is_not_taken() -> None:
    label, outputs = held_out(100)

    def own(label, outputs):
        return {"auc": 0.25 * float(np.mean(label)) + float(np.mean(outputs["logit"]))}

    counts = np.ones(100, int)
    counts[:50], counts[50:] = 2, 0
    rows = np.repeat(np.arange(100), counts)
    assert statistic("auc", label, outputs, own)(counts) == own(label[rows], {"logit": outputs["logit"][rows]})["auc"]


def test_churn_counts_decisions_and_sees_what_the_metric_hides() -> None:
    probability = np.array([[0.1], [0.6], [0.7], [0.4]])
    swapped = np.array([[0.1], [0.4], [0.7], [0.6]])
    assert churn({"probability": probability}, {"probability": swapped}) == 0.5
    classes = np.array([["a"], ["b"]], dtype=object)
    assert churn({"label": classes}, {"label": np.array([["a"], ["c"]], dtype=object)}) == 0.5
    many = np.array([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]])
    assert churn({"probabilities": many}, {"probabilities": many[:, ::-1]}) == 0.5
    assert churn({"value": np.array([[3.5], [-2.0]])}, {"value": np.array([[3.0], [-1.0]])}) is None


def test_difference_is_absolute_for_small_values_and_relative_for_large_ones() -> None:
    expected = {"value": np.array([[0.5], [2000.0]])}
    got = {"value": np.array([[0.5], [2000.2]])}
    assert difference(expected, got) == pytest.approx(1e-4)
    assert worst_row(expected, got) == 1
    assert difference(expected, {"value": np.array([[0.5], [np.nan]])}) == math.inf
    assert difference(expected, {"value": np.array([[0.5]])}) == math.inf
    assert difference(expected, {"other": expected["value"]}) == math.inf
