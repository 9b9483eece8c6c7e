"""Endpoints in the loop: started once, taken over, started again, given up, stopped, and wanted again."""

from __future__ import annotations

import json
import time

import pytest
from loop_world import World, drive

from onejob.core.artifact import digest_file
from onejob.core.plan import Output, Serving
from onejob.core.ports import Status
from onejob.core.state import EndpointState, RunState
from onejob.loop.endpoints import newest_host, tend_endpoint
from onejob.loop.reconcile import reconcile


@pytest.fixture
def world(tmp_path, monkeypatch):
    made = World(tmp_path, monkeypatch)
    made.executor.ends["host"] = ["serve"]
    yield made
    made.close()


def serve(world, session, **more):
    wish = Serving("tiny", Output("a", "out"), {"port": 0})
    return world.add(session, world.step("a"), serving=wish, refs={"tiny/x@latest": Output("a", "out")}, **more)


def host_ends(world, session, status=None):
    host, number = newest_host(session.home.endpoint("tiny"))
    world.executor.over[host["dir"]] = status or Status("gone", reason="killed")
    return number


def state(session):
    return session.ledger.get_endpoint("tiny").state


def test_the_run_is_done_when_its_endpoint_is_ready_and_another_run_changes_nothing(world):
    session = world.supervisor()
    assert drive(session, serve(world, session)).state is RunState.DONE
    endpoint = session.ledger.get_endpoint("tiny")
    assert (endpoint.state, endpoint.port, endpoint.generation) == (EndpointState.READY, 8123, 1)
    assert drive(session, serve(world, session)).state is RunState.DONE
    assert world.executor.runs["host"] == 1
    assert session.ledger.get_endpoint("tiny") == endpoint


def test_refs_are_set_once_also_by_a_supervisor_that_goes_on_after_another(world):
    session = world.supervisor()
    world.executor.ends["host"] = ["hang"]
    run = serve(world, session)
    drive(session, run, passes=4)
    other = session.ledger.list_artifacts(kind="source")[0][0]
    session.ledger.set_ref("tiny/x@latest", other, None)
    reconcile(session, [run.id])
    world.kill(session)
    world.executor.ends["host"] = ["serve"]
    again = world.supervisor()
    assert drive(again, run).state is RunState.DONE
    assert again.ledger.get_ref("tiny/x@latest").digest == other


def test_up_starts_a_host_again_that_died(world):
    session = world.supervisor()
    drive(session, serve(world, session))
    assert host_ends(world, session) == 1
    for _ in range(3):
        reconcile(session)
    assert state(session) is EndpointState.READY
    assert world.executor.runs["host"] == 2


def test_the_next_run_starts_it_again_though_every_step_is_cached(world):
    session = world.supervisor()
    drive(session, serve(world, session))
    host_ends(world, session)
    assert drive(session, serve(world, session)).state is RunState.DONE
    assert world.executor.runs == {"a": 1, "host": 2}


def test_hosts_that_fail_in_a_row_are_given_up_and_the_next_run_tries_anew(world):
    world.clock.now = time.time()  # their folders tell when it was
    session = world.supervisor()
    world.executor.ends["host"] = ["gone"]
    ended = drive(session, serve(world, session))
    assert ended.state is RunState.FAILED
    assert "failed 3 times in a row" in ended.error["message"]
    assert world.executor.runs["host"] == 3
    world.executor.ends["host"] = ["serve"]
    assert drive(session, serve(world, session)).state is RunState.DONE


def test_a_model_that_can_not_be_loaded_fails_the_run_and_leaves_no_host(world):
    session = world.supervisor()
    world.executor.ends["host"] = ["refuse"]
    ended = drive(session, serve(world, session))
    assert ended.state is RunState.FAILED
    assert "can't be loaded" in ended.error["message"]
    assert world.executor.cancelled == {newest_host(session.home.endpoint("tiny"))[0]["dir"]}
    world.executor.ends["host"] = ["serve"]
    assert drive(session, serve(world, session)).state is RunState.DONE
    assert state(session) is EndpointState.READY


def test_the_same_wish_after_a_failed_rollout_is_a_new_generation_for_the_host_that_goes_on(world):
    session = world.supervisor()
    drive(session, serve(world, session))
    session.ledger.set_endpoint("tiny", EndpointState.FAILED, error={"error": "StoreError", "message": "no"})
    assert drive(session, serve(world, session)).state is RunState.DONE
    assert session.ledger.get_endpoint("tiny").generation == 2
    assert world.executor.runs["host"] == 1
    assert drive(session, serve(world, session)).state is RunState.DONE
    assert session.ledger.get_endpoint("tiny").generation == 2


def test_one_that_somebody_else_gave_up_or_stopped_ends_the_run_that_waits_for_it(world):
    session = world.supervisor()
    world.executor.ends["host"] = ["hang"]
    run = serve(world, session)
    drive(session, run, passes=4)
    session.ledger.set_endpoint("tiny", EndpointState.STOPPING)
    ended = drive(session, run)
    assert ended.state is RunState.FAILED
    assert "stopped" in ended.error["message"]
    for _ in range(3):
        tend_endpoint(session, "tiny")
    assert state(session) is EndpointState.STOPPED
    world.executor.ends["host"] = ["serve"]
    assert drive(session, serve(world, session)).state is RunState.DONE


