"""The story of an endpoint: which signals, which runs, which decisions and promotions, in the order of event time."""

from __future__ import annotations

import math
from collections.abc import Iterator

from onejob.core.artifact import short
from onejob.core.records import Decision, Promotion, Signal, Turn
from onejob.core.state import PromotionState
from onejob.loop.closing import LOOK, RETRAIN, asked, scene_of, waits_for_a_person
from onejob.loop.session import Session
from onejob.loop.trigger import SCHEDULE, SLO, is_past
from onejob.loop.views import StoryLine
from onejob.monitor.spec import DAY


def story(session: Session, name: str) -> list[StoryLine]:
    """What has happened to an endpoint since it was made, the oldest first; nothing where no loop was closed."""
    told: list[tuple[float, float, int, StoryLine]] = []
    ledger = session.ledger
    for order, lines in enumerate(
        (
            _signals(ledger.list_signals(name), _served(session, name)),
            _turns(session, [turn for turn in ledger.list_turns(name) if turn.kind in (RETRAIN, LOOK)]),
            _decisions(ledger.list_decisions(name)),
            _promotions(ledger.list_promotions(name)),
        )
    ):
        told += [(line.time, math.inf if line.run is None else line.run, order, line) for line in lines]
    return [line for *_, line in sorted(told, key=lambda each: each[:3])]


def outlook(session: Session, name: str) -> str:
    """What the endpoint's loop waits for now; "" for nothing."""
    scene = scene_of(session, name)
    if scene is None:
        return ""
    newest = next(iter(session.ledger.list_decisions(name, limit=1)), None)
    if newest is not None and waits_for_a_person(scene, newest):
        return f"challenger {short(newest.challenger)} waits for `onejob promote {name}`"
    return asked(session, scene).reason


def _served(session: Session, name: str) -> str:
    endpoint = session.ledger.get_endpoint(name)
    return endpoint.artifact if endpoint else ""


def _signals(signals: list[Signal], served: str) -> Iterator[StoryLine]:
    """A line for all signals of a kind that came to the same: a storm is one line."""
    groups: dict[tuple[str, int | None, str], list[Signal]] = {}
    for signal in reversed(signals):
        groups.setdefault((signal.kind, signal.run, _came_to(signal, served)), []).append(signal)
    for (kind, run, came), found in groups.items():
        first = found[0]
        figures = _figures(first)
        says = first.evidence.get("says") or first.evidence.get("reason") or ""
        more = f"; {len(found) - 1:,} more such" if len(found) > 1 else ""
        more += f", the last of {found[-1].block}" if more and found[-1].block else ""
        block = f" of {first.block}" if first.block else ""
        text = f"{kind}{block}{figures}{f' ({says})' if says else ''}{more}{came}"
        yield StoryLine(first.event_time, "signal", text, run)


def _came_to(signal: Signal, served: str) -> str:
    """What came of a signal that has caused no run."""
    if signal.run is not None or signal.kind == SLO:
        return ""  # of the service nothing comes by itself: it is for people
    if is_past(signal, served):
        return f"; it has caused no run, and {short(signal.champion or '')} serves no more"
    return "; it has caused no run"


def _figures(signal: Signal) -> str:
    """What was measured, in its own unit."""
    if signal.value is None or signal.threshold is None:
        return ""
    if signal.kind == "labels":
        return f": {signal.value:,.0f} fresh ones, {signal.threshold:,.0f} are asked"
    if signal.kind == SLO:
        return f": the budget burns {signal.value:.3g} times as fast as it may, {signal.threshold:g} is the threshold"
    if signal.kind == SCHEDULE:
        return f": {signal.value / DAY:.1f} days since the last retraining, {signal.threshold / DAY:g} are allowed"
    return f": {signal.value:.4g}, {signal.threshold:.4g} is the threshold"


def _turns(session: Session, turns: list[Turn]) -> Iterator[StoryLine]:
    for turn in turns:
        run = session.ledger.get_run(turn.run)
        what = "retrains" if turn.kind == RETRAIN else "has the gate look again"
        ended = turn.outcome or str(run.state)
        yield StoryLine(
            turn.event_time, "run", f"run {run.id} {what}, since {run.cause.get('reason')}: {ended}", run.id
        )


def _decisions(decisions: list[Decision]) -> Iterator[StoryLine]:
    for decision in decisions:
        missing = f"; missing: {', '.join(decision.missing)}" if decision.missing else ""
        reasons = "; ".join(decision.reasons)
        text = f"{decision.verdict} {short(decision.challenger)} against {short(decision.champion)}: {reasons}{missing}"
        outcome = f" ({decision.outcome})" if decision.outcome else " (nothing has come of it yet)"
        yield StoryLine(decision.event_time, "gate", f"look {decision.look}: {text}{outcome}", decision.run)


def _promotions(promotions: list[Promotion]) -> Iterator[StoryLine]:
    for promotion in promotions:
        cause = promotion.cause
        run = cause.get("run")
        by = cause.get("user") or (f"run {run}" if run else str(cause.get("kind", "")))
        text = f"{short(promotion.digest)} takes the place of {short(promotion.former)}, by {by}"
        yield StoryLine(promotion.event_time, "promotion", text, run)
        if promotion.ended is not None:
            back = promotion.state is PromotionState.ROLLED_BACK
            what = f"rolled back to {short(promotion.former)}" if back else "kept"
            text = f"{short(promotion.digest)} is {what}: {promotion.reason}"
            yield StoryLine(promotion.ended, "rollback" if back else "probation", text, run)
