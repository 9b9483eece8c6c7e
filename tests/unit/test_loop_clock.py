"""The machine's clock jumps while the loop closes: nothing is started twice, and nothing waits for another time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest
from closing_world import NAME, ClosingWorld, decision, finding, report

from onejob.core.artifact import Json
from onejob.core.ports import Status
from onejob.core.state import EndpointState, RunState
from onejob.loop.closing import RETRAIN, WATCHED
from onejob.loop.endpoints import newest_host
from onejob.loop.reconcile import reconcile
from onejob.loop.session import Session

HOUR, YEAR = 3600.0, 365 * 86_400.0
JUMPS = [[-HOUR], [YEAR], [YEAR, -YEAR]]
"""What the clock does, again and again."""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClosingWorld]:
    made = ClosingWorld(tmp_path, monkeypatch)
    made.clock.now = 1_800_000_000.0
    yield made
    made.close()


def retrains_then_does_harm(world: ClosingWorld) -> None:
    """Labels ask for a retraining; its challenger is promoted, and its watch says that it does harm."""
    fresh = report(500, "", finding("labels", "b"))

    def found(task: Json) -> dict[str, Json]:
        if not task["options"]["fresh_from"]:
            return fresh
        return report(0, "roll_back" if "former" in task["inputs"] else "")

    world.found.report = found
    world.found.decision = lambda task: decision("promote")


def closed_once(world: ClosingWorld, session: Session, champion: str, *, days: int) -> None:
    (run,) = world.of_kind(session, RETRAIN)
    assert run.state is RunState.DONE
    assert world.executor.runs["train"] == 2
    (promotion,) = session.ledger.list_promotions(NAME)
    assert promotion.state == "rolled_back"
    assert (promotion.event_time, promotion.ended) == (15_002 * 86_400 + 20 * HOUR, 15_003 * 86_400 + 20 * HOUR)
    endpoint = world.endpoint(session)
    assert (endpoint.artifact, endpoint.generation, endpoint.state) == (champion, 3, EndpointState.READY)
    assert [(signal.kind, signal.run) for signal in session.ledger.list_signals(NAME)] == [("labels", run.id)]
    watched = session.ledger.list_turns(NAME, kind=WATCHED)
    assert [turn.outcome for turn in watched].count("0 new signals") == days - 2
    assert len(watched) == days - 1
    assert session.troubles.known == {}


@pytest.mark.parametrize("jumps", JUMPS, ids=str)
def test_the_loop_closes_once_whatever_the_clock_does_between_two_passes(
    world: ClosingWorld, jumps: list[float]
) -> None:
    session, jump = world.supervisor(), cycle(jumps)
    champion = world.serve(session)
    retrains_then_does_harm(world)
    for _ in range(5):
        world.day(session, passes=0)
        for _ in range(10):
            reconcile(session)
            world.clock.now += next(jump)
    closed_once(world, session, champion, days=5)


@pytest.mark.parametrize("jumps", JUMPS, ids=str)
def test_two_supervisors_close_it_once(world: ClosingWorld, jumps: list[float]) -> None:
    """Each jump makes the other's leases look expired, or endless."""
    one, two = world.supervisor(), world.supervisor()
    jump = cycle(jumps)
    champion = world.serve(one)
    retrains_then_does_harm(world)
    for _ in range(5):
        world.day(one, passes=0)
        for _ in range(10):
            for session in (one, two, two, one):
                reconcile(session)
                world.clock.now += next(jump)
    two.troubles.known.clear()
    closed_once(world, one, champion, days=5)


def training(world: ClosingWorld) -> tuple[Session, str]:
    """A supervisor in the middle of a retraining, and the champion's digest; then the clock goes back a year."""
    session = world.supervisor()
    champion = world.serve(session)
    retrains_then_does_harm(world)
    world.executor.ends["train"] = ["ok", "hang"]
    world.day(session, 2)
    (run,) = world.of_kind(session, RETRAIN)
    assert run.state is RunState.RUNNING
    world.clock.now -= YEAR
    return session, champion


def goes_on(world: ClosingWorld, session: Session, champion: str) -> None:
    world.executor.ends["train"] = ["ok"]
    world.passes(session)
    world.day(session, 3)
    closed_once(world, session, champion, days=5)


def test_a_supervisor_that_dies_is_followed_at_once(world: ClosingWorld) -> None:
    first, champion = training(world)
    other = world.supervisor()
    for session in (first, other, other):
        reconcile(session)
    world.kill(first)
    goes_on(world, other, champion)


def test_one_that_hangs_is_followed_when_its_leases_have_lasted_so_long_from_now(world: ClosingWorld) -> None:
    first, champion = training(world)
    other = world.supervisor()
    for _ in range(2):  # first the run, then what it executes
        reconcile(other)
        world.clock.now += first.ttl + 1
    goes_on(world, other, champion)


def test_one_that_works_keeps_what_it_holds(world: ClosingWorld) -> None:
    first, champion = training(world)
    other = world.supervisor()
    for _ in range(12):
        for session in (first, other):
            reconcile(session)
        world.clock.now += first.ttl / 4
    assert [event.subject for event in first.ledger.events() if event.kind == "taken over"] == []
    goes_on(world, first, champion)


def test_a_retraining_is_bounded_by_event_time_not_by_the_clock(world: ClosingWorld) -> None:
    """Labels enough in every report: the cool-down of three days of event time lets a third of the days retrain."""
    session = world.supervisor()
    world.serve(session)
    world.found.report = lambda task: report(500, "", finding("labels", f"b{len(world.found.asked)}"))
    for _ in range(6):
        world.day(session)
        world.clock.now += YEAR
    days = [turn.event_time // 86_400 - 15_000 for turn in reversed(session.ledger.list_turns(NAME, kind=RETRAIN))]
    assert days == [2, 5]


def test_hosts_that_died_in_a_time_to_come_are_no_reason_to_give_up(world: ClosingWorld) -> None:
    session = world.supervisor()
    world.serve(session)
    for _ in range(3):
        host_dies(world, session)
        world.clock.now += HOUR
        world.passes(session)
    assert world.endpoint(session).state is EndpointState.READY, "an hour lies between them"
    world.clock.now -= YEAR
    host_dies(world, session)
    world.passes(session)
    assert (world.endpoint(session).state, world.executor.runs["host"]) == (EndpointState.READY, 5)


def host_dies(world: ClosingWorld, session: Session) -> None:
    host, number = newest_host(session.home.endpoint(NAME))
    told = {"code": 1, "time": world.clock.now, "reason": "killed"}
    (session.home.endpoint(NAME) / f"host-{number}" / "exit.json").write_text(json.dumps(told))
    world.executor.over[host["dir"]] = Status("gone", reason="killed")
