"""The loop's table of turns: what each state of a step asks for, with a fake executor and a real ledger."""

from __future__ import annotations

import pytest
from loop_world import World, drive
from sqlalchemy import event

from onejob.core.plan import Needs, Output
from onejob.core.ports import Status
from onejob.core.state import ExecutionState, RunState, StepState
from onejob.errors import StorageFullError
from onejob.loop.executions import verdict
from onejob.loop.reconcile import Outlook, reconcile


@pytest.fixture
def world(tmp_path, monkeypatch):
    made = World(tmp_path, monkeypatch)
    yield made
    made.close()


def states(world, session, run):
    return {name: str(row.state) for name, row in world.rows(session, run).items()}


def test_a_chain_runs_in_order_and_sets_its_refs(world):
    session = world.supervisor()
    run = world.add(session, *world.chain("a", "b", "c"), refs={"tiny/data@latest": Output("c", "out")})
    assert drive(session, run).state is RunState.DONE
    assert world.executor.runs == {"a": 1, "b": 1, "c": 1}
    made = session.ledger.get_execution(world.rows(session, run)["c"].execution)
    assert session.ledger.get_ref("tiny/data@latest").digest == made.outputs["out"]
    assert not list((session.home.root / "scratch").iterdir())
    assert not (session.home.work(made.id) / "out").exists()


def test_results_never_go_back_to_an_older_run_that_ends_later(world):
    session = world.supervisor()
    older = world.add(session, world.step("a"), refs={"tiny/data@latest": Output("a", "out")})
    newer = world.add(session, world.step("b"), refs={"tiny/data@latest": Output("b", "out")})
    assert drive(session, newer).state is RunState.DONE
    latest = session.ledger.get_ref("tiny/data@latest")
    assert drive(session, older).state is RunState.DONE
    assert session.ledger.get_ref("tiny/data@latest") == latest
    said = [e.data["text"] for e in session.ledger.events(subject=f"run/{older.id}") if e.kind == "warning"]
    assert said == [f"run {newer.id} of this job ended first: its results stay the latest, and are what is served"]


def test_the_same_again_is_cached_in_a_single_pass(world):
    session = world.supervisor()
    drive(session, world.add(session, *world.chain("a", "b")))
    run = world.add(session, *world.chain("a", "b"))
    assert reconcile(session, [run.id]) is Outlook.MOVED
    rows = world.rows(session, run)
    assert session.ledger.get_run(run.id).state is RunState.DONE
    assert all(row.cached for row in rows.values())
    assert rows["a"].reason == "the same key as in run 1"
    assert world.executor.runs == {"a": 1, "b": 1}


def test_a_cached_result_whose_bytes_are_gone_is_made_again(world):
    session = world.supervisor()
    run = world.add(session, world.step("a"))
    drive(session, run)
    made = session.ledger.get_execution(world.rows(session, run)["a"].execution)
    artifact = session.ledger.get_artifact(made.outputs["out"])
    session.blobs.delete(artifact.files[0].digest)
    again = world.add(session, world.step("a"))
    assert drive(session, again).state is RunState.DONE
    assert world.executor.runs["a"] == 2
    assert "gone" in session.ledger.get_execution(made.id).forgotten
    assert session.blobs.get(artifact.files[0].digest).exists()


def test_a_step_that_says_what_is_wrong_fails_for_good_and_later_ones_are_skipped(world):
    session = world.supervisor()
    world.executor.ends["a"] = ["fail"]
    run = world.add(session, *world.chain("a", "b", retries=3))
    ended = drive(session, run)
    assert ended.state is RunState.FAILED
    assert ended.error["message"] == "no luck"
    assert ended.error["step"] == "a"
    assert states(world, session, run) == {"a": "failed", "b": "skipped"}
    assert world.rows(session, run)["b"].reason == "a failed"
    assert world.executor.runs == {"a": 1}


@pytest.mark.parametrize(
    ("retries", "tries", "end"), [(0, 1, "failed"), (2, 3, "done"), (3, 3, "done"), (1, 2, "failed")]
)
def test_lost_tries_are_counted_and_limited_by_retries(world, retries, tries, end):
    session = world.supervisor()
    world.executor.ends["a"] = ["gone", "retryable", "ok"]
    run = world.add(session, world.step("a", retries=retries))
    assert drive(session, run).state == end
    row = world.rows(session, run)["a"]
    assert world.executor.runs["a"] == tries
    assert row.attempt == tries - 1
    if end == "failed" and tries > 1:
        assert f"(tried {tries} times)" in row.reason


