"""Runs as people ask for them: gone on with, ended for a newer version, handed to `up`; with an executor that fakes."""

from __future__ import annotations

import time
from importlib import import_module

import pytest
from loop_world import World

from onejob.core.state import EndpointState, ExecutionState, RunState
from onejob.errors import StoreError, UnavailableError
from onejob.loop import reconcile as loop
from onejob.loop.reconcile import Outlook, reconcile

# The package gives the names to the functions.
commands = import_module("onejob.loop.commands.run")
stopping = import_module("onejob.loop.commands.stop")

JOB = """
name = "tiny"

[data]
family = "tabular"
source = "rows.csv"
steps = ["work:make"]
columns = { label = "a", numbers = ["b"] }
retries = 0
"""


@pytest.fixture
def world(tmp_path, monkeypatch):
    made = World(tmp_path, monkeypatch)
    (made.project / "job.toml").write_text(JOB)
    (made.project / "rows.csv").write_text("a,b\n1,2\n")
    monkeypatch.setattr(time, "sleep", lambda seconds: setattr(made.clock, "now", made.clock.now + seconds))
    yield made
    made.close()


def job(world):
    return world.project / "job.toml"


def interrupted(world, session):
    """A run whose supervisor was killed while its step goes on."""
    world.executor.ends["data"] = ["hang"]
    commands.run(session, job(world), detach=True)
    run = session.ledger.list_runs()[0]
    with session.ledger._db.write() as connection:
        connection.exec_driver_sql("UPDATE run SET cause = json_remove(cause, '$.detached')")
    reconcile(session, [run.id])
    world.kill(session)
    return run


def test_an_interrupted_run_of_the_same_job_is_gone_on_with(world):
    run = interrupted(world, world.supervisor())
    world.executor.ends["data"] = ["ok"]
    assert commands.run(world.supervisor(), job(world)).run == run.id
    assert world.executor.runs == {"data": 1}


def test_one_of_another_version_is_ended_with_what_it_had_started(world):
    run = interrupted(world, world.supervisor())
    session = world.supervisor()
    job(world).write_text(JOB.replace("retries = 0", "retries = 0\nexpect = { rows_min = 1 }"))
    world.executor.ends["data"] = ["hang", "ok"]
    view = commands.run(session, job(world))
    assert view.state == "done"
    assert session.ledger.get_run(run.id).state is RunState.CANCELLED
    assert len(world.executor.cancelled) == 1
    assert not session.ledger.list_executions(states=[ExecutionState.CLAIMED, ExecutionState.RUNNING])


def test_runs_that_wait_for_up_are_kept_whatever_is_run_beside_them(world):
    session = world.supervisor()
    for rows in (1, 2, 2):
        commands.run(session, job(world), sets=[f"data.expect.rows_min={rows}"], detach=True)
    assert commands.run(session, job(world)).state == "done"
    waiting = session.ledger.list_runs(states=loop.OPEN)
    assert [run.id for run in waiting] == [3, 2, 1]
    commands.up(session, passes=8)
    assert not session.ledger.list_runs(states=loop.OPEN)
    assert world.executor.runs == {"data": 3}


def test_up_goes_on_when_the_ledger_fails_it_for_a_while(world, monkeypatch):
    session = world.supervisor()
    commands.run(session, job(world), detach=True)
    answers = type(session.ledger).list_runs
    failures = iter([StoreError("the ledger's server is going down")] * 2)

    def list_runs(ledger, **filters):
        if error := next(failures, None):
            raise error
        return answers(ledger, **filters)

    monkeypatch.setattr(type(session.ledger), "list_runs", list_runs)
    commands.up(session, passes=24)
    assert answers(session.ledger)[0].state is RunState.DONE


def test_up_gives_its_leases_back(world):
    session = world.supervisor()
    world.executor.ends["data"] = ["hang"]
    commands.run(session, job(world), detach=True)
    commands.up(session, passes=2)
    assert session.ledger.list_runs()[0].lease is None
    assert not session.held


def test_stopping_an_endpoint_of_a_silent_machine_says_where_it_runs(world):
    session = world.supervisor()
    session.ledger.want_endpoint("tiny", artifact="ab" * 32, execution=None, options={})
    folder = session.home.endpoint("tiny") / "host-1"
    folder.mkdir(parents=True)
    world.executor.ends["host"] = ["hang"]
    world.executor.runs["host"] = 1
    handle = {"dir": str(folder), "host": "far"}
    session.ledger.set_endpoint("tiny", EndpointState.READY, handle=handle)
    with pytest.raises(UnavailableError, match="far"):
        stopping.stop(session, "tiny")


def test_passes_come_ever_later_while_nothing_changes_and_off_the_beat_only_when_waiting():
    assert commands.pause(Outlook.MOVED, 1.0, 0.5) == commands.QUICK
    waits = [commands.QUICK]
    for _ in range(20):
        waits.append(commands.pause(Outlook.WORKING, waits[-1], 0.9))
    assert waits == sorted(waits)
    assert waits[-1] == commands.SLOW
    assert commands.pause(Outlook.WAITING, 10, 0.0) == 0.75 * commands.IDLE
    assert commands.pause(Outlook.WAITING, 10, 1.0) == 1.25 * commands.IDLE
