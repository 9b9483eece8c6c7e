"""Each watch goes on from the last one's report; a few strays don't move an endpoint's clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from closing_world import NAME, ClosingWorld, decision, report

from onejob.core.artifact import Json
from onejob.loop.champion import clock_of, event_now
from onejob.loop.closing import WATCHED
from onejob.loop.session import Session
from onejob.monitor.plan import LABELLED, WATCH
from onejob.monitor.spec import DAY

HORIZON = 3


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClosingWorld]:
    made = ClosingWorld(tmp_path, monkeypatch)
    made.rules |= {"horizon": HORIZON * DAY, "harm": {"reference_blocks": 14}}
    yield made
    made.close()


def labelled_days(world: ClosingWorld, session: Session, count: int = 1) -> None:
    """Days of traffic whose labels come on the same day."""
    for _ in range(count):
        at = (15_000 + world.days + 1) * DAY
        world.traffic(session, at + 3600, at + 19 * 3600, kind="labels")
        world.day(session)


def watch_of(world: ClosingWorld, session: Session) -> tuple[Mapping[str, Json], Mapping[str, Json]]:
    """The newest watch: (what its run was planned to read, what it was handed)."""
    turn = session.ledger.list_turns(NAME, kind=WATCHED, limit=1)[0]
    steps = {step["name"]: step for step in session.ledger.get_run(turn.run).plan["steps"]}
    (asked,) = [task for task in world.found.asked if task["name"] == WATCH][-1:]
    assert asked["options"] == steps[WATCH]["options"]
    return steps[LABELLED]["options"], asked


def test_a_watch_reads_only_what_can_still_change(world: ClosingWorld) -> None:
    session = world.supervisor()
    world.serve(session)
    labelled_days(world, session, 2)
    window, first = watch_of(world, session)
    assert "before" not in first["inputs"], "there was none"
    assert window["from"] < 0, "the first champion serves since ever"
    reports = []
    for day in (3, 4, 5):
        labelled_days(world, session)
        reports.append(session.ledger.list_turns(NAME, kind=WATCHED, limit=1)[0].facts["report"])
        window, asked = watch_of(world, session)
        before = day - 1  # when the last watch looked, the newest block was this one
        assert asked["options"]["settled_until"] == (15_000 + before - HORIZON) * DAY
        assert window["from"] == (15_000 + before - HORIZON - 15) * DAY
    assert asked["inputs"]["before"]["digest"] == reports[-2]


def test_under_other_rules_nothing_is_taken_over(world: ClosingWorld) -> None:
    session = world.supervisor()
    world.serve(session)
    labelled_days(world, session, 3)
    assert "before" in watch_of(world, session)[1]["inputs"]
    world.rules |= {"block": {"rows_min": 5}}
    world.serve(session)
    labelled_days(world, session)
    assert "before" not in watch_of(world, session)[1]["inputs"]
    labelled_days(world, session)
    assert "before" in watch_of(world, session)[1]["inputs"]


def test_what_had_no_label_is_looked_at_again_until_later_labels_have_come(world: ClosingWorld) -> None:
    """Labels of many days, sealed after the traffic of these days was watched."""
    session = world.supervisor()
    world.serve(session)
    labelled_days(world, session, 2)
    world.day(session, 8)
    window, asked = watch_of(world, session)
    settled = (15_000 + 2 - HORIZON) * DAY
    assert (asked["options"]["settled_until"], window["from"]) == (settled, settled - 15 * DAY)
    labelled_days(world, session, 2)
    assert watch_of(world, session)[1]["options"]["settled_until"] == (15_000 + 11 - HORIZON) * DAY


def test_a_new_champion_is_watched_from_its_beginning(world: ClosingWorld) -> None:
    world.rules["retrain"] = {"labels_min": 100, "cooldown": "3d", "every": "365d", "hold_out": "2d"}
    session = world.supervisor()
    first = world.serve(session)
    finding: Json = {"kind": "labels", "block": "b", "value": 1.0, "threshold": 0.5, "evidence": {}}
    world.found.report = lambda task: report(0 if task["options"]["fresh_from"] else 500, "", finding)
    world.found.decision = lambda task: decision("promote")
    world.day(session, 2)
    assert world.endpoint(session).artifact != first
    world.day(session)
    window, asked = watch_of(world, session)
    assert "before" not in asked["inputs"]
    assert window["from"] > 14_900 * DAY, "and only from then on"


def traffic(*newest: float, rows: int, each: int = 1) -> Mapping[str, Json]:
    return {"newest": [[time, each] for time in newest], "rows": rows}


def test_strays_do_not_move_the_clock() -> None:
    assert clock_of([traffic(9.0, 7.0, rows=2), traffic(8.0, rows=1)]) == 9.0, "replicas seal independently"
    many = traffic(10.0, 9.9, 9.8, rows=290, each=50)
    assert clock_of([many]) == 10.0, "a request with many of the rows is no stray"
    assert clock_of([many, traffic(1e9, 1e9, rows=2)]) == 10.0
    assert clock_of([many, traffic(1e9, rows=3, each=3)]) == 1e9, "more than a hundredth of the rows"
    few = traffic(*(float(n) for n in range(20, 11, -1)), rows=100_000)
    assert clock_of([few]) == 12.0, "never more than eight"


def test_a_request_without_its_time_leaves_the_loop_where_it_was(world: ClosingWorld) -> None:
    session = world.supervisor()
    world.serve(session)
    world.day(session, 20)
    before = event_now(session, NAME)
    world.traffic(session, 20_000 * DAY, 20_000 * DAY, rows=1)
    world.passes(session)
    assert event_now(session, NAME) == before
    watches = len(world.of_kind(session, WATCHED))
    world.day(session)
    assert len(world.of_kind(session, WATCHED)) == watches + 1, "and the next day is watched"
