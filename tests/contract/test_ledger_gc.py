"""Garbage collection on both databases: what is referred to stays, the rest goes, also while runs go on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from onejob.core.artifact import Artifact, FileEntry
from onejob.core.records import Execution
from onejob.core.state import ExecutionState, RunState, StepState
from onejob.errors import NotFoundError
from onejob.store.blobs import DirBlobs
from onejob.store.collect import plan_gc, sweep
from onejob.store.ledger import SqlLedger
from onejob.testing.ledger_samples import TTL, A, Clock, OpenLedger, leave, new_run, request, some_artifact, won

DAY = 86400.0


class World:
    """A ledger and blobs whose times a test sets: what is put is as old as the clock says."""

    def __init__(self, ledger: SqlLedger, blobs: DirBlobs, clock: Clock) -> None:
        self.ledger, self.blobs, self.clock = ledger, blobs, clock

    def keep(self, text: str, kind: str = "dataset") -> Artifact:
        """Put an artifact's bytes and manifest, as ingest does."""
        digest, size = self.put(text.encode())
        artifact = Artifact(kind, (FileEntry("a.txt", digest, size),))
        self.put(artifact.manifest_bytes())
        return artifact

    def put(self, data: bytes) -> tuple[str, int]:
        digest, size = self.blobs.put(data)
        os.utime(self.blobs.path(digest), (self.clock.now, self.clock.now))
        return digest, size

    def run(self, *texts: str, job: str = "flights", end: RunState | None = RunState.DONE) -> list[Execution]:
        """A run whose steps leave one artifact each, the next reading the one before."""
        run = self.ledger.add_run(new_run(job, *(f"step{n}" for n in range(len(texts)))))
        lease = self.ledger.lease("run", run.id, A, TTL)
        assert lease is not None
        self.ledger.set_run(run.id, RunState.RUNNING, token=lease.token)
        made: list[Execution] = []
        for n, text in enumerate(texts):
            inputs = {"in": made[-1].outputs["out"]} if made else {}
            key = f"key-{'-'.join(texts[: n + 1])}"
            made.append(leave(self.ledger, run.id, key, {"out": self.keep(text)}, inputs=inputs))
            self.ledger.set_step(run.id, f"step{n}", StepState.READY, token=lease.token)
            self.ledger.set_step(run.id, f"step{n}", StepState.DONE, token=lease.token, execution=made[-1].id)
        if end is not None:
            self.ledger.set_run(run.id, end, token=lease.token)
        return made

    def collect(self, keep_runs: int = 1, grace: float = DAY) -> None:
        sweep(self.ledger, self.blobs, plan_gc(self.ledger, self.blobs, self.clock.now, grace, keep_runs))

    def there(self, made: Sequence[Execution]) -> list[bool]:
        """Whether each execution's output is whole: catalogued, manifest and file."""
        return [self.has(execution.outputs["out"]) for execution in made]

    def has(self, digest: str) -> bool:
        try:
            artifact = self.ledger.get_artifact(digest)
        except NotFoundError:
            assert not self.blobs.has(digest)
            return False
        assert self.blobs.has(digest)
        assert all(self.blobs.has(entry.digest) for entry in artifact.files)
        return True


@pytest.fixture
def world(open_ledger: OpenLedger, tmp_path: Path) -> World:
    clock = Clock(1e9)
    ledger = open_ledger(clock=clock)
    assert isinstance(ledger, SqlLedger)
    return World(ledger, DirBlobs(tmp_path / "home" / "blobs", tmp_path / "home" / "tmp"), clock)


def test_the_last_done_runs_stay_and_older_ones_go(world: World) -> None:
    runs = [world.run(f"data{n}", "same", f"engine{n}") for n in range(3)]
    other = world.run("movies", job="movies")
    world.clock.now += 2 * DAY
    world.collect(keep_runs=2)
    assert [world.there(run) for run in runs] == [[False, True, False], [True] * 3, [True] * 3]
    assert world.there(other) == [True]
    assert world.ledger.get_execution(runs[0][0].id).forgotten.startswith("gc: ")
    assert world.ledger.claim(request(1, "key-data0"), A, TTL).answer == "won", "what is gone is not done"
    assert world.ledger.claim(request(1, "key-data1"), A, TTL).answer == "done"


def test_refs_and_endpoints_keep_all_that_they_stand_on(world: World) -> None:
    champion, served, plain = world.run("d1", "c1", "e1"), world.run("d2", "c2", "e2"), world.run("d3", "c3", "e3")
    world.run("d4")
    world.ledger.set_ref("flights/engine@champion", champion[1].outputs["out"], champion[1].id)
    world.ledger.want_endpoint("flights", artifact=served[2].outputs["out"], execution=served[2].id, options={})
    traffic = some_artifact("rows", "traffic")
    world.ledger.add_segment("flights", traffic, begins=0.0, ends=1.0, rows=1)
    world.clock.now += 2 * DAY
    plan = plan_gc(world.ledger, world.blobs, world.clock.now, DAY, 1)
    assert plan.kept[traffic.digest] == "it came back from the endpoint flights"
    assert plan.kept[champion[0].outputs["out"]] == "the ref flights/engine@champion stands on it"
    world.collect()
    assert world.there(champion) == [True, True, False]
    assert world.there(served) == [True] * 3
    assert world.there(plain) == [False] * 3


