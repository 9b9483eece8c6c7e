"""What every table of the job file shares: the strict model, resources, durations, sizes.

A knob is one typed field with a sentence: it gives the key, the JSON Schema, docs/job.md, the form and the check.
A field marked `uncounted` (where a step runs, with how much memory, how often it is retried) never enters a step key.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from onejob.core.artifact import Json

UNCOUNTED = "onejob_uncounted"
WORDS = "onejob_words"
"""In a JSON Schema: what a type is, in plain words, for the reference page."""


class Model(BaseModel):
    """A frozen model that refuses unknown keys; the base of every table of the job file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def uncounted(default: Any = ..., **more: Any) -> Any:
    """A field that doesn't count in a step key: it changes where or how a step runs, never what comes out."""
    return Field(default, json_schema_extra={UNCOUNTED: True}, **more)


def counted(model: BaseModel) -> dict[str, Json]:
    """A model's values that count in a step key, as JSON, without the uncounted fields (at any depth)."""
    return {
        name: _counted_value(getattr(model, name))
        for name, info in type(model).model_fields.items()
        if not (isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get(UNCOUNTED))
    }


def _counted_value(value: Any) -> Json:
    if isinstance(value, BaseModel):
        return counted(value)
    if isinstance(value, list | tuple):
        return [_counted_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _counted_value(item) for key, item in value.items()}
    return value


_DURATION = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_duration(value: Any) -> Any:
    """Seconds from a number, or from text such as '90s', '15m', '2h', '1d'."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*", value) if isinstance(value, str) else None
    if not match:
        raise ValueError("a duration is a number of seconds, or text such as '90s', '15m', '2h', '1d'")
    return float(match[1]) * _DURATION[match[2]]


def parse_size(value: Any) -> Any:
    """Bytes from an integer, or from text such as '512MiB', '2GiB'."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)\s*", value) if isinstance(value, str) else None
    if not match:
        raise ValueError("a size is a number of bytes, or text such as '512MiB', '2GiB'")
    return int(float(match[1]) * _SIZE[match[2]])


def _written(number: str, units: str, words: str) -> WithJsonSchema:
    """The JSON Schema of what a person may write: a number, or text with a unit."""
    text = {"type": "string", "pattern": rf"^\s*\d+(\.\d+)?\s*({units})\s*$"}
    return WithJsonSchema({"anyOf": [{"type": number, "exclusiveMinimum": 0}, text], WORDS: words})


Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    Field(gt=0),
    _written("number", "|".join(_DURATION), "duration: seconds, or text such as '15m'"),
]
Size = Annotated[
    int,
    BeforeValidator(parse_size),
    Field(gt=0),
    _written("integer", "|".join(_SIZE), "size: bytes, or text such as '2GiB'"),
]


class Resources(Model):
    """What a task needs from the machine that runs it."""

    cpus: float = uncounted(1.0, gt=0, description="CPU cores for each process.")
    memory: Size | None = uncounted(
        None, description="Memory for the whole task, such as '2GiB'; unset means no limit."
    )
    gpus: float = uncounted(
        0.0, ge=0, description="GPUs for each process; a fraction is allowed where the device can be shared."
    )
    processes: int = Field(
        1, ge=1, description="How many processes work as one gang; the world size, which counts in the key."
    )


class StageSpec(Model):
    """The options that every stage takes."""

    resources: Resources = Field(Resources(), description="What the step needs to run.")
    timeout: Duration | None = uncounted(
        None, description="Longest time a step may take, such as '30m'; unset means no limit."
    )
    retries: int = uncounted(
        2,
        ge=0,
        description="How often a step whose processes died is started again; an error that it reports is not retried.",
    )
    imports: list[str] = Field(
        [],
        description="Modules of the project that a step reaches in a way that can't be followed (a dynamic import); "
        "'helper.py:load' says that nothing else is reached by that function.",
    )
    reads: list[str] = Field(
        [],
        description="Files, folders and globs of the project that a step reads by path; their bytes count in the key; "
        "'helper.py:load' says that nothing else is read by that function.",
    )
