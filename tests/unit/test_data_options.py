"""Lines of `[data] steps`: what is accepted, what they become, and what a mistake says."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from onejob.data.options import STEPS, StepCall, StepLine, parse_step
from onejob.data.steps import FUNCTIONS


class Lines(BaseModel):
    steps: list[StepLine]


def mistake(line: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Lines(steps=[line])
    return str(caught.value)


def test_a_name_alone_gets_the_defaults() -> None:
    assert parse_step("drop_duplicates") == StepCall(name="drop_duplicates", options={"columns": [], "keep": "first"})


def test_options_are_resolved_so_that_a_changed_default_counts() -> None:
    call = parse_step({"filter": {"where": "a > 1"}})
    assert call.options == {"where": "a > 1", "reason": "", "keep": True}


def test_what_was_parsed_can_be_parsed_again() -> None:
    for line in ("sort_it:go", {"helper:f": {"first": "2013-01-01"}}, {"sort": {"by": ["a"]}}):
        call = parse_step(line)
        assert Lines.model_validate(Lines(steps=[call]).model_dump(mode="json")).steps == [call]


def test_a_users_options_are_handed_on_and_dates_of_toml_become_text() -> None:
    call = parse_step({"my.helper:clean": {"day": datetime.date(2013, 2, 22), "more": {"at": [1, 2]}}})
    assert (call.module, call.options) == ("my.helper", {"day": "2013-02-22", "more": {"at": [1, 2]}})


def test_a_date_of_toml_is_a_moment_to_split_at() -> None:
    assert parse_step({"split": {"by": "time", "at": datetime.date(2013, 2, 22)}}).options["at"] == "2013-02-22"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("drop_dupes", "no step is called 'drop_dupes'. Did you mean 'drop_duplicates'?"),
        ({"sort": {"columns": ["a"]}}, "step 'sort': needs the option 'by'; unknown option 'columns'."),
        ({"join": {"table": "w", "onn": ["a"]}}, "unknown option 'onn'. Did you mean 'on'?"),
        ({"join": {"table": "w"}}, "give either 'on', or 'left_on' and 'right_on' of the same length"),
        ({"join": {"table": "w", "left_on": ["a"], "right_on": ["b", "c"]}}, "of the same length"),
        ({"cast": {"columns": {"a": "number"}}}, "columns.a = 'number'"),
        ({"split": {"by": "random", "at": 3}}, "'at' needs by = 'time'"),
        ({"split": {"by": "time"}}, "give either 'test' or 'at'"),
        ({"split": {"by": "time", "test": 0.1, "group": "a"}}, "'group' needs by = 'random'"),
        ({"sample": {"rows": 5, "share": 0.5}}, "give either 'rows' or 'share'"),
        ({"select": {}}, "give either 'columns' or 'without'"),
        ("helper.py:clean up", "is not of the form 'module:function'"),
        (3, "a step is 'name'"),
        ({"sort": {"by": ["a"]}, "select": {"columns": ["a"]}}, "a step is 'name'"),
    ],
)
def test_a_mistake_names_the_step_the_value_and_the_cure(line: Any, said: str) -> None:
    assert said in mistake(line)


def test_only_what_draws_lots_depends_on_the_seed() -> None:
    assert parse_step({"split": {"by": "random", "test": 0.1}}).random
    assert parse_step({"sample": {"rows": 5}}).random
    assert not parse_step({"split": {"by": "time", "test": 0.1}}).random
    assert not parse_step("helper:sample").random


def test_every_step_has_options_and_a_function_and_every_option_a_sentence() -> None:
    assert list(STEPS) == list(FUNCTIONS)
    for model in STEPS.values():
        for name, field in model.model_fields.items():
            assert (field.description or "").endswith("."), f"{model.__name__}.{name}"


def test_the_schema_lists_every_step_with_its_options() -> None:
    text = str(Lines.model_json_schema())
    for name, model in STEPS.items():
        assert f"'{name}'" in text
        assert all(f"'{option}'" in text for option in model.model_fields)
