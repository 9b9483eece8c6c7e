"""Learning rates."""

import pytest

from onejob.train.schedule import rate


def test_constant_stays():
    assert {rate(step, 10, lr=0.1, schedule="constant", warmup=0) for step in range(10)} == {0.1}


def test_warm_up_rises_to_the_highest_rate():
    rates = [rate(step, 10, lr=0.1, schedule="constant", warmup=4) for step in range(6)]
    assert rates == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1, 0.1])


def test_cosine_falls_from_the_highest_rate_to_nearly_nothing():
    rates = [rate(step, 10, lr=0.1, schedule="cosine", warmup=2) for step in range(10)]
    assert rates[2] == 0.1
    assert rates[6] == pytest.approx(0.05)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 0 < rates[9] < 0.005


def test_a_warm_up_longer_than_the_training_never_divides_by_zero():
    assert rate(3, 4, lr=0.1, schedule="cosine", warmup=9) == pytest.approx(0.04)
