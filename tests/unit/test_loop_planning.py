"""What only the whole job shows to be wrong: each table by itself is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from onejob.errors import JobFileError
from onejob.loop.commands.run import load_job
from onejob.loop.planning import plan_job
from onejob.machines import inventory

JOB = """
name = "tiny"
[data]
source = "rows.csv"
columns = { label = "late", numbers = ["hour"], time = "day" }
[train]
[serve]
[monitor]
retrain = { on = ["schedule"] }
"""
GATE = 'gate = { promote = "better", margin = 0.0 }\n'


def job(tmp_path: Path, text: str) -> Path:
    (tmp_path / "rows.csv").write_text("day,hour,late\n2024-01-01,1,0\n")
    (tmp_path / "job.toml").write_text(text)
    return tmp_path / "job.toml"


def test_the_rows_of_the_gate_must_not_choose_the_epoch(tmp_path: Path) -> None:
    plan_job(load_job(job(tmp_path, JOB), ["train.keep=best"]))
    gated = load_job(job(tmp_path, JOB + GATE), ["train.keep=best"])
    with pytest.raises(JobFileError, match=r"job\.toml \[train\] keep: .* Set keep = \"last\""):
        plan_job(gated)
    plan_job(load_job(job(tmp_path, JOB + GATE)))


@pytest.mark.parametrize(
    ("optimize", "serve", "measured"),
    [
        ("", "", (6, 64)),
        ("", "replicas = 4", (1, 64)),
        ("", "threads = 3\nbatch = { max = 16 }", (3, 16)),
        ("threads = 2\nbatch = 8", "threads = 3\nbatch = { max = 16 }", (2, 8)),
    ],
)
def test_candidates_are_measured_as_they_will_be_served(
    tmp_path: Path, optimize: str, serve: str, measured: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "cpus", lambda: 6.5)
    tables = f'[optimize]\nbudget = {{ metric = "auc", drop = 0.1 }}\n{optimize}\n[serve]\n{serve}\n'
    plan = plan_job(load_job(job(tmp_path, JOB.replace("[serve]\n", tables))))
    choose = next(step for step in plan.steps if step.name == "optimize.choose")
    assert (choose.options["threads"], choose.options["batch"]) == measured
