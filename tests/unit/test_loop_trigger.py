"""The trigger, as a table and as properties: what starts a retraining, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onejob.core.records import Signal
from onejob.loop.trigger import Facts, Rules, decide

DAY = 86_400.0
RULES = Rules(("labels", "harm", "schedule"), labels_min=100, every=30 * DAY, cooldown=7 * DAY, budget=2)


def signal(number: int, kind: str, champion: str | None = "c1", block: str = "2013-03-10") -> Signal:
    return Signal(number, "e", kind, block, None, None, {}, champion, "r", 0, 0.0, 0.0)


def facts(signals: Sequence[Signal] = (), **more: Any) -> Facts:
    told: dict[str, Any] = {"now": 100 * DAY, "champion": "c1", "signals": signals, "fresh": 500, "since": 90 * DAY}
    told |= {"last": None, "today": 0, "is_open": False, "stopped": False, "has_rows": True}
    return Facts(**{**told, **more})


@pytest.mark.parametrize("kind", ["labels", "harm", "hand"])
def test_a_signal_that_the_rules_name_starts_a_run_and_is_consumed(kind: str) -> None:
    answer = decide(RULES, facts([signal(3, kind)]))
    assert (answer.start, answer.consumes, answer.raised) == (True, (3,), ())
    assert answer.reason == f"{kind} of 2013-03-10"


def test_others_ask_for_nothing() -> None:
    assert not decide(RULES, facts([signal(1, "warning"), signal(2, "slo")])).start
    assert decide(replace(RULES, on=["warning"]), facts([signal(1, "warning")])).start
    assert not decide(RULES, facts([signal(1, "harm", champion="c0")])).start, "of a former champion"
    assert not decide(RULES, facts()).start
    assert decide(RULES, facts()).reason == ""


def test_all_that_ask_are_consumed_by_one_run() -> None:
    storm = [signal(number, "harm", block=f"b{number:04}") for number in range(1000, 0, -1)] + [signal(0, "hand")]
    answer = decide(RULES, facts([*storm, signal(2000, "slo")]))
    assert answer.consumes == tuple(range(1001))
    assert answer.reason == "hand of 2013-03-10, harm of b0001"


@pytest.mark.parametrize(
    ("more", "waits"),
    [
        ({"is_open": True}, "a retraining, or another look of the gate, goes on"),
        ({"stopped": True}, "the endpoint is stopped"),
        ({"has_rows": False}, "no block has ended that anything was asked in"),
        ({"today": 2}, "the budget of 2 a day is used up"),
        ({"last": 98 * DAY}, "the cool-down is over in 5.0 days of event time"),
        ({"fresh": 99}, "99 fresh labels, and 100 are asked"),
        ({"fresh": None}, "nothing was watched since the last retraining"),
        ({"last": 93 * DAY}, ""),
        ({"last": 101 * DAY}, ""),
    ],
)
def test_what_a_signal_waits_for(more: dict[str, Any], waits: str) -> None:
    answer = decide(RULES, facts([signal(1, "harm")], **more))
    assert (answer.start, answer.consumes) == ((False, ()) if waits else (True, (1,)))
    assert answer.start or answer.reason == waits


def test_by_hand_needs_no_labels_and_no_cool_down_but_not_two_at_once() -> None:
    hand = [signal(1, "hand", champion=None)]
    assert decide(RULES, facts(hand, fresh=None, last=99 * DAY)).start
    assert not decide(RULES, facts(hand, is_open=True)).start
    assert not decide(RULES, facts(hand, today=2)).start
    assert not decide(RULES, facts(hand, has_rows=False)).start
    assert not decide(RULES, facts(hand, stopped=True)).start


def test_the_schedule_raises_its_own_signal() -> None:
    answer = decide(RULES, facts(since=70 * DAY))
    assert (answer.start, answer.consumes, answer.reason) == (True, (), "schedule")
    (raised,) = answer.raised
    assert (raised.kind, raised.value, raised.threshold) == ("schedule", 30 * DAY, 30 * DAY)
    assert not decide(RULES, facts(since=70 * DAY + 1)).start
    assert not decide(RULES, facts(since=None)).start
    assert not decide(RULES, facts(since=70 * DAY, fresh=3)).start
    assert not decide(replace(RULES, on=["harm"]), facts(since=70 * DAY)).start


@given(
    st.lists(st.sampled_from(["labels", "harm", "warning", "slo", "hand"]), max_size=5),
    st.floats(0, 200),
    st.one_of(st.none(), st.floats(0, 200)),
    st.integers(0, 3),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 200)),
)
def test_never_two_at_once_never_over_budget(
    kinds: list[str], now: float, last: float | None, today: int, is_open: bool, fresh: int | None
) -> None:
    signals = [signal(number, kind) for number, kind in enumerate(kinds)]
    since = 0.0 if last is None else last * DAY
    last = None if last is None else last * DAY
    told = facts(signals, now=now * DAY, last=last, since=since, today=today, is_open=is_open, fresh=fresh)
    answer = decide(RULES, told)
    assert set(answer.consumes) <= {s.id for s in signals if s.kind in ("labels", "harm", "hand")}
    if answer.start:
        assert not is_open
        assert today < RULES.budget
        assert answer.consumes or answer.raised
        assert "hand" in kinds or (fresh is not None and fresh >= RULES.labels_min)
    else:
        assert answer.consumes == answer.raised == ()
