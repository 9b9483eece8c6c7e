"""Trainings as real processes: ranks agree, and whoever is killed ends with the same bytes.

The processes come from a fork server that has imported torch, so that a start costs no import; each runs the step
runner as it is. The launcher here does what the shim does: environment, the store's listening socket, and the end of
the gang when one rank ends badly; the last test uses the shim itself.
"""

import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from onejob.core import faults
from onejob.core.artifact import digest_bytes
from onejob.core.context import read_lines
from onejob.core.plan import Output, Upstream
from onejob.core.ports import Task
from onejob.exec import step as runner
from onejob.exec.local import LocalExecutor
from onejob.train import checkpoint
from onejob.train.engines import replica
from onejob.train.spec import Spec, plan

ROWS, HELD_OUT, BATCH = 150, 40, 64  # 150 = 64 + 64 + 22: the last batch of an epoch is ragged
STEPS = 9

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "polars", "onejob.train.engines.torch", "onejob.families.tabular.model"])


@dataclass(frozen=True)
class Case:
    """A training to run: its dataset, and where its scratch lies."""

    folder: Path
    meta: Mapping[str, Any]
    spec: Mapping[str, Any] = field(default_factory=dict)

    def task(self, name: str, scratch: str) -> Path:
        """A work folder with its task.json."""
        upstream = Upstream("tiny", str(self.folder), 7, {"dataset": Output("data", "dataset")})
        spec = {"epochs": 3, "batch": BATCH, "lr": 0.02, "checkpoint": 2, **self.spec}
        model = {"hidden": [8], "dropout": 0.3, "min_count": 1, **spec.pop("model", {})}
        upstream = Upstream(**{**_fields(upstream), "family": "onejob.families.tabular"})
        (planned,) = plan(Spec(model=model, **spec), upstream).steps
        work = self.folder / name
        work.mkdir(exist_ok=True)
        task = {
            "name": "train",
            "entry": planned.entry,
            "options": planned.options,
            "setup": planned.setup,
            "seed": planned.seed,
            "threads": planned.threads,
            "outputs": list(planned.outputs),
            "scratch": str(self.folder / scratch),
            "project": str(self.folder),
            "inputs": {
                "dataset": {
                    "digest": "d" * 64,
                    "kind": "dataset",
                    "meta": self.meta,
                    "path": str(self.folder / "dataset"),
                }
            },
        }
        (work / "task.json").write_text(json.dumps(task))
        return work


def _fields(upstream: Upstream) -> dict[str, Any]:
    return {name: getattr(upstream, name) for name in ("job", "project", "seed", "outputs")}


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make_case(tmp_path)


def make_case(folder: Path, **spec: Any) -> Case:
    """A small dataset with a signal, in the layout of the contract."""
    source = np.random.default_rng(5)
    count = ROWS + HELD_OUT
    carrier = source.integers(0, 4, count)
    wind = source.normal(size=count)
    wind[::9] = np.nan
    late = (np.nan_to_num(wind) + (carrier == 2) + source.normal(size=count) * 0.5) > 0.4
    frame = pl.DataFrame({"late": late, "carrier": [f"C{n}" for n in carrier], "wind": wind}).fill_nan(None)
    splits = {}
    for split, part in (("train", frame[:ROWS]), ("holdout", frame[ROWS:])):
        path = folder / "dataset" / split / "00000.arrow"
        path.parent.mkdir(parents=True)
        part.write_ipc(path)
        splits[split] = {"rows": len(part), "shards": [{"path": f"{split}/00000.arrow", "rows": len(part)}]}
    meta = {
        "format": 1,
        "family": "tabular",
        "columns": {"label": "late", "categories": ["carrier"], "numbers": ["wind"], "time": None},
        "schema": {"late": "Boolean", "carrier": "String", "wind": "Float64"},
        "splits": splits,
    }
    return Case(folder, meta, spec)


# ---- the launcher ------------------------------------------------------------------------------------------------


