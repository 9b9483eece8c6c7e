"""A world for tests of the loop: a real ledger and blobs in a temporary folder, a clock that is set, an executor that
starts nothing. Supervisors come, die at named lines and come again; what the executor was asked to run stays.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from onejob.core.artifact import Json
from onejob.core.plan import Needs, Output, Plan, Serving, Source, Step
from onejob.core.ports import Status, Task
from onejob.core.records import NewRun, Owner, Run, StepRow
from onejob.errors import ConflictError
from onejob.loop import endpoints, executions, ingest, reconcile, tasks
from onejob.loop.home import open_home
from onejob.loop.session import Session
from onejob.loop.troubles import Troubles
from onejob.store import endpoints as store_endpoints
from onejob.store import executions as store_executions
from onejob.store import runs as store_runs
from onejob.store.blobs import DirBlobs
from onejob.store.ledger import SqlLedger
from onejob.testing.ledger_samples import Clock

HOST = "here/boot/1"
WITH_FAULTS = (endpoints, executions, ingest, reconcile, tasks, store_endpoints, store_executions, store_runs)


class Crash(BaseException):
    """The supervisor dies here; no `except Exception` may notice."""


@dataclass
class FakeExecutor:
    """Tasks that end as they are told: `ends[step]` lists how each try ends, the last one for ever after."""

    cpus: float = 2.0
    ends: dict[str, list[str]] = field(default_factory=dict)
    runs: Counter[str] = field(default_factory=Counter)
    """Step -> how often it was really started."""
    tries: dict[str, int] = field(default_factory=dict)
    """Folder -> which try at its step it is."""
    cancelled: set[str] = field(default_factory=set)
    over: dict[str, Status] = field(default_factory=dict)
    refuse: dict[str, Exception] = field(default_factory=dict)

    def submit(self, task: Task) -> Json:
        name = self._name(task.work)
        if error := self.refuse.get(name):
            raise error
        if not (task.work / "started.json").exists():
            (task.work / "started.json").write_text(json.dumps({"pid": 1, "host": "here"}))
            self.runs[name] += 1
            self.tries[str(task.work)] = self.runs[name]
            self.over.pop(str(task.work), None)  # a folder that was cleared away may come again
            self.cancelled.discard(str(task.work))
        handle = self.adopt(task.work)
        if handle is None:
            raise ConflictError("the task was given up before it started", place=str(task.work))
        return handle

    def adopt(self, work: Path) -> Json:
        try:
            started = json.loads((work / "started.json").read_bytes())
        except OSError:
            return None
        return None if "revoked" in started else {"dir": str(work), **started}

    def revoke(self, work: Path) -> bool:
        work.mkdir(parents=True, exist_ok=True)
        if not (work / "started.json").exists():
            (work / "started.json").write_text(json.dumps({"revoked": True}))
        return self.adopt(work) is None

    def poll(self, handles: Sequence[Json]) -> list[Status]:
        return [self._status(Path(handle["dir"])) for handle in handles]

    def cancel(self, handle: Json, *, now: bool = False) -> None:
        self.cancelled.add(handle["dir"])

    def capacity(self) -> Mapping[str, Json]:
        return {"cpus": self.cpus, "gpus": [], "memory": 1 << 30}

    def _status(self, work: Path) -> Status:
        if str(work) in self.over:
            return self.over[str(work)]
        if str(work) in self.cancelled:
            status = Status("exited", 75, "asked to stop", cause="stopped")
        else:
            name = self._name(work)
            ends = self.ends.get(name, ["ok"])
            end = ends[min(self.tries.get(str(work), 1), len(ends)) - 1]
            status = self._end(work, end)
        if status.state != "running":
            self.over[str(work)] = status
        return status

    def _end(self, work: Path, end: str) -> Status:
        match end:
            case "hang":
                return Status("running")
            case "serve":
                desired = json.loads((work.parent / "desired.json").read_bytes())
                state = {"pid": 7, "port": 8123, "state": "ready", "generation": desired["generation"]}
                (work.parent / "state.json").write_text(json.dumps(state))
                return Status("running")
            case "refuse":
                error = {"error": "StoreError", "message": "the model can't be loaded"}
                state = {"pid": 7, "port": 0, "state": "failed", "generation": -1, "error": error}
                desired = json.loads((work.parent / "desired.json").read_bytes())
                (work.parent / "state.json").write_text(
                    json.dumps({**state, "failed_generation": desired["generation"]})
                )
                return Status("running")
            case "ok":
                _leave(work)
                return Status("exited", 0)
            case "fail" | "retryable":
                (work / "error.json").write_text(
                    json.dumps({"error": "StepError", "message": "no luck", "retryable": end == "retryable"})
                )
                return Status("exited", 5, "exited with code 5", cause="exit")
        assert end == "gone", end
        return Status("gone", reason="its shim was killed")

    def _name(self, work: Path) -> str:
        if work.name.startswith("host-"):
            return "host"
        name: str = json.loads((work / "task.json").read_bytes())["name"]
        return name


def _leave(work: Path) -> None:
    """What the step computes: its name, and the digests that it read."""
    task = json.loads((work / "task.json").read_bytes())
    for name in task["outputs"]:
        (work / "out" / name).mkdir(parents=True, exist_ok=True)
        read = sorted(given["digest"] for given in task["inputs"].values())
        (work / "out" / name / "a.txt").write_text(json.dumps([task["name"], task["options"], read]))
        (work / "out" / f"{name}.json").write_text(json.dumps({"kind": "dataset", "meta": {}}))


class World:
    """One home, any number of supervisors."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.clock, self.executor = root, Clock(), FakeExecutor()
        self.project = root / "project"
        self.project.mkdir()
        (self.project / "work.py").write_text("def make(context):\n    return context\n")
        (self.project / "rows.csv").write_text("a\n1\n")
        self.living: set[Owner] = set()
        self.pids = 100
        self.fatal: Callable[[str], bool] = lambda point: False
        for module in WITH_FAULTS:
            monkeypatch.setattr(module, "reach", self._reach)
        monkeypatch.setattr(os, "fsync", lambda file: None)  # nobody pulls the plug of this machine
        self.ledgers: list[SqlLedger] = []

    def _reach(self, point: str) -> None:
        if self.fatal(point):
            raise Crash(point)

    def supervisor(self, host: str = HOST) -> Session:
        self.pids += 1
        owner = Owner(host, self.pids, 1.0)
        self.living.add(owner)
        home = open_home(self.root / "home")
        ledger = SqlLedger(home.ledger_url, clock=self.clock, alive=self._alive)
        event.listen(ledger._db.engine, "connect", lambda raw, record: raw.execute("PRAGMA synchronous = OFF"))
        ledger._db.engine.dispose()  # the next connection heeds it
        self.ledgers.append(ledger)
        blobs = DirBlobs(home.blobs, home.tmp)
        troubles = Troubles(clock=self.clock)
        executors: Any = {"local": self.executor}
        return Session(home, ledger, blobs, executors, owner, self.clock, self._alive, troubles=troubles)

    def _alive(self, owner: Owner) -> bool | None:
        return owner in self.living if owner.host == HOST else None

    def kill(self, session: Session) -> None:
        self.living.discard(session.owner)
        session.ledger.close()

    def close(self) -> None:
        for ledger in self.ledgers:
            ledger.close()

    def step(self, name: str, *after: str, **more: Any) -> Step:
        inputs: dict[str, Any] = {one: Output(one, "out") for one in after}
        if not after:
            inputs = {"rows": Source((("rows.csv", str(self.project / "rows.csv")),))}
        values: dict[str, Any] = {"options": {"name": name}, "needs": Needs(), "retries": 0}
        values |= more
        return Step(name, "data", "work:make", inputs=inputs, outputs=("out",), **values)

    def chain(self, *names: str, **more: Any) -> tuple[Step, ...]:
        return tuple(self.step(name, *names[max(0, i - 1) : i], **more) for i, name in enumerate(names))

    def add(
        self,
        session: Session,
        *steps: Step,
        job: str = "tiny",
        forced: Sequence[str] = (),
        refs: Mapping[str, Output] | None = None,
        serving: Serving | None = None,
    ) -> Run:
        plan = Plan(steps, serving, dict(refs or {}))
        spec = {"run": {}, "monitor": {}}
        return session.ledger.add_run(NewRun(job, str(self.project), spec, plan, {"kind": "person"}, tuple(forced)))

    def rows(self, session: Session, run: Run) -> dict[str, StepRow]:
        return {row.name: row for row in session.ledger.list_steps(run.id)}


def drive(session: Session, run: Run, passes: int = 12) -> Run:
    """Pass after pass over one run, until it has ended."""
    for _ in range(passes):
        reconcile.reconcile(session, [run.id])
        now = session.ledger.get_run(run.id)
        if now.state not in reconcile.OPEN:
            return now
    return session.ledger.get_run(run.id)
