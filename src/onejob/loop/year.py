"""A year of traffic, told month by month: what was answered, what other policies would have answered, what happened.

Plain records and pure functions over arrays; loop/commands/year.py plays the year and fills them. Four policies are
scored on the same rows: *static* (the first engine, for ever), *loop* (as answered), *always* (every challenger, from
when it was ready, whatever the gate said), and *constant* (for each day the share of late labels known by then).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onejob.core.artifact import Json
from onejob.monitor.blocks import group, trailing_share

Array = NDArray[Any]
Score = Callable[[Array, Mapping[str, Array]], Mapping[str, float]]
"""A family's `metrics.score`: encoded labels and served outputs -> metrics."""

POLICIES = ("static", "loop", "always")
"""Those that have models, in the order of tables and plots."""
CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Figures:
    """How good a policy's forecasts were; NaN where a month has one class only."""

    auc: float
    log_loss: float

    def to_json(self) -> dict[str, Json]:
        return {"auc": _json(self.auc), "log_loss": _json(self.log_loss)}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate said in a month; `none` where no challenger came before it."""

    decision: str
    reason: str

    def to_json(self) -> dict[str, Json]:
        return {"decision": self.decision, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Month:
    """A month of traffic."""

    month: str
    """`2013-03`."""
    n: int
    """Rows that were asked and answered."""
    late_share: float
    policies: Mapping[str, Figures]
    gate: Verdict
    promoted: bool
    """Whether a challenger took over at the end of it."""
    story: tuple[str, ...] = ()
    """What was signalled, retrained and decided at the end of it, a line each."""

    def to_json(self) -> dict[str, Json]:
        told = {name: self.policies[name].to_json() for name in POLICIES}
        head: dict[str, Json] = {"month": self.month, "n": self.n, "late_share": self.late_share}
        return {**head, **told, "gate": self.gate.to_json()}


@dataclass(frozen=True, slots=True)
class Year:
    """The whole of it."""

    months: tuple[Month, ...]
    failed_requests: int
    seconds: float

    def mean(self, policy: str) -> Figures:
        """Over months, each counting the same."""
        found = [month.policies[policy] for month in self.months]
        aucs = [figures.auc for figures in found if not math.isnan(figures.auc)]
        return Figures(fmean(aucs) if aucs else math.nan, fmean([f.log_loss for f in found]) if found else math.nan)

    def to_json(self) -> dict[str, Json]:
        return {
            "months": [month.to_json() for month in self.months],
            "mean": {name: self.mean(name).to_json() for name in POLICIES},
            "failed_requests": self.failed_requests,
            "seconds": round(self.seconds, 1),
        }


def months_of(time: Array, zone: str) -> list[str]:
    """The month of each row, as a clock in `zone` shows it."""
    days = group(time, "day", zone)
    names = np.array([day[:7] for day in days.ids])
    return [str(name) for name in names[days.index]]


def constant_forecast(time: Array, label: Array, delay: float, zone: str, prior: float, window: float) -> Array:
    """For each row the late share that was known when its day began: what one would say without any model."""
    days = group(time, "day", zone)
    shares = trailing_share(time, time + delay, label, days.first, window=window, prior=prior)
    return np.asarray(shares[days.index])


def figures(score: Score, label: Array, chance: Array) -> Figures:
    """Scores of the rows that have an answer."""
    known = np.isfinite(chance)
    found = score(label[known], {"probability": chance[known]})
    return Figures(found.get("auc", math.nan), found.get("log_loss", math.nan))


def verdict_of(decisions: Sequence[tuple[str, Sequence[str], str]]) -> Verdict:
    """A month's verdict, from (verdict, reasons, outcome) of its decisions, oldest first: the newest counts."""
    if not decisions:
        return Verdict("none", "no challenger was ready")
    decision, reasons, outcome = decisions[-1]
    told = "; ".join(reasons)
    if decision == "promote" and outcome != "promoted":
        told = f"{told}; {outcome}"
    return Verdict(decision, told)


def drawing(year: Year) -> dict[str, Any]:
    """What a plot needs of a year; a constant forecast ranks nothing, so it has no AUC worth a line."""
    of = {name: [month.policies[name] for month in year.months] for name in (*POLICIES, CONSTANT)}
    return {
        "months": [month.month for month in year.months],
        "curves": {
            "auc": {name: [figures.auc for figures in of[name]] for name in POLICIES},
            "log_loss": {name: [figures.log_loss for figures in of[name]] for name in of},
        },
        "shares": [month.late_share for month in year.months],
        "promoted": [month.promoted for month in year.months],
    }


def _json(value: float) -> Json:
    return None if math.isnan(value) else value
