"""The typed options of the built-in data steps, and how a line of `[data] steps` becomes a call.

A line is `"drop_duplicates"`, `{ name = { options } }`, `"module:function"` or `{ "module:function" = { options } }`.
Options of the built-in steps are checked here, before anything runs; those of a user's function are handed on as they
are.
"""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema, model_validator

from onejob.core.artifact import Json
from onejob.core.spec import WORDS, Model

Type = Literal["int", "float", "text", "bool", "date", "datetime"]
"""The types that a column can be declared as, or cast to."""


def _moment(value: Any) -> Any:
    """TOML has dates of its own; they become ISO text, which is what JSON can hold."""
    return value.isoformat() if isinstance(value, datetime.date | datetime.datetime) else value


Moment = Annotated[str | int | float, BeforeValidator(_moment)]
"""A point in the time column's own terms: ISO text for dates and times, a number for numbers."""


class DropDuplicates(Model):
    """Drop rows that repeat an earlier one."""

    columns: list[str] = Field([], description="Columns that make rows the same; empty means all of them.")
    keep: Literal["first", "last"] = Field("first", description="Which of the rows that are the same stays.")


class DropNulls(Model):
    """Drop rows with missing values."""

    columns: list[str] = Field([], description="Columns that must have a value; empty means all of them.")


class Filter(Model):
    """Keep the rows for which an expression is true."""

    where: str = Field(description="A SQL expression over the row's columns, such as `distance > 100 AND month <= 2`.")
    reason: str = Field("", description="Why the other rows are dropped; unset means the expression itself.")
    keep: bool = Field(True, description="Whether the dropped rows are kept in the dataset; they are always counted.")


class Select(Model):
    """Keep some columns, in the order given, or all but some."""

    columns: list[str] = Field([], description="Columns that stay, in this order.")
    without: list[str] = Field([], description="Columns that go; may be given instead of `columns`.")

    @model_validator(mode="after")
    def _one_of_both(self) -> Select:
        if bool(self.columns) == bool(self.without):
            raise ValueError("give either 'columns' or 'without'")
        return self


class Rename(Model):
    """Give columns new names."""

    columns: dict[str, str] = Field(min_length=1, description="Old name -> new name.")


class Cast(Model):
    """Change the types of columns."""

    columns: dict[str, Type] = Field(min_length=1, description="Column -> its new type.")
    on_error: Literal["fail", "drop", "null"] = Field(
        "fail", description="What happens to a value that isn't of the type: fail, drop the row, or make it null."
    )


class Join(Model):
    """Add columns of another table; a row never becomes two."""

    table: str = Field(description="A name from `tables`.")
    on: list[str] = Field([], description="Columns of the same name in both tables that must be equal.")
    left_on: list[str] = Field([], description="The columns of this table, where the names differ.")
    right_on: list[str] = Field([], description="The columns of the other table, in the same order as `left_on`.")
    how: Literal["left", "inner"] = Field(
        "left", description="Rows without a partner stay with nulls (left), or are dropped with a reason (inner)."
    )
    columns: list[str] = Field([], description="Columns to take from the other table; empty means all of them.")
    prefix: str = Field("", description="Put before the names of the columns that are taken.")
    duplicates: Literal["fail", "first"] = Field(
        "fail", description="What happens if the other table has a key twice: fail, or take its first row."
    )

    @model_validator(mode="after")
    def _keys(self) -> Join:
        if bool(self.on) == bool(self.left_on) or len(self.left_on) != len(self.right_on):
            raise ValueError("give either 'on', or 'left_on' and 'right_on' of the same length")
        return self


class WithColumns(Model):
    """Add or replace columns."""

    columns: dict[str, str] = Field(
        min_length=1, description="Name -> SQL expression over the row's columns, such as `year - plane_year`."
    )


class Sample(Model):
    """Keep some rows, chosen by the seed; the others are counted, not kept."""

    rows: int | None = Field(None, ge=1, description="How many rows stay.")
    share: float | None = Field(None, gt=0, le=1, description="The share of rows that stay, about.")

    @model_validator(mode="after")
    def _one_of_both(self) -> Sample:
        if (self.rows is None) == (self.share is None):
            raise ValueError("give either 'rows' or 'share'")
        return self


class Sort(Model):
    """Order the rows; rows that are equal keep their order."""

    by: list[str] = Field(min_length=1, description="Columns to sort by, the first counts most.")
    descending: bool = Field(False, description="Whether the largest comes first.")


