"""A promoted engine that goes back while it is tried on a share of the requests: the loop follows its host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from closing_world import NAME, ClosingWorld, Found, decision, finding, report

from onejob.core.artifact import short
from onejob.core.ports import Status
from onejob.core.state import EndpointState
from onejob.errors import InferenceError
from onejob.loop.closing import RETRAIN
from onejob.loop.commands.explain import why
from onejob.loop.commands.promote import promote
from onejob.loop.session import Session


class Trying(Found):
    """Hosts that try each generation but the first beside the one that serves, and then let it serve, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.verdicts: dict[int, str] = {}
        """Generation -> `back`, or `tried` while it lasts; others serve at once."""
        self.serves = 1

    def _end(self, work: Path, end: str) -> Status:
        if end != "serve":
            return super()._end(work, end)
        generation = json.loads((work.parent / "desired.json").read_bytes())["generation"]
        verdict = self.verdicts.get(generation)
        if verdict is None:
            self.serves = generation
        state = {"pid": 7, "port": 8123, "state": "ready", "generation": self.serves, "error": None}
        if verdict == "tried":
            state |= {"rollout": {"generation": generation}}
        if verdict == "back":
            error = InferenceError(f"generation {generation} was tried and went back: 9 of 9 failed")
            state |= {"error": error.to_json(), "failed_generation": generation}
        (work.parent / "state.json").write_text(json.dumps(state))
        return Status("running")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClosingWorld]:
    made = ClosingWorld(tmp_path, monkeypatch)
    made.found = made.executor = Trying()
    yield made
    made.close()


def verdicts(world: ClosingWorld) -> dict[int, str]:
    assert isinstance(world.found, Trying)
    return world.found.verdicts


def promoted(world: ClosingWorld) -> tuple[Session, str, str]:
    """A challenger was promoted, and is tried: (session, champion, challenger)."""
    session = world.supervisor()
    champion = world.serve(session)
    fresh = report(500, "", finding("labels", "b"))
    world.found.report = lambda task: report() if task["options"]["fresh_from"] else fresh
    world.found.decision = lambda task: decision("promote")
    verdicts(world)[2] = "tried"
    world.day(session, 3)
    endpoint = world.endpoint(session)
    assert (endpoint.generation, endpoint.state) == (2, EndpointState.STARTING), "until it has taken all"
    return session, champion, endpoint.artifact


def test_an_engine_that_goes_back_is_rolled_back_and_what_served_all_the_time_is_ready(world: ClosingWorld) -> None:
    session, champion, challenger = promoted(world)
    verdicts(world)[2] = "back"
    world.passes(session)
    endpoint = world.endpoint(session)
    assert (endpoint.artifact, endpoint.generation, endpoint.state) == (champion, 3, EndpointState.READY)
    assert endpoint.error is None
    (promotion,) = session.ledger.list_promotions(NAME)
    told = "it failed: generation 2 was tried and went back: 9 of 9 failed"
    assert (promotion.state, promotion.reason) == ("rolled_back", told)
    ref = session.ledger.get_ref(f"{NAME}/engine@champion")
    assert ref is not None
    assert ref.digest == champion
    assert why(session, NAME).story[-1].text == f"{short(challenger)} is rolled back to {short(champion)}: {told}"
    assert world.executor.runs["host"] == 1, "its host goes on"
    assert world.executor.cancelled == set()
    world.day(session, 4)
    assert len(world.of_kind(session, RETRAIN)) == 1
    assert world.endpoint(session).generation == 3, "it is not promoted again by itself"


def test_one_that_takes_all_serves(world: ClosingWorld) -> None:
    session, _, challenger = promoted(world)
    world.day(session)
    (promotion,) = session.ledger.list_promotions(NAME)
    assert promotion.state == "probation"
    assert "former" in world.found.asked[-1]["inputs"], "it is watched while it is tried"
    del verdicts(world)[2]
    world.passes(session)
    endpoint = world.endpoint(session)
    assert (endpoint.artifact, endpoint.generation, endpoint.state) == (challenger, 2, EndpointState.READY)


def test_harm_while_it_is_tried_ends_the_trial(world: ClosingWorld) -> None:
    session, champion, _ = promoted(world)
    world.found.report = lambda task: report(0, "roll_back" if "former" in task["inputs"] else "")
    world.day(session)
    endpoint = world.endpoint(session)
    assert (endpoint.artifact, endpoint.generation, endpoint.state) == (champion, 3, EndpointState.READY)


def test_a_person_who_promotes_it_is_told_and_the_loop_goes_back_without_any_traffic(world: ClosingWorld) -> None:
    session = world.supervisor()
    champion = world.serve(session)
    session.ledger.add_run(world.job(lr=0.5))
    world.passes(session)
    other = world.endpoint(session).artifact
    assert other != champion
    verdicts(world)[3] = "back"
    with pytest.raises(InferenceError, match="went back"):
        promote(session, "1")
    world.passes(session)
    endpoint = world.endpoint(session)
    assert (endpoint.artifact, endpoint.generation, endpoint.state) == (other, 4, EndpointState.READY)
    assert session.ledger.list_promotions(NAME)[0].state == "rolled_back"
    assert session.ledger.list_segments(NAME) == []
