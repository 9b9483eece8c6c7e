"""The Polars engine on small tables: from a job's table to the files and the metadata that other stages read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from onejob.core.context import InputArtifact, StepContext
from onejob.core.plan import Source, Upstream
from onejob.data.engines import shards
from onejob.data.engines.polars import run
from onejob.data.engines.profile import profile
from onejob.data.spec import Spec, plan
from onejob.engines.dataset import read_split
from onejob.errors import (
    DamagedError,
    DataError,
    ExpectationError,
    SourceError,
    StepError,
    StorageFullError,
    UnavailableError,
)

CSV = """n,t,carrier,origin,delay
1,2013-01-01,UA,EWR,20
2,2013-01-02,B6,JFK,
3,2013-01-03,,EWR,3
4,2013-01-04,UA,LGA,-5
4,2013-01-04,UA,LGA,-5
5,2013-01-05,AA,JFK,30
"""
COLUMNS = {"label": "late", "categories": ["carrier", "origin"], "numbers": ["n", "temp"], "time": "t", "id": "n2"}
HELPER = """
import polars as pl

def label(rows, weather, limit):
    late = rows.filter(pl.col("delay").is_not_null()).with_columns(late=(pl.col("delay") > limit).cast(pl.Int8), n2="n")
    return late.join(weather, on="origin", how="left", maintain_order="left"), {
        "no delay": rows.filter(pl.col("delay").is_null())
    }

def only_ua(rows):
    return rows.filter(pl.col("carrier") == "UA")

def eager(rows):
    return rows.collect()

def nothing(rows):
    return None

def broken(rows):
    return {}["key"]
"""
STEPS: list[Any] = [
    "drop_duplicates",
    {"helper_engine:label": {"limit": 15}},
    {"split": {"by": "time", "at": "2013-01-04"}},
]


class Project:
    """A folder with two tables and a helper; `run` does what the loop does around the step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / "work"
        (folder / "rows.csv").write_text(CSV)
        (folder / "weather.csv").write_text("origin,temp\nEWR,39.0\nJFK,NaN\n")
        (folder / "helper_engine.py").write_text(HELPER)

    def run(self, **more: Any) -> dict[str, Any]:
        table = {"source": "rows.csv", "tables": {"weather": "weather.csv"}, "columns": COLUMNS, "steps": STEPS, **more}
        table["format"] = more.get("format", {"types": {"t": "date"}})
        table["tables"] = {"weather": {"source": "weather.csv", "format": {}}}
        (step,) = plan(Spec.model_validate(table), Upstream("j", str(self.folder), 7, {})).steps
        inputs = {}
        for name, source in step.inputs.items():
            assert isinstance(source, Source)
            for logical, path in source.files:
                link = self.work / "in" / name / logical
                link.parent.mkdir(parents=True, exist_ok=True)
                link.unlink(missing_ok=True)
                link.symlink_to(path)
            inputs[name] = InputArtifact("0" * 64, "source", {}, self.work / "in" / name)
        seed = step.seed or 0
        run(StepContext("data", step.options, {}, inputs, self.work, self.folder / "scratch", self.folder, seed=seed))
        emitted = json.loads((self.work / "out" / "dataset.json").read_text())
        assert emitted["kind"] == "dataset"
        meta: dict[str, Any] = emitted["meta"]
        return meta

    @property
    def out(self) -> Path:
        return self.work / "out" / "dataset"

    def files(self) -> dict[str, bytes]:
        return {p.relative_to(self.out).as_posix(): p.read_bytes() for p in sorted(self.out.rglob("*")) if p.is_file()}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    folder = tmp_path / "a job"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return Project(folder)