def test_two_runs_of_one_job_do_the_work_once(world):
    one, two = world.supervisor(), world.supervisor()
    world.executor.ends["a"] = ["hang"]
    first, second = world.add(one, world.step("a")), world.add(two, world.step("a"))
    reconcile(one, [first.id])
    reconcile(two, [second.id])
    assert world.rows(one, first)["a"].execution == world.rows(two, second)["a"].execution
    world.executor.ends["a"] = ["ok"]
    assert drive(one, first).state is RunState.DONE
    assert drive(two, second).state is RunState.DONE
    assert world.executor.runs == {"a": 1}
    assert world.rows(two, second)["a"].cached


def test_whoever_joined_goes_on_when_the_starter_is_cancelled_and_when_it_dies(world):
    one, two = world.supervisor(), world.supervisor()
    world.executor.ends["a"] = ["hang"]
    first, second = world.add(one, world.step("a")), world.add(two, world.step("a"))
    reconcile(one, [first.id])
    reconcile(two, [second.id])
    one.ledger.cancel_run(first.id)
    reconcile(one, [first.id])
    assert not world.executor.cancelled
    world.kill(one)
    world.executor.ends["a"] = ["ok"]
    assert drive(two, second).state is RunState.DONE
    assert world.executor.runs == {"a": 1}


def test_being_stopped_is_no_failed_attempt_of_a_run_that_joined(world):
    """Somebody runs the job again while the tasks of the run that was cancelled are still saving what they have."""
    one, two = world.supervisor(), world.supervisor()
    world.executor.ends["a"] = ["hang", "ok"]
    first = world.add(one, world.step("a"))
    reconcile(one, [first.id])
    one.ledger.cancel_run(first.id)
    reconcile(one, [first.id])
    assert len(world.executor.cancelled) == 1
    second = world.add(two, world.step("a"))
    reconcile(two, [second.id])  # joins it while it ends
    reconcile(one, [first.id])
    assert drive(two, second).state is RunState.DONE
    row = world.rows(two, second)["a"]
    assert row.attempt == 0
    assert world.executor.runs["a"] == 2


def test_a_forced_step_runs_once_in_its_run_also_beside_another_forced_one(world):
    one, two = world.supervisor(), world.supervisor()
    drive(one, world.add(one, world.step("a")))
    first, second = (world.add(s, world.step("a"), forced=["a"]) for s in (one, two))
    for _ in range(4):
        reconcile(one, [first.id])
        reconcile(two, [second.id])
    assert one.ledger.get_run(first.id).state is RunState.DONE
    assert one.ledger.get_run(second.id).state is RunState.DONE
    assert 2 <= world.executor.runs["a"] <= 3
    assert world.rows(one, first)["a"].execution != one.ledger.list_executions()[-1].id


def test_what_the_dead_left_is_kept_and_its_slots_are_freed_by_whoever_comes(world):
    """No other run waits for a slot of an execution that ended after its supervisor had died."""
    world.executor.cpus = 1
    dead, other = world.supervisor(), world.supervisor()
    world.executor.ends["a"] = ["hang"]
    first = world.add(dead, world.step("a"))
    reconcile(dead, [first.id])
    world.kill(dead)
    second = world.add(other, world.step("b"), job="other")
    reconcile(other, [second.id])
    assert world.rows(other, second)["b"].state is StepState.READY
    world.executor.ends["a"] = ["ok"]
    assert drive(other, second).state is RunState.DONE
    assert other.ledger.get_execution(world.rows(other, first)["a"].execution).state is ExecutionState.DONE
    again = world.supervisor()
    assert drive(again, first).state is RunState.DONE
    assert world.executor.runs == {"a": 1, "b": 1}


def test_a_claim_of_the_dead_that_never_started_holds_no_slot(world):
    world.executor.cpus = 1
    dead, other = world.supervisor(), world.supervisor()
    first = world.add(dead, world.step("a"))
    world.fatal = lambda point: point == "loop.before_submit"
    with pytest.raises(BaseException, match=r"loop\.before_submit"):
        reconcile(dead, [first.id])
    world.fatal = lambda point: False
    world.kill(dead)
    second = world.add(other, world.step("b"), job="other")
    assert drive(other, second).state is RunState.DONE
    again = world.supervisor()
    assert drive(again, first).state is RunState.DONE
    assert world.rows(again, first)["a"].attempt == 0
    assert world.executor.runs == {"a": 1, "b": 1}


