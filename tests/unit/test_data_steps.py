"""The built-in steps on small frames: what stays, in which order, and what is dropped with which reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onejob.data.engines.query import StepRows, execute
from onejob.data.options import parse_step
from onejob.data.steps import chance
from onejob.data.steps.dropped import REASON
from onejob.data.steps.split import HELD_OUT
from onejob.errors import DataError

Rows = dict[str, list[Any]]


def done(
    rows: Rows | pl.DataFrame, *lines: Any, tables: Mapping[str, pl.DataFrame] | None = None, seed: int = 7
) -> tuple[pl.DataFrame, list[StepRows]]:
    frames = {name: frame.lazy() for name, frame in (tables or {}).items()}
    source = rows if isinstance(rows, pl.DataFrame) else pl.DataFrame(rows)
    given = {"seed": seed, "time": "t"}
    return execute(source.lazy(), [parse_step(line) for line in lines], frames, given, lambda _: None)


def reasons(step: StepRows) -> dict[str, int]:
    return {each.reason: each.count for each in step.dropped if each.count}


def test_drop_duplicates_keeps_the_first_or_the_last_and_the_order() -> None:
    rows = {"a": [2, 1, 2, 3, 1], "b": [1, 2, 3, 4, 5]}
    stays, (step,) = done(rows, {"drop_duplicates": {"columns": ["a"]}})
    assert stays["b"].to_list() == [1, 2, 4]
    assert reasons(step) == {"duplicate of another row in a": 2}
    assert step.dropped[0].rows is not None
    assert step.dropped[0].rows["b"].to_list() == [3, 5]
    assert done(rows, {"drop_duplicates": {"columns": ["a"], "keep": "last"}})[0]["b"].to_list() == [3, 4, 5]
    assert done(rows, "drop_duplicates")[0].height == 5
    assert done({"a": [None, None, 1]}, "drop_duplicates")[0].height == 2


def test_drop_nulls_says_which_column_was_empty() -> None:
    stays, (step,) = done({"a": [1, None, 3, None], "b": [1, 2, None, None]}, "drop_nulls")
    assert stays.to_dict(as_series=False) == {"a": [1], "b": [1]}
    assert reasons(step) == {"a is missing": 2, "b is missing": 1}
    assert done({"a": [1, None], "b": [None, 2]}, {"drop_nulls": {"columns": ["a"]}})[0].height == 1


def test_filter_drops_false_and_unknown_with_the_reason() -> None:
    line = {"filter": {"where": "a > 1 AND b = 'x'", "reason": "unwanted"}}
    stays, (step,) = done({"a": [1, 2, None, 3], "b": ["x", "x", "x", "y"]}, line)
    assert stays["a"].to_list() == [2]
    assert step.dropped[0].rows is not None
    assert step.dropped[0].rows.to_dict(as_series=False) == {
        "a": [1, None, 3],
        "b": ["x", "x", "y"],
        REASON: ["unwanted"] * 3,
    }


def test_filter_may_count_without_keeping() -> None:
    _, (step,) = done({"a": [1, 2, 3]}, {"filter": {"where": "a > 2", "keep": False}})
    assert [(each.reason, each.count, each.rows) for each in step.dropped] == [("not (a > 2)", 2, None)]


def test_select_and_rename_keep_the_order_that_is_asked_for() -> None:
    rows = {"a": [1], "b": [2], "c": [3]}
    assert done(rows, {"select": {"columns": ["c", "a"]}})[0].columns == ["c", "a"]
    assert done(rows, {"select": {"without": ["b"]}})[0].columns == ["a", "c"]
    assert done(rows, {"rename": {"columns": {"b": "x"}}})[0].columns == ["a", "x", "c"]


@pytest.mark.parametrize(
    ("values", "to", "wanted"),
    [
        (["1", " 2 ", None], "int", [1, 2, None]),
        ([1.0, 2.0, None], "int", [1, 2, None]),
        (["1.5", "2"], "float", [1.5, 2.0]),
        (["yes", "FALSE", "1", None], "bool", [True, False, True, None]),
        ([1, 2], "text", ["1", "2"]),
    ],
)
def test_cast(values: list[Any], to: str, wanted: list[Any]) -> None:
    assert done({"a": values}, {"cast": {"columns": {"a": to}}})[0]["a"].to_list() == wanted


def test_cast_of_times() -> None:
    stays, _ = done({"a": ["2013-02-22"], "b": ["2013-02-22T18:00:00"]}, {"cast": {"columns": {"a": "date"}}})
    assert stays["a"].dtype == pl.Date
    stays, _ = done(stays, {"cast": {"columns": {"b": "datetime"}}})
    assert stays["b"].cast(pl.String).to_list() == ["2013-02-22 18:00:00.000000"]


@pytest.mark.parametrize(("values", "bad"), [(["1", "x", "3"], "'x'"), ([1.0, 2.5, 3.0], "2.5")])
def test_cast_fails_drops_or_empties(values: list[Any], bad: str) -> None:
    with pytest.raises(DataError, match=rf"steps\[0\] cast: column 'a', row 2: {bad} is not of type int"):
        done({"a": values}, {"cast": {"columns": {"a": "int"}}})
    stays, (step,) = done({"a": values}, {"cast": {"columns": {"a": "int"}, "on_error": "drop"}})
    assert (stays["a"].to_list(), reasons(step)) == ([1, 3], {"a is not of type int": 1})
    stays, _ = done({"a": values}, {"cast": {"columns": {"a": "int"}, "on_error": "null"}})
    assert stays["a"].to_list() == [1, None, 3]


WEATHER = pl.DataFrame({"at": ["x", "y", None, None], "temp": [1.0, 2.0, 3.0, 4.0], "year": [1, 2, 3, 4]})
PLACES = {"place": ["y", "x", "z", None, "y"], "n": [1, 2, 3, 4, 5]}
KEYS = {"table": "weather", "left_on": ["place"], "right_on": ["at"]}


def test_a_left_join_keeps_every_row_once_in_order() -> None:
    stays, (step,) = done(PLACES, {"join": {**KEYS, "prefix": "w_"}}, tables={"weather": WEATHER})
    assert stays.columns == ["place", "n", "w_temp", "w_year"]
    assert stays["n"].to_list() == [1, 2, 3, 4, 5]
    assert stays["w_temp"].to_list() == [2.0, 1.0, None, None, 2.0]
    assert step.rows_out == 5


def test_an_inner_join_drops_rows_without_a_partner_with_the_reason() -> None:
    line = {"join": {**KEYS, "how": "inner", "columns": ["temp"]}}
    stays, (step,) = done(PLACES, line, tables={"weather": WEATHER})
    assert (stays["n"].to_list(), reasons(step)) == ([1, 2, 5], {"no partner in weather": 2})


def test_a_join_never_multiplies_rows() -> None:
    twice = pl.concat([WEATHER, WEATHER.head(1).with_columns(temp=pl.lit(9.0))])
    line = {"join": {**KEYS, "columns": ["temp"]}}
    with pytest.raises(DataError, match=r"'weather' has 1 keys more than once; the first: at = 'x' \(2 rows\)"):
        done(PLACES, line, tables={"weather": twice})
    line["join"]["duplicates"] = "first"
    stays, _ = done(PLACES, line, tables={"weather": twice})
    assert stays["temp"].to_list() == [2.0, 1.0, None, None, 2.0]


def test_a_join_refuses_columns_that_clash_or_are_not_there() -> None:
    with pytest.raises(DataError, match=r"both tables have a column 'n'.*prefix = 'weather_'"):
        done(PLACES, {"join": KEYS}, tables={"weather": WEATHER.rename({"temp": "n"})})
    with pytest.raises(DataError, match=r"table 'weather' has no column 'wind'. It has: at, temp, year"):
        done(PLACES, {"join": {**KEYS, "columns": ["wind"]}}, tables={"weather": WEATHER})


def test_with_columns_sees_the_columns_before_the_step() -> None:
    stays, _ = done({"a": [1, 2]}, {"with_columns": {"columns": {"a": "a * 10", "b": "a + 1"}}})
    assert stays.to_dict(as_series=False) == {"a": [10, 20], "b": [2, 3]}


def test_sort_is_stable_with_missing_values_last() -> None:
    rows = {"a": [2, None, 1, 2, 1], "n": [0, 1, 2, 3, 4]}
    assert done(rows, {"sort": {"by": ["a"]}})[0]["n"].to_list() == [2, 4, 0, 3, 1]
    assert done(rows, {"sort": {"by": ["a"], "descending": True}})[0]["n"].to_list() == [0, 3, 2, 4, 1]


def test_sample_keeps_the_order_and_hangs_on_the_seed() -> None:
    rows: Rows = {"n": list(range(1000))}
    stays, (step,) = done(rows, {"sample": {"rows": 100}})
    assert stays.height == 100
    assert stays["n"].is_sorted()
    assert [(each.reason, each.count, each.rows) for each in step.dropped] == [("not in the sample", 900, None)]
    assert done(rows, {"sample": {"rows": 100}})[0].equals(stays)
    assert not done(rows, {"sample": {"rows": 100}}, seed=8)[0].equals(stays)
    assert done(rows, {"sample": {"rows": 5000}})[0].height == 1000
    assert 400 < done(rows, {"sample": {"share": 0.5}})[0].height < 600


def held_out(frame: pl.DataFrame, column: str) -> list[Any]:
    return frame.filter(HELD_OUT)[column].to_list()


def test_split_by_time_holds_out_the_last_rows_and_orders_them() -> None:
    rows = {"t": [5, 1, 4, 2, 3, None], "n": [0, 1, 2, 3, 4, 5]}
    stays, (step,) = done(rows, {"split": {"by": "time", "test": 0.4}})
    assert stays["t"].to_list() == [1, 2, 3, 4, 5]
    assert held_out(stays, "t") == [4, 5]
    assert reasons(step) == {"t is missing": 1}
    assert held_out(done(rows, {"split": {"by": "time", "at": 5}})[0], "t") == [5]


def test_split_by_time_never_parts_rows_of_one_moment() -> None:
    stays, _ = done({"t": [1, 1, 2, 2, 2, 2]}, {"split": {"by": "time", "test": 0.2}})
    assert held_out(stays, "t") == [2, 2, 2, 2]


def test_split_at_a_moment_means_the_columns_own_time_zone() -> None:
    utc = pl.Series("t", ["2013-02-22T04:59:00Z", "2013-02-22T05:00:00Z"]).str.to_datetime(time_zone="UTC")
    local = pl.DataFrame([utc.dt.convert_time_zone("America/New_York")])
    line = {"split": {"by": "time", "at": "2013-02-22"}}
    assert done(local, line)[0][HELD_OUT].to_list() == [False, True]
    assert done(pl.DataFrame([utc]), line)[0][HELD_OUT].to_list() == [True, True]
    dates = pl.DataFrame({"t": ["2013-02-21", "2013-02-22"]}).with_columns(pl.col("t").str.to_date())
    assert done(dates, line)[0][HELD_OUT].to_list() == [False, True]


@pytest.mark.parametrize(
    ("values", "at", "said"),
    [
        ([1, 2], "2013-02-22", "is no number, but column 't' is of type Int64"),
        (["a", "b"], "2013-02-22", "no order in time"),
    ],
)
def test_split_at_a_moment_that_does_not_fit(values: list[Any], at: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        done({"t": values}, {"split": {"by": "time", "at": at}})


def test_a_random_split_hangs_on_the_seed_alone_and_keeps_the_order() -> None:
    rows: Rows = {"n": list(range(2000)), "g": [f"g{n % 50}" for n in range(2000)]}
    line = {"split": {"by": "random", "test": 0.25}}
    first, again, other = done(rows, line)[0], done(rows, line)[0], done(rows, line, seed=8)[0]
    assert first.equals(again)
    assert not first.equals(other)
    assert first["n"].to_list() == rows["n"]
    assert 400 < len(held_out(first, "n")) < 600


def test_a_group_is_never_on_both_sides() -> None:
    rows: Rows = {"g": [f"g{n % 50}" if n % 7 else None for n in range(2000)]}
    stays, _ = done(rows, {"split": {"by": "random", "test": 0.25, "group": "g"}})
    sides = stays.group_by("g").agg(pl.col(HELD_OUT).n_unique())
    assert sides[HELD_OUT].max() == 1
    assert 0 < len(held_out(stays, "g")) < 1000


def test_chance_is_the_same_for_ever() -> None:
    """These numbers are in the keys of datasets: a change would silently give other splits."""
    rows = pl.DataFrame({"g": ["a", "b", None]})
    of_rows = rows.select(chance.of_rows(7).alias("c"))["c"].to_list()
    assert of_rows == [0.7215081806049702, 0.23928447285727472, 0.27598243332716743]
    of_values = rows.select(chance.of_values("g", 7).alias("c"))["c"].to_list()
    assert of_values == [0.09075215921546109, 0.596000113046736, 0.07244048688271754]


@given(st.integers(0, 2**63), st.integers(1, 200))
def test_chance_lies_between_0_and_1(seed: int, rows: int) -> None:
    values = pl.DataFrame({"a": range(rows)}).select(chance.of_rows(seed).alias("c"))["c"]
    assert values.is_between(0, 1, closed="left").all()
    assert values.n_unique() == rows


def test_steps_stay_lazy_until_rows_must_be_kept() -> None:
    """A plan of steps that only add to the query is computed once, at the end: here nothing fails before."""
    stays, steps = done(
        {"a": [3, 1, 2], "b": [1, 2, 3]},
        {"sort": {"by": ["a"]}},
        {"with_columns": {"columns": {"c": "a + b"}}},
        {"select": {"columns": ["c"]}},
    )
    assert stays["c"].to_list() == [3, 5, 4]
    assert [(step.name, step.rows_in, step.rows_out) for step in steps] == [
        ("sort", 3, 3),
        ("with_columns", 3, 3),
        ("select", 3, 3),
    ]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([{"sort": {"by": ["a"]}}, {"select": {"columns": ["x"]}}], r"steps\[1\] select: .*x"),
        ([{"filter": {"where": "x > 1"}}], r"steps\[0\] filter: .*x"),
        ([{"filter": {"where": "a >"}}], r"steps\[0\] filter: "),
        ([{"cast": {"columns": {"x": "int"}}}], r"steps\[0\] cast: there is no column 'x'"),
    ],
)
def test_an_error_names_its_step(lines: list[Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        done({"a": [1, 2]}, *lines)


def test_an_error_while_computing_names_the_first_step_at_fault() -> None:
    lines = [
        {"with_columns": {"columns": {"d": "a || '!'"}}},
        {"with_columns": {"columns": {"e": "CAST(a AS INT)"}}},
        "drop_duplicates",
    ]
    with pytest.raises(DataError, match=r"steps\[1\] with_columns: "):
        done({"a": ["2013-02-22", "2013-02-23"]}, *lines)