def test_the_metadata_is_what_other_stages_read(project: Project) -> None:
    assert project.run() == {
        "format": 1,
        "family": "tabular",
        "columns": COLUMNS,
        "schema": {
            "n2": "Int64",
            "t": "Date",
            "late": "Int8",
            "carrier": "String",
            "origin": "String",
            "n": "Int64",
            "temp": "Float64",
        },
        "splits": {
            "train": {"rows": 2, "shards": [{"path": "train/00000.arrow", "rows": 2}]},
            "holdout": {"rows": 2, "shards": [{"path": "holdout/00000.arrow", "rows": 2}]},
        },
        "counts": {
            "source": {"source": 6, "weather": 2},
            "dropped": [
                {
                    "number": 0,
                    "step": "drop_duplicates",
                    "reason": "duplicate of another row",
                    "rows": 1,
                    "file": "dropped/00.arrow",
                },
                {
                    "number": 1,
                    "step": "helper_engine:label",
                    "reason": "no delay",
                    "rows": 1,
                    "file": "dropped/01.arrow",
                },
            ],
        },
    }
    assert list(project.files()) == [
        "dropped/00.arrow",
        "dropped/01.arrow",
        "holdout/00000.arrow",
        "profile.json",
        "train/00000.arrow",
    ]


def test_dropped_rows_are_kept_whole_with_the_reason(project: Project) -> None:
    project.run()
    (row,) = pl.read_ipc(project.out / "dropped/01.arrow").to_dicts()
    assert {key: str(value) for key, value in row.items()} == {
        "n": "2",
        "t": "2013-01-02",
        "carrier": "B6",
        "origin": "JFK",
        "delay": "None",
        "onejob_reason": "no delay",
    }


def test_rows_left_out_without_a_reason_are_counted_too(project: Project) -> None:
    meta = project.run(steps=["helper_engine:only_ua", {"helper_engine:label": {"limit": 15}}])
    assert meta["counts"]["dropped"][0] == {
        "number": 0,
        "step": "helper_engine:only_ua",
        "reason": "not selected",
        "rows": 3,
        "file": None,
    }
    assert meta["splits"]["holdout"] == {"rows": 0, "shards": []}


def test_a_step_may_give_a_frame_that_is_computed_already(project: Project) -> None:
    assert project.run(steps=["helper_engine:eager", *STEPS]) == project.run() | {
        "counts": {
            **project.run()["counts"],
            "dropped": [
                {**each, "number": each["number"] + 1, "file": f"dropped/0{each['number'] + 1}.arrow"}
                for each in project.run()["counts"]["dropped"]
            ],
        }
    }


def test_columns_are_read_as_the_families_take_them(project: Project) -> None:
    meta = project.run()
    train = read_split(project.out, meta, "train")
    assert {name: column.dtype.kind for name, column in train.items()} == {
        "late": "i",
        "carrier": "O",
        "origin": "O",
        "n": "f",
        "temp": "f",
    }
    assert train["late"].tolist() == [1, 0]
    assert train["carrier"].tolist() == ["UA", None]
    assert train["n"].tolist() == [1.0, 3.0]
    held_out = read_split(project.out, meta, "holdout", ["t", "temp", "n2"])
    assert held_out["t"].tolist() == [np.datetime64("2013-01-04").item(), np.datetime64("2013-01-05").item()]
    assert [math.isnan(value) for value in held_out["temp"]] == [True, True]
    assert held_out["n2"].tolist() == [4, 5]


def test_a_split_without_rows_has_columns_of_the_same_types(project: Project) -> None:
    meta = project.run(steps=STEPS[:2])
    empty, full = read_split(project.out, meta, "holdout"), read_split(project.out, meta, "train")
    assert {name: (len(column), column.dtype) for name, column in empty.items()} == {
        name: (0, column.dtype) for name, column in full.items()
    }


def test_what_is_not_there_is_named(project: Project) -> None:
    meta = project.run()
    with pytest.raises(DataError, match=r"no split 'test'. It has: holdout, train"):
        read_split(project.out, meta, "test")
    with pytest.raises(DataError, match=r"no column 'delay'. It has: "):
        read_split(project.out, meta, "train", ["delay"])


def test_a_damaged_shard_is_named(project: Project) -> None:
    meta = project.run()
    shard = project.out / "train" / "00000.arrow"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(DamagedError, match=r"train/00000.arrow: the shard can't be read"):
        read_split(project.out, meta, "train")
    shard.write_bytes((project.out / "holdout" / "00000.arrow").read_bytes())
    meta["splits"]["train"]["shards"][0]["rows"] = 3
    with pytest.raises(DamagedError, match=r"has 2 rows, not 3"):
        read_split(project.out, meta, "train")