def rank_main(
    work: Path, environ: dict[str, str], listener: socket.socket | None, before: Callable[[Path], None] | None
) -> None:
    """In a process of its own: what the shim would start."""
    os.environ.update(environ)
    output = os.open(work / f"log-{environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if listener is not None:
        os.environ["ONEJOB_STORE_FD"] = str(listener.detach())
    faults._armed = environ.get(faults.VARIABLE, "")
    if before:
        before(work)
    sys.exit(runner.main([str(work)]))


def start(
    work: Path,
    world: int,
    *,
    fault: Mapping[int, str] | None = None,
    before: Callable[[Path], None] | None = None,
    only: int | None = None,
) -> list[int]:
    """Run the ranks (or `only` one of them) to their end; gives exit codes, -9 for the killed."""
    listener = socket.create_server(("127.0.0.1", 0))
    ranks = range(world) if only is None else [only]
    processes = {}
    for rank in ranks:
        environ = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            faults.VARIABLE: (fault or {}).get(rank, ""),
        }
        given = listener if rank == 0 else None
        processes[rank] = context.Process(target=rank_main, args=(work, environ, given, before))
        processes[rank].start()
    if only is None:
        listener.close()
    multiprocessing.connection.wait([process.sentinel for process in processes.values()])
    deadline = time.monotonic() + 30
    while any(process.is_alive() for process in processes.values()):
        dead = [process for process in processes.values() if process.exitcode is not None and process.exitcode < 0]
        if dead or time.monotonic() > deadline:
            for process in processes.values():
                process.kill()
        for process in processes.values():
            process.join(0.05)
    listener.close()
    return [processes[rank].exitcode for rank in ranks]


def result(work: Path) -> str:
    """The digest of everything that the training left as its artifact."""
    files = sorted(path for path in (work / "out").rglob("*") if path.is_file())
    assert {path.name for path in files} == {"checkpoint.json", "encoding.json", "model.safetensors"}
    return digest_bytes(b"".join(path.read_bytes() for path in files))


