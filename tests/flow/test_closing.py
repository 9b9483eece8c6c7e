"""The loop closes on a whole job: traffic and labels come in over HTTP, a challenger is trained, judged and promoted;
then the world turns back, and so does the endpoint. Whoever moves it is killed in the middle."""

from __future__ import annotations

import datetime
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import Project, make_project

from onejob.core.records import Promotion
from onejob.loop.commands.run import up
from onejob.loop.factory import open_session
from onejob.loop.session import Session
from onejob.testing.faults import armed

MONITOR = """
[monitor]
capture = { age = "1s" }
horizon = "3d"
block = { rows_min = 20 }
retries = 0

[monitor.retrain]
on = ["labels"]
labels_min = 1000
cooldown = "90d"
hold_out = "5d"

[monitor.gate]
promote = "better"
margin = 0.01
blocks_min = 4
slices = []
probation = "20d"
"""
FIRST = datetime.datetime(2024, 2, 1, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)
ROWS = 150
PATIENCE = 240.0


@dataclass
class Airport:
    """An endpoint's clients: what they ask, day by day, and what turned out to be true."""

    project: Project
    url: str
    source: random.Random = field(default_factory=lambda: random.Random(7))
    days: int = 0
    newest: str = ""
    asked: str = ""
    """Id of the newest request for an answer."""

    def days_pass(self, count: int, late: Callable[[int], bool]) -> None:
        """Days of requests, each with its labels a day later; `late` is how it mostly turns out, by the hour."""
        for _ in range(count):
            day = FIRST + self.days * DAY
            rows = [self._row(day, number) for number in range(ROWS)]
            for start in range(0, ROWS, 50):
                self._post(":predict", {"instances": rows[start : start + 50]})
            self.asked = self.newest
            labels = [self._label(row, day, late(row["hour"])) for row in rows]
            told = self._post("/labels", {"labels": labels})
            assert (told["accepted"], told["refused"]) == (ROWS, 0)
            self.days += 1

    def _row(self, day: datetime.datetime, number: int) -> dict[str, Any]:
        hour = 5 + number % 18
        return {
            "day": (day + datetime.timedelta(hours=hour)).isoformat(),
            "flight": f"{self.days}-{number}",
            "carrier": self.source.choice(["AA", "UA", "B6"]),
            "distance": self.source.randrange(200, 5000),
            "hour": hour,
        }

    def _label(self, row: dict[str, Any], day: datetime.datetime, late: bool) -> dict[str, Any]:
        true = late if self.source.random() < 0.92 else not late
        return {"flight": row["flight"], "late": int(true), "label_time": (day + DAY).isoformat()}

    def _post(self, what: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        with urllib.request.urlopen(f"{self.url}/v1/models/tiny{what}", data=data, timeout=30) as reply:
            self.newest = str(reply.headers["x-request-id"])
            return json.loads(reply.read())


def open_airport(root: Path, kind: type[Airport] = Airport, *, retries: int = 0) -> Airport:
    """A served job with [monitor], whose steps are tried again so often."""
    project = make_project(root, stages="all")
    text = (project.folder / "job.toml").read_text()
    text = text.replace('time = "day" }', 'time = "day", id = "flight" }').replace("epochs = 2", "epochs = 6")
    text = text.replace("max = 16", "max = 64")
    project.write("job.toml", (text + MONITOR).replace("retries = 0", f"retries = {retries}"))
    lines = (project.folder / "rows.csv").read_text().splitlines()
    rows = [f"{line},j{number}" for number, line in enumerate(lines[1:])]
    project.write("rows.csv", "\n".join([f"{lines[0]},flight", *rows]) + "\n")
    project.json("run", "job.toml")
    return kind(project, project.json("show", "tiny")["endpoint"]["url"])


@pytest.fixture
def airport(tmp_path: Path) -> Iterator[Airport]:
    made = open_airport(tmp_path)
    yield made
    made.project.cli("stop", "tiny", "--now")
    assert not made.project.processes()


def passes_until(session: Session, reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < deadline, story(session)
        up(session, passes=1)
        assert not session.troubles.known, session.troubles.known


def story(session: Session) -> list[Any]:
    turns = [(t.run, t.kind, t.outcome, dict(t.facts)) for t in session.ledger.list_turns("tiny")]
    return [*turns, *session.ledger.list_decisions("tiny"), *session.ledger.list_promotions("tiny")]


@pytest.mark.timeout(600)
def test_a_challenger_takes_over_and_goes_back_when_it_does_harm(airport: Airport) -> None:
    project = airport.project
    airport.days_pass(16, late=lambda hour: hour < 12)

    # Whoever was about to promote is killed there: everything before it stays, and nothing is done twice.
    supervisor = [sys.executable, "-m", "onejob", "up", "-q"]
    env = {**os.environ, "ONEJOB_HOME": str(project.home), **armed("closing.before_promote")}
    first = subprocess.Popen(supervisor, env=env, cwd=project.folder, stderr=subprocess.PIPE)
    try:
        err = first.communicate(timeout=PATIENCE)[1]
    finally:
        first.kill()
    assert first.returncode == -signal.SIGKILL, err

    with open_session(project.home) as session:
        champion = session.ledger.get_endpoint("tiny")
        assert champion is not None
        (decided,) = session.ledger.list_decisions("tiny")
        assert (decided.verdict, decided.applied) == ("promote", None), decided
        passes_until(session, lambda: bool(_serving(session, decided.challenger)))
        (promotion,) = _promotions(session)
        assert (promotion.former, promotion.state) == (champion.artifact, "probation")
        (turn,) = session.ledger.list_turns("tiny", kind="retrain")
        assert [s.run for s in session.ledger.list_signals("tiny") if s.kind == "labels"][-1:] == [turn.run]
        session.release()

    # The same job again is no reason to forget what was learned since.
    view = project.json("run", "job.toml")
    assert view["endpoint"]["digest"] == decided.challenger
    assert any("keeps" in text and "onejob promote" in text for text in view["warnings"])

    airport.days_pass(12, late=lambda hour: hour >= 12)
    with open_session(project.home) as session:
        passes_until(session, lambda: _promotions(session)[0].state != "probation")
        (promotion,) = _promotions(session)
        assert promotion.state == "rolled_back", promotion
        assert "the former champion was better" in promotion.reason
        passes_until(session, lambda: bool(_serving(session, champion.artifact)))
        assert len(session.ledger.list_turns("tiny", kind="retrain")) == 1
        assert sum(e.step == "train" for e in session.ledger.list_executions(job="tiny")) == 2
        session.release()
    story_lines = project.json("why", "tiny")["story"]
    told = [(line["kind"], line["text"]) for line in story_lines if line["run"]]  # later labels wait for the cool-down
    assert [kind for kind, _ in told][-5:] == ["signal", "run", "gate", "promotion", "rollback"], told
    assert "the former champion was better" in told[-1][1]
    nodes = project.json("trace", airport.asked)["nodes"]
    labels = [node for node in nodes if node["kind"] == "label"]
    assert labels[0]["name"] in ("row 0: 0", "row 0: 1")
    assert labels[0]["detail"].startswith("known since 2024-0")
    datasets = [node["detail"] for node in nodes if node["kind"] == "dataset"]
    assert any("of them captured, 2024-02-01 to 2024-02-" in detail for detail in datasets), nodes
    refs = project.json("show", "tiny/engine@champion")
    assert refs["artifacts"][0]["digest"] == champion.artifact


def _promotions(session: Session) -> list[Promotion]:
    return session.ledger.list_promotions("tiny")


def _serving(session: Session, digest: str) -> bool:
    endpoint = session.ledger.get_endpoint("tiny")
    return endpoint is not None and endpoint.artifact == digest and endpoint.state == "ready"
