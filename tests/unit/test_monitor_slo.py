"""Burn rates over two windows: the workbook's table, partial intervals, little traffic, latency buckets."""

from __future__ import annotations

import json
from bisect import bisect_left

import pytest

from onejob.core.counters import BOUNDS_US
from onejob.monitor import slo

OBJECTIVE = slo.Objective("errors", 0.999)
MINUTE = 60.0


def minutes(*parts: tuple[int, float], total: float = 1000.0) -> list[slo.Interval]:
    """Intervals of a minute each: (how many, share of bad)."""
    found: list[slo.Interval] = []
    for count, share in parts:
        found += [slo.Interval((len(found) + k + 1) * MINUTE, MINUTE, total, total * share) for k in range(count)]
    return found


def severities(intervals: list[slo.Interval]) -> list[tuple[str, float]]:
    found = slo.alerts(intervals, OBJECTIVE, intervals[-1].end)
    return [(alert.severity, alert.threshold) for alert in found]


def test_a_fast_burn_pages() -> None:
    found = severities(minutes((300, 0.0), (60, 0.02)))  # 20 times the budget for an hour
    assert found[0] == ("page", 14.4)


def test_a_slow_burn_is_a_ticket() -> None:
    assert severities(minutes((3 * 24 * 60, 0.0015))) == [("ticket", 1.0)]


def test_within_the_budget_nothing_alerts() -> None:
    assert severities(minutes((3 * 24 * 60, 0.0009))) == []


def test_an_alert_ends_when_the_trouble_has() -> None:
    trouble = minutes((300, 0.0), (60, 0.02), (6, 0.0))
    alerts = slo.alerts(trouble, OBJECTIVE, trouble[-1].end)
    assert 14.4 not in [alert.threshold for alert in alerts]  # the hour is still bad, the last five minutes aren't
    assert slo.burn(trouble, OBJECTIVE, trouble[-1].end, 3600).rate > 14.4


def test_a_hiccup_does_not_alert() -> None:
    assert severities(minutes((24 * 60, 0.0), (2, 0.2))) == []


def test_few_bad_requests_never_alert() -> None:
    quiet = minutes((60, 0.5), total=0.2)  # 12 requests an hour, half of them bad: 6
    assert slo.burn(quiet, OBJECTIVE, quiet[-1].end, 3600).rate > 14.4
    assert severities(quiet) == []


def test_an_interval_counts_by_its_share_of_the_window() -> None:
    lone = [slo.Interval(100.0, 100.0, 1000.0, 10.0)]
    half = slo.burn(lone, OBJECTIVE, now=150.0, window=100.0)
    assert (half.total, half.bad) == pytest.approx((500.0, 5.0))
    assert half.rate == pytest.approx(10.0)
    assert slo.burn(lone, OBJECTIVE, now=300.0, window=100.0).rate == 0.0
    assert slo.burn([slo.Interval(100.0, 0.0, 10.0, 1.0)], OBJECTIVE, 100.0, 50.0).bad == 1.0


def test_what_lies_in_the_future_does_not_count() -> None:
    lone = [slo.Interval(200.0, 50.0, 1000.0, 1000.0)]
    assert slo.burn(lone, OBJECTIVE, now=100.0, window=100.0).bad == 0.0


def test_rules_for_another_period_keep_their_rates() -> None:
    rules = slo.scaled(slo.RULES, slo.PERIOD / 30)
    assert [rule.burn for rule in rules] == [rule.burn for rule in slo.RULES]
    assert rules[0].long == pytest.approx(120.0)


def test_errors_and_slow_answers_from_the_collected_series() -> None:
    bucket = bisect_left(BOUNDS_US, 50_000.0)
    latency = {str(bucket - 5): 60, str(bucket): 30, str(bucket + 5): 10, str(len(BOUNDS_US)): 1}
    line = {"time": 10.0, "seconds": 5.0, "requests": 101, "errors": 7, "latency": latency}
    assert slo.failed([line]) == [slo.Interval(10.0, 5.0, 101, 7)]
    (at_bound,) = slo.slow([line], BOUNDS_US[bucket] / 1000)
    assert at_bound.bad == pytest.approx(11.0)
    (within,) = slo.slow([line], (BOUNDS_US[bucket - 1] + BOUNDS_US[bucket]) / 2000)
    assert within.bad == pytest.approx(11.0 + 15.0)
    (all_slow,) = slo.slow([line], 0.0)
    assert all_slow.bad == pytest.approx(101.0)
    assert all_slow.total == 101.0


def test_an_alert_is_data() -> None:
    intervals = minutes((60, 0.5))
    alert = slo.alerts(intervals, OBJECTIVE, intervals[-1].end)[0]
    told = json.loads(json.dumps(alert.to_json(), allow_nan=False))
    assert told["long"]["rate"] == pytest.approx(500.0)
