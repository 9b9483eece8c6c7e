"""Several processes on one ledger: nothing is claimed twice, and one killed inside a transaction leaves no trace."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

from onejob.core.faults import VARIABLE
from onejob.core.state import ExecutionState
from onejob.store.leases import this_process
from onejob.store.ledger import SqlLedger
from onejob.testing.ledger_samples import TTL, OpenLedger, new_run, request, won

WORKER = """
import sys
from onejob.core.state import ExecutionState
from onejob.store.leases import this_process
from onejob.store.ledger import SqlLedger
from onejob.testing.ledger_samples import request, some_artifact
url, count = sys.argv[1], int(sys.argv[2])
ledger, me = SqlLedger(url), this_process()
todo = [f"key{n}" for n in range(count)]
while todo:
    for key in list(todo):
        claim = ledger.claim(request(1, key), me, 30.0)
        if claim.answer == "won":
            token = claim.execution.lease.token
            ledger.start_execution(claim.execution.id, token, {"pid": me.pid})
            outputs = {"out": some_artifact(key)}
            ledger.finish_execution(claim.execution.id, token, ExecutionState.DONE, outputs=outputs)
        if claim.answer in ("won", "done"):
            todo.remove(key)
ledger.close()
"""
OPENER = """
import sys
from onejob.store.ledger import SqlLedger
sys.stdin.read()
ledger = SqlLedger(sys.argv[1])
ledger.add_event("opener", "opened", {})
ledger.close()
"""


def start(program: str, *arguments: str, fault: str = "", stdin: int | None = None) -> subprocess.Popen[bytes]:
    environment = {**os.environ, VARIABLE: fault}
    return subprocess.Popen([sys.executable, "-c", program, *arguments], env=environment, stdin=stdin)


def test_processes_share_a_queue_without_double_claims(open_ledger: OpenLedger, database_url: str) -> None:
    ledger = open_ledger()
    ledger.add_run(new_run())
    workers = [start(WORKER, database_url, "40") for _ in range(4)]
    assert [worker.wait() for worker in workers] == [0, 0, 0, 0]
    executions = ledger.list_executions()
    assert Counter(e.key for e in executions) == Counter(f"key{n}" for n in range(40))
    assert {e.state for e in executions} == {ExecutionState.DONE}
    held = 0
    events = [e for e in ledger.events() if e.subject.startswith("execution/")]
    for event in events:
        held += {"claimed": 1, "running": 0, "done": -1}[event.kind]
        assert 0 <= held <= 2, "two CPUs, one each"
    assert len(events) == 3 * 40
    assert [e.seq for e in ledger.events()] == list(range(1, len(ledger.events()) + 1))


def test_many_processes_open_a_new_database_at_once(database_url: str) -> None:
    openers = [start(OPENER, database_url, stdin=subprocess.PIPE) for _ in range(6)]
    for opener in openers:
        assert opener.stdin is not None
        opener.stdin.close()
    assert [opener.wait() for opener in openers] == [0] * 6
    ledger = SqlLedger(database_url)
    assert len(ledger.events(subject="opener")) == 6
    ledger.close()


def test_a_process_killed_while_it_makes_the_tables_is_followed_by_one_that_does(database_url: str) -> None:
    opener = start(OPENER, database_url, fault="migrate.before_commit", stdin=subprocess.PIPE)
    opener.communicate()
    assert opener.returncode == -9
    ledger = SqlLedger(database_url)
    assert ledger.list_runs() == []
    ledger.close()


def test_a_process_killed_inside_a_claim_leaves_no_trace(open_ledger: OpenLedger, database_url: str) -> None:
    ledger = open_ledger()
    ledger.add_run(new_run())
    before = ledger.events()
    worker = start(WORKER, database_url, "1", fault="claim.before_commit")
    assert worker.wait() == -9
    assert ledger.list_executions() == []
    assert ledger.events() == before
    won(ledger.claim(request(1, "key0"), this_process(), TTL))


def test_a_process_killed_while_it_ends_an_execution_is_taken_over_at_once(
    open_ledger: OpenLedger, database_url: str
) -> None:
    ledger = open_ledger()
    ledger.add_run(new_run())
    # The first passing is the start, the second the end.
    worker = start(WORKER, database_url, "1", fault="executions.before_commit:2")
    assert worker.wait() == -9
    (execution,) = ledger.list_executions()
    assert (execution.state, execution.outputs) == (ExecutionState.RUNNING, {})
    assert ledger.list_artifacts() == []
    assert execution.lease is not None
    lease = ledger.lease("execution", execution.id, this_process(), TTL)
    assert lease is not None, "its owner is dead, so nobody waits for the lease to expire"
    assert lease.token != execution.lease.token
    ledger.finish_execution(execution.id, lease.token, ExecutionState.LOST)
    assert ledger.claim(request(1, "key0"), this_process(), TTL).answer == "won"
