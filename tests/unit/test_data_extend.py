"""Extending a dataset by captured rows: types, times, and what can't be trained on."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from onejob.core.context import InputArtifact, StepContext
from onejob.core.plan import Existing, Step, Upstream
from onejob.data.engines.extend import run
from onejob.data.engines.shards import write_arrow, write_split
from onejob.data.spec import Expect, Spec, plan_extend
from onejob.engines.dataset import read_split
from onejob.errors import DamagedError, DataError, ExpectationError

DAY = 86_400.0
START = 1_704_067_200.0
COLUMNS = {"label": "late", "categories": ["carrier"], "numbers": ["x"], "time": "t", "id": "n"}


def planned(cut: float = START + 2 * DAY, **more: Any) -> Step:
    columns = {**COLUMNS, **more.pop("columns", {})}
    spec = Spec.model_validate({"source": "rows.csv", "columns": columns, "expect": more.pop("expect", {})})
    plan = plan_extend(spec, Upstream("j", "/", 7, {}), base=Existing("a"), labelled=Existing("b"), cut=cut, **more)
    return plan.steps[0]


class Extending:
    """A base of three rows of 2023 and captured ones, a day apart from 2024-01-01 on."""

    def __init__(self, folder: Path, base: dict[str, Any] | None = None, rows: dict[str, Any] | None = None) -> None:
        self.folder = folder
        days = [datetime.datetime(2023, 12, day, 12, tzinfo=datetime.UTC) for day in (1, 2, 3)]
        own = {"n": [1, 2, 3], "t": days, "late": [True, False, True], "carrier": ["UA", None, "AA"], "x": [1, 2, 3]}
        self.base = pl.DataFrame({**own, **(base or {})})
        captured = {
            "onejob_time": [round((START + n * DAY) * 1e6) for n in range(4)],
            "onejob_key": ["7", "8", None, "x"],
            "onejob_request": ["r1", "r1", "r2", "r3"],
            "onejob_row": pl.Series([0, 1, 0, 0], dtype=pl.Int32),
            "late": [1, None, 0, 1],
            "carrier": ["B6", "UA", None, "AA"],
            "x": [4.0, 5.0, None, 6.0],
        }
        self.rows = pl.DataFrame({**captured, **(rows or {})})
        self.private: dict[str, str] = {}

    def run(self, step: Step | None = None) -> dict[str, Any]:
        step = step or planned()
        base, labelled = self.folder / "base", self.folder / "labelled"
        splits = {"train": self.base[:2], "holdout": self.base[2:]}
        meta = {
            "family": "tabular",
            "columns": COLUMNS,
            "schema": {name: str(dtype) for name, dtype in self.base.schema.items()},
            "splits": {name: write_split(part, base, name) for name, part in splits.items()},
        }
        if not labelled.exists():
            write_arrow(self.rows, labelled / "rows.arrow")
        inputs = {
            "dataset": InputArtifact("base-digest", "dataset", meta, base),
            "labelled": InputArtifact("rows-digest", "labelled", {"private": self.private}, labelled),
        }
        work = self.folder / "work"
        work.mkdir(exist_ok=True)
        run(StepContext("data", step.options, {}, inputs, work, work, self.folder))
        self.out = work / "out" / "dataset"
        return json.loads((work / "out" / "dataset.json").read_text())["meta"]

    def split(self, name: str) -> pl.DataFrame:
        return pl.concat([pl.read_ipc(path) for path in sorted((self.out / name).glob("*.arrow"))])


def test_captured_rows_take_the_types_of_the_first_dataset(tmp_path: Path) -> None:
    world = Extending(tmp_path)
    meta = world.run()
    train, held = world.split("train"), world.split("holdout")
    assert train.schema == {**world.base.schema, "onejob_request": pl.String, "onejob_row": pl.Int32}
    assert train["n"].to_list() == [1, 2, 3, 7]
    assert train["late"].to_list() == [True, False, True, True]
    assert train["x"].to_list() == [1, 2, 3, 4]
    assert train["onejob_request"].to_list() == [None, None, None, "r1"]
    assert train["t"][3] == datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    assert held["onejob_request"].to_list() == ["r2", "r3"]
    assert held["n"].to_list() == [None, None], "a key that is no number of the id's column"
    assert held["x"].to_list() == [None, 6]
    assert (meta["extended"]["base"], meta["extended"]["labelled"]) == ("base-digest", "rows-digest")
    assert (meta["extended"]["base_rows"], meta["extended"]["captured_rows"]) == (3, 3)
    assert meta["splits"]["train"]["rows"] == 4
    assert json.loads((world.out / "profile.json").read_text())["train"]["x"]["count"] == 4
    assert read_split(world.out, meta, "train")["x"].tolist() == [1, 2, 3, 4]


def test_a_second_try_in_the_same_folder_leaves_the_same(tmp_path: Path) -> None:
    world = Extending(tmp_path)
    first = world.run()
    files = {path.name: path.read_bytes() for path in world.out.rglob("*") if path.is_file()}
    (world.out / "train" / "00009.arrow").write_bytes(b"left by a killed try")
    assert world.run() == first
    assert {path.name: path.read_bytes() for path in world.out.rglob("*") if path.is_file()} == files


def test_whole_numbers_make_room_for_fractions(tmp_path: Path) -> None:
    world = Extending(tmp_path, rows={"x": [4.5, 5.0, None, 6.0]})
    assert world.run()["schema"]["x"] == "Float64"
    assert world.split("train")["x"].to_list() == [1.0, 2.0, 3.0, 4.5]


@pytest.mark.parametrize(
    ("times", "kept"),
    [
        (["2023-12-01", "2023-12-02", "2024-01-09"], "2024-01-01T00:00:00.000000Z"),
        (
            [datetime.date(2023, 12, 1), datetime.date(2023, 12, 2), datetime.date(2024, 1, 9)],
            datetime.date(2024, 1, 1),
        ),
        (
            [datetime.datetime(2023, 12, 1), datetime.datetime(2023, 12, 2), datetime.datetime(2024, 1, 9)],
            datetime.datetime(2024, 1, 1),
        ),
    ],
    ids=["text", "date", "without zone"],
)
def test_times_of_every_type_are_cut(tmp_path: Path, times: list[Any], kept: Any) -> None:
    world = Extending(tmp_path, base={"t": times})
    world.run()
    assert world.split("train")["t"].to_list()[2] == kept
    assert world.split("holdout")["n"].to_list() == [3, None, None], "a first row from after the cut is held out too"


def test_a_zone_of_the_first_dataset_stays_and_the_moment_counts(tmp_path: Path) -> None:
    world = Extending(tmp_path)
    world.base = world.base.with_columns(pl.col("t").dt.convert_time_zone("America/New_York").dt.cast_time_unit("ms"))
    meta = world.run()
    assert meta["schema"]["t"] == "Datetime(time_unit='ms', time_zone='America/New_York')"
    utc = world.split("train")["t"].dt.convert_time_zone("UTC").to_list()
    assert utc[3] == datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    assert meta["extended"]["cut"] == START + 2 * DAY
    assert world.split("holdout")["onejob_request"].to_list() == ["r2", "r3"]


def test_rows_whose_time_nobody_knows_stay_with_all_history_only(tmp_path: Path) -> None:
    world = Extending(tmp_path, base={"t": [1, 2, 3]})
    world.run()
    assert world.split("train")["t"].to_list() == [1, 2, 3, None]
    world = Extending(tmp_path / "some", base={"t": [1, 2, 3]})
    assert world.run(planned(history=10 * DAY))["extended"]["base_rows"] == 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rows": {"late": ["yes", None, "no", "no"]}}, "'late' is of type String"),
        ({"rows": {"late": [2, None, 0, 1]}}, "'late' is of type Int64"),
        ({"rows": {"late": [None, None, None, None]}}, "none can be held out"),
        ({"step": planned(START + 9 * DAY)}, "none is from 2024-01-10"),
        ({"step": planned(START - 90 * DAY)}, "no row is left to train on"),
        ({"step": planned(columns={"numbers": ["x", "y"]})}, "no column 'y'"),
        ({"private": {"carrier": "hash"}}, "'carrier' is private"),
        ({"lacks": "carrier"}, "'carrier' was never captured"),
    ],
)
def test_what_can_t_be_trained_on_says_so(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    world = Extending(tmp_path, rows=change.get("rows"))
    world.private = change.get("private", {})
    if lacks := change.get("lacks"):
        world.rows = world.rows.drop(lacks)
    with pytest.raises(DataError, match=told):
        world.run(change.get("step"))


# ---- expectations ------------------------------------------------------------------------------------------------


def many(rows: int, **columns: Any) -> dict[str, Any]:
    """So many captured rows, half of them before the cut; `columns` are values of the first ones."""
    plain = {
        "onejob_time": [round((START + n % 4 * DAY) * 1e6) for n in range(rows)],
        "onejob_key": [str(n % 7) for n in range(rows)],
        "onejob_request": [f"r{n}" for n in range(rows)],
        "onejob_row": pl.Series([0] * rows, dtype=pl.Int32),
        "late": [n // 4 % 2 for n in range(rows)],
        "carrier": ["UA"] * rows,
        "x": [5.0] * rows,
    }
    first = {name: [*values, *plain[name][len(values) :]] for name, values in columns.items()}
    return {**plain, **first}


HELD = [None] * 12  # of twelve rows in a row three are of each day, and six are held out


@pytest.mark.parametrize(
    ("expect", "columns", "told"),
    [
        ({"not_null": ["x"]}, {"x": HELD}, "not_null = x: 6 of 200 captured rows in train break it, 6 of 200 captured"),
        ({"null_share": {"x": 0.05}}, {"x": [5.0, 5.0, None, None] * 11}, "null_share.x = 0.05: 22 of 200 values in h"),
        ({"between": {"x": [0, 9]}}, {"x": [10.0] * 12}, r"between.x = \[0, 9\]: 6 of 200 captured rows in train"),
        ({"between": {"carrier": [1, 12]}}, {}, r"between.carrier = \[1, 12\]: 200 of 200 captured rows in train"),
        ({"values": {"carrier": ["UA", "AA"]}}, {"carrier": ["XX"] * 12}, "values.carrier = .*: 6 of 200 captured"),
        ({"matches": {"carrier": "[A-Z]*"}}, {"carrier": ["a"] * 12}, "matches.carrier = .*: 6 of 200 captured"),
        (
            {"label_share": [0.3, 0.7]},
            {"late": [1] * 400},
            "it is 0.9951 in train\nlabel_share = .* it is 1.0000 in hol",
        ),
        ({"holdout_min": 201}, {}, "holdout_min = 201: 200 rows are held out"),
        ({"rows_min": 404}, {}, "rows_min = 404: there are 403 rows"),
    ],
)
def test_a_broken_join_fails_the_retraining(
    tmp_path: Path, expect: dict[str, Any], columns: dict[str, Any], told: str
) -> None:
    world = Extending(tmp_path, rows=many(400, **columns))
    world.run(planned())
    with pytest.raises(ExpectationError, match=told) as caught:
        world.run(planned(expect=expect))
    assert caught.value.place == "[data] expect"
    assert "[monitor.retrain] hold_out and history" in caught.value.cure


def test_the_rows_at_fault_are_shown_with_their_requests_and_kept(tmp_path: Path) -> None:
    world = Extending(tmp_path, rows=many(400, x=HELD))
    with pytest.raises(ExpectationError) as caught:
        world.run(planned(expect={"not_null": ["x"], "null_share": {"x": 0.0}}))
    table = [line.split() for line in caught.value.message.splitlines()]
    assert ["x", "n", "t", "onejob_request", "late", "carrier"] in table
    assert ["null", "2", "2024-01-03", "00:00:00.000…", "r2", "false", "UA"] in table
    at_fault = pl.read_ipc(tmp_path / "work" / "offending.arrow")
    assert at_fault["onejob_request"].to_list()[:12] == [f"r{n}" for n in range(12)]
    assert str(tmp_path / "work" / "offending.arrow") in caught.value.cure


def test_one_odd_request_in_a_hundred_is_left_out_and_told(tmp_path: Path) -> None:
    world = Extending(tmp_path, rows=many(400, x=[99.0, 99.0, 99.0], carrier=["?", "?"]))
    expect = {"between": {"x": [0, 9]}, "values": {"carrier": ["UA", "AA"]}}
    meta = world.run(planned(expect=expect))
    left_out = pl.read_ipc(world.out / "dropped" / "00.arrow")
    assert left_out["onejob_request"].to_list() == ["r0", "r1", "r2"]
    assert left_out["onejob_reason"].unique().to_list() == ["breaks between.x = [0, 9]"]
    assert meta["counts"] == {
        "source": {"base": 3, "captured": 400},
        "dropped": [
            {
                "number": 0,
                "step": "expect",
                "reason": "breaks between.x = [0, 9]",
                "rows": 3,
                "file": "dropped/00.arrow",
            }
        ],
    }
    assert meta["extended"]["captured_rows"] == 397
    assert world.split("train").height + world.split("holdout").height == 400


def test_what_clients_need_not_tell_is_not_asked_of_what_came_back(tmp_path: Path) -> None:
    expect = {
        "unique": ["n", ["n", "t"]],  # the same may be asked twice
        "rows_max": 3,
        "dropped_share": 0.0,
        "not_null": ["n", "t", "tailnum"],
        "null_share": {"n": 0.0, "tailnum": 0.0},
        "between": {"n": [0, 5], "wind": [0, 1]},
        "values": {"n": [1, 2, 3]},
        "matches": {"tailnum": "N.*"},
    }
    world = Extending(tmp_path)  # half of the keys are no numbers of the id's column
    assert world.run(planned(expect=expect)) == world.run(planned())
    assert Expect.model_validate(planned(expect=expect).options["expect"]) == Expect()


def test_a_category_that_was_a_number_is_held_to_its_range(tmp_path: Path) -> None:
    world = Extending(
        tmp_path, base={"carrier": ["1", None, "12"]}, rows=many(400, carrier=[str(n % 12 + 1) for n in range(400)])
    )
    assert world.run(planned(expect={"between": {"carrier": [1, 12]}}))["extended"]["captured_rows"] == 400
    assert world.run(planned(expect={"between": {"carrier": [1, 12]}, "not_null": ["carrier"]}))


def test_a_damaged_input_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "labelled").mkdir()
    (tmp_path / "labelled" / "rows.arrow").write_bytes(b"not Arrow")
    with pytest.raises(DamagedError, match=r"rows\.arrow"):
        Extending(tmp_path).run()


def test_the_key_counts_what_decides_and_no_more() -> None:
    step = planned(history=5 * DAY)
    assert step.options["cut"] == START + 2 * DAY
    assert step.options["history"] == 5 * DAY
    assert step.options["columns"]["label"] == "late"
    assert planned(expect={"not_null": ["x"]}).options["expect"]["not_null"] == ["x"]
    assert planned(expect={"unique": ["n"]}).options == planned().options, "what isn't asked doesn't count"
    assert step.inputs == {"dataset": Existing("a"), "labelled": Existing("b")}
    assert (step.name, step.stage, step.outputs, step.seed) == ("data", "data", ("dataset",), None)
