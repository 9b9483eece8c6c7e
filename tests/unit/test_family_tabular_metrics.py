"""Scores of the tabular family against their definitions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onejob.errors import InferenceError
from onejob.families.tabular.metrics import HIGHER_IS_BETTER, auc, score

few_scores = st.lists(st.tuples(st.booleans(), st.sampled_from([0.1, 0.2, 0.5, 0.5, 0.9])), min_size=1, max_size=30)


@given(few_scores)
def test_auc_is_the_chance_that_a_positive_scores_higher_ties_counting_half(rows: list[tuple[bool, float]]):
    positives = [s for truth, s in rows if truth]
    negatives = [s for truth, s in rows if not truth]
    found = auc(np.array([truth for truth, _ in rows]), np.array([s for _, s in rows]))
    if not positives or not negatives:
        assert found is None
        return
    wins = [1.0 if p > n else 0.5 if p == n else 0.0 for p in positives for n in negatives]
    assert found == pytest.approx(sum(wins) / len(wins), abs=1e-12)


def test_binary_scores():
    found = score(np.array([1, 0, 1, 0]), {"probability": np.array([[0.9], [0.2], [0.4], [0.4]])})
    assert found == pytest.approx(
        {
            "auc": 3.5 / 4,
            "log_loss": -(math.log(0.9) + math.log(0.8) + math.log(0.4) + math.log(0.6)) / 4,
            "accuracy": 0.75,
            "brier": (0.01 + 0.04 + 0.36 + 0.16) / 4,
        }
    )


def test_model_outputs_score_as_the_served_ones():
    logit = np.array([[-2.0], [0.0], [3.0]])
    label = np.array([0, 1, 1])
    assert score(label, {"logit": logit}) == pytest.approx(score(label, {"probability": 1 / (1 + np.exp(-logit))}))
    logits = np.array([[1.0, 2.0, 0.0], [0.0, 0.0, 5.0]])
    powers = np.exp(logits)
    served = {"probabilities": powers / powers.sum(1, keepdims=True), "label": np.array([["b"], ["c"]], object)}
    assert score(np.array([1, 2]), {"logits": logits}) == pytest.approx(score(np.array([1, 2]), served))


def test_multiclass_scores():
    found = score(np.array([0, 1]), {"probabilities": np.array([[0.7, 0.3], [0.6, 0.4]])})
    assert found == pytest.approx({"log_loss": -(math.log(0.7) + math.log(0.4)) / 2, "accuracy": 0.5})


def test_regression_scores():
    found = score(np.array([1.0, 2.0, 3.0]), {"value": np.array([[1.0], [2.0], [5.0]])})
    assert found == pytest.approx({"rmse": math.sqrt(4 / 3), "mae": 2 / 3, "r2": 1 - 4 / 2})


def test_what_has_no_meaning_is_left_out():
    assert "auc" not in score(np.array([1, 1]), {"logit": np.zeros((2, 1))})
    assert "r2" not in score(np.array([2.0, 2.0]), {"value": np.zeros((2, 1))})
    assert score(np.zeros(0), {"logit": np.zeros((0, 1))}) == {}


def test_certainty_that_is_wrong_costs_much_but_not_infinitely_much():
    found = score(np.array([1, 0]), {"probability": np.array([[0.0], [1.0]], np.float32)})
    assert 10 < found["log_loss"] < 20


def test_outputs_that_are_not_finite_are_refused_by_row():
    with pytest.raises(InferenceError, match=r"'logit'.*1 rows.*row 1"):
        score(np.array([1, 0]), {"logit": np.array([[0.0], [np.nan]])})


def test_every_score_says_which_way_is_better():
    scores = {
        **score(np.array([1, 0]), {"logit": np.zeros((2, 1))}),
        **score(np.array([1, 0]), {"logits": np.zeros((2, 2))}),
        **score(np.array([1.0, 0.0]), {"value": np.zeros((2, 1))}),
    }
    assert set(scores) == set(HIGHER_IS_BETTER)
