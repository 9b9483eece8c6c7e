"""The service of an endpoint: `onejob up` collects its counters, and tells once where an error budget burns."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from closing_world import NAME, ClosingWorld, decision, finding, report

from onejob.core.counters import Counters
from onejob.core.records import Signal
from onejob.core.state import EndpointState
from onejob.loop.commands import look
from onejob.loop.commands.explain import why
from onejob.loop.commands.run import up
from onejob.loop.service import Service, watch_service
from onejob.loop.session import Session
from onejob.monitor.collect import series_of

YEAR = 365 * 86_400.0
PROMISED = {"slo": {"p99_ms": 50, "error_rate": 0.01}}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClosingWorld]:
    made = ClosingWorld(tmp_path, monkeypatch)
    made.rules = {**made.rules, **PROMISED}
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    yield made
    made.close()


class Replica:
    """One that counts on, and leaves its counters in the endpoint's folder."""

    def __init__(self, session: Session) -> None:
        self._path = session.home.endpoint(NAME) / "metrics" / "7.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._counters = Counters()

    def answers(self, good: int, failed: int = 0, slow: int = 0) -> None:
        for count, milliseconds in ((good, 5), (failed, 5), (slow, 500)):
            for _ in range(count):
                self._counters.observe(milliseconds * 1_000_000)
        self._counters.count("success", good + slow)
        self._counters.count("failure.BACKEND", failed)
        self._path.write_text(json.dumps({"id": "7:1", **self._counters.to_json()}))


def minutes(world: ClosingWorld, session: Session, replica: Replica, count: int, **each: int) -> None:
    """So many minutes of `onejob up`, in each of which the replica answers so much."""
    for _ in range(count):
        replica.answers(**each)
        world.clock.now += 60
        up(session, passes=1)


def service_signals(session: Session) -> list[Signal]:
    return [signal for signal in session.ledger.list_signals(NAME) if signal.kind == "slo"]


def served(world: ClosingWorld) -> tuple[Session, Replica]:
    session = world.supervisor()
    world.serve(session)
    world.day(session)
    return session, Replica(session)


def test_up_collects_and_says_nothing_of_a_healthy_service(world: ClosingWorld) -> None:
    session, replica = served(world)
    minutes(world, session, replica, 90, good=20)
    lines = series_of(session.home.endpoint(NAME))
    assert len(lines) == 90
    assert sum(line["requests"] for line in lines) == 1800
    assert service_signals(session) == []


@pytest.mark.parametrize(
    ("each", "objective"), [({"good": 10, "failed": 10}, "error_rate"), ({"good": 10, "slow": 10}, "p99_ms")]
)
def test_a_budget_that_burns_is_told_once_for_each_block_and_champion(
    world: ClosingWorld, monkeypatch: pytest.MonkeyPatch, each: dict[str, int], objective: str
) -> None:
    session, replica = served(world)
    champion = world.endpoint(session).artifact
    minutes(world, session, replica, 60, good=20)
    minutes(world, session, replica, 5, **each)
    ticket, page = (f"{objective} ({severity}), 2011-01-27" for severity in ("ticket", "page"))
    assert [signal.block for signal in service_signals(session)] == [ticket]
    minutes(world, session, replica, 55, **each)
    found = service_signals(session)
    assert [signal.block for signal in found] == [page, ticket], "the slower burn does not hide the faster one"
    assert [signal.threshold for signal in found] == [6.0, 1.0]
    assert (found[0].champion, found[0].run, found[0].evidence["objective"]) == (champion, None, objective)
    fresh = report(500, "", finding("labels", "b"))
    world.found.report = lambda task: report() if task["options"]["fresh_from"] else fresh
    world.found.decision = lambda task: decision("promote")
    world.day(session)
    minutes(world, session, replica, 3, **each)
    later = service_signals(session)[:-2]
    challenger = world.endpoint(session).artifact
    assert [(signal.champion, signal.block) for signal in later] == [(challenger, f"{objective} (page), 2011-01-28")]
    assert later[0].evidence["says"] == "600 of 1,200 requests in 1 h"
    monkeypatch.setattr(look, "told_of", lambda session, endpoint: {})  # the traffic of this world can't be read
    for told in (why(session, NAME).story, look.show(session, NAME).story):
        line = next(line for line in told if line.kind == "signal" and line.text.startswith("slo"))
        assert line.text.startswith(f"slo of {ticket}: the budget burns ")
        says = " times as fast as it may, 1 is the threshold (20 of 1,240 requests in 72 h)"
        assert line.text.endswith(f"{says}; 2 more such, the last of {later[0].block}")


