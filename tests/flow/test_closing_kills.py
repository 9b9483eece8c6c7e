"""kill -9 of whoever moves the loop, wherever it is: replicas while they capture and take labels, then supervisors and
steps one after the other from the first sealed segment to the promotion. Each thing happens once all the same."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Project
from served_models import wait_for
from test_closing import PATIENCE, ROWS, Airport, open_airport, passes_until

from onejob.core.faults import MARK
from onejob.core.state import ExecutionState
from onejob.loop.factory import open_session
from onejob.loop.session import Session
from onejob.loop.traffic import files_of
from onejob.monitor.capture import read_traffic
from onejob.monitor.joined import join
from onejob.monitor.labels import read_labels
from onejob.serve.folder import read_json
from onejob.testing.faults import POINTS, armed

DEATHS = (
    "traffic.before_add",
    "step.before_entry",  # the labelled rows
    "loop.after_finish",
    "step.before_exit",  # the watch
    "signals.before_commit",
    "turns.before_commit",
    "data.shard_written",
    "train.step",
    "choose.copied",
    "monitor.gate",
    "decisions.before_commit",
    "promotions.before_commit",
    "closing.after_promote",
)
"""Fault points, and a step, one after the other in the order in which the loop passes them."""
DAYS, KILLED = 16, 3
"""In the first of them a replica is killed each day, while it captures and takes labels."""


class StubbornAirport(Airport):
    """Clients that ask again until they are answered, so what was answered to nobody comes twice."""

    def _post(self, what: str, body: dict[str, Any]) -> Any:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return super()._post(what, body)
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)


@pytest.fixture
def airport(tmp_path: Path) -> Iterator[Airport]:
    made = open_airport(tmp_path, StubbornAirport, retries=3)
    yield made
    made.project.cli("stop", "tiny", "--now")
    assert not made.project.processes()


@pytest.mark.timeout(600)
def test_whoever_is_killed_wherever_it_happens_once(airport: Airport) -> None:
    killed: set[int] = set()
    for _ in range(KILLED):
        killer = threading.Timer(0.01, kill_replica, [airport.project, killed])
        killer.start()
        airport.days_pass(1, late=lambda hour: hour < 12)
        killer.join()
    airport.days_pass(DAYS - KILLED, late=lambda hour: hour < 12)
    for number, where in enumerate(DEATHS):
        somebody_dies(airport.project, where, airport.project.home.parent / f"dead-{number}")
    with open_session(airport.project.home) as session:
        passes_until(session, lambda: _is_promoted(session))
        session.release()
        happened_once(session)
        counted_once(session)


def kill_replica(project: Project, killed: set[int]) -> None:
    """Kill the replica that serves; one that was killed before may still be told of."""
    folder = project.home / "endpoints" / "tiny"

    def found() -> list[int]:
        replicas = (read_json(folder / "state.json") or {}).get("replicas", ())
        return [replica["pid"] for replica in replicas if replica["ready"] and replica["pid"] not in killed]

    wait_for(lambda: bool(found()), PATIENCE)
    for pid in found():
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)


def somebody_dies(project: Project, where: str, mark: Path) -> None:
    """`onejob up` until it, or a process below it, has died there; then it dies too."""
    fault = armed(where) if where in POINTS else {}
    env = {**os.environ, "ONEJOB_HOME": str(project.home), MARK: str(mark), **fault}
    up = subprocess.Popen(
        [sys.executable, "-m", "onejob", "up", "-q"], env=env, cwd=project.folder, stderr=subprocess.PIPE
    )
    try:
        wait_for(mark.exists if fault else lambda: _kill_step(project, where), PATIENCE)
    except AssertionError:
        raise AssertionError(f"{where} was never passed") from None
    finally:
        up.kill()
        up.communicate()


def _kill_step(project: Project, name: str) -> bool:
    """Kill a step with its shim, if it runs; whether it did."""
    with open_session(project.home) as session:
        running = session.ledger.list_executions(states=[ExecutionState.RUNNING])
    found = [execution.handle["pid"] for execution in running if execution.step == name and execution.handle]
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(os.getpgid(pid), signal.SIGKILL)
    return bool(found)


def _is_promoted(session: Session) -> bool:
    endpoint = session.ledger.get_endpoint("tiny")
    assert endpoint is not None
    promotions = session.ledger.list_promotions("tiny")
    turns = session.ledger.list_turns("tiny", taken=False)
    return bool(promotions) and not turns and (endpoint.artifact, endpoint.state) == (promotions[0].digest, "ready")


def happened_once(session: Session) -> None:
    ledger = session.ledger
    (turn,) = ledger.list_turns("tiny", kind="retrain")
    (decision,) = ledger.list_decisions("tiny")
    (promotion,) = ledger.list_promotions("tiny")
    assert (decision.verdict, decision.outcome, promotion.digest) == ("promote", "promoted", decision.challenger)
    found = [(signal.kind, signal.champion, signal.block) for signal in ledger.list_signals("tiny")]
    assert len(set(found)) == len(found)
    assert [s.kind for s in ledger.list_signals("tiny") if s.run == turn.run] == ["labels"]
    trained = [e for e in ledger.list_executions(job="tiny") if (e.step, e.state) == ("train", ExecutionState.DONE)]
    assert len(trained) == 2
    done = [(e.key, e.step) for e in ledger.list_executions(job="tiny") if e.state is ExecutionState.DONE]
    assert len(set(done)) == len(done), "no step was done twice"
    endpoint = ledger.get_endpoint("tiny")
    assert endpoint is not None
    assert endpoint.generation == 2


def counted_once(session: Session) -> None:
    """Each row that was captured is there once with its label; what a client said twice is counted as said twice."""
    traffic = read_traffic(files_of(session, session.ledger.list_segments("tiny", kind="traffic")))
    labels = read_labels(files_of(session, session.ledger.list_segments("tiny", kind="labels")))
    assert {label.key for label in labels} == {f"{day}-{n}" for day in range(DAYS) for n in range(ROWS)}
    joined = join(traffic, labels)
    keys = joined.traffic.key.tolist()
    assert len(set(keys)) == len(keys)
    assert joined.labelled.all()
    assert (DAYS - KILLED) * ROWS <= len(keys) < DAYS * ROWS, "a killed replica loses its last second"
    assert (joined.counts.corrections, joined.counts.conflicts) == (0, 0)
    assert joined.counts.waiting + joined.counts.unknown == DAYS * ROWS - len(keys), "labels of rows that were lost"
