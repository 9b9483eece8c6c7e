"""Steps of the loop that are killed, signals that come while one of its runs goes on: each thing happens once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from closing_world import NAME, ClosingWorld, decision, finding, report

from onejob.core.records import NewSignal
from onejob.core.state import RunState
from onejob.loop.closing import RETRAIN, WATCHED
from onejob.loop.reconcile import reconcile


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClosingWorld]:
    made = ClosingWorld(tmp_path, monkeypatch)
    yield made
    made.close()


def labels_ask(world: ClosingWorld, verdict: str = "promote") -> None:
    fresh = report(500, "", finding("labels", "b"))
    world.found.report = lambda task: report() if task["options"]["fresh_from"] else fresh
    world.found.decision = lambda task: decision(verdict)


@pytest.mark.parametrize("step", ["monitor.labelled", "monitor.watch", "monitor.gate"])
def test_a_step_that_is_killed_is_tried_again_and_counts_once(world: ClosingWorld, step: str) -> None:
    session = world.supervisor()
    champion = world.serve(session)
    labels_ask(world)
    world.executor.ends[step] = ["gone", "ok"]
    world.day(session, 2, passes=20)
    assert world.executor.runs[step] == {"monitor.labelled": 3, "monitor.watch": 2, "monitor.gate": 2}[step]
    (run,) = world.of_kind(session, RETRAIN)
    assert world.executor.runs["train"] == 2
    assert [(signal.kind, signal.champion, signal.run) for signal in session.ledger.list_signals(NAME)] == [
        ("labels", champion, run.id)
    ]
    assert len(session.ledger.list_promotions(NAME)) == len(session.ledger.list_decisions(NAME)) == 1


def test_a_watch_that_can_not_be_done_is_made_up_for_by_the_next(world: ClosingWorld) -> None:
    session = world.supervisor()
    world.serve(session)
    labels_ask(world)
    world.executor.ends["monitor.watch"] = ["fail", "ok"]
    world.day(session, 2)
    (run,) = world.of_kind(session, WATCHED)
    assert run.state is RunState.FAILED
    world.passes(session)
    assert len(world.of_kind(session, WATCHED)) == 1, "not the same again"
    assert session.ledger.list_signals(NAME) == []
    world.day(session)
    assert len(session.ledger.list_signals(NAME)) == len(world.of_kind(session, RETRAIN)) == 1


def test_a_storm_while_a_retraining_goes_on_starts_one_more_when_it_may(world: ClosingWorld) -> None:
    session = world.supervisor()
    champion = world.serve(session)
    labels_ask(world, "reject")
    world.executor.ends["train"] = ["ok", "hang"]
    world.day(session, 2)
    (first,) = world.of_kind(session, RETRAIN)
    for minute in range(10):
        storm = [NewSignal("harm", f"{minute}-{number}") for number in range(20)]
        for _ in range(2):  # a report that is read twice
            session.ledger.add_signals(NAME, storm, event_time=1.0, champion=champion)
        reconcile(session)
    assert [run.id for run in world.of_kind(session, RETRAIN)] == [first.id]
    world.executor.ends["train"] = ["ok"]
    world.found.report = lambda task: report(500)  # fresh labels, after it
    world.day(session, 6)
    first, second = world.of_kind(session, RETRAIN)
    assert len(second.cause["signals"]) == 200
    assert [signal.run for signal in session.ledger.list_signals(NAME)].count(second.id) == 200
    turns = session.ledger.list_turns(NAME, kind=RETRAIN)
    assert turns[0].event_time - turns[1].event_time == 3 * 86_400, "as soon as the cool-down was over"
