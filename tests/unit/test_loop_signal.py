"""A person asks for a retraining: what the command says is what happens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from closing_world import NAME, ClosingWorld

from onejob.core.state import EndpointState
from onejob.loop.closing import RETRAIN
from onejob.loop.commands.explain import why
from onejob.loop.commands.signal import STARTS, signal
from onejob.monitor.spec import DAY


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClosingWorld]:
    made = ClosingWorld(tmp_path, monkeypatch)
    yield made
    made.close()


def test_before_the_first_block_has_ended_it_waits_for_it(world: ClosingWorld) -> None:
    session = world.supervisor()
    world.serve(session)
    world.day(session)
    waits = "no block has ended that anything was asked in"
    assert (signal(session, NAME).detail, why(session, NAME).outlook) == (waits, waits)
    world.passes(session)
    assert world.of_kind(session, RETRAIN) == []
    world.day(session)
    (run,) = world.of_kind(session, RETRAIN)
    assert run.cause["reason"] == "hand"
    assert why(session, NAME).outlook == ""


def test_a_pause_longer_than_the_history_leaves_nothing_to_retrain_on(world: ClosingWorld) -> None:
    world.rules = {**world.rules, "retrain": {**world.rules["retrain"], "history": "10d"}}
    session = world.supervisor()
    world.serve(session)
    world.day(session, 2)
    world.days += 200
    at = 15_000 * DAY + world.days * DAY
    world.traffic(session, at + 3600, at + 7200)
    assert signal(session, NAME).detail.startswith("no block has ended")
    world.passes(session)
    assert world.of_kind(session, RETRAIN) == []
    world.day(session)
    assert len(world.of_kind(session, RETRAIN)) == 1


def test_the_loop_of_a_stopped_endpoint_stands_still(world: ClosingWorld) -> None:
    session = world.supervisor()
    world.serve(session)
    world.day(session, 2)
    session.ledger.set_endpoint(NAME, EndpointState.STOPPING)
    session.ledger.set_endpoint(NAME, EndpointState.STOPPED)
    assert (signal(session, NAME).detail, why(session, NAME).outlook) == ("the endpoint is stopped",) * 2
    world.passes(session)
    assert world.of_kind(session, RETRAIN) == []
    session.ledger.set_endpoint(NAME, EndpointState.STARTING)
    assert signal(session, NAME).detail == STARTS
    world.passes(session)
    (run,) = world.of_kind(session, RETRAIN)
    assert len(run.cause["signals"]) == 2
