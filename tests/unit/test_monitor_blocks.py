"""Blocks of event time: zones, the hour that a clock repeats, means of paired losses, the trailing reference."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import numpy as np
import pytest

from onejob.errors import DataError, UsageError
from onejob.monitor.blocks import (
    Block,
    distance_losses,
    group,
    largest_difference,
    log_losses,
    means,
    trailing_share,
    weekday_hour,
)

NEW_YORK = "America/New_York"


def at(*moments: str) -> np.ndarray:
    return np.array([datetime.fromisoformat(moment).replace(tzinfo=UTC).timestamp() for moment in moments])


def test_a_day_is_the_zones_day() -> None:
    times = at("2013-03-02T03:00", "2013-03-01T20:00", "2013-03-02T04:59:59", "2013-03-02T05:00")
    assert group(times).ids == ("2013-03-01", "2013-03-02")
    local = group(times, "day", NEW_YORK)
    assert local.ids == ("2013-03-01", "2013-03-02")
    assert local.index.tolist() == [0, 0, 0, 1]  # an evening in New York is the next day in UTC
    assert local.first.tolist() == at("2013-03-01T20:00", "2013-03-02T05:00").tolist()


def test_days_on_which_the_clock_changes() -> None:
    times = at("2013-03-10T04:59", "2013-03-10T05:00", "2013-03-11T03:59", "2013-03-11T04:00")
    assert group(times, "day", NEW_YORK).index.tolist() == [0, 1, 1, 2]  # the 10th has 23 hours


def test_the_hour_that_a_clock_shows_twice_is_two_blocks() -> None:
    times = at("2013-11-03T05:30", "2013-11-03T06:30")  # both half past one
    assert weekday_hour(times, NEW_YORK)[1].tolist() == [1, 1]
    assert group(times, "hour", NEW_YORK).ids == ("2013-11-03T05:00Z", "2013-11-03T06:00Z")


def test_hours_of_a_zone_half_an_hour_off() -> None:
    times = at("2013-01-01T05:29", "2013-01-01T05:30")
    assert group(times, "hour", "Asia/Kolkata").ids == ("2013-01-01T04:30Z", "2013-01-01T05:30Z")


def test_weeks_begin_on_monday_and_sort_over_the_new_year() -> None:
    times = at("2012-12-30T23:59", "2012-12-31T00:00", "2013-01-06T23:59", "2013-01-07T00:00")
    grouping = group(times, "week")
    assert grouping.ids == ("2012-W52", "2013-W01", "2013-W02")
    assert grouping.index.tolist() == [0, 1, 1, 2]
    assert list(grouping.ids) == sorted(grouping.ids)
    assert weekday_hour(times)[0].tolist() == [6, 0, 6, 0]


def test_times_before_1970() -> None:
    grouping = group(np.array([-1.0, 0.0]), "day")
    assert grouping.ids == ("1969-12-31", "1970-01-01")
    assert weekday_hour(np.array([-1.0]))[0].tolist() == [2]


def test_an_unknown_zone_and_a_missing_time_are_named() -> None:
    with pytest.raises(UsageError, match="'Mars/Olympus'"):
        group(at("2013-01-01T00:00"), "day", "Mars/Olympus")
    with pytest.raises(DataError, match="1 rows have no event time, the first is row 1"):
        group(np.array([0.0, math.nan]))


def test_means_count_only_rows_with_a_label_and_blocks_with_rows_enough() -> None:
    grouping = group(np.array([0.0, 1.0, 2.0, 90000.0, 90001.0, 200000.0]))
    values = np.array([1.0, 3.0, math.nan, 5.0, math.nan, math.nan])
    found = means(grouping, values, min_rows=2)
    assert found.blocks == (Block("1970-01-01", 2, 2.0),)
    assert found.small == (Block("1970-01-02", 1, 5.0),)  # the third day has no label at all: no block
    assert Block.from_json(found.blocks[0].to_json()) == found.blocks[0]


def test_log_losses_are_bounded_as_said() -> None:
    label, chance = np.array([1.0, 0.0, 1.0, math.nan]), np.array([0.0, 1.0, 0.5, 0.5])
    losses = log_losses(label, chance)
    assert losses[:2] == pytest.approx([-math.log(0.01)] * 2)
    assert losses[2] == pytest.approx(math.log(2))
    assert math.isnan(losses[3])
    best = log_losses(np.array([1.0]), np.array([1.0]))
    assert losses[0] - best[0] == pytest.approx(largest_difference())


def test_log_losses_of_several_classes_are_of_the_true_one() -> None:
    chances = np.array([[0.2, 0.5, 0.3], [0.2, 0.5, 0.3]])
    assert log_losses(np.array([1.0, 2.0]), chances) == pytest.approx([-math.log(0.5), -math.log(0.3)])


def test_distance_losses_are_at_most_one() -> None:
    assert distance_losses(np.array([0.0, 0.0]), np.array([1.0, -9.0]), scale=4.0).tolist() == [0.25, 1.0]


def test_the_reference_knows_no_label_before_it_came() -> None:
    event = np.array([0.0, 10.0, 20.0, 30.0])
    known = np.array([5.0, 100.0, 25.0, math.nan])
    label = np.array([1.0, 1.0, 0.0, 1.0])
    shares = trailing_share(event, known, label, np.array([4.0, 24.0, 25.0, 100.0]), window=1000, least=1, prior=0.3)
    assert shares.tolist() == [0.3, 1.0, 0.5, pytest.approx(2 / 3)]


def test_the_reference_forgets_what_is_older_than_its_window_and_wants_rows_enough() -> None:
    event, label = np.array([0.0, 50.0, 60.0]), np.array([1.0, 0.0, 0.0])
    shares = trailing_share(event, event, label, np.array([20.0, 40.0, 61.0]), window=30, least=2, prior=0.3)
    assert shares.tolist() == [0.3, 0.3, 0.0]  # one label is too few; then none is left; then two


def test_a_label_can_not_be_known_before_its_event() -> None:
    shares = trailing_share(np.array([50.0]), np.array([1.0]), np.array([1.0]), np.array([10.0]), least=1, prior=0.3)
    assert shares.tolist() == [0.3]
