"""Expectations: each holds or breaks, all are reported at once, with the rows at fault."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from onejob.data.engines import expectations
from onejob.data.engines.expectations import EXPECTATION
from onejob.data.spec import Columns, Expect
from onejob.data.steps.split import HELD_OUT
from onejob.errors import DataError

COLUMNS = Columns(label="late", categories=["origin"], numbers=["distance"], id="id")
FRAME = pl.DataFrame(
    {
        "id": ["a", "b", "c", "d"],
        "late": [1, 0, 0, 1],
        "origin": ["EWR", "JFK", None, "LGA"],
        "distance": [10.0, 20.0, None, 40.0],
        HELD_OUT: [False, False, False, True],
    }
)


def broken(frame: pl.DataFrame = FRAME, dropped: int = 0, **expect: Any) -> list[expectations.Broken]:
    return expectations.check(frame, Expect.model_validate(expect), COLUMNS, dropped)


@pytest.mark.parametrize(
    "holds",
    [
        {"rows_min": 4, "rows_max": 4, "holdout_min": 1},
        {"unique": ["id", ["origin", "distance"]]},
        {"not_null": ["id"], "null_share": {"origin": 0.25}},
        {"between": {"distance": [10, 40]}},
        {"values": {"origin": ["EWR", "JFK", "LGA"], "late": [0, 1]}},
        {"matches": {"id": "[a-d]", "origin": "[A-Z]{3}"}},
        {"label_share": [0.3, 1.0]},
        {"dropped_share": 0.0},
    ],
)
def test_what_holds_says_nothing(holds: dict[str, Any]) -> None:
    assert broken(**holds) == []


@pytest.mark.parametrize(
    ("breaks", "expectation", "found", "ids"),
    [
        ({"rows_min": 5}, "rows_min = 5", "there are 4 rows", None),
        ({"rows_max": 3}, "rows_max = 3", "there are 4 rows", None),
        ({"holdout_min": 2}, "holdout_min = 2", "1 rows are held out", None),
        ({"unique": ["late"]}, "unique = late", "4 of 4 rows break it", ["a", "b", "c", "d"]),
        ({"not_null": ["origin"]}, "not_null = origin", "1 of 4 rows break it", ["c"]),
        ({"null_share": {"origin": 0.2}}, "null_share.origin = 0.2", "1 of 4 values are missing (0.2500)", ["c"]),
        ({"between": {"distance": [15, 30]}}, "between.distance = [15, 30]", "2 of 4 rows break it", ["a", "d"]),
        ({"values": {"origin": ["EWR", "JFK"]}}, "values.origin = ['EWR', 'JFK']", "1 of 4 rows break it", ["d"]),
        ({"matches": {"id": "a|b"}}, "matches.id = 'a|b'", "2 of 4 rows break it", ["c", "d"]),
        ({"label_share": [0.4, 0.6]}, "label_share = [0.4, 0.6]", "it is 0.3333 in train", None),
        ({"label_share": [0.2, 0.6]}, "label_share = [0.2, 0.6]", "it is 1.0000 in holdout", None),
    ],
)
def test_what_breaks_names_the_rows(
    breaks: dict[str, Any], expectation: str, found: str, ids: list[str] | None
) -> None:
    first = broken(**breaks)[0]
    assert (first.expectation, first.found) == (expectation, found)
    assert (None if first.rows is None else first.rows["id"].to_list()) == ids


def test_nan_is_outside_of_every_range() -> None:
    frame = FRAME.with_columns(distance=pl.lit(float("nan")))
    assert broken(frame, between={"distance": [0, 1e9]})[0].found == "4 of 4 rows break it"


def test_dropped_rows_count_against_those_that_stay() -> None:
    assert broken(dropped=1, dropped_share=0.2) == []
    assert broken(dropped=2, dropped_share=0.2)[0].found == "2 of 6 rows were dropped (0.3333)"


def test_the_error_shows_all_of_them_with_small_tables() -> None:
    many = pl.concat([FRAME] * 4)
    found = broken(many, not_null=["origin"], matches={"id": "[a-c]"}, rows_min=100)
    text = str(expectations.error(found, ["id"], "/job/offending.arrow"))
    assert text.startswith("[data] expect: 3 expectations don't hold\nrows_min = 100: there are 16 rows\n")
    assert "  id  late  origin  distance\n  d   1     LGA     40.0\n" in text
    assert "  origin  id  late  distance\n  null    c   0     null\n" in text
    assert text.endswith(". All the rows at fault: /job/offending.arrow")


def test_long_values_and_many_rows_are_cut_short() -> None:
    frame = pl.concat([FRAME.with_columns(id=pl.lit("x" * 100))] * 3)
    text = str(expectations.error(broken(frame, not_null=["late"], matches={"id": "y"}), ["id"], "there"))
    assert "x" * 23 + "…" in text
    assert "x" * 24 not in text
    assert "… and 7 more" in text


def test_offending_rows_carry_what_they_broke() -> None:
    rows = expectations.offending(broken(not_null=["origin"], between={"distance": [15, 30]}, rows_min=9))
    assert rows is not None
    assert rows.select("id", EXPECTATION).rows() == [
        ("c", "not_null = origin"),
        ("a", "between.distance = [15, 30]"),
        ("d", "between.distance = [15, 30]"),
    ]
    assert expectations.offending(broken(rows_min=9)) is None


@pytest.mark.parametrize(
    ("expect", "said"),
    [
        ({"not_null": ["orign"]}, r"no column 'orign' after the last step. Did you mean 'origin'"),
        ({"between": {"origin": [0, 1]}}, r"expect.between: column 'origin' is of type String, not a number"),
        ({"matches": {"late": "1"}}, r"expect.matches: column 'late' is of type Int64, not text"),
        ({"values": {"late": ["yes"]}}, r"expect.values.late: .* are no values of a column of type Int64"),
    ],
)
def test_an_expectation_that_makes_no_sense_is_refused(expect: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        broken(**expect)
