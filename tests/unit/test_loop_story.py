"""The story of an endpoint, in order and in words; runs that monitor are not in the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from closing_world import NAME, ClosingWorld, decision, finding, report

from onejob.core.artifact import short
from onejob.core.records import NewSignal
from onejob.loop.closing import RETRAIN, WATCHED
from onejob.loop.commands import look
from onejob.loop.commands.explain import why
from onejob.loop.commands.look import ps
from onejob.loop.commands.promote import rollback
from onejob.loop.commands.signal import STARTS, signal


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClosingWorld]:
    made = ClosingWorld(tmp_path, monkeypatch)
    yield made
    made.close()


def test_the_story_of_an_endpoint(world: ClosingWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    session = world.supervisor()
    champion = world.serve(session)
    assert why(session, NAME).story == ()
    found = report(500, "", finding("labels", "2011-01-28"))
    world.found.report = lambda task: report() if task["options"]["fresh_from"] else found
    world.found.decision = lambda task: decision("promote")
    world.day(session, 3)
    challenger = world.endpoint(session).artifact
    rollback(session, NAME, "no good")
    told = why(session, NAME)
    (run,) = world.of_kind(session, RETRAIN)
    assert [(line.kind, line.run) for line in told.story] == [
        ("signal", run.id),
        ("run", run.id),
        ("gate", run.id),
        ("promotion", run.id),
        ("rollback", run.id),
    ]
    texts = [line.text for line in told.story]
    assert texts[0] == "labels of 2011-01-28: 1 fresh ones, 0 are asked (so)"
    assert texts[1] == f"run {run.id} retrains, since labels of 2011-01-28: promote"
    assert texts[2].startswith(f"look 1: promote {short(challenger)} against {short(champion)}: because promote")
    assert texts[3] == f"{short(challenger)} takes the place of {short(champion)}, by run {run.id}"
    assert texts[4] == f"{short(challenger)} is rolled back to {short(champion)}: no good"
    monkeypatch.setattr(look, "told_of", lambda session, endpoint: {})  # the traffic of this world can't be read
    shown = look.show(session, NAME)
    assert shown.story == told.story


def test_a_storm_is_one_line_and_what_waits_is_told(world: ClosingWorld) -> None:
    world.rules = {**world.rules, "retrain": {**world.rules["retrain"], "budget": 1}}
    session = world.supervisor()
    world.serve(session)
    world.day(session, 2)
    assert signal(session, NAME, "now").detail == STARTS
    world.passes(session)
    for _ in range(3):
        assert signal(session, NAME).detail == "the budget of 1 a day is used up"
    told = why(session, NAME)
    lines = [line.text for line in told.story if line.kind == "signal"]
    assert lines == ["hand (now)", "hand; 2 more such; it has caused no run"]
    assert told.outlook == "the budget of 1 a day is used up"


def test_harm_of_an_engine_that_serves_no_more_is_told_as_past(world: ClosingWorld) -> None:
    session = world.supervisor()
    champion = world.serve(session)
    fresh = report(500, "", finding("labels", "2011-01-28"))
    late = report(0, "", finding("harm", "2011-01-28"))
    world.found.report = lambda task: late if task["options"]["fresh_from"] else fresh
    world.found.decision = lambda task: decision("promote")
    world.rules = {**world.rules, "retrain": {**world.rules["retrain"], "cooldown": "90d"}}
    world.day(session, 3)
    harm = [NewSignal("harm", "2011-01-27"), NewSignal("harm", "2011-01-28"), NewSignal("warning", "2011-01-27")]
    session.ledger.add_signals(NAME, harm, event_time=1.0, champion=champion)
    lines = sorted(line.text for line in why(session, NAME).story if line.kind == "signal" and line.run is None)
    past = f"it has caused no run, and {short(champion)} serves no more"
    assert lines == [
        f"harm of 2011-01-27; 1 more such, the last of 2011-01-28; {past}",
        "harm of 2011-01-28: 1, 0.5 is the threshold (so); it has caused no run",
        f"warning of 2011-01-27; {past}",
    ]
    rollback(session, NAME)
    assert all(champion[:8] not in line.text for line in why(session, NAME).story if line.kind == "signal"), (
        "it is back"
    )


def test_runs_that_monitor_are_listed_only_with_all(world: ClosingWorld) -> None:
    session = world.supervisor()
    world.serve(session)
    world.executor.ends["monitor.watch"] = ["hang"]
    world.day(session, 2)
    (run,) = world.of_kind(session, WATCHED)
    assert [view.run for view in ps(session).runs] == [1]
    assert [view.run for view in ps(session, all=True).runs] == [run.id, 1]
