"""The label-free warning: p-values by rank within a stratum, the martingale on them, what it may trigger."""

from __future__ import annotations

import json

import numpy as np
import pytest

from onejob.monitor import warning
from onejob.monitor.blocks import group


def stream(values: np.ndarray, first: int = 0) -> list[warning.Observation]:
    """Days with the weekday as stratum; [days, columns]."""
    return [
        warning.Observation(f"{first + day:04d}", str(day % 7), {f"x{k}": float(v) for k, v in enumerate(row)})
        for day, row in enumerate(values)
    ]


def watched(reference: np.ndarray, live: np.ndarray) -> warning.Watch:
    state = warning.Watch(reference=tuple(stream(reference)))
    return warning.update_all(state, stream(live, len(reference)))


def test_p_values_are_uniform_on_exchangeable_blocks() -> None:
    rng = np.random.default_rng(1)
    found = warning.p_values(watched(rng.normal(size=(70, 1)), rng.normal(size=(1400, 1))), "x0")
    assert np.isfinite(found).all()
    shares = np.histogram(found, bins=10, range=(0, 1))[0] / len(found)
    assert shares == pytest.approx(np.full(10, 0.1), abs=0.03)


def test_a_weekday_is_compared_with_its_like() -> None:
    """Sundays are quiet: among their like they are usual; were all days alike, every Sunday would be the lowest."""
    rng = np.random.default_rng(2)

    def week(days: int) -> np.ndarray:
        values = rng.normal(size=(days, 1))
        values[6::7] -= 10
        return values

    state = watched(week(70), week(140))
    assert warning.read(state).alarm is None
    shifted = warning.Watch(
        reference=tuple(warning.Observation(o.id, "any", o.values) for o in state.reference if o.stratum != "6"),
        live=tuple(warning.Observation(o.id, "any", o.values) for o in state.live if o.stratum == "6"),
    )
    assert warning.read(shifted).columns["x0"] > 20


def test_the_level_on_independent_blocks() -> None:
    alarms = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        state = watched(rng.normal(size=(56, 2)), rng.normal(size=(120, 2)))
        alarms += warning.read(warning.Watch(0.1, 7, state.reference, state.live)).alarm is not None
    assert alarms <= 10  # 6 expected at most, at a level of 0.1


def test_a_shift_is_found_whichever_way_it_goes() -> None:
    rng = np.random.default_rng(3)
    for direction in (-2.0, 2.0):
        live = rng.normal(size=(100, 3))
        live[40:, 1] += direction
        reading = warning.read(watched(rng.normal(size=(56, 3)), live))
        assert reading.alarm is not None
        assert 56 + 40 < int(reading.alarm) < 56 + 100
        assert max(reading.columns, key=lambda name: reading.columns[name]) == "x1"


def test_strata_with_few_blocks_are_silent_and_counted() -> None:
    rng = np.random.default_rng(4)
    state = watched(rng.normal(size=(21, 1)), rng.normal(size=(14, 1)) + 100)
    reading = warning.read(state)
    assert (reading.blocks, reading.silent) == (14, 14)  # three or four earlier days of each weekday
    assert reading.value == 1.0


def test_ties_are_broken_by_a_chance_that_stays() -> None:
    state = watched(np.zeros((56, 1)), np.zeros((70, 1)))
    first, again = warning.p_values(state, "x0"), warning.p_values(state, "x0")
    assert np.array_equal(first, again)
    assert 0.3 < first.mean() < 0.7
    assert first.std() > 0.1


def test_counting_twice_and_out_of_order() -> None:
    rng = np.random.default_rng(5)
    live = stream(rng.normal(size=(20, 2)), 56)
    state = wanted = warning.update_all(warning.Watch(reference=tuple(stream(rng.normal(size=(56, 2))))), live)
    for observation in reversed(live):
        state = warning.update(state, observation)
    assert state == wanted
    assert warning.Watch.from_json(json.loads(json.dumps(state.to_json()))) == state
    json.dumps(warning.read(state).to_json(), allow_nan=False)


def test_observe_makes_strata_of_weekday_and_hour() -> None:
    times = np.array([0.0, 1.0, 3600.0, 3601.0, 86400.0])  # Thursday, 1970-01-01
    columns = {"score": np.array([1.0, 3.0, 5.0, np.nan, 9.0])}
    days = warning.observe(group(times), times, columns, min_rows=2)
    assert days == (warning.Observation("1970-01-01", "Thu", {"score": 3.0}),)
    hours = warning.observe(group(times, "hour"), times, columns, kind="hour", min_rows=1)
    assert [each.stratum for each in hours] == ["Thu 00h", "Thu 01h", "Fri 00h"]
    weeks = warning.observe(group(times, "week"), times, columns, kind="week", min_rows=1)
    assert [each.stratum for each in weeks] == [""]


def test_nothing_to_say() -> None:
    reading = warning.read(warning.Watch())
    assert (reading.value, reading.alarm, reading.columns) == (1.0, None, {})


def test_the_warning_only_describes_until_its_level_holds_on_real_traffic() -> None:
    assert warning.DESCRIPTIVE_ONLY  # bench/results/levels.txt, "warning"
    assert warning.read(warning.Watch()).descriptive_only
