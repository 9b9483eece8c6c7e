"""The harm e-process and its restarted form: exact small cases, levels, and a state that can't count anything twice."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from onejob.monitor import harm
from onejob.monitor.blocks import Block


def blocks(values: list[float]) -> list[Block]:
    return [Block(f"{day:04d}", 100, value) for day, value in enumerate(values)]


def test_one_block_by_hand() -> None:
    reading = harm.read(harm.update(harm.Harm(bound=0.5), Block("a", 100, 0.25)))
    wanted = float(np.mean([1 + bet * 0.5 for bet in harm.BETS]))
    assert reading.e_value == pytest.approx(wanted)
    assert reading.run_value == pytest.approx(wanted)


def test_the_restarted_form_is_the_sum_of_all_starts() -> None:
    values = np.array([0.1, -0.2, 0.3, 0.05])
    factors = harm.fractions(values, 0.5)
    path, alarms = harm.restarted(factors, 1e9)
    starts = [np.prod(factors[first:], axis=0) for first in range(4)]
    assert path[-1] == pytest.approx(np.mean(np.sum(starts, axis=0)))
    assert alarms == []


def test_harm_alarms_and_says_where() -> None:
    state = harm.update_all(harm.Harm(), blocks([-0.02] * 20 + [0.2] * 20))
    reading = harm.read(state)
    assert reading.e_alarm is not None
    assert "0020" < reading.e_alarm <= "0035"
    assert reading.run_alarms[0] < reading.e_alarm  # it has no good days to forget
    assert reading.e_peak >= reading.e_threshold == pytest.approx(100)
    assert reading.says()["e_process"].startswith("false-alarm probability: at most 0.01")
    assert "365 blocks" in reading.says()["restarted"]
    json.dumps(reading.to_json(), allow_nan=False)


def test_a_healthy_stream_does_not_alarm_and_an_empty_one_says_nothing() -> None:
    assert harm.read(harm.update_all(harm.Harm(), blocks([-0.05] * 500))).e_alarm is None
    empty = harm.read(harm.Harm())
    assert (empty.e_value, empty.run_value, empty.e_alarm, empty.run_alarms) == (1.0, 0.0, None, ())


def test_a_good_year_delays_the_e_process_but_not_the_restarted_form() -> None:
    def first(good: int) -> tuple[float, int]:
        reading = harm.read(harm.update_all(harm.Harm(), blocks([-0.05] * good + [0.1] * 200)))
        return float(reading.e_alarm or "inf") - good, int(reading.run_alarms[0]) - good

    assert first(360)[0] > first(30)[0] + 30
    assert abs(first(360)[1] - first(30)[1]) <= 1


def test_counting_twice_out_of_order_and_corrected() -> None:
    each = blocks([0.1, -0.3, 0.2, 0.0, 0.15, -0.1])
    wanted = harm.update_all(harm.Harm(), each)
    shuffled = each * 2
    random.Random(1).shuffle(shuffled)
    state = harm.Harm()
    for block in shuffled:
        state = harm.update(state, block)
    assert state == wanted
    assert harm.read(state) == harm.read(wanted)
    corrected = harm.update(state, Block("0001", 101, 0.4))
    assert [block.value for block in corrected.blocks] == [0.1, 0.4, 0.2, 0.0, 0.15, -0.1]
    assert harm.read(corrected).e_value > harm.read(state).e_value


def test_the_state_survives_json() -> None:
    state = harm.update_all(harm.Harm(alpha=0.05, run_length=100, bound=0.2), blocks([0.1, -0.3]))
    assert harm.Harm.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_gains_count_up_to_the_bound_and_losses_in_full() -> None:
    reading = harm.read(harm.update_all(harm.Harm(bound=0.3), blocks([-5.0, -0.3, 2.0])))
    assert reading.clipped == 1
    assert harm.fractions(np.array([-5.0, -0.3, 2.0]), 0.3).min() > 0
    assert np.array_equal(harm.fractions(np.array([-5.0]), 0.3), harm.fractions(np.array([-0.3]), 0.3))
    assert reading.e_value > harm.read(harm.update_all(harm.Harm(bound=0.3), blocks([-5.0, -0.3, 1.0]))).e_value


def test_ten_years_of_harm_do_not_overflow() -> None:
    reading = harm.read(harm.update_all(harm.Harm(), blocks([2.0] * 3650)))
    assert np.isfinite(reading.e_value)


def test_the_level_on_fair_coins() -> None:
    """The hardest healthy case: a mean of exactly 0, both values at the bound. At a level of 0.1, 2000 streams."""
    values = np.random.default_rng(5).choice([-0.3, 0.3], (2000, 300))
    peaks = harm.e_process(harm.fractions(values, 0.3)).max(axis=1)
    share = float(np.mean(peaks >= 10))
    assert 0.02 < share <= 0.1  # valid, and not so careful as to be useless


def test_the_run_length_on_fair_coins() -> None:
    values = np.random.default_rng(6).choice([-0.3, 0.3], (200, 1000))
    alarms = sum(len(harm.restarted(factors, 50.0)[1]) for factors in harm.fractions(values, 0.3))
    assert 50 <= 200 * 1000 / alarms < 250