def test_an_execution_of_another_host_is_left_alone_until_both_its_supervisor_and_its_task_are_over(world):
    far, here = world.supervisor("far/boot/9"), world.supervisor()
    world.executor.ends["a"] = ["hang"]
    first, second = world.add(far, world.step("a")), world.add(here, world.step("a"))
    reconcile(far, [first.id])
    world.executor.ends["a"] = ["ok"]
    reconcile(here, [second.id])
    reconcile(here, [second.id])
    assert world.rows(here, second)["a"].state is StepState.RUNNING, "its supervisor may be alive"
    world.clock.now += far.ttl + 1
    world.executor.ends["a"] = ["hang"]
    reconcile(here, [second.id])
    assert world.rows(here, second)["a"].state is StepState.RUNNING, "its task is heard of"
    world.executor.ends["a"] = ["ok"]
    assert drive(here, second).state is RunState.DONE
    assert world.executor.runs == {"a": 1}


def test_a_claim_of_a_dead_host_that_never_started_is_given_up(world):
    far, here = world.supervisor("far/boot/9"), world.supervisor()
    first, second = world.add(far, world.step("a")), world.add(here, world.step("a"))
    world.fatal = lambda point: point == "loop.after_claim"
    with pytest.raises(BaseException, match="after_claim"):
        reconcile(far, [first.id])
    world.fatal = lambda point: False
    reconcile(here, [second.id])
    assert not world.executor.runs
    world.clock.now += far.ttl + 1
    assert drive(here, second).state is RunState.DONE
    assert world.executor.runs == {"a": 1}
    assert world.rows(here, second)["a"].attempt == 0


def test_code_that_is_edited_between_the_key_and_the_start_gets_a_new_key(world):
    world.executor.cpus = 1
    session = world.supervisor()
    world.executor.ends["a"] = ["hang"]
    blocker = world.add(session, world.step("a"))
    reconcile(session, [blocker.id])
    run = world.add(session, world.step("b"), job="other")
    reconcile(session, [run.id])
    old = world.rows(session, run)["b"].key
    (world.project / "work.py").write_text("def make(context):\n    return 2\n")
    session.ledger.cancel_run(blocker.id)
    assert drive(session, run).state is RunState.DONE
    row = world.rows(session, run)["b"]
    assert row.key != old
    assert row.attempt == 0
    assert world.executor.runs["b"] == 1


def test_a_source_that_changes_before_the_start_is_read_under_its_new_key_and_one_that_vanishes_is_named(world):
    world.executor.cpus = 1
    session = world.supervisor()
    world.executor.ends["a"] = ["hang"]
    blocker = world.add(session, world.step("a"))
    reconcile(session, [blocker.id])
    run, other = world.add(session, world.step("b"), job="b"), world.add(session, world.step("c"), job="c")
    reconcile(session, [run.id, other.id])
    (world.project / "rows.csv").write_text("a\n22\n")
    session.ledger.cancel_run(blocker.id)
    assert drive(session, run).state is RunState.DONE
    assert "changed" not in (session.ledger.get_run(run.id).error or {})
    (world.project / "rows.csv").unlink()
    ended = drive(session, other)
    assert ended.state is RunState.FAILED
    assert ended.error["error"] == "SourceError"
    assert "rows.csv" in ended.error["place"]


def test_a_wish_that_no_machine_can_meet_fails_the_step_with_its_cure(world):
    session = world.supervisor()
    run = world.add(session, world.step("a", needs=Needs(gpus=4)))
    ended = drive(session, run)
    assert ended.state is RunState.FAILED
    assert ended.error["error"] == "UsageError"
    assert "GPUs" in ended.error["message"]


def test_a_damaged_input_is_named_and_the_next_run_makes_it_anew(world):
    session = world.supervisor()
    drive(session, world.add(session, world.step("a")))
    made = session.ledger.list_executions()[0]
    entry = session.ledger.get_artifact(made.outputs["out"]).files[0]
    session.blobs.path(entry.digest).chmod(0o644)
    session.blobs.path(entry.digest).write_text("damaged")
    ended = drive(session, world.add(session, *world.chain("a", "b")))
    assert ended.state is RunState.FAILED
    assert ended.error["error"] == "DamagedError"
    assert "run the job again" in ended.error["cure"].lower()
    assert drive(session, world.add(session, *world.chain("a", "b"))).state is RunState.DONE
    assert world.executor.runs == {"a": 2, "b": 1}


