"""The data stage on the real flights of 2013: the counts that the job's README tells, and equal bytes everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from onejob.core.plan import Source, Upstream
from onejob.data.spec import Spec, plan
from onejob.engines.dataset import read_split

EXAMPLE = Path(__file__).parents[2] / "src/onejob/examples/flights"
SCRIPT = """
import json, sys
from pathlib import Path
from onejob.core.context import InputArtifact, StepContext
from onejob.data.engines.polars import run
task = json.loads(Path(sys.argv[1]).read_text())
work = Path(task["work"])
sys.path.insert(0, task["project"])
inputs = {name: InputArtifact("0" * 64, "source", {}, work / "in" / name) for name in task["inputs"]}
run(StepContext("data", task["options"], {}, inputs, work, work, Path(task["project"])))
"""


@dataclass(frozen=True)
class Dataset:
    """What a run of the stage left."""

    folder: Path
    meta: dict[str, Any]

    def files(self) -> dict[str, bytes]:
        return {p.relative_to(self.folder).as_posix(): p.read_bytes() for p in self.folder.rglob("*") if p.is_file()}


def run_in(work: Path, env: Mapping[str, str]) -> Dataset:
    """The example's [data] in a process of its own, as the step runner would start it."""
    table = tomllib.loads((EXAMPLE / "job.toml").read_text())["data"]
    (step,) = plan(Spec.model_validate(table), Upstream("flights", str(EXAMPLE), 7, {})).steps
    for name, source in step.inputs.items():
        assert isinstance(source, Source)
        for logical, path in source.files:
            link = work / "in" / name / logical
            link.parent.mkdir(parents=True)
            link.symlink_to(path)
    task = {"work": str(work), "project": str(EXAMPLE), "options": step.options, "inputs": list(step.inputs)}
    (work / "task.json").write_text(json.dumps(task))
    command = [sys.executable, "-c", SCRIPT, str(work / "task.json")]
    subprocess.run(command, check=True, env={**os.environ, **env, "PYTHONDONTWRITEBYTECODE": "1"})
    meta = json.loads((work / "out" / "dataset.json").read_text())["meta"]
    return Dataset(work / "out" / "dataset", meta)


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return run_in(tmp_path_factory.mktemp("one"), {"POLARS_MAX_THREADS": "1", "PYTHONHASHSEED": "1"})


def test_the_counts_that_the_readme_tells(flights: Dataset) -> None:
    assert flights.meta["counts"]["source"] == {"source": 336_776, "weather": 26_115, "planes": 3_322}
    dropped = {each["reason"]: each["rows"] for each in flights.meta["counts"]["dropped"]}
    assert dropped == {"cancelled": 1_782, "diverted": 164, "not selected": 284_821}
    rows = {split: each["rows"] for split, each in flights.meta["splits"].items()}
    assert rows == {"train": 43_770, "holdout": 6_239}
    readme = (EXAMPLE / "README.md").read_text()
    for number in (*rows.values(), dropped["cancelled"], dropped["diverted"], sum(rows.values())):
        assert f"{number:,}" in readme


def test_cancelled_and_diverted_flights_are_kept_apart_with_the_reason(flights: Dataset) -> None:
    rows = pl.read_ipc(flights.folder / "dropped/01.arrow")
    assert rows["onejob_reason"].value_counts(sort=True).rows() == [("cancelled", 1_782), ("diverted", 164)]
    assert rows.filter(pl.col("onejob_reason") == "cancelled")["dep_time"].null_count() == 1_782
    assert rows["arr_delay"].null_count() == rows.height


def test_the_end_of_february_is_held_out_in_time_order(flights: Dataset) -> None:
    train = read_split(flights.folder, flights.meta, "train", ["departs", "late"])
    held_out = read_split(flights.folder, flights.meta, "holdout", ["departs", "late"])
    assert train["departs"].max() < held_out["departs"].min()
    assert (held_out["departs"][1:] >= held_out["departs"][:-1]).all()
    profile = json.loads((flights.folder / "profile.json").read_text())
    assert profile["train"]["departs"]["min"].startswith("2013-01-01 05:15")
    assert profile["holdout"]["departs"]["min"].startswith("2013-02-22 ")
    # by the local date: in UTC, the last evening of February is March already
    assert profile["holdout"]["departs"]["max"].startswith("2013-02-28 23:")
    assert 0.2 < train["late"].mean() < held_out["late"].mean() < 0.3


def test_the_weather_is_that_of_the_flights_own_hour(flights: Dataset) -> None:
    """United 1545, 1 January, 05:15 from Newark: weather.csv has 39.02 F, dew point 28.04 F for EWR at 5 o'clock."""
    rows = read_split(flights.folder, flights.meta, "train", ["flight_id", "temp", "dewp", "distance", "plane_age"])
    (index,) = [i for i, name in enumerate(rows["flight_id"]) if name == "UA1545-EWR-2013-01-01"]
    assert [rows[name][index] for name in ("temp", "dewp", "distance", "plane_age")] == [39.02, 28.04, 1400.0, 14.0]


def test_threads_folder_and_run_change_no_byte(flights: Dataset, tmp_path: Path) -> None:
    folder = tmp_path / "another [folder] with 'quotes'"
    folder.mkdir()
    again = run_in(folder, {"POLARS_MAX_THREADS": "3", "PYTHONHASHSEED": "2", "TZ": "Asia/Tokyo"})
    assert again.meta == flights.meta
    assert again.files() == flights.files()
