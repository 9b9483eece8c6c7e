"""The contract of a ledger's signals, turns, decisions and promotions, as tests that every adapter passes.

A test module inherits `SignalsContract` and gives the fixture `open_ledger`, as for `ledger_contract.LedgerContract`.
"""

from __future__ import annotations

from typing import Any

import pytest

from onejob.core.ports import Ledger
from onejob.core.records import Decision, Execution, NewSignal, NewTurn, Run
from onejob.core.state import EndpointState, PromotionState, RunState
from onejob.errors import ConflictError, NotFoundError
from onejob.testing.ledger_samples import TTL, A, Clock, OpenLedger, leave, new_run, some_artifact

OLD, NEW, NEWER = (some_artifact(text, "engine") for text in ("old", "new", "newer"))
HARM = NewSignal("harm", "2013-03-10", 21.5, 20.0, {"e": [1.0, 21.5], "text": "naïve\0"})


class SignalsContract:
    """What every ledger does with signals, turns, decisions and promotions."""

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def ledger(self, open_ledger: OpenLedger, clock: Clock) -> Ledger:
        made = open_ledger(clock=clock)
        for artifact in (OLD, NEW, NEWER):
            made.add_artifact(artifact)
        made.want_endpoint("e", artifact=OLD.digest, execution=None, options={"port": 0, "tries": 2})
        return made

    @pytest.fixture
    def maker(self, ledger: Ledger) -> Execution:
        """The execution that made NEW."""
        return leave(ledger, ledger.add_run(new_run()).id, "k1", {"engine": NEW})

    def turn(self, ledger: Ledger, kind: str = "watch", **more: Any) -> Run | None:
        return ledger.add_turn(new_run(), NewTurn("e", kind, 500.0, OLD.digest, {"segment": 3}), **more)

    def end(self, ledger: Ledger, run: Run) -> None:
        lease = ledger.lease("run", run.id, A, TTL)
        assert lease is not None
        ledger.set_run(run.id, RunState.RUNNING, token=lease.token)
        ledger.set_run(run.id, RunState.DONE, token=lease.token)

    # ---- signals

    def test_a_finding_is_stored_once_with_its_evidence(self, ledger: Ledger, open_ledger: OpenLedger) -> None:
        told: dict[str, Any] = {"event_time": 400.0, "champion": OLD.digest}
        (first,) = ledger.add_signals("e", [HARM], report="r1", **told)
        assert (first.id, first.kind, first.block, first.value, first.threshold) == (1, "harm", "2013-03-10", 21.5, 20)
        assert (first.champion, first.report, first.place, first.run) == (OLD.digest, "r1", 0, None)
        assert (first.created, first.event_time, first.evidence) == (1000.0, 400.0, HARM.evidence)
        later = NewSignal("harm", "2013-03-11")
        again = ledger.add_signals("e", [HARM, later, later], report="r2", **told)
        assert [(s.id, s.block, s.place) for s in again] == [(2, "2013-03-11", 1)]
        assert ledger.add_signals("e", [HARM], event_time=400.0, champion=NEW.digest), "another engine's"
        assert [s.id for s in open_ledger().list_signals("e")] == [3, 2, 1]
        assert [s.id for s in ledger.list_signals("e", limit=1)] == [3]
        assert ledger.list_signals("E") == []
        kinds = [e.kind for e in ledger.events(subject="endpoint/e/signal")]
        assert kinds == ["harm", "harm", "harm"]
        with pytest.raises(NotFoundError):
            ledger.add_signals("nosuch", [HARM], event_time=0.0)

    def test_signals_by_hand_are_each_their_own(self, ledger: Ledger) -> None:
        for _ in range(2):
            assert ledger.add_signals("e", [NewSignal("hand")], event_time=1.0)
        assert len(ledger.list_signals("e", fresh=True)) == 2

    def test_the_turn_that_brought_signals_ends_with_them(self, ledger: Ledger) -> None:
        run = self.turn(ledger)
        assert run is not None
        assert [t.run for t in ledger.list_turns("e", taken=False)] == [run.id]
        for _ in range(2):
            ledger.add_signals("e", [HARM], event_time=1.0, champion=OLD.digest, report="r1", turn=run.id)
        (turn,) = ledger.list_turns("e", taken=True)
        assert (turn.run, turn.kind, turn.event_time, turn.champion) == (run.id, "watch", 500.0, OLD.digest)
        assert (turn.facts, turn.taken, turn.outcome) == ({"segment": 3}, 1000.0, "1 new signals")

    # ---- turns

    def test_one_run_of_a_kind_at_a_time_until_its_result_is_taken_over(self, ledger: Ledger) -> None:
        run = self.turn(ledger)
        assert run is not None
        assert self.turn(ledger) is None
        other = self.turn(ledger, "retrain")
        assert other is not None
        self.end(ledger, run)
        assert self.turn(ledger) is None, "it has ended, and nobody has read its result"
        ledger.end_turn(run.id, "failed")
        ledger.end_turn(run.id, "again")
        assert self.turn(ledger) is not None
        assert [t.outcome for t in ledger.list_turns("e", kind="watch")] == ["", "failed"]
        assert [t.run for t in ledger.list_turns("e", kind="retrain", limit=3)] == [other.id]
        with pytest.raises(NotFoundError):
            ledger.end_turn(99, "")

    def test_a_signal_causes_one_run(self, ledger: Ledger) -> None:
        made = ledger.add_signals("e", [HARM, NewSignal("labels", "b")], event_time=1.0, champion=OLD.digest)
        ids = [signal.id for signal in made]
        run = self.turn(ledger, "retrain", signals=ids, raised=[NewSignal("schedule")])
        assert run is not None
        assert [(s.kind, s.run) for s in ledger.list_signals("e")] == [
            ("schedule", run.id),
            ("labels", run.id),
            ("harm", run.id),
        ]
        assert ledger.list_signals("e", fresh=True) == []
        self.end(ledger, run)
        ledger.end_turn(run.id, "promoted")
        runs = len(ledger.list_runs())
        assert self.turn(ledger, "retrain", signals=ids[:1]) is None
        assert self.turn(ledger, "retrain", signals=[99]) is None, "such a signal isn't there"
        assert len(ledger.list_runs()) == runs, "nothing was added"

    # ---- decisions

    def decision(self, run: Run, **more: Any) -> Decision:
        told: dict[str, Any] = {"verdict": "promote", "reasons": ("proven",), "missing": (), "execution": None}
        told |= {"champion": OLD.digest, "challenger": NEW.digest, "artifact": "d1", "event_time": 600.0}
        return Decision(run=run.id, endpoint="e", **{**told, **more})

    def test_a_run_has_one_decision_and_it_ends_the_turn(self, ledger: Ledger, clock: Clock) -> None:
        run = self.turn(ledger, "retrain")
        assert run is not None
        stored = ledger.add_decision(self.decision(run))
        assert (stored.verdict, stored.reasons, stored.created, stored.applied) == (
            "promote",
            ("proven",),
            1000.0,
            None,
        )
        clock.now += 5
        assert ledger.add_decision(self.decision(run, verdict="reject")) == stored
        assert [t.outcome for t in ledger.list_turns("e")] == ["promote"]
        ledger.settle_decision(run.id, "waits")
        ledger.settle_decision(run.id, "something else")
        assert [(d.applied, d.outcome) for d in ledger.list_decisions("e", limit=1)] == [(1005.0, "waits")]
        with pytest.raises(NotFoundError):
            ledger.settle_decision(99, "")

    # ---- promotions

    def test_a_promotion_is_all_or_nothing_and_once(self, ledger: Ledger, maker: Execution) -> None:
        run = self.turn(ledger, "retrain")
        assert run is not None
        ledger.add_decision(self.decision(run))
        told: dict[str, Any] = {"digest": NEW.digest, "execution": maker.id, "cause": {"kind": "gate", "run": run.id}}
        told |= {"event_time": 600.0, "state": PromotionState.PROBATION, "decision": run.id, "ref": "e/engine@champion"}
        with pytest.raises(ConflictError):
            ledger.promote("e", **told, expect=NEWER.digest)
        assert ledger.list_promotions("e") == []
        made = [ledger.promote("e", **told, expect=OLD.digest) for _ in range(2)]
        assert made[0] == made[1]
        assert ledger.list_promotions("e") == made[:1]
        assert (made[0].former, made[0].former_execution, made[0].state) == (OLD.digest, None, "probation")
        endpoint, ref = ledger.get_endpoint("e"), ledger.get_ref("e/engine@champion")
        assert endpoint is not None
        assert ref is not None
        assert (endpoint.artifact, endpoint.execution, endpoint.generation) == (NEW.digest, maker.id, 2)
        assert endpoint.options == {"port": 0}, "the tries of the old wish are over"
        assert ref.digest == NEW.digest
        assert [d.outcome for d in ledger.list_decisions("e")] == ["promoted"]
        with pytest.raises(NotFoundError):
            ledger.promote("nosuch", **{**told, "decision": None})

    def test_only_the_newest_is_on_probation(self, ledger: Ledger) -> None:
        told: dict[str, Any] = {"execution": None, "cause": {"kind": "person"}, "state": PromotionState.PROBATION}
        ledger.promote("e", digest=NEW.digest, event_time=600.0, **told)
        ledger.promote("e", digest=NEWER.digest, event_time=700.0, **told)
        newer, new = ledger.list_promotions("e")
        assert (newer.state, new.state, new.ended) == ("probation", "kept", 700.0)
        assert newer.former == NEW.digest
        ledger.keep_promotion(newer.id, reason="no harm", event_time=900.0)
        assert [p.reason for p in ledger.list_promotions("e", limit=1)] == ["no harm"]

    def test_the_former_engine_comes_back_once(self, ledger: Ledger) -> None:
        told: dict[str, Any] = {"execution": None, "cause": {"kind": "person"}, "state": PromotionState.PROBATION}
        first = ledger.promote("e", digest=NEW.digest, event_time=600.0, ref="e/engine@champion", **told)
        ledger.set_endpoint("e", EndpointState.FAILED, error={"message": "no"})
        back: dict[str, Any] = {"reason": "harm", "cause": {"kind": "probation"}, "ref": "e/engine@champion"}
        for _ in range(2):
            done = ledger.roll_back(first.id, event_time=650.0, **back)
            assert (done.state, done.reason, done.ended) == ("rolled_back", "harm", 650.0)
        endpoint, ref = ledger.get_endpoint("e"), ledger.get_ref("e/engine@champion")
        assert endpoint is not None
        assert ref is not None
        assert (endpoint.artifact, endpoint.generation, endpoint.state) == (OLD.digest, 3, EndpointState.STARTING)
        assert endpoint.error is None
        assert ref.digest == OLD.digest
        with pytest.raises(ConflictError):
            ledger.keep_promotion(first.id, reason="", event_time=0.0)
        second = ledger.promote("e", digest=NEWER.digest, event_time=700.0, **told)
        ledger.want_endpoint("e", artifact=OLD.digest, execution=None, options={})
        with pytest.raises(ConflictError):
            ledger.roll_back(second.id, event_time=800.0, **back)

    def test_engines_of_promotions_are_not_dropped(self, ledger: Ledger) -> None:
        ledger.promote(
            "e",
            digest=NEW.digest,
            execution=None,
            cause={"kind": "person"},
            event_time=1.0,
            state=PromotionState.KEPT,
        )
        with pytest.raises(ConflictError, match="a promotion of the endpoint e"):
            ledger.drop_artifacts([OLD.digest])
        ledger.drop_artifacts([NEWER.digest])