def test_a_full_disk_loses_no_result_and_no_attempt(world, monkeypatch):
    session = world.supervisor()
    run = world.add(session, world.step("a"))
    put = type(session.blobs).put

    def only_files(blobs, source):
        if isinstance(source, bytes):
            return put(blobs, source)
        raise StorageFullError("no space is left")

    monkeypatch.setattr(type(session.blobs), "put", only_files)
    reconcile(session, [run.id])
    with pytest.raises(StorageFullError):
        reconcile(session, [run.id])
    monkeypatch.undo()
    assert session.ledger.get_run(run.id).state is RunState.RUNNING
    assert drive(world.supervisor(), run).state is RunState.RUNNING, "the first one is alive and holds it"
    assert drive(session, run).state is RunState.DONE
    assert world.executor.runs == {"a": 1}


def test_what_goes_wrong_with_one_run_stops_no_other(world):
    session = world.supervisor()
    bad, good = world.add(session, world.step("a"), job="bad"), world.add(session, world.step("b"), job="good")
    world.executor.refuse["a"] = RuntimeError("a bug")
    for _ in range(4):
        reconcile(session)
    assert session.ledger.get_run(good.id).state is RunState.DONE
    assert session.ledger.get_run(bad.id).state is RunState.RUNNING
    assert f"run/{bad.id}" in session.troubles.known
    del world.executor.refuse["a"]
    for _ in range(4):
        world.clock.now += 10
        reconcile(session)
    assert session.ledger.get_run(bad.id).state is RunState.DONE
    assert not session.troubles.known


def test_a_slow_holder_renews_what_it_holds(world):
    slow, other = world.supervisor(), world.supervisor()
    run = world.add(slow, world.step("a"))
    assert slow.hold("run", run.id)
    for _ in range(5):
        world.clock.now += slow.ttl * 0.6
        slow.renew()  # what the thread of `renewing` does while a pass is long
        assert other.hold("run", run.id) is None
    world.clock.now += slow.ttl + 1
    assert other.hold("run", run.id)
    slow.renew()
    assert ("run", run.id) not in slow.held


def test_waiting_for_slots_costs_no_write(world):
    world.executor.cpus = 1
    session = world.supervisor()
    world.executor.ends["a"] = ["hang"]
    reconcile(session, [world.add(session, world.step("a")).id])
    waiting = world.supervisor()
    run = world.add(waiting, world.step("b"), job="other")
    reconcile(waiting, [run.id])
    assert "waiting for 1 CPU" in world.rows(waiting, run)["b"].reason
    writes = []
    event.listen(waiting.ledger._db.engine, "begin", lambda c: writes.append(c.get_execution_options()))
    for _ in range(3):
        world.clock.now += 1
        assert reconcile(waiting, [run.id]) is Outlook.WAITING
    assert len(writes) <= 3 * 3
    assert not any(options.get("onejob_writer") for options in writes)


EXITS = [
    (Status("exited", 75, "stopped", cause="stopped"), None, "cancelled", "StepError"),
    (Status("exited", 5, "x", cause="stopped"), {"error": "DataError", "message": "m"}, "cancelled", "StepError"),
    (Status("exited", 75, "x", cause="exit"), None, "lost", "StepError"),
    (Status("exited", 124, "ran past", cause="timeout"), {"error": "DataError"}, "failed", "StepTimeoutError"),
    (Status("exited", 137, "used 3 GiB", cause="memory"), None, "failed", "StepError"),
    (Status("exited", 127, "no such file", cause="start"), None, "failed", "StepError"),
    (Status("exited", 4, "x", cause="exit"), {"error": "DataError", "message": "m"}, "failed", "DataError"),
    (Status("exited", 5, "x", cause="exit"), {"error": "RankError", "retryable": True}, "lost", "RankError"),
    (Status("exited", 137, "rank 1 was killed", rank=1, cause="signal"), None, "lost", "RankError"),
    (Status("exited", 124, "rank 1 never arrived", rank=1, cause="arrive"), None, "lost", "RankError"),
    (Status("exited", 139, "was killed by SIGSEGV", cause="signal"), None, "lost", "StepError"),
    (Status("gone"), None, "lost", "StepError"),
]


@pytest.mark.parametrize(("status", "reported", "state", "error"), EXITS)
def test_what_an_end_means(status, reported, state, error):
    found, told = verdict(status, reported, place="train")
    assert (found, told["error"]) == (state, error)
