"""The trigger: does anything ask for a retraining, and may it start now? Pure.

All times are event time, so a year that is played in minutes triggers like a year. A clock that went back (the last
retraining lies in the future) can't be trusted with a cool-down: it counts as over, and the budget of that day and the
fresh labels that every run but one by hand needs are what bounds the number of runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onejob.core.artifact import Json
from onejob.core.records import NewSignal, Signal

BY_HAND = "hand"
SCHEDULE = "schedule"
SLO = "slo"
ABOUT_CHAMPION = ("harm", "warning", "labels")
"""Findings that say nothing about an engine that took the champion's place."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What of [monitor.retrain] decides when a retraining starts."""

    on: Sequence[str]
    labels_min: int
    every: float
    cooldown: float
    budget: int


@dataclass(frozen=True, slots=True)
class Facts:
    """How things stand; times are seconds of event time."""

    now: float
    champion: str
    signals: Sequence[Signal]
    """Those that have caused no run yet."""
    fresh: int | None
    """Fresh labels by the newest report since the last retraining; None: there is no such report yet."""
    since: float | None
    """When the last retraining started, else when the endpoint's traffic began; None: there is no traffic."""
    last: float | None
    """When the last retraining started; None: never."""
    today: int
    """Retrainings that started in the day of event time that is now."""
    is_open: bool
    """Whether a retraining, or another look of the gate, goes on."""
    stopped: bool
    """Whether the endpoint is stopped: then its loop stands still."""
    has_rows: bool
    """Whether there is traffic of a block that has ended, to retrain on."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether to start a run, which signals it consumes and raises, and why; or what it waits for."""

    start: bool
    reason: str = ""
    consumes: tuple[int, ...] = ()
    raised: tuple[NewSignal, ...] = ()


def decide(rules: Rules, facts: Facts) -> Answer:
    """One run for all signals that ask for one."""
    asking = [signal for signal in facts.signals if _asks(signal, rules, facts)]
    due = _schedule(rules, facts)
    if not asking and due is None:
        return Answer(False)
    by_hand = any(signal.kind == BY_HAND for signal in asking)
    if waits := _waits_for(rules, facts, by_hand):
        return Answer(False, waits)
    raised = (due,) if due is not None and _enough(rules, facts) else ()
    kinds = list(dict.fromkeys([signal.kind for signal in reversed(asking)] + [signal.kind for signal in raised]))
    told = [f"{kind} of {_block(asking, kind)}" if _block(asking, kind) else kind for kind in kinds]
    return Answer(True, ", ".join(told), tuple(sorted(signal.id for signal in asking)), raised)


def is_past(signal: Signal, champion: str) -> bool:
    """Whether it is about an engine that the champion has replaced: then it asks for nothing."""
    return signal.kind in ABOUT_CHAMPION and signal.champion not in (None, champion)


def _asks(signal: Signal, rules: Rules, facts: Facts) -> bool:
    if is_past(signal, facts.champion):
        return False
    return signal.kind == BY_HAND or signal.kind in rules.on


def _schedule(rules: Rules, facts: Facts) -> NewSignal | None:
    """The signal of the schedule, if it is due."""
    if SCHEDULE not in rules.on or facts.since is None:
        return None
    passed = facts.now - facts.since
    if passed < rules.every:
        return None
    evidence: dict[str, Json] = {"since": facts.since, "now": facts.now}
    return NewSignal(SCHEDULE, "", passed, rules.every, evidence)


def _waits_for(rules: Rules, facts: Facts, by_hand: bool) -> str:
    """What keeps a retraining from starting now; a person's wish waits for no labels and no cool-down."""
    if facts.stopped:
        return "the endpoint is stopped"
    if facts.is_open:
        return "a retraining, or another look of the gate, goes on"
    if facts.today >= rules.budget:
        return f"the budget of {rules.budget} a day is used up"
    if not facts.has_rows:
        return "no block has ended that anything was asked in"
    if by_hand:
        return ""
    if facts.last is not None and 0 <= facts.now - facts.last < rules.cooldown:
        return f"the cool-down is over in {(facts.last + rules.cooldown - facts.now) / 86400:.1f} days of event time"
    if facts.fresh is None:
        return "nothing was watched since the last retraining"
    if not _enough(rules, facts):
        return f"{facts.fresh:,} fresh labels, and {rules.labels_min:,} are asked"
    return ""


def _enough(rules: Rules, facts: Facts) -> bool:
    return facts.fresh is not None and facts.fresh >= rules.labels_min


def _block(signals: Sequence[Signal], kind: str) -> str:
    """The block of the oldest signal of a kind; the newest come first."""
    return next((signal.block for signal in reversed(signals) if signal.kind == kind), "")