def test_large_splits_are_cut_into_shards_in_order(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_ROWS", 2)
    meta = project.run(steps=STEPS[:2])
    assert [shard["rows"] for shard in meta["splits"]["train"]["shards"]] == [2, 2]
    assert read_split(project.out, meta, "train", ["n"])["n"].tolist() == [1.0, 3.0, 4.0, 5.0]


def test_again_in_the_same_folder_gives_the_same_bytes_and_nothing_left_over(project: Project) -> None:
    meta, first = project.run(), project.files()
    (project.out / "train" / "00007.arrow").write_bytes(b"of an attempt that was killed")
    assert project.run() == meta
    assert project.files() == first
    assert not (project.work / "unpacked").exists()


def test_a_full_disk_is_said_so(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(frame: pl.DataFrame, path: Path) -> None:
        Path("/dev/full").write_bytes(b"x")

    monkeypatch.setattr(shards, "write_arrow", full)
    with pytest.raises(StorageFullError, match=r"no space left for the dataset"):
        project.run()
    assert not (project.work / "out" / "dataset.json").exists()


def test_equal_rows_have_equal_bytes_however_they_came_about(tmp_path: Path) -> None:
    values = {"i": [None, 2, None, 4], "f": [0.5, None, None, 1.5], "s": [None, "é", "", "a long text of more than 12"]}
    plain = pl.DataFrame(values).with_columns(b=pl.col("i") > 2, d=pl.col("i").cast(pl.Date))
    # the same rows, from chunks, slices of larger frames, filters, joins and dictionaries
    chunked = pl.concat([plain[:1], plain[1:3], plain[3:]], rechunk=False)
    sliced = pl.concat([plain, plain, plain])[4:8]
    masked = plain.with_columns(pl.when(pl.col("i").is_not_null()).then(pl.col("i")).otherwise(None)).with_columns(
        i=pl.when(pl.Series([False, True, False, True])).then(pl.Series([9, 2, 7, 4]))
    )
    coded = plain.with_columns(pl.col("s").cast(pl.Categorical))
    assert all(
        frame.with_columns(pl.col("s").cast(pl.String)).equals(plain) for frame in (chunked, sliced, masked, coded)
    )
    written = []
    for index, frame in enumerate((plain, chunked, sliced, masked, coded)):
        shards.write_arrow(frame, tmp_path / f"{index}.arrow")
        written.append((tmp_path / f"{index}.arrow").read_bytes())
    assert len(set(written)) == 1
    assert pl.read_ipc(tmp_path / "0.arrow").equals(plain)


def test_the_profile_tells_of_every_column() -> None:
    train = pl.DataFrame({"x": [0.0, 10.0, None, 10.0, float("nan")], "c": ["b", "a", "b", "a", None], "y": [True] * 5})
    held_out = pl.DataFrame({"x": [-5.0, 5.0, 25.0], "c": ["z", None, None], "y": [True, False, None]})
    found = profile({"train": train, "holdout": held_out})
    x = found["train"]["x"]
    assert (x["count"], x["nulls"], x["not_finite"], x["distinct"]) == (4, 1, 1, 3)
    assert (x["min"], x["max"], x["mean"]) == (0.0, 10.0, 20 / 3)
    assert x["std"] == pytest.approx(np.std([0.0, 10.0, 10.0]))
    assert x["quantiles"]["0.5"] == 10.0
    assert x["histogram"]["counts"] == [1, *[0] * 18, 2]
    assert found["train"]["c"]["top"] == [["a", 2], ["b", 2]]
    # the same edges for all splits: only so can they be compared
    other = found["holdout"]["x"]["histogram"]
    assert other["edges"] == x["histogram"]["edges"]
    assert (sum(other["counts"]), other["below"], other["above"]) == (1, 1, 1)
    assert found["holdout"]["y"]["top"] == [[False, 1], [True, 1]]


def test_times_are_profiled_as_text_in_their_own_zone() -> None:
    utc = pl.Series("t", ["2013-02-22T04:00:00Z", None]).str.to_datetime(time_zone="UTC")
    frame = pl.DataFrame([utc.dt.convert_time_zone("America/New_York")])
    assert profile({"train": frame})["train"]["t"]["min"].startswith("2013-02-21 23:00:00")


def test_what_was_measured_belongs_to_the_execution(project: Project) -> None:
    project.run()
    measured = json.loads((project.work / "measured.json").read_text())
    assert [(step["step"], step["rows_in"], step["rows_out"]) for step in measured["steps"]] == [
        ("drop_duplicates", 6, 5),
        ("helper_engine:label", 5, 4),
        ("split", 4, 4),
    ]
    assert set(measured["seconds"]) == {"read", "compute", "write"}
    lines = [json.loads(line) for line in (project.work / "progress.jsonl").read_text().splitlines()]
    assert [line["done"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {line["total"] for line in lines} == {6}


def test_an_expectation_that_breaks_fails_the_run_and_leaves_the_rows(project: Project) -> None:
    with pytest.raises(ExpectationError, match=r"not_null = carrier: 1 of 4 rows break it\n  carrier  n2") as caught:
        project.run(expect={"not_null": ["carrier"]})
    assert str(project.work / "offending.arrow") in str(caught.value)
    rows = pl.read_ipc(project.work / "offending.arrow")
    assert rows["n"].to_list() == [3]
    assert rows["onejob_expectation"].to_list() == ["not_null = carrier"]
    assert not (project.work / "out" / "dataset.json").exists()


@pytest.mark.parametrize(
    ("more", "kind", "said"),
    [
        ({"steps": ["helper_engine:lable"]}, UnavailableError, r"steps\[0\] .*no 'lable'"),
        ({"steps": ["helpr_engine:label"]}, UnavailableError, r"'helpr_engine'.*beside the job file"),
        (
            {"steps": [{"helper_engine:label": {"limt": 15}}]},
            DataError,
            r"takes no option 'limt'. Did you mean 'limit'",
        ),
        ({"steps": ["helper_engine:label"]}, DataError, r"needs 'limit', which is neither an option .* nor a table"),
        ({"steps": ["helper_engine:nothing"]}, StepError, r"steps\[0\] .*gave back NoneType. It gives a LazyFrame"),
        ({"steps": ["helper_engine:broken"]}, StepError, r"steps\[0\] helper_engine:broken: KeyError: 'key'"),
        ({"steps": []}, DataError, r"columns: there is no column 'n2' after the last step"),
        (
            {"columns": {**COLUMNS, "numbers": ["origin"], "categories": []}, "steps": STEPS},
            DataError,
            r"number 'origin' is of type String; row 1 holds 'EWR'",
        ),
        (
            {"columns": {**COLUMNS, "numbers": ["n"], "categories": ["temp"]}},
            DataError,
            r"category 'temp' is of type Float64",
        ),
        (
            {"columns": {**COLUMNS, "label": "carrier", "categories": []}},
            DataError,
            r"label 'carrier' is missing in 1 of 4 rows",
        ),
        (
            {"steps": [*STEPS[:2], {"split": {"by": "time", "at": "2000-01-01"}}]},
            DataError,
            r"no row is left to train on \(held out: 4\)",
        ),
        (
            {"format": {"types": {"t": "int"}}},
            SourceError,
            r"rows.csv: column 't', row 1: '2013-01-01' is not of type int",
        ),
    ],
)
def test_what_does_not_fit_is_named(project: Project, more: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        project.run(**more)


def test_a_damaged_row_further_down_is_the_error_whatever_step_meets_it(project: Project) -> None:
    (project.folder / "rows.csv").write_text(CSV + "7,2013-01-07,UA,EWR,1,9,9\n8,2013-01-08,UA,EWR,1\n")
    with pytest.raises(SourceError, match=r"rows.csv: row 7 has 7 fields, the first line 5"):
        project.run()
