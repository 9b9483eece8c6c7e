"""Whatever supervisors do at once, and wherever they die: every key is done once, and every run ends well."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loop_world import Crash, World, drive

from onejob.core.plan import Output, Serving
from onejob.core.state import ExecutionState, RunState
from onejob.loop.reconcile import reconcile

POINTS = (
    *("loop.after_claim", "task.prepared_inputs", "loop.before_submit", "loop.after_submit"),
    *("ingest.after_blob", "ingest.before_commit", "loop.after_finish", "loop.before_refs", "loop.before_done"),
    *("endpoint.before_submit", "endpoint.after_submit", "claim.before_commit", "runs.before_commit"),
    *("executions.before_commit", "endpoints.before_commit"),
)
TURN = st.tuples(
    st.integers(0, 2),
    st.sampled_from(["run", "up"]),
    st.one_of(st.none(), st.none(), st.sampled_from(POINTS)),
    st.sampled_from([0.1, 0.1, 16.0, 31.0]),
)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(TURN, min_size=4, max_size=14))
def test_every_key_is_done_once_and_every_run_ends_well(turns):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        world = World(Path(folder), patch)
        try:
            carry_out(world, turns)
        finally:
            world.close()


def carry_out(world, turns):
    world.executor.cpus = 1
    world.executor.ends["host"] = ["serve"]
    sessions = [world.supervisor() for _ in range(3)]
    steps = world.chain("a", "b")
    wish = Serving("tiny", Output("b", "out"), {"port": 0})
    refs = {"tiny/b@latest": Output("b", "out")}
    runs = [world.add(sessions[0], *steps, serving=wish, refs=refs) for _ in range(3)]
    for who, how, point, later in turns:
        world.clock.now += later
        world.fatal = lambda reached, point=point: reached == point
        try:
            reconcile(sessions[who], [runs[who].id] if how == "run" else None)
        except Crash:
            world.kill(sessions[who])
            sessions[who] = world.supervisor()
        world.fatal = lambda reached: False
    for _ in range(3):  # whoever still holds something ends too, as every process does at last
        for session, run in zip(sessions, runs, strict=True):
            world.clock.now += 61.0
            drive(session, run, passes=8)
    last = world.supervisor()
    assert [last.ledger.get_run(run.id).state for run in runs] == [RunState.DONE] * 3
    made = last.ledger.list_executions()
    done = [execution.key for execution in made if execution.state is ExecutionState.DONE]
    assert len(done) == len(set(done)) == 2
    assert not last.ledger.list_executions(states=[ExecutionState.CLAIMED, ExecutionState.RUNNING])
    assert world.executor.runs == {"a": 1, "b": 1, "host": 1}