def test_runs_that_go_on_live_executions_and_the_newest_run_stay(world: World) -> None:
    going, failed = world.run("d1", end=None), world.run("d2", job="movies", end=RunState.FAILED)
    read = world.keep("read by a live one")
    world.ledger.add_artifact(read)
    won(world.ledger.claim(request(1, "live", inputs={"in": read.digest}), A, TTL))
    old_failed = world.run("d3", end=RunState.FAILED)
    world.run("d4")
    world.clock.now += 2 * DAY
    world.collect()
    assert world.there(going) == [True]
    assert world.there(failed) == [True]
    assert world.has(read.digest)
    assert world.there(old_failed) == [False]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_what_is_new_stays_whatever_names_it(world: World) -> None:
    world.clock.now += 2 * DAY
    loose, _ = world.put(b"put, and not yet committed")
    added = world.keep("added, and not yet claimed")
    world.ledger.add_artifact(added)
    first = world.run("d1")
    world.run("d2")
    world.clock.now += DAY - 1
    world.collect()
    assert world.blobs.has(loose)
    assert world.has(added.digest)
    assert world.there(first) == [True]
    world.clock.now += 2
    world.collect()
    assert not world.blobs.has(loose)
    assert not world.has(added.digest)
    assert world.there(first) == [False]


def test_a_dry_run_tells_what_would_go_and_changes_nothing(world: World) -> None:
    (gone,) = world.run("old")
    world.run("new")
    loose, size = world.put(b"nobody's")
    world.clock.now += 2 * DAY
    before = world.ledger.events()
    plan = plan_gc(world.ledger, world.blobs, world.clock.now, DAY, 1)
    assert set(plan.forget) == {gone.id}
    assert set(plan.drop) == {gone.outputs["out"]}
    reasons = {blob.digest: blob.reason for blob in plan.free}
    assert len(reasons) == 3
    assert reasons[loose] == "no artifact names it"
    assert reasons[gone.outputs["out"]].startswith("nothing refers to dataset ")
    assert plan.size > size
    assert world.ledger.events() == before
    swept = sweep(world.ledger, world.blobs, plan)
    assert swept.size == plan.size
    again = plan_gc(world.ledger, world.blobs, world.clock.now, DAY, 1)
    assert (again.forget, again.drop, again.free) == ({}, {}, ()), "and then there is nothing left to do"


def test_what_comes_into_use_between_plan_and_sweep_stays(world: World) -> None:
    asked, attached, pointed, put, added = (world.run(text)[0] for text in ("d1", "d2", "d3", "d4", "d5"))
    bystander = world.run("d6")
    world.run("d7")
    world.clock.now += 2 * DAY
    plan = plan_gc(world.ledger, world.blobs, world.clock.now, DAY, 1)
    assert set(plan.forget) == {e.id for e in (asked, attached, pointed, put, added, *bystander)}
    assert world.ledger.claim(request(1, "key-d1"), A, TTL).answer == "done"
    run = world.ledger.add_run(new_run("movies", "data"))
    lease = world.ledger.lease("run", run.id, A, TTL)
    assert lease is not None
    world.ledger.set_step(run.id, "data", StepState.READY, token=lease.token)
    world.ledger.set_step(run.id, "data", StepState.DONE, token=lease.token, execution=attached.id)
    world.ledger.set_ref("ref", pointed.outputs["out"], None)
    world.keep("d4")
    world.ledger.add_artifact(world.keep("d5"))
    swept = sweep(world.ledger, world.blobs, plan)
    assert [world.has(e.outputs["out"]) for e in (asked, attached, pointed, added)] == [True] * 4
    assert world.there(bystander) == [False]
    assert all(world.blobs.has(entry.digest) for entry in world.keep("d4").files)
    assert not world.ledger.get_execution(asked.id).forgotten
    assert not world.ledger.get_execution(attached.id).forgotten
    assert len(swept.freed) == 2, "the bystander's manifest and file"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_shared_bytes_stay_while_one_artifact_names_them(world: World) -> None:
    (old,) = world.run("shared")
    candidate = world.ledger.get_artifact(old.outputs["out"])
    engine = Artifact("engine", candidate.files)
    world.put(engine.manifest_bytes())
    newest = world.ledger.add_run(new_run("flights", "pick"))
    leave(world.ledger, newest.id, "pick", {"out": engine})
    world.ledger.set_ref("engine", engine.digest, None)
    world.ledger.cancel_run(newest.id)
    world.run("newer")
    world.clock.now += 2 * DAY
    world.collect()
    assert not world.has(candidate.digest)
    assert world.has(engine.digest)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_an_execution_that_is_live_keeps_its_key_busy_through_a_sweep(world: World) -> None:
    run = world.ledger.add_run(new_run())
    execution, token = won(world.ledger.claim(request(run.id, "live"), A, TTL))
    artifact = world.keep("made before the end")
    world.clock.now += 2 * DAY
    artifact = world.keep("made before the end")  # ingest puts, whether the bytes are there or not
    world.collect()
    world.ledger.finish_execution(execution.id, token, ExecutionState.DONE, outputs={"out": artifact})
    assert world.has(artifact.digest)
