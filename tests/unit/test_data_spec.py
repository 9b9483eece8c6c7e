"""`[data]`: its table, and the one step that it becomes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from onejob.core.plan import Source, Step, Upstream
from onejob.data.spec import Expect, Options, Spec, plan
from onejob.errors import SourceError, UnavailableError

COLUMNS = {"label": "late", "categories": ["carrier"], "numbers": ["distance"], "time": "day"}


def table(**more: Any) -> dict[str, Any]:
    return {"source": "rows.csv", "columns": COLUMNS, **more}


def planned(folder: Path, **more: Any) -> Step:
    (folder / "rows.csv").write_text("late\n1\n")
    (folder / "w.csv").write_text("x\n1\n")
    upstream = Upstream(job="j", project=str(folder), seed=7, outputs={})
    (step,) = plan(Spec.model_validate(table(**more)), upstream).steps
    return step


def mistake(**more: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Spec.model_validate(table(**more))
    return str(caught.value)


def test_the_plan_is_one_step_that_leaves_the_dataset(tmp_path: Path) -> None:
    step = planned(tmp_path, tables={"weather": "w.csv"}, steps=["helper:f", {"lib.more:g": {}}, "drop_nulls"])
    assert (step.name, step.stage, step.outputs) == ("data", "data", ("dataset",))
    assert step.entry == "onejob.data.engines.polars:run"
    assert step.inputs == {
        "source": Source((("rows.csv", str(tmp_path / "rows.csv")),)),
        "table.weather": Source((("w.csv", str(tmp_path / "w.csv")),)),
    }
    assert step.roots == ("helper:f", "lib.more:g")
    assert Step.from_json(step.to_json()) == step


def test_the_plugins_door_may_name_another_engine(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("late\n1\n")
    spec = Spec.model_validate(table(engine="ray"))
    with pytest.raises(UnavailableError, match=r"no data engine is called 'ray'"):
        plan(spec, Upstream("j", str(tmp_path), 7, {}))
    (step,) = plan(spec, Upstream("j", str(tmp_path), 7, {}, plugins={"data/ray": "my.ray:run"})).steps
    assert step.entry == "my.ray:run"


def test_where_the_files_lie_is_no_option(tmp_path: Path) -> None:
    """Options count in the key, so they must not hold a path: the same job in two folders has one key."""
    steps = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        steps.append(planned(tmp_path / name, source=str(tmp_path / name / "rows.csv"), tables={"w": "w.csv"}))
    assert steps[0].options == steps[1].options
    assert [name for name, _ in steps[0].inputs["source"].files] == ["rows.csv"]  # type: ignore[union-attr]
    assert Options.model_validate(steps[0].options).model_dump(mode="json") == steps[0].options


def test_a_table_is_read_like_the_main_one_unless_it_says_otherwise(tmp_path: Path) -> None:
    step = planned(
        tmp_path,
        format={"nulls": ["NA"]},
        tables={"same": "w.csv", "own": {"source": "w.csv", "format": {"separator": ";"}}},
    )
    assert step.options["formats"]["same"]["nulls"] == ["NA"]
    assert step.options["formats"]["own"]["nulls"] == []
    assert step.options["formats"]["own"]["separator"] == ";"


def test_the_seed_counts_only_where_something_draws_lots(tmp_path: Path) -> None:
    assert planned(tmp_path, steps=[{"split": {"by": "time", "test": 0.1}}]).seed is None
    assert planned(tmp_path, steps=[{"split": {"by": "random", "test": 0.1}}]).seed == 7


def test_a_missing_source_is_found_when_the_job_is_planned(tmp_path: Path) -> None:
    (tmp_path / "weather.csv").write_text("a\n")
    with pytest.raises(SourceError, match=r"\[data\] tables.w: no such file: 'wether.csv'.*weather.csv"):
        planned(tmp_path, tables={"w": "wether.csv"})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"stepz": []}, "Extra inputs are not permitted"),
        ({"steps": [{"split": {"by": "time", "test": 0.1}}, "drop_nulls"]}, "'split' comes once, as the last step"),
        (
            {"steps": [{"join": {"table": "wether", "on": ["a"]}}], "tables": {"weather": "w"}},
            "Did you mean 'weather'?",
        ),
        ({"tables": {"source": "w.csv"}}, "not 'source'"),
        ({"resources": {"processes": 2}}, "works in one process"),
        ({"columns": {"label": "a", "numbers": ["b", "a"]}}, "named twice: a"),
        ({"columns": {"label": "a"}}, "name at least one column"),
        ({"expect": {"between": {"a": [2, 1]}}}, "the smallest comes first"),
        ({"expect": {"label_share": [0.9, 0.1]}}, "the smallest comes first"),
        ({"expect": {"null_share": {"a": 1.5}}}, "less than or equal to 1"),
        ({"format": {"types": {"a": "integer"}}}, "Input should be 'int'"),
    ],
)
def test_a_mistake_is_refused_with_words(more: dict[str, Any], said: str) -> None:
    assert said in mistake(**more)


def test_a_split_by_time_needs_a_time() -> None:
    columns = {"label": "late", "numbers": ["distance"]}
    assert "needs columns.time" in mistake(columns=columns, steps=[{"split": {"by": "time", "test": 0.1}}])


def test_every_key_has_a_sentence() -> None:
    for model in (Spec, Expect, Options.model_fields["format"].annotation, Options.model_fields["columns"].annotation):
        for name, field in model.model_fields.items():  # type: ignore[union-attr]
            assert field.description, f"{model}.{name}"


def test_the_flights_example_is_a_valid_table() -> None:
    job = Path(__file__).parents[2] / "src/onejob/examples/flights/job.toml"
    spec = Spec.model_validate(tomllib.loads(job.read_text())["data"])
    assert [step.name for step in spec.steps][-1] == "split"
    forbidden = {"dep_delay", "dep_time", "arr_time", "arr_delay", "air_time"}
    assert not forbidden & {*spec.columns.categories, *spec.columns.numbers}
