"""The loop closed, with a real ledger and steps that find what a test says: once, whoever dies, and back again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from closing_world import NAME, ClosingWorld, decision, finding, report

from onejob.core.records import NewSignal, Segment
from onejob.core.state import EndpointState, RunState
from onejob.errors import ConflictError, NotFoundError, UsageError
from onejob.loop.champion import RECENT, block_begins, newest_event
from onejob.loop.closing import LOOK, RETRAIN, WATCHED
from onejob.loop.commands.promote import promote, rollback
from onejob.loop.commands.run import _continue
from onejob.loop.commands.signal import STARTS, signal
from onejob.loop.reconcile import reconcile
from onejob.loop.session import Session
from onejob.monitor.spec import DAY
from onejob.testing.faults import POINTS


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClosingWorld]:
    made = ClosingWorld(tmp_path, monkeypatch)
    yield made
    made.close()


def labels_arrive(world: ClosingWorld, verdict: str = "promote") -> None:
    """Each report tells of fresh labels until they were trained on; the gate says what is told."""
    fresh = report(500, "", finding("labels", "b"))
    world.found.report = lambda task: report() if task["options"]["fresh_from"] else fresh
    world.found.decision = lambda task: decision(verdict)


def test_a_block_that_ends_is_watched_once(world: ClosingWorld) -> None:
    session = world.supervisor()
    champion = world.serve(session)
    world.day(session)
    assert world.of_kind(session, WATCHED) == [], "the first block hasn't ended"
    world.day(session)
    (run,) = world.of_kind(session, WATCHED)
    assert run.state is RunState.DONE
    assert run.cause["kind"] == "monitor"
    assert run.job == NAME
    (asked,) = world.found.asked
    assert asked["inputs"]["champion"]["digest"] == champion
    assert set(asked["inputs"]) == {"labelled", "dataset", "champion"}
    world.passes(session, 6)
    world.traffic(session, 15_002 * DAY, 15_002 * DAY + 21 * 3600)  # the same day
    world.passes(session, 6)
    assert len(world.of_kind(session, WATCHED)) == 1
    world.day(session)
    assert len(world.of_kind(session, WATCHED)) == 2


def test_labels_that_come_after_the_last_block_are_watched_once(world: ClosingWorld) -> None:
    session = world.supervisor()
    world.serve(session)
    world.day(session, 2)
    for hour in (1, 2):  # of the same day: one more watch
        world.traffic(session, 15_003 * DAY, 15_003 * DAY + hour * 3600, kind="labels")
        world.passes(session)
    assert len(world.of_kind(session, WATCHED)) == 2


def test_labels_retrain_and_the_gate_promotes_once(world: ClosingWorld) -> None:
    session = world.supervisor()
    champion = world.serve(session)
    labels_arrive(world)
    world.day(session, 4)
    (run,) = world.of_kind(session, RETRAIN)
    (found,) = session.ledger.list_signals(NAME)
    assert run.cause == {"kind": "signal", "endpoint": NAME, "signals": [found.id], "reason": "labels of b"}
    assert (found.kind, found.champion, found.run) == ("labels", champion, run.id)
    names = [row.name for row in session.ledger.list_steps(run.id)]
    assert names == ["monitor.labelled", "data", "train", "optimize.choose", "monitor.gate"]
    served = world.endpoint(session)
    (promotion,) = session.ledger.list_promotions(NAME)
    (decided,) = session.ledger.list_decisions(NAME)
    assert served.artifact == promotion.digest == decided.challenger != champion
    assert (promotion.former, promotion.cause, promotion.state) == (
        champion,
        {"kind": "gate", "run": run.id},
        "probation",
    )
    assert (decided.outcome, served.generation, served.state) == ("promoted", 2, EndpointState.READY)
    for name in (f"{NAME}/engine@champion", f"{NAME}/engine@challenger"):
        ref = session.ledger.get_ref(name)
        assert ref is not None
        assert ref.digest == served.artifact
    assert world.executor.runs["train"] == 2
    assert set(world.found.asked[-1]["inputs"]) == {"labelled", "dataset", "champion", "former"}


def test_the_retraining_extends_the_first_dataset(world: ClosingWorld) -> None:
    session = world.supervisor()
    world.serve(session)
    base = world.rows(session, session.ledger.get_run(1))["data"]
    labels_arrive(world)
    world.day(session, 3)
    (run,) = world.of_kind(session, RETRAIN)
    made = session.ledger.get_execution(world.rows(session, run)["data"].execution or "")
    assert made.inputs["dataset"] == session.ledger.get_execution(base.execution or "").outputs["dataset"]
    assert session.ledger.get_artifact(made.inputs["labelled"]).kind == "labelled"


@pytest.mark.parametrize("verdict", ["reject", "hold"])
def test_what_the_gate_does_not_let_through_changes_nothing(world: ClosingWorld, verdict: str) -> None:
    session = world.supervisor()
    champion = world.serve(session)
    labels_arrive(world, verdict)
    world.day(session, 3, passes=12)
    assert (world.endpoint(session).artifact, world.endpoint(session).generation) == (champion, 1)
    newest = session.ledger.list_decisions(NAME)[-1]
    assert newest.outcome == {"reject": "rejected", "hold": "held"}[verdict]
    assert newest.reasons == (f"because {verdict}",)


def test_a_held_challenger_is_looked_at_again_without_training(world: ClosingWorld) -> None:
    session = world.supervisor()
    champion = world.serve(session)
    labels_arrive(world)
    verdicts = iter([decision("hold", blocks=1), decision("hold", blocks=2), decision("promote")])
    world.found.decision = lambda task: next(verdicts)
    world.day(session, 8)
    looks = world.of_kind(session, LOOK)
    assert len(looks) == 2
    asked = [task["options"]["look"] for task in world.found.asked if task["name"] == "monitor.gate"]
    assert asked == [1, 1, 2], "a look at too few blocks has spent nothing"
    assert world.executor.runs["train"] == 2
    assert world.endpoint(session).artifact != champion
    assert [d.outcome for d in session.ledger.list_decisions(NAME)] == ["promoted", "held", "held"]


def test_a_challenger_is_not_looked_at_for_ever(world: ClosingWorld) -> None:
    session = world.supervisor()
    world.serve(session)
    labels_arrive(world, "hold")
    world.day(session, 9)
    assert len(session.ledger.list_decisions(NAME)) == 4


def test_by_hand_it_waits_for_a_person(world: ClosingWorld) -> None:
    world.rules = {**world.rules, "gate": {**world.rules["gate"], "approve": "hand"}}
    session = world.supervisor()
    champion = world.serve(session)
    with pytest.raises(NotFoundError, match="no challenger waits"):
        promote(session, NAME)
    labels_arrive(world)
    world.day(session, 5)
    assert world.endpoint(session).artifact == champion
    (decided,) = session.ledger.list_decisions(NAME)
    assert decided.applied is None
    view = promote(session, NAME)
    assert (view.digest, view.former, view.promotion) == (decided.challenger, champion, "probation")
    assert session.ledger.list_decisions(NAME)[0].outcome == "promoted"
    assert session.ledger.list_promotions(NAME)[0].cause["kind"] == "person"
    with pytest.raises(NotFoundError):
        promote(session, NAME)


# ---- back again --------------------------------------------------------------------------------------------------


def promoted(world: ClosingWorld, session: Session) -> tuple[str, str]:
    """(first champion, the challenger in its place, on probation)"""
    champion = world.serve(session)
    labels_arrive(world)
    world.day(session, 3)
    served = world.endpoint(session).artifact
    assert served != champion
    return champion, served


def test_harm_on_probation_brings_the_former_champion_back(world: ClosingWorld) -> None:
    session = world.supervisor()
    champion, _ = promoted(world, session)
    world.found.report = lambda task: report(0, "roll_back" if "former" in task["inputs"] else "")
    world.day(session, 2)
    (promotion,) = session.ledger.list_promotions(NAME)
    assert (promotion.state, promotion.reason) == ("rolled_back", "it says roll_back")
    served, ref = world.endpoint(session), session.ledger.get_ref(f"{NAME}/engine@champion")
    assert (served.artifact, served.generation, served.state) == (champion, 3, EndpointState.READY)
    assert ref is not None
    assert ref.digest == champion
    assert "former" not in world.found.asked[-1]["inputs"], "it is no longer on probation"
    assert world.found.asked[-1]["options"]["since"] == promotion.ended


def test_a_probation_that_goes_well_ends(world: ClosingWorld) -> None:
    session = world.supervisor()
    _, challenger = promoted(world, session)
    world.found.report = lambda task: report(0, "keep" if "former" in task["inputs"] else "")
    world.day(session, 2)
    (promotion,) = session.ledger.list_promotions(NAME)
    assert (promotion.state, promotion.reason) == ("kept", "it says keep")
    assert world.endpoint(session).artifact == challenger


def test_what_was_rolled_back_is_not_promoted_again_by_itself(world: ClosingWorld) -> None:
    session = world.supervisor()
    champion, challenger = promoted(world, session)
    rollback(session, NAME, "no good")
    assert world.endpoint(session).artifact == champion
    with pytest.raises(ConflictError, match="no engine that was promoted"):
        rollback(session, NAME)
    # the same challenger once more: its steps are cached, since nothing that they read has changed
    world.found.report = lambda task: report(500, "", finding("labels", task["options"]["fresh_from"] or "x"))
    first = session.ledger.list_decisions(NAME)[0]
    turn = session.ledger.list_turns(NAME, kind=RETRAIN)[0]
    again = session.ledger.add_run(world.job())
    world.passes(session)
    made = session.ledger.get_run(again.id)
    assert made.state is RunState.DONE
    assert (first.challenger, turn.outcome) == (challenger, "promote")
    view = promote(session, f"{NAME}/engine@challenger")
    assert (view.digest, view.promotion) == (challenger, "probation")


def test_an_engine_that_fails_goes_back_at_once(world: ClosingWorld) -> None:
    session = world.supervisor()
    champion = world.serve(session)
    world.found.refused = {2}
    labels_arrive(world)
    world.day(session, 3, passes=16)
    (promotion,) = session.ledger.list_promotions(NAME)
    assert (promotion.state, promotion.reason) == ("rolled_back", "it failed: the model can't be loaded")
    assert world.endpoint(session).artifact == champion


def test_rollback_goes_back_step_by_step(world: ClosingWorld) -> None:
    session = world.supervisor()
    champion, challenger = promoted(world, session)
    run = session.ledger.add_run(world.job(lr=0.5))
    world.passes(session)
    other = world.endpoint(session).artifact
    assert session.ledger.get_run(run.id).state is RunState.DONE
    assert other not in (champion, challenger), "another [train]: another model is wanted"
    assert session.ledger.list_promotions(NAME)[0].cause == {"kind": "run", "run": run.id}
    assert rollback(session, NAME).digest == challenger
    assert rollback(session, NAME).digest == champion
    with pytest.raises(ConflictError):
        rollback(session, NAME)


# ---- once --------------------------------------------------------------------------------------------------------


def test_a_thousand_signals_start_one_run(world: ClosingWorld) -> None:
    session = world.supervisor()
    world.serve(session)
    world.day(session, 2)
    storm = [NewSignal("harm", f"b{number}") for number in range(999)]
    session.ledger.add_signals(NAME, storm, event_time=1.0, champion=world.endpoint(session).artifact)
    assert signal(session, NAME, "now").detail == STARTS
    world.passes(session)
    (run,) = world.of_kind(session, RETRAIN)
    assert len(run.cause["signals"]) == 1000
    assert {s.run for s in session.ledger.list_signals(NAME)} == {run.id}
    world.day(session, 6)
    assert len(world.of_kind(session, RETRAIN)) == 1


def test_a_retraining_that_fails_is_not_tried_again_for_the_same_signals(world: ClosingWorld) -> None:
    session = world.supervisor()
    world.serve(session)
    world.executor.ends["train"] = ["ok", "fail"]
    world.day(session, 2)
    signal(session, NAME)
    world.passes(session)
    world.day(session, 6)
    (turn,) = session.ledger.list_turns(NAME, kind=RETRAIN)
    assert turn.outcome == "failed: no luck"
    assert world.executor.runs["train"] == 2


def test_two_supervisors_start_one_run(world: ClosingWorld) -> None:
    one, two = world.supervisor(), world.supervisor()
    world.serve(one)
    labels_arrive(world)
    for _ in range(3):
        world.day(one, passes=0)
        for _ in range(10):
            reconcile(two)
            reconcile(one)
    assert len(world.of_kind(one, RETRAIN)) == 1
    assert len(one.ledger.list_promotions(NAME)) == 1


CLOSING = [point for point in POINTS if point.startswith("closing.")]
SECOND = [("closing.before_add", 2), ("closing.after_add", 2), ("turns.before_commit", 2), ("signals.before_commit", 2)]
SECOND += [("promotions.before_commit", 2)]
TRANSACTIONS = [f"{part}.before_commit" for part in ("signals", "turns", "decisions", "promotions")]


@pytest.mark.parametrize(("point", "nth"), [*((point, 1) for point in CLOSING + TRANSACTIONS), *SECOND])
def test_dying_at_any_line_does_everything_once(world: ClosingWorld, point: str, nth: int) -> None:
    session = world.supervisor()
    champion = world.serve(session)
    passed = 0

    def fatal(reached: str) -> bool:
        nonlocal passed
        passed += reached == point
        return reached == point and passed == nth

    def found(task: dict[str, dict[str, object]]) -> dict[str, object]:
        if not task["options"]["fresh_from"]:
            return report(500, "", finding("labels", "b"))
        return report(0, "roll_back" if "former" in task["inputs"] else "")

    world.found.report = found  # type: ignore[assignment]
    world.found.decision = lambda task: decision("promote")
    world.fatal = fatal
    for _ in range(4):
        world.day(session, passes=0)
        session = world.hardy(session)
    world.fatal = lambda reached: False
    assert world.died == 1, f"{point} was reached {passed} times"
    (run,) = world.of_kind(session, RETRAIN)
    assert world.executor.runs["train"] == 2
    (promotion,) = session.ledger.list_promotions(NAME)
    assert promotion.state == "rolled_back"
    assert (world.endpoint(session).artifact, world.endpoint(session).generation) == (champion, 3)
    assert [d.outcome for d in session.ledger.list_decisions(NAME)] == ["promoted"]
    assert [(s.kind, s.champion, s.run) for s in session.ledger.list_signals(NAME)] == [("labels", champion, run.id)]
    watched = session.ledger.list_turns(NAME, kind=WATCHED)
    assert len(watched) == 3, "one for each block that has ended"
    assert all(turn.taken for turn in watched)


# ---- a person's runs ---------------------------------------------------------------------------------------------


def test_an_ordinary_run_leaves_the_champion(world: ClosingWorld) -> None:
    session = world.supervisor()
    champion, challenger = promoted(world, session)
    run = session.ledger.add_run(world.job())
    world.passes(session)
    assert session.ledger.get_run(run.id).state is RunState.DONE
    assert world.endpoint(session).artifact == challenger
    ref = session.ledger.get_ref(f"{NAME}/engine@champion")
    assert ref is not None
    assert ref.digest == challenger
    said = [e.data["text"] for e in session.ledger.events(subject=f"run/{run.id}") if e.kind == "warning"]
    assert len(said) == 1
    assert f"`onejob promote {run.id}`" in said[0]
    assert promote(session, str(run.id)).digest == champion


def test_its_other_tables_are_applied_all_the_same(world: ClosingWorld) -> None:
    session = world.supervisor()
    _, challenger = promoted(world, session)
    world.rules = {**world.rules, "interval": 9.0}
    session.ledger.add_run(world.job())
    world.passes(session)
    served = world.endpoint(session)
    assert (served.artifact, served.options["monitor"]["interval"]) == (challenger, 9.0)


@pytest.mark.parametrize("how", ["forced", "without a gate"])
def test_a_forced_run_and_one_without_a_gate_serve_theirs(world: ClosingWorld, how: str) -> None:
    session = world.supervisor()
    _, challenger = promoted(world, session)
    if how == "forced":
        world.clock.now += 1
        new = world.job()
        session.ledger.add_run(type(new)(new.job, new.project, new.spec, new.plan, new.cause, ("optimize.choose",)))
    else:
        world.rules = {"retrain": world.rules["retrain"]}
        session.ledger.add_run(world.job())
    world.passes(session)
    assert world.endpoint(session).artifact != challenger


def test_a_run_neither_goes_on_with_nor_ends_runs_of_the_loop(
    world: ClosingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = world.supervisor()
    world.serve(session)
    world.day(session, 2)
    signal(session, NAME)
    world.executor.ends["train"] = ["hang"]
    world.passes(session)
    (run,) = world.of_kind(session, RETRAIN)
    monkeypatch.setattr(sys.modules["onejob.loop.commands.run"], "_fingerprint", lambda job, plan: "f")
    job = type("Job", (), {"name": NAME, "project": world.project})
    assert _continue(session, job, world.job().plan, ()) is None  # type: ignore[arg-type]
    assert session.ledger.get_run(run.id).state is RunState.RUNNING


# ---- rules and time ----------------------------------------------------------------------------------------------


def test_without_rules_nothing_is_retrained_or_promoted(world: ClosingWorld) -> None:
    world.rules = {}
    session = world.supervisor()
    world.serve(session)
    with pytest.raises(UsageError, match="nothing has come back"):
        signal(session, NAME)
    labels_arrive(world)
    world.day(session, 3)
    assert world.of_kind(session, RETRAIN) == []
    with pytest.raises(UsageError, match="no rules for a retraining"):
        signal(session, NAME)


def test_without_a_gate_it_is_trained_and_not_promoted(world: ClosingWorld) -> None:
    world.rules = {"retrain": world.rules["retrain"]}
    session = world.supervisor()
    champion = world.serve(session)
    labels_arrive(world)
    world.day(session, 3)
    (turn,) = session.ledger.list_turns(NAME, kind=RETRAIN)
    assert turn.outcome.startswith("trained")
    assert world.endpoint(session).artifact == champion
    challenger = session.ledger.get_ref(f"{NAME}/engine@challenger")
    assert challenger is not None
    assert promote(session, f"{NAME}/engine@challenger").promotion == "kept", "no rules, no probation"


def test_an_epoch_that_held_out_rows_chose_is_not_judged_by_such_rows(world: ClosingWorld) -> None:
    """A job with a gate can't be planned so; an engine of an older run, promoted by hand, may have been."""
    session = world.supervisor()
    session.ledger.add_run(world.job(keep="best"))
    labels_arrive(world)
    world.passes(session)
    world.day(session, 3)
    assert world.of_kind(session, RETRAIN) == []
    (told,) = [e.data["text"] for e in session.ledger.events() if "[train] keep" in e.data.get("text", "")]
    assert told.startswith("retrain: ")


