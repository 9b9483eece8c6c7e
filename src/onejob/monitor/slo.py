"""Service levels: how fast an endpoint burns its budget of errors and of slow answers, over two windows at once.

An objective of 99.9 % leaves a budget of 0.1 % bad requests over a period of 30 days. The burn rate is the share of
bad requests over that budget: at 1 the budget lasts the period, at 14.4 two per cent of it go in an hour. An alert
needs the rate over a long window (so that one hiccup isn't one) and over a short one (so that it ends when the trouble
has). The table is that of the Site Reliability Workbook, chapter 5, "multiwindow, multi-burn-rate alerts". Time is an
argument, never the clock.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from onejob.core.artifact import Json
from onejob.core.counters import BOUNDS_US

HOUR = 3600.0
PERIOD = 30 * 24 * HOUR
LEAST_BAD = 10
"""With little traffic one failed request is a great share; fewer bad ones than this in the long window never alert."""

Severity = Literal["page", "ticket"]


@dataclass(frozen=True, slots=True)
class Rule:
    """Alert when the burn rate reaches `burn` over both windows (seconds)."""

    burn: float
    long: float
    short: float
    severity: Severity


RULES = (
    Rule(14.4, HOUR, HOUR / 12, "page"),  # 2 % of the budget in an hour
    Rule(6.0, 6 * HOUR, HOUR / 2, "page"),  # 5 % in six hours
    Rule(3.0, 24 * HOUR, 2 * HOUR, "ticket"),  # 10 % in a day
    Rule(1.0, 72 * HOUR, 6 * HOUR, "ticket"),  # 10 % in three days
)


@dataclass(frozen=True, slots=True)
class Objective:
    """What is promised: the share of good requests over the period."""

    name: str
    target: float

    @property
    def budget(self) -> float:
        return 1 - self.target


@dataclass(frozen=True, slots=True)
class Interval:
    """Requests between two readings of the counters, and how many of them were bad; `bad` may be a fraction."""

    end: float
    seconds: float
    total: float
    bad: float


@dataclass(frozen=True, slots=True)
class Burn:
    """The burn rate over a window; 0 where nothing was asked."""

    window: float
    total: float
    bad: float
    rate: float


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule whose two windows both burn too fast."""

    objective: str
    severity: Severity
    threshold: float
    long: Burn
    short: Burn

    def to_json(self) -> dict[str, Json]:
        return dataclasses.asdict(self)


def failed(lines: Iterable[Mapping[str, Json]]) -> list[Interval]:
    """The collected series as intervals in which failed requests are bad."""
    return [Interval(line["time"], line["seconds"], line["requests"], line["errors"]) for line in lines]


def slow(lines: Iterable[Mapping[str, Json]], limit_ms: float) -> list[Interval]:
    """The collected series as intervals in which answers slower than `limit_ms` are bad."""
    found = []
    for line in lines:
        latency = {int(bucket): float(amount) for bucket, amount in line.get("latency", {}).items()}
        over = sum(amount * _share_above(bucket, limit_ms * 1000) for bucket, amount in latency.items())
        found.append(Interval(line["time"], line["seconds"], sum(latency.values()), over))
    return found


def burn(intervals: Sequence[Interval], objective: Objective, now: float, window: float) -> Burn:
    """The burn rate over the `window` seconds before `now`; an interval that reaches out of it counts by its share."""
    total = bad = 0.0
    for interval in intervals:
        share = _inside(interval, now - window, now)
        total += share * interval.total
        bad += share * interval.bad
    return Burn(window, total, bad, bad / total / objective.budget if total > 0 else 0.0)


def alerts(
    intervals: Sequence[Interval],
    objective: Objective,
    now: float,
    *,
    rules: Sequence[Rule] = RULES,
    least_bad: float = LEAST_BAD,
) -> tuple[Alert, ...]:
    """The rules that alert now, the fastest burn first."""
    found = []
    for rule in rules:
        long, short = (burn(intervals, objective, now, window) for window in (rule.long, rule.short))
        if long.rate >= rule.burn and short.rate >= rule.burn and long.bad >= least_bad:
            found.append(Alert(objective.name, rule.severity, rule.burn, long, short))
    return tuple(found)


def scaled(rules: Sequence[Rule], period: float) -> tuple[Rule, ...]:
    """The rules for a budget over another period than 30 days: the same burn rates, windows in proportion."""
    factor = period / PERIOD
    return tuple(dataclasses.replace(rule, long=rule.long * factor, short=rule.short * factor) for rule in rules)


def _inside(interval: Interval, start: float, end: float) -> float:
    """The share of an interval that lies in (start, end]; one of no length lies where it ends."""
    if interval.seconds <= 0:
        return 1.0 if start < interval.end <= end else 0.0
    covered = min(interval.end, end) - max(interval.end - interval.seconds, start)
    return min(1.0, max(0.0, covered / interval.seconds))


def _share_above(bucket: int, limit_us: float) -> float:
    """How much of a latency bucket lies above a limit, its requests spread evenly in it."""
    if bucket >= len(BOUNDS_US):
        return 1.0
    low, high = (BOUNDS_US[bucket - 1] if bucket else 0.0), BOUNDS_US[bucket]
    if bisect_right(BOUNDS_US, limit_us) != bucket:
        return 1.0 if limit_us <= low else 0.0
    return (high - max(low, limit_us)) / (high - low)
