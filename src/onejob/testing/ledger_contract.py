"""The contract of a ledger, as tests that every adapter passes.

A test module inherits `LedgerContract` and gives the fixture `open_ledger`: a function that opens the same, at first
empty, ledger each time it is called, with the keywords `clock` and `alive` of `SqlLedger`.
"""

from __future__ import annotations

import pytest

from onejob.core.ports import Ledger
from onejob.core.records import Run
from onejob.core.state import ExecutionState, RunState, StepState
from onejob.errors import ConflictError, LeaseLostError, NotFoundError, UsageError
from onejob.testing.ledger_catalog_contract import CatalogContract
from onejob.testing.ledger_samples import (
    FAR,
    TTL,
    A,
    B,
    Clock,
    OpenLedger,
    leave,
    new_run,
    request,
    some_artifact,
    some_step,
    won,
)


class LedgerContract(CatalogContract):
    """What every ledger does; inherit it in a module of tests."""

    # ---- runs and steps

    def test_a_run_is_remembered_as_it_was_added(self, ledger: Ledger, open_ledger: OpenLedger, run: Run) -> None:
        assert (run.id, run.state, run.created, run.forced) == (1, RunState.QUEUED, 1000.0, ("train",))
        assert run.project == "/home/a b'c/\udcff"
        assert run.plan["serving"] == {"name": "flights", "artifact": {"digest": "ab" * 32}, "options": {"port": 0}}
        assert run.plan["refs"] == {"flights/engine@champion": {"step": "train", "output": "out"}}
        again = open_ledger()
        assert again.get_run(run.id) == run
        steps = again.list_steps(run.id)
        assert [(row.name, row.state, row.position) for row in steps] == [
            ("data", "waiting", 0),
            ("train", "waiting", 1),
        ]
        assert steps[1].step == some_step("train", "data")

    def test_runs_count_up_and_are_listed_newest_first(self, ledger: Ledger, run: Run, token: str) -> None:
        other = ledger.add_run(new_run("movies"))
        assert [r.id for r in ledger.list_runs()] == [2, 1]
        assert [r.id for r in ledger.list_runs(limit=1)] == [other.id]
        ledger.set_run(run.id, RunState.RUNNING, token=token)
        assert [r.id for r in ledger.list_runs(states=[RunState.RUNNING])] == [1]
        assert [r.id for r in ledger.list_runs(job="movies")] == [2]
        with pytest.raises(NotFoundError):
            ledger.get_run(3)

    def test_a_run_changes_only_under_its_lease_and_as_the_table_says(
        self, ledger: Ledger, run: Run, token: str, clock: Clock
    ) -> None:
        with pytest.raises(LeaseLostError):
            ledger.set_run(run.id, RunState.RUNNING, token="stale")
        with pytest.raises(ConflictError):
            ledger.set_run(run.id, RunState.DONE, token=token)
        ledger.set_run(run.id, RunState.RUNNING, token=token)
        clock.now = 1010.0
        ledger.set_run(run.id, RunState.FAILED, token=token, error={"message": "no"})
        ledger.set_run(run.id, RunState.FAILED, token=token, error={"message": "again"})
        ended = ledger.get_run(run.id)
        assert (ended.state, ended.finished, ended.error) == (RunState.FAILED, 1010.0, {"message": "no"})
        assert [e.kind for e in ledger.events(subject="run/1") if e.subject == "run/1"] == [
            "queued",
            "running",
            "failed",
        ]

    def test_a_step_changes_under_the_lease_of_its_run(self, ledger: Ledger, run: Run, token: str) -> None:
        with pytest.raises(LeaseLostError):
            ledger.set_step(run.id, "data", StepState.READY, token="stale")
        with pytest.raises(NotFoundError):
            ledger.set_step(run.id, "nosuch", StepState.READY, token=token)
        ledger.set_step(run.id, "data", StepState.READY, token=token, key="k1", reason="first\0time")
        with pytest.raises(ConflictError):
            ledger.set_step(run.id, "data", StepState.WAITING, token=token)
        before = len(ledger.events())
        ledger.set_step(run.id, "data", StepState.READY, token=token, key="k1")
        assert len(ledger.events()) == before, "nothing changed, so there is nothing to tell"
        ledger.set_step(run.id, "data", StepState.DONE, token=token, cached=True, attempt=2)
        row = ledger.list_steps(run.id)[0]
        assert (row.state, row.key, row.cached, row.attempt) == (StepState.DONE, "k1", True, 2)

    def test_cancelling_a_run_takes_it_from_its_holder(self, ledger: Ledger, run: Run, token: str) -> None:
        ledger.set_step(run.id, "data", StepState.READY, token=token)
        ledger.set_step(run.id, "data", StepState.DONE, token=token)
        ledger.cancel_run(run.id)
        ledger.cancel_run(run.id)
        assert ledger.get_run(run.id).state is RunState.CANCELLED
        assert [row.state for row in ledger.list_steps(run.id)] == [StepState.DONE, StepState.CANCELLED]
        assert [e.kind for e in ledger.events(subject="run/1")].count("cancelled") == 2  # the run, and one step
        with pytest.raises(LeaseLostError):
            ledger.set_run(run.id, RunState.RUNNING, token=token)
        with pytest.raises(LeaseLostError):
            ledger.set_step(run.id, "train", StepState.READY, token=token)

    def test_the_last_other_key_of_a_step(self, ledger: Ledger) -> None:
        for number, key in enumerate(("k1", "k2", "k2"), 1):
            lease = ledger.lease("run", ledger.add_run(new_run()).id, A, TTL)
            assert lease is not None
            ledger.set_step(number, "data", StepState.READY, token=lease.token, key=key)
        found = ledger.last_step_with_other_key("flights", "data", "k2", 3)
        assert found is not None
        assert (found.run, found.key) == (1, "k1")
        assert ledger.last_step_with_other_key("flights", "data", "k1", 1) is None
        assert ledger.last_step_with_other_key("movies", "data", "k2", 3) is None

    # ---- executions

    def test_a_key_is_won_once_then_busy_then_done(self, ledger: Ledger, run: Run, clock: Clock) -> None:
        execution, token = won(ledger.claim(request(run.id), A, TTL))
        assert len(execution.id) == 12
        assert int(execution.id, 16) >= 0
        busy = ledger.claim(request(run.id), B, TTL)
        assert (busy.answer, busy.execution) == ("busy", execution)
        clock.now += 5
        ledger.start_execution(execution.id, token, {"pid": 7})
        ledger.start_execution(execution.id, token, {"pid": 7})
        clock.now += 5
        outputs = {"out": some_artifact("x")}
        for _ in range(2):
            ledger.finish_execution(
                execution.id, token, ExecutionState.DONE, outputs=outputs, measured={"auc": float("inf")}
            )
        done = ledger.claim(request(run.id), B, TTL)
        assert done.answer == "done"
        assert done.execution == ledger.get_execution(execution.id)
        ended = ledger.get_execution(execution.id)
        assert (ended.started, ended.finished, ended.handle, ended.lease) == (1005.0, 1010.0, {"pid": 7}, None)
        assert ended.outputs == {"out": outputs["out"].digest}
        assert ended.measured == {"auc": float("inf")}
        assert ledger.get_artifact(outputs["out"].digest) == outputs["out"]
        assert [e.kind for e in ledger.events(subject=f"execution/{execution.id}")] == ["claimed", "running", "done"]

    def test_an_execution_changes_only_under_its_token(self, ledger: Ledger, run: Run) -> None:
        execution, token = won(ledger.claim(request(run.id), A, TTL))
        with pytest.raises(LeaseLostError):
            ledger.start_execution(execution.id, "stale", {})
        with pytest.raises(LeaseLostError):
            ledger.finish_execution(execution.id, "stale", ExecutionState.DONE)
        ledger.finish_execution(execution.id, token, ExecutionState.FAILED, error={"message": "no"})
        with pytest.raises(ConflictError):
            ledger.finish_execution(execution.id, token, ExecutionState.DONE)
        with pytest.raises(ConflictError):
            ledger.start_execution(execution.id, token, {})
        assert ledger.get_execution(execution.id).error == {"message": "no"}
        assert ledger.claim(request(run.id), A, TTL).answer == "won", "a failed try doesn't count as done"

    def test_a_forced_step_wants_a_fresh_execution(self, ledger: Ledger, run: Run, clock: Clock) -> None:
        first = leave(ledger, run.id, "k1", {})
        clock.now -= 10  # a clock that jumps back must not make what is old look fresh
        again_run = ledger.add_run(new_run())
        assert ledger.claim(request(run.id, fresh_from=run.id), A, TTL).execution == first
        second, token = won(ledger.claim(request(again_run.id, fresh_from=again_run.id), A, TTL))
        ledger.finish_execution(second.id, token, ExecutionState.DONE)
        again = ledger.claim(request(again_run.id, fresh_from=again_run.id), A, TTL).execution
        assert again is not None
        assert again.id == second.id
        assert [e.id for e in ledger.list_executions(key="k1", states=[ExecutionState.DONE])] == [second.id, first.id]
        assert [e.id for e in ledger.list_executions(job="flights", limit=1)] == [second.id]

    def test_a_forgotten_execution_is_not_done(self, ledger: Ledger, run: Run) -> None:
        done = leave(ledger, run.id, "k1", {})
        ledger.forget_execution(done.id, "its output is damaged")
        ledger.forget_execution(done.id, "again")
        assert ledger.get_execution(done.id).forgotten == "its output is damaged"
        second, _ = won(ledger.claim(request(run.id), A, TTL))
        with pytest.raises(ConflictError):
            ledger.forget_execution(second.id, "it is live")

    def test_slots_are_given_out_once(self, ledger: Ledger, run: Run) -> None:
        first, token = won(ledger.claim(request(run.id, "k1"), A, TTL))
        full = ledger.claim(request(run.id, "k2", needs={"cpus": 2.0}), B, TTL)
        assert full.answer == "full"
        assert full.reason == f"waiting for 2 CPUs: 1 of 2 free, held by execution {first.id} (train of flights)"
        assert ledger.claim(request(run.id, "k3", needs={"cpus": 2.0}, host="there"), B, TTL).answer == "won"
        assert ledger.claim(request(run.id, "k4", needs={"cpus": 2.0}, executor="slurm"), B, TTL).answer == "won"
        ledger.finish_execution(first.id, token, ExecutionState.LOST)
        assert ledger.claim(request(run.id, "k2", needs={"cpus": 2.0}), B, TTL).answer == "won"

    def test_gpus_are_chosen_and_held(self, ledger: Ledger, run: Run) -> None:
        gpus = {"capacity": {"cpus": 9.0, "gpus": [0, 1]}}
        half = {"cpus": 1.0, "gpus": 0.5}
        first, _ = won(ledger.claim(request(run.id, "k1", needs=half, **gpus), A, TTL))
        second, _ = won(ledger.claim(request(run.id, "k2", needs=half, **gpus), A, TTL))
        whole, _ = won(ledger.claim(request(run.id, "k3", needs={"cpus": 1.0, "gpus": 1.0}, **gpus), A, TTL))
        assert [e.needs["gpu_ids"] for e in (first, second, whole)] == [[0], [0], [1]]
        assert ledger.claim(request(run.id, "k4", needs=half, **gpus), A, TTL).answer == "full"
        with pytest.raises(UsageError, match="asks for 3 GPUs, and there are 2"):
            ledger.claim(request(run.id, "k5", needs={"cpus": 1.0, "gpus": 3.0}, **gpus), A, TTL)

    def test_keys_keep_their_components(self, ledger: Ledger) -> None:
        ledger.add_key("k1", {"code": {"a": "1\0"}})
        ledger.add_key("k1", {"code": {"a": "1\0"}})
        assert ledger.get_key("k1") == {"code": {"a": "1\0"}}
        with pytest.raises(NotFoundError):
            ledger.get_key("k2")

    def test_attached_runs_are_those_that_go_on(self, ledger: Ledger, run: Run, token: str) -> None:
        execution, _ = won(ledger.claim(request(run.id), A, TTL))
        ledger.set_step(run.id, "data", StepState.READY, token=token)
        ledger.set_step(run.id, "data", StepState.RUNNING, token=token, execution=execution.id)
        assert ledger.attached_runs(execution.id) == [run.id]
        ledger.cancel_run(run.id)
        assert ledger.attached_runs(execution.id) == []

    # ---- leases

    def test_a_lease_is_held_by_one(self, ledger: Ledger, run: Run, clock: Clock) -> None:
        mine = ledger.lease("run", run.id, A, TTL)
        assert mine is not None
        assert mine.expires == 1030.0
        clock.now += 10
        again = ledger.lease("run", run.id, A, TTL)
        assert again is not None
        assert (again.token, again.expires) == (mine.token, 1040.0), "ours already: the same token, for longer"
        assert ledger.lease("run", run.id, B, TTL) is None
        ledger.release("run", run.id, "not his")
        assert ledger.lease("run", run.id, B, TTL) is None
        ledger.release("run", run.id, mine.token)
        assert ledger.lease("run", run.id, B, TTL) is not None
        with pytest.raises(NotFoundError):
            ledger.lease("run", 99, A, TTL)

    def test_an_expired_lease_is_taken_and_its_old_holder_fenced_off(
        self, ledger: Ledger, run: Run, token: str, clock: Clock
    ) -> None:
        clock.now += TTL
        assert ledger.renew("run", run.id, token, TTL), "expired, but nobody took it"
        clock.now += TTL
        assert ledger.lease("run", run.id, B, TTL) is not None
        assert not ledger.renew("run", run.id, token, TTL)
        with pytest.raises(LeaseLostError):
            ledger.set_run(run.id, RunState.RUNNING, token=token)
        taken = [e for e in ledger.events(subject=f"run/{run.id}") if e.kind == "taken over"]
        assert [e.data for e in taken] == [{"from": str(A), "owner": str(B), "why": "expired"}]

    def test_the_lease_of_a_dead_process_of_this_host_is_free(self, ledger: Ledger, run: Run, dead: set[str]) -> None:
        execution, token = won(ledger.claim(request(run.id), A, TTL))
        assert ledger.lease("execution", execution.id, B, TTL) is None
        dead.add(str(A))
        assert ledger.lease("execution", execution.id, B, TTL) is not None
        with pytest.raises(LeaseLostError):
            ledger.finish_execution(execution.id, token, ExecutionState.DONE)
        assert ledger.lease("run", run.id, FAR, TTL) is not None
        dead.add(str(FAR))
        assert ledger.lease("run", run.id, B, TTL) is None, "of another host nothing is known"

    def test_a_clock_that_goes_back_keeps_no_lease_for_ever(self, ledger: Ledger, run: Run, clock: Clock) -> None:
        clock.now = 1_000_000.0
        assert ledger.lease("run", run.id, FAR, TTL) is not None
        clock.now = 1000.0
        assert ledger.lease("run", run.id, B, TTL) is None, "it may well be alive"
        clock.now += TTL
        assert ledger.lease("run", run.id, B, TTL) is not None

    def test_a_clock_that_jumps_ahead_leaves_one_holder(
        self, ledger: Ledger, run: Run, token: str, clock: Clock
    ) -> None:
        clock.now += 1e9
        other = ledger.lease("run", run.id, B, TTL)
        assert other is not None
        clock.now -= 1e9
        with pytest.raises(LeaseLostError):
            ledger.set_run(run.id, RunState.RUNNING, token=token)
        ledger.set_run(run.id, RunState.RUNNING, token=other.token)

    def test_an_ended_execution_is_nobodys(self, ledger: Ledger, run: Run) -> None:
        assert ledger.lease("execution", leave(ledger, run.id, "k1", {}).id, A, TTL) is None
        ledger.want_endpoint("flights", artifact="ab" * 32, execution=None, options={})
        assert ledger.lease("endpoint", "flights", A, TTL) is not None
        assert ledger.lease("endpoint", "flights", B, TTL) is None