def test_a_stop_while_the_host_is_started_is_not_lost(world, monkeypatch):
    session, other = world.supervisor(), world.supervisor()
    world.fatal = lambda point: (
        point == "endpoint.after_submit" and bool(other.ledger.set_endpoint("tiny", EndpointState.STOPPING))
    )
    run = serve(world, session)
    reconcile(session, [run.id])
    drive(session, run, passes=3)
    world.fatal = lambda point: False
    for _ in range(3):
        tend_endpoint(session, "tiny")
    assert state(session) is EndpointState.STOPPED
    assert len(world.executor.cancelled) == world.executor.runs["host"] == 1


def test_a_host_that_was_only_just_starting_is_revoked_by_a_stop(world):
    session = world.supervisor()
    drive(session, serve(world, session))
    number = host_ends(world, session)
    coming = session.home.endpoint("tiny") / f"host-{number + 1}"
    coming.mkdir()
    session.ledger.set_endpoint("tiny", EndpointState.STOPPING)
    assert tend_endpoint(session, "tiny").state is EndpointState.STOPPED
    assert json.loads((coming / "started.json").read_bytes()) == {"revoked": True}


def test_two_supervisors_start_one_host_and_a_dead_one_is_followed(world):
    one, two = world.supervisor(), world.supervisor()
    first, second = serve(world, one), serve(world, two)
    world.fatal = lambda point: point == "endpoint.after_submit"
    with pytest.raises(BaseException, match="after_submit"):
        drive(one, first)
    world.fatal = lambda point: False
    world.kill(one)
    assert drive(two, second).state is RunState.DONE
    three = world.supervisor()
    assert drive(three, first).state is RunState.DONE
    assert world.executor.runs == {"a": 1, "host": 1}


def test_a_damaged_engine_fails_the_run_and_the_next_run_makes_it_anew(world):
    session = world.supervisor()
    drive(session, world.add(session, world.step("a")))
    made = session.ledger.list_executions()[0]
    blob = session.blobs.path(session.ledger.get_artifact(made.outputs["out"]).files[0].digest)
    blob.chmod(0o644)
    blob.write_text("damaged")
    ended = drive(session, serve(world, session))
    assert ended.state is RunState.FAILED
    assert ended.error["error"] == "DamagedError"
    assert state(session) is EndpointState.FAILED
    assert drive(session, serve(world, session)).state is RunState.DONE
    assert world.executor.runs == {"a": 2, "host": 1}


def test_an_endpoint_of_another_machine_is_taken_over_once_nothing_is_heard_of_it(world):
    far, here = world.supervisor("far/boot/9"), world.supervisor()
    drive(far, serve(world, far))
    handle = {**newest_host(far.home.endpoint("tiny"))[0], "host": "far"}
    far.ledger.set_endpoint("tiny", EndpointState.READY, handle=handle)
    world.executor.over[handle["dir"]] = Status("gone")
    reconcile(here)
    assert world.executor.runs["host"] == 1, "its supervisor may be alive"
    world.clock.now += far.ttl + 1
    for _ in range(2):
        reconcile(here)
    assert world.executor.runs["host"] == 2
    assert state(here) is EndpointState.READY


def test_files_that_somebody_has_changed_are_laid_out_again_once(world):
    session = world.supervisor()
    drive(session, serve(world, session))
    folder = session.home.endpoint("tiny")
    desired = json.loads((folder / "desired.json").read_text())
    (name, digest), *_ = desired["engine"]["files"].items()
    path = folder / "engines" / desired["engine"]["digest"] / name
    before = path.read_bytes()
    aside = path.with_name("aside")
    aside.write_bytes(b"another model")
    aside.replace(path)
    reconcile(session)
    assert path.read_bytes() == before
    assert digest_file(path) == digest
    told = json.loads((folder / "desired.json").read_text())
    assert {**told, "engine": {**told["engine"], "laid": 0}} == {**desired, "engine": {**desired["engine"], "laid": 0}}
    seen = (folder / "desired.json").stat().st_mtime_ns
    reconcile(session)
    assert (folder / "desired.json").stat().st_mtime_ns == seen
    path.unlink()
    reconcile(session)
    assert path.read_bytes() == before


def test_an_endpoint_that_serves_goes_on_though_its_engine_can_not_be_laid_out_again(world):
    session = world.supervisor()
    drive(session, serve(world, session))
    folder = session.home.endpoint("tiny")
    desired = json.loads((folder / "desired.json").read_text())
    (name, digest), *_ = desired["engine"]["files"].items()
    (folder / "engines" / desired["engine"]["digest"] / name).unlink()
    blob = session.blobs.get(digest)
    blob.chmod(0o644)
    blob.unlink()
    for _ in range(3):
        reconcile(session)
    assert state(session) is EndpointState.READY
