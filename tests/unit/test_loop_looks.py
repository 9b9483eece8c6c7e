"""A challenger is held against the engine that serves: one at a time, and again where another has come to serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from closing_world import NAME, ClosingWorld, decision, finding, report

from onejob.core.artifact import Json
from onejob.loop.closing import LOOK, OTHER_CHAMPION, RETRAIN, asked, scene_of
from onejob.loop.commands.promote import rollback
from onejob.loop.commands.signal import signal


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClosingWorld]:
    made = ClosingWorld(tmp_path, monkeypatch)
    made.rules["retrain"] = {**made.rules["retrain"], "cooldown": "1d"}
    made.found.report = lambda task: report(500, "", finding("labels", "b"))
    yield made
    made.close()


def test_a_retraining_waits_for_a_look_that_goes_on(world: ClosingWorld) -> None:
    session = world.supervisor()
    world.serve(session)
    reasons = []

    def verdict(task: Mapping[str, Json]) -> dict[str, Json]:
        signal(session, NAME, "a person wants it")
        scene = scene_of(session, NAME)
        assert scene is not None
        reasons.append(asked(session, scene).reason)
        return decision("hold", blocks=1)

    world.found.decision = verdict
    world.day(session, 4)
    assert [world.of_kind(session, kind) != [] for kind in (RETRAIN, LOOK)] == [True, True]
    assert set(reasons) == {"a retraining, or another look of the gate, goes on"}


def test_a_challenger_whose_champion_has_gone_meets_the_new_one(world: ClosingWorld) -> None:
    session = world.supervisor()
    first = world.serve(session)
    world.found.decision = lambda task: decision("promote")
    world.day(session, 2)
    second = world.endpoint(session).artifact
    assert second != first

    def meanwhile(task: object) -> dict[str, object]:
        """While the gate decides, a person puts the first one back."""
        world.found.decision = lambda task: decision("promote")
        rollback(session, NAME)
        return decision("promote")

    world.found.decision = meanwhile
    world.day(session, 2, passes=30)
    told = session.ledger.list_decisions(NAME)
    late = next(found for found in told if found.outcome == OTHER_CHAMPION)
    again = min((found for found in told if found.run > late.run), key=lambda found: found.run)
    assert (late.champion, again.champion) == (second, first)
    assert (again.challenger, again.look, again.outcome) == (late.challenger, 1, "promoted")