def test_a_stopped_endpoint_is_left_alone(world: ClosingWorld) -> None:
    session = world.supervisor()
    world.serve(session)
    world.day(session)
    session.ledger.set_endpoint(NAME, EndpointState.STOPPING)
    session.ledger.set_endpoint(NAME, EndpointState.STOPPED)
    world.day(session, 3)
    assert world.of_kind(session, WATCHED) == []


def segment(ends: float) -> Segment:
    return Segment(1, NAME, "d", "traffic", ends - 1, ends, 1)


def test_a_single_wild_clock_does_not_stop_time(world: ClosingWorld) -> None:
    assert newest_event([]) is None
    assert newest_event([segment(5.0), segment(9.0), segment(7.0)]) == 9.0, "replicas seal independently"
    session = world.supervisor()
    world.serve(session)
    labels_arrive(world)
    world.day(session, 2, passes=20)
    world.traffic(session, 15_003 * DAY, 40_000 * DAY)
    world.passes(session)
    before = len(world.of_kind(session, RETRAIN))
    world.day(session, RECENT + 8, passes=6)
    watched = session.ledger.list_turns(NAME, kind=WATCHED)
    assert watched[0].event_time < 16_000 * DAY, "time goes on where it was"
    assert len(watched) > 8
    assert len(world.of_kind(session, RETRAIN)) <= before + 4


@pytest.mark.parametrize(
    ("time", "by", "zone", "begins"),
    [
        (1363000000.0, "day", "UTC", 1362960000.0),
        (1363000000.0, "hour", "UTC", 1362999600.0),
        (1363000000.0, "week", "UTC", 1362960000.0),
        (1362960000.0 - 1, "week", "UTC", 1362355200.0),
        (1363000000.0, "day", "America/New_York", 1362974400.0),
        (1362900000.0, "day", "America/New_York", 1362891600.0),
    ],
)
def test_where_a_block_begins(time: float, by: str, zone: str, begins: float) -> None:
    assert block_begins(time, by, zone) == begins