def test_a_service_that_only_fails_has_captured_nothing_and_is_told_all_the_same(world: ClosingWorld) -> None:
    session = world.supervisor()
    world.serve(session)
    world.clock.now = 1_800_000_000.0
    minutes(world, session, Replica(session), 3, good=0, failed=20)
    (signal,) = service_signals(session)
    assert (signal.block, signal.event_time) == ("error_rate (page), 2027-01-15", world.clock.now - 120)


def test_an_endpoint_that_is_only_starting_is_looked_after_and_a_stopped_one_is_not(world: ClosingWorld) -> None:
    """While an engine is tried on a share of the requests, the endpoint counts as starting: it matters most then."""
    session, replica = served(world)
    world.executor.ends["host"] = ["hang"]
    session.ledger.set_endpoint(NAME, EndpointState.STARTING)
    minutes(world, session, replica, 2, good=10, failed=10)
    assert [signal.block for signal in service_signals(session)] == ["error_rate (page), 2011-01-27"]
    session.ledger.set_endpoint(NAME, EndpointState.STOPPING)
    session.ledger.set_endpoint(NAME, EndpointState.STOPPED)
    before = series_of(session.home.endpoint(NAME))
    minutes(world, session, replica, 2, good=10, failed=10)
    assert series_of(session.home.endpoint(NAME)) == before


def test_without_promises_nothing_is_told(world: ClosingWorld) -> None:
    del world.rules["slo"]
    session, replica = served(world)
    minutes(world, session, replica, 3, good=10, failed=10)
    assert service_signals(session) == []
    watch_service(session, "nosuch")


@pytest.mark.parametrize("jump", [-3600.0, YEAR, -YEAR])
def test_a_clock_that_jumps_stops_neither_collecting_nor_looking(world: ClosingWorld, jump: float) -> None:
    world.clock.now = 1_800_000_000.0
    session, replica = served(world)
    service = Service(session)

    def passes(count: int, **each: int) -> None:
        for _ in range(count):
            replica.answers(**each)
            world.clock.now += 60
            service.tend()

    passes(10, good=20)
    world.clock.now += jump
    passes(10, good=20)
    assert service_signals(session) == []
    lines = series_of(session.home.endpoint(NAME))
    assert sum(line["requests"] for line in lines if line["time"] <= world.clock.now) >= 200, "the last ten minutes"
    passes(20, good=0, failed=20)
    assert len(service_signals(session)) == 1


def test_what_is_wrong_with_one_endpoint_is_not_the_others_fault(world: ClosingWorld) -> None:
    session, replica = served(world)
    options: dict[str, Any] = {"monitor": {"slo": {"p99_ms": "no number"}}}
    first = world.endpoint(session)
    for name in ("another", "elsewhere"):
        session.ledger.want_endpoint(name, artifact=first.artifact, execution=None, options=options)
        session.home.endpoint(name).mkdir(parents=True)
    session.ledger.set_endpoint("elsewhere", EndpointState.STARTING, handle={"host": "far/1/1"})
    service = Service(session)
    replica.answers(good=5)
    service.tend()
    assert [line["requests"] for line in series_of(session.home.endpoint(NAME))] == [5]
    assert list(session.troubles.known) == ["service/another"], "another machine's is not ours"