def error(work: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((work / "error.json").read_text())
    return found


def measured(work: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((work / "measured.json").read_text())
    return found


def log(work: Path, rank: int = 0) -> str:
    return (work / f"log-{rank}").read_text()


def keep_every_step(work: Path) -> None:
    """In the rank's process: write down all parameters after each step."""
    plain = replica.Replica.step
    count = iter(range(1000))

    def step(self: replica.Replica, *args: Any) -> None:
        plain(self, *args)
        flat = torch.cat([p.detach().reshape(-1) for p in self.parameters.values()])
        np.save(work / f"step-{next(count)}-rank-{os.environ['RANK']}.npy", flat.numpy())

    replica.Replica.step = step  # type: ignore[method-assign]


def disturb_rank_1(work: Path) -> None:
    """In the rank's process: rank 1 goes astray in its third step."""
    if os.environ["RANK"] != "1":
        return
    plain = replica.Replica.step
    count = iter(range(1000))

    def step(self: replica.Replica, *args: Any) -> None:
        plain(self, *args)
        if next(count) == 2:
            with torch.no_grad():
                self.parameters["head.bias"].add_(1e-3)

    replica.Replica.step = step  # type: ignore[method-assign]


# ---- the tests ---------------------------------------------------------------------------------------------------


def test_one_and_two_ranks_agree_at_every_step(case: Case):
    alone, gang = case.task("alone", "scratch-1"), case.task("gang", "scratch-2")
    assert start(alone, 1, before=keep_every_step) == [0], log(alone)
    assert start(gang, 2, before=keep_every_step) == [0, 0], log(gang)
    lines = [read_lines(work / "metrics.jsonl") for work in (alone, gang)]
    losses = [[line["loss"] for line in found if line["split"] == "train"] for found in lines]
    scores = [[line["auc"] for line in found if line["split"] == "holdout"] for found in lines]
    assert len(losses[0]) == STEPS
    assert losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(scores[1], scores[0], rtol=0, atol=1e-3)
    for step in range(STEPS):
        first, second = (np.load(gang / f"step-{step}-rank-{rank}.npy") for rank in (0, 1))
        np.testing.assert_allclose(first, np.load(alone / f"step-{step}-rank-0.npy"), rtol=0, atol=1e-5)
        np.testing.assert_array_equal(first, second)
    worst = max(abs(a - b) for a, b in zip(*losses, strict=True))
    print(f"largest difference of a loss: {worst:.1e}")


def test_ranks_without_rows_in_a_ragged_batch_take_part(tmp_path: Path):
    case = make_case(tmp_path, batch=ROWS - 1, epochs=2)  # the second batch has one row for three ranks
    alone, gang = case.task("alone", "scratch-1"), case.task("gang", "scratch-3")
    assert start(alone, 1) == [0]
    assert start(gang, 3) == [0, 0, 0], log(gang)
    losses = [[line["loss"] for line in read_lines(work / "metrics.jsonl") if "loss" in line] for work in (alone, gang)]
    assert len(losses[0]) == 4
    np.testing.assert_allclose(losses[1], losses[0], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What uninterrupted trainings of one and of two ranks leave."""
    found = {}
    for world in (1, 2):
        case = make_case(tmp_path_factory.mktemp(f"whole-{world}"))
        work = case.task("work", "scratch")
        assert start(work, world) == [0] * world, log(work)
        assert measured(work)["resumed_from"] is None
        found[world] = result(work)
    return found


def test_the_same_training_leaves_the_same_bytes(case: Case, whole: dict[int, str]):
    work = case.task("work", "scratch")
    assert start(work, 2) == [0, 0]
    assert result(work) == whole[2]


KILLS = [
    # (world, rank, where, step of the checkpoint that the next start must find)
    (1, 0, "train.step:1", None),
    (1, 0, "train.step:5", 4),
    (1, 0, "train.step:9", 8),
    (1, 0, "checkpoint.after_shard:1", None),
    (1, 0, "checkpoint.before_manifest:3", 4),
    (1, 0, "step.after_entry", 9),
    (2, 1, "train.step:4", 2),
    (2, 1, "checkpoint.after_shard:2", 2),
    (2, 0, "checkpoint.before_manifest:2", 2),
]


@pytest.mark.parametrize(("world", "rank", "where", "resumed"), KILLS)
def test_killed_anywhere_it_ends_with_the_same_bytes(
    case: Case, whole: dict[int, str], world: int, rank: int, where: str, resumed: int | None
):
    first = case.task("first", "scratch")
    assert -signal.SIGKILL in start(first, world, fault={rank: where})
    again = case.task("again", "scratch")
    assert start(again, world) == [0] * world, log(again)
    assert measured(again)["resumed_from"] == resumed
    assert result(again) == whole[world]
    steps = [line["step"] for line in read_lines(again / "metrics.jsonl") if line["split"] == "train"]
    assert steps == list(range(1, STEPS + 1))  # also those that an earlier execution made


def test_killed_again_and_again_it_still_ends_with_the_same_bytes(case: Case, whole: dict[int, str]):
    for attempt in range(2):
        work = case.task(f"work-{attempt}", "scratch")
        assert -signal.SIGKILL in start(work, 2, fault={attempt % 2: "train.step:3"})
    work = case.task("last", "scratch")
    assert start(work, 2) == [0, 0]
    assert result(work) == whole[2]


def test_a_damaged_checkpoint_is_left_out(case: Case, whole: dict[int, str]):
    first = case.task("first", "scratch")
    start(first, 1, fault={0: "train.step:5"})
    shard = case.folder / "scratch" / "checkpoints" / "4" / "rank-0-of-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    again = case.task("again", "scratch")
    assert start(again, 1) == [0], log(again)
    assert measured(again)["resumed_from"] == 2
    assert "step 4 is left out" in (again / "warnings.jsonl").read_text()
    assert result(again) == whole[1]


def test_replicas_that_drift_apart_are_named(case: Case):
    work = case.task("work", "scratch")
    assert start(work, 2, before=disturb_rank_1) == [5, 5]
    assert error(work)["error"] == "RankError"
    assert "model of rank 1 differs from rank 0's at step 4" in error(work)["message"]
    kept = checkpoint.newest_complete(case.folder / "scratch" / "checkpoints", 2)
    assert kept is not None
    assert kept.step == 2


def test_a_loss_that_is_not_finite_names_step_and_rows_and_keeps_the_checkpoint(tmp_path: Path):
    case = make_case(tmp_path, lr=1e25, clip=0.0, optimizer="sgd", schedule="constant", checkpoint=1)
    work = case.task("work", "scratch")
    assert start(work, 2) == [5, 5]
    found = error(work)
    assert found["error"] == "StepError"
    assert "at step 1 (epoch 0), from training rows" in found["message"]
    rows = [int(row) for row in found["message"].partition("rows ")[2].split(", ")]
    assert len(rows) > 5  # of both ranks: each names at most five
    assert all(0 <= row < ROWS for row in rows)
    assert "checkpoint of step 1 is kept" in found["cure"]
    assert checkpoint.newest_complete(tmp_path / "scratch" / "checkpoints", 2) is not None


def test_a_rank_that_does_not_arrive_is_named(tmp_path: Path):
    case = make_case(tmp_path, arrive=5.5)
    works = [case.task(f"only-{present}", f"scratch-{present}") for present in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        codes = list(pool.map(lambda present: start(works[present], 2, only=present), (0, 1)))
    assert codes == [[5], [5]]
    for present, missing in ((0, 1), (1, 0)):
        assert f"rank {present}: waiting for rank {missing}, not arrived for 5 s" in log(works[present], present)
        assert error(works[present])["error"] == "RankError"
        assert f"rank {missing} never arrived" in error(works[present])["message"]


def test_the_best_epoch_is_kept_also_over_a_kill(tmp_path: Path):
    case = make_case(tmp_path, keep="best", metric="log_loss", lr=0.5, epochs=6, schedule="constant")
    work = case.task("work", "scratch-1")
    assert start(work, 2) == [0, 0]
    held = [line for line in read_lines(work / "metrics.jsonl") if line["split"] == "holdout"]
    best = min(held, key=lambda line: line["log_loss"])
    assert best["step"] < held[-1]["step"], "the case must have its best epoch before the last"
    assert measured(work)["best_step"] == best["step"]
    assert measured(work)["scores"]["log_loss"] == best["log_loss"]
    killed, again = case.task("killed", "scratch-2"), case.task("again", "scratch-2")
    start(killed, 2, fault={1: "train.step:17"})
    assert start(again, 2) == [0, 0], log(again)
    assert measured(again)["resumed_from"] == 16
    assert result(again) == result(work)


def test_sigterm_under_the_shim_saves_on_all_ranks_and_goes_on(tmp_path: Path):
    case = make_case(tmp_path, epochs=150, checkpoint=10**6)
    stopped, again, uninterrupted = (
        case.task("stopped", "scratch"),
        case.task("again", "scratch"),
        case.task("all", "other"),
    )
    executor = LocalExecutor()
    argv = (sys.executable, "-m", "onejob.exec.step", str(stopped))
    handle = executor.submit(Task("stopped", argv, stopped, {}, processes=2, timeout=100, grace=60))
    wait(lambda: len(read_lines(stopped / "metrics.jsonl")) > 3)
    executor.cancel(handle)
    wait(lambda: executor.poll([handle])[0].state == "exited")
    assert executor.poll([handle])[0].code == runner.STOPPED
    assert start(again, 2) == [0, 0], log(again)
    resumed = measured(again)["resumed_from"]
    assert resumed == max(line["step"] for line in read_lines(stopped / "metrics.jsonl"))
    assert 3 < resumed < 450
    assert start(uninterrupted, 2) == [0, 0]
    assert result(again) == result(uninterrupted)


def wait(ready: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)