class Split(Model):
    """Hold out rows; must be the last step."""

    by: Literal["time", "random"] = Field(
        description="The last rows in time, in the order of the time column; or rows chosen by the seed."
    )
    test: float | None = Field(None, gt=0, lt=1, description="The share of rows to hold out, about.")
    at: Moment | None = Field(
        None, description="With `by = 'time'`: rows at or after this moment are held out, in the column's time zone."
    )
    group: str | None = Field(
        None, description="With `by = 'random'`: rows with the same value of this column stay on the same side."
    )

    @model_validator(mode="after")
    def _fitting(self) -> Split:
        if (self.test is None) == (self.at is None):
            raise ValueError("give either 'test' or 'at'")
        if self.by == "random" and self.at is not None:
            raise ValueError("'at' needs by = 'time'")
        if self.by == "time" and self.group is not None:
            raise ValueError("'group' needs by = 'random'")
        return self


STEPS: Mapping[str, type[Model]] = {
    "drop_duplicates": DropDuplicates,
    "drop_nulls": DropNulls,
    "filter": Filter,
    "select": Select,
    "rename": Rename,
    "cast": Cast,
    "join": Join,
    "with_columns": WithColumns,
    "sample": Sample,
    "sort": Sort,
    "split": Split,
}
"""The built-in steps, by name, with the model of their options."""

RANDOM = frozenset({"sample", "split"})
"""Steps whose result may depend on the seed."""

_USER = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class StepCall(Model):
    """One line of `steps`: what is called, and with which options."""

    name: str = Field(description="A built-in step, or `module:function`.")
    options: dict[str, Json] = Field({}, description="Options, with defaults filled in.")

    @property
    def module(self) -> str | None:
        """The user's module, or None for a built-in step."""
        module, colon, _ = self.name.partition(":")
        return module if colon else None

    @property
    def random(self) -> bool:
        """Whether the result depends on the seed."""
        return self.name in RANDOM and self.options.get("by") != "time"


def parse_step(value: Any) -> Any:
    """A `StepCall` from a line of the job file; ValueError says what is wrong with it."""
    if isinstance(value, StepCall):
        return value
    if isinstance(value, Mapping) and set(value) == {"name", "options"}:
        name, given = value["name"], value["options"]
    elif isinstance(value, Mapping) and len(value) == 1:
        ((name, given),) = value.items()
    else:
        name, given = value, {}
    if not isinstance(name, str) or not isinstance(given, Mapping):
        raise ValueError("a step is 'name', { name = { options } }, 'module:function' or { 'module:function' = { … } }")
    if ":" in name:
        if not _USER.fullmatch(name):
            raise ValueError(f"{name!r} is not of the form 'module:function'")
        return StepCall(name=name, options={key: _plain(item) for key, item in given.items()})
    if name not in STEPS:
        raise ValueError(f"no step is called {name!r}.{did_you_mean(name, STEPS)} Steps: {', '.join(STEPS)}")
    try:
        options = STEPS[name].model_validate(given)
    except ValidationError as error:
        raise ValueError(f"step {name!r}: {_mistakes(STEPS[name], error)}") from None
    return StepCall(name=name, options=options.model_dump(mode="json"))


def did_you_mean(name: str, known: Any) -> str:
    """` Did you mean 'x'?` for the nearest of the known names, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _plain(value: Any) -> Json:
    """A value of TOML as JSON: its dates and times become ISO text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, datetime.date | datetime.datetime | datetime.time) else value


def _mistakes(model: type[Model], error: ValidationError) -> str:
    lines = []
    for mistake in error.errors():
        key = ".".join(str(part) for part in mistake["loc"])
        if mistake["type"] == "extra_forbidden":
            lines.append(f"unknown option {key!r}.{did_you_mean(key, model.model_fields)}")
        elif mistake["type"] == "missing":
            lines.append(f"needs the option {key!r}")
        else:
            text = mistake["msg"].removeprefix("Value error, ")
            lines.append(f"{key} = {mistake['input']!r}: {text}" if key else text)
    return "; ".join(lines)


def _schema() -> dict[str, Json]:
    """The JSON Schema of a line: every built-in step with its options, or any function of the user's."""
    own = {"type": "string", "pattern": rf"^{_USER.pattern}$"}
    return {
        "anyOf": [
            {"enum": list(STEPS)},
            *(
                {
                    "type": "object",
                    "properties": {name: model.model_json_schema()},
                    "required": [name],
                    "additionalProperties": False,
                }
                for name, model in STEPS.items()
            ),
            own,
            {
                "type": "object",
                "patternProperties": {own["pattern"]: {"type": "object"}},
                "additionalProperties": False,
            },
        ],
        WORDS: "step: 'name', { name = { options } }, 'module:function' or { 'module:function' = { options } }",
    }


StepLine = Annotated[StepCall, BeforeValidator(parse_step), WithJsonSchema(_schema())]
"""A line of `steps`, as pydantic reads it."""
