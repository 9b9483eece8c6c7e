"""A world in which the loop closes: a served champion, traffic by days, and steps that find what a test says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from loop_world import Crash, FakeExecutor, World

from onejob.core.artifact import Artifact, FileEntry, Json
from onejob.core.key import StepKey
from onejob.core.plan import Output, Plan, Serving, Step
from onejob.core.ports import Status
from onejob.core.records import Endpoint, NewRun, Run
from onejob.core.state import RunState
from onejob.loop import closing, executions
from onejob.loop import reconcile as reconciling
from onejob.loop.keys import Keyed
from onejob.loop.reconcile import reconcile
from onejob.loop.session import Session
from onejob.monitor.plan import GATE, WATCH
from onejob.monitor.spec import DAY, Spec
from onejob.store import promotions as store_promotions
from onejob.store import signals as store_signals

NAME = "tiny"
RULES: dict[str, Json] = {
    "retrain": {"labels_min": 100, "cooldown": "3d", "every": "365d", "hold_out": "2d"},
    "gate": {"promote": "better", "margin": 0.0, "blocks_min": 2},
}
COLUMNS = {"label": "late", "numbers": ["distance"], "time": "day"}
KINDS = {"dataset": "dataset", "checkpoint": "checkpoint", "engine": "engine", "report": "report"}


def report(fresh: int = 0, probation: str = "", *signals: Mapping[str, Json]) -> dict[str, Json]:
    told = {"verdict": probation, "reason": f"it says {probation}", "reading": {}} if probation else None
    return {"signals": list(signals), "labels": {"fresh": fresh}, "probation": told}


def finding(kind: str, block: str) -> dict[str, Json]:
    return {"kind": kind, "block": block, "value": 1.0, "threshold": 0.5, "evidence": {"says": "so"}}


def decision(verdict: str, blocks: int = 9) -> dict[str, Json]:
    told: dict[str, Json] = {"verdict": verdict, "reasons": [f"because {verdict}"], "missing": [], "look": 1}
    return {**told, "comparison": {"overall": {"blocks": blocks}}}


class Found(FakeExecutor):
    """Steps leave artifacts of their kinds; a watch and a gate find what the test says."""

    def __init__(self) -> None:
        super().__init__(ends={"host": ["serve"]})
        self.report: Callable[[Mapping[str, Json]], dict[str, Json]] = lambda task: report()
        self.decision: Callable[[Mapping[str, Json]], dict[str, Json]] = lambda task: decision("reject")
        self.asked: list[Mapping[str, Json]] = []
        """task.json of each watch and gate."""
        self.refused: set[int] = set()
        """Generations of the endpoint that can't be served."""

    def _end(self, work: Path, end: str) -> Status:
        if end == "serve" and json.loads((work.parent / "desired.json").read_bytes())["generation"] in self.refused:
            end = "refuse"
        status = super()._end(work, end)
        if end != "ok":
            return status
        task = json.loads((work / "task.json").read_bytes())
        for name in task["outputs"]:
            told = {"kind": name, "meta": {"format": 1}}
            (work / "out" / f"{name}.json").write_text(json.dumps(told))
        for step, name, say in ((WATCH, "report", self.report), (GATE, "decision", self.decision)):
            if task["name"] == step:
                self.asked.append(task)
                (work / "out" / name / f"{name}.json").write_text(json.dumps(say(task)))
        return status


def _key_of(step: Step, inputs: Mapping[str, str], project: Path) -> Keyed:
    return Keyed(StepKey({"step": step.to_json(), "inputs": dict(inputs)}), (), ())


class ClosingWorld(World):
    """One endpoint `tiny` with [monitor], served by a finished run; `day` brings a day's traffic."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(root, monkeypatch)
        for module in (closing, store_signals, store_promotions):
            monkeypatch.setattr(module, "reach", self._reach)
        for module in (reconciling, executions):
            monkeypatch.setattr(module, "key_of", _key_of)  # what code the steps reach is not what is tested here
        self.found = self.executor = Found()  # type: ignore[assignment]
        self.rules: dict[str, Json] = dict(RULES)
        self.days = 0
        self.died = 0

    def job(self, **train: Json) -> NewRun:
        """A person's run of the whole job."""
        data = self.step("data")
        steps = (
            Step("data", "data", "work:make", {}, data.inputs, ("dataset",), retries=0),
            Step(
                "train",
                "train",
                "work:make",
                {"family": "onejob.families.tabular", **train},
                {"dataset": Output("data", "dataset")},
                ("checkpoint",),
                retries=0,
            ),
            Step(
                "optimize.choose",
                "optimize",
                "work:make",
                {},
                {"dataset": Output("data", "dataset"), "checkpoint": Output("train", "checkpoint")},
                ("engine",),
                retries=0,
            ),
        )
        engine = Output("optimize.choose", "engine")
        plan = Plan(steps, Serving(NAME, engine, {}), {f"{NAME}/engine@champion": engine})
        table = {"family": "tabular", "source": "rows.csv", "columns": COLUMNS}
        spec = {"data": table, "train": train, "run": {}, "monitor": self.spec}
        return NewRun(NAME, str(self.project), spec, plan, {"kind": "person"})

    @property
    def spec(self) -> Json:
        return Spec.model_validate(self.rules).model_dump(mode="json")

    def serve(self, session: Session) -> str:
        """Run the job to its end; gives the digest that is served."""
        run = session.ledger.add_run(self.job())
        self.passes(session)
        assert session.ledger.get_run(run.id).state is RunState.DONE, session.ledger.get_run(run.id).error
        return self.endpoint(session).artifact

    def endpoint(self, session: Session) -> Endpoint:
        found = session.ledger.get_endpoint(NAME)
        assert found is not None
        return found

    def traffic(self, session: Session, begins: float, ends: float, kind: str = "traffic", rows: int = 10) -> None:
        text = f"{begins} {ends}".encode()
        digest, size = session.blobs.put(text)
        meta = {"begins": begins, "rows": rows, "newest": [[ends, rows]]}
        artifact = Artifact(kind, (FileEntry("segment.arrows", digest, size),), meta)
        session.blobs.put(artifact.manifest_bytes())
        session.ledger.add_segment(NAME, artifact, begins=begins, ends=ends, rows=rows)

    def day(self, session: Session, count: int = 1, passes: int = 10) -> None:
        """So many days of traffic, each followed by passes."""
        for _ in range(count):
            self.days += 1
            at = 15_000 * DAY + self.days * DAY
            self.traffic(session, at + 3600, at + 20 * 3600)
            self.passes(session, passes)

    def passes(self, session: Session, count: int = 10) -> None:
        for _ in range(count):
            newest = session.ledger.newest_event()
            reconcile(session)
            if told := session.troubles.known:
                raise AssertionError(told)
            if session.ledger.newest_event() == newest:
                break

    def hardy(self, session: Session, count: int = 14) -> Session:
        """Passes of supervisors of which each that dies is followed by another."""
        for _ in range(count):
            newest = session.ledger.newest_event()
            try:
                reconcile(session)
                if session.ledger.newest_event() == newest:
                    break
            except Crash:
                self.died += 1
                self.kill(session)
                session = self.supervisor()
        return session

    def of_kind(self, session: Session, kind: str) -> list[Run]:
        """Runs of the loop, oldest first."""
        return [session.ledger.get_run(turn.run) for turn in reversed(session.ledger.list_turns(NAME, kind=kind))]
