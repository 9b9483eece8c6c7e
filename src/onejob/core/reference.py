"""What can stand in a job file, from the models that check it: the JSON Schema, and the page docs/job.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo

from onejob.core.artifact import Json, canonical
from onejob.core.job import NAME, NAME_WORDS, TABLES
from onejob.core.mistakes import fields, models_in
from onejob.core.spec import UNCOUNTED, WORDS, Model, StageSpec

_INTRO = """\
# The job file

*This page is generated from the models that check the file: `python -m onejob.loop.reference`.*

A job is one TOML file with a `name` and up to six tables, in the order of the work. A table that is left out hands the
previous artifact through. Unknown keys are mistakes, and all mistakes are reported at once, by `onejob check`.
`--set train.lr=0.01` overrides one value; it is read as TOML, or else as text. `onejob check --schema` prints the JSON
Schema of the file, for editors.

The column *counts* says whether a value counts in the [step key](design/keys.md): `yes`, if the step runs again when it
changes; `no`, if it only decides where and how the step runs. A default of `-` means that a value must be given.
"""


@dataclass(frozen=True, slots=True)
class _Row:
    key: str
    words: str
    default: str
    counted: bool
    description: str


def schema(stages: Mapping[str, type[StageSpec]], run: type[Model]) -> dict[str, Json]:
    """The JSON Schema (2020-12) of a job file with these tables."""
    whole = _whole(stages, run).model_json_schema()
    plain = _without_null({name: value for name, value in whole.items() if name != "description"})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "onejob job file",
        "description": "One job, from raw data to a served model.",
        **plain,
    }


Details = Mapping[str, Sequence[tuple[str, type[BaseModel]]]]
"""Table -> (title, model): what a key of it may hold beyond what the table's own model says."""


def reference(stages: Mapping[str, type[StageSpec]], run: type[Model], details: Details | None = None) -> str:
    """The page docs/job.md, in Markdown."""
    models: dict[str, type[BaseModel]] = {**stages, "run": run}
    known = [table for table in TABLES if table in models]
    parts = [_INTRO]
    parts.append(f"## name\n\nThe name of the job: {NAME_WORDS}. Refs, runs and the endpoint go by it.\n")
    parts.append(
        "## Every stage\n\nThese keys are in every table but `[run]`.\n\n" + _table(StageSpec, skip=frozenset())
    )
    for table in known:
        model = models[table]
        shared = _shared(model)
        about = " ".join((model.__doc__ or "").split())
        parts.append(f"## [{table}]\n\n{about}\n\n{_table(model, skip=shared)}")
        for title, detail in (details or {}).get(table, ()):
            about = " ".join((detail.__doc__ or "").split())
            parts.append(f"### {title}\n\n{about}\n\n{_table(detail, skip=frozenset())}")
    return "\n".join(parts)


# ---- the schema --------------------------------------------------------------------------------------------------


def _whole(stages: Mapping[str, type[StageSpec]], run: type[Model]) -> type[BaseModel]:
    """One model of the whole file; it only serves to give a schema in which equal names of models don't collide."""
    models: dict[str, type[BaseModel]] = {**stages, "run": run}
    tables: dict[str, Any] = {table: (models[table] | None, None) for table in TABLES if table in models}
    name = (str, Field(pattern=f"^{NAME.pattern}$", description=f"The name of the job: {NAME_WORDS}."))
    return create_model("Job", __config__=ConfigDict(extra="forbid"), name=name, **tables)


def _without_null(value: Json) -> Json:
    """TOML has no null: a key that may be none may be left out."""
    if isinstance(value, list):
        return [_without_null(item) for item in value]
    if not isinstance(value, dict):
        return value
    plain = {
        key: _without_null(item)
        for key, item in value.items()
        # a title is only the key again; a key that is called so holds a schema, not text
        if item is not None and not (key == "title" and isinstance(item, str))
    }
    if "anyOf" in plain:
        choices = [choice for choice in plain["anyOf"] if choice != {"type": "null"}]
        if len(choices) == 1:
            del plain["anyOf"]
            return {**choices[0], **plain}
        plain["anyOf"] = choices
    return plain


# ---- the page ----------------------------------------------------------------------------------------------------


def _shared(model: type[BaseModel]) -> frozenset[str]:
    """Keys that a table has from StageSpec, unchanged."""
    own, every = model.model_fields, StageSpec.model_fields
    return frozenset(name for name in own.keys() & every.keys() if own[name] == every[name] or _like(model, name))


def _like(model: type[BaseModel], name: str) -> bool:
    return name not in model.__annotations__ and issubclass(model, StageSpec)


def _table(model: type[BaseModel], skip: frozenset[str]) -> str:
    schema = _without_null(model.model_json_schema())
    rows = list(_rows(model, schema.get("$defs", {}), "", skip, True, (model,)))
    lines = ["| key | type | default | counts | meaning |", "|---|---|---|---|---|"]
    lines += [
        f"| `{row.key}` | {_cell(row.words)} | {_cell(row.default)} | {'yes' if row.counted else 'no'} "
        f"| {_cell(row.description)} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def _rows(
    model: type[BaseModel],
    definitions: Mapping[str, Json],
    start: str,
    skip: frozenset[str],
    counted: bool,
    above: tuple[type[BaseModel], ...],
) -> Iterator[_Row]:
    """A row for each key of a model, and of the models within it."""
    properties = _without_null(model.model_json_schema()).get("properties", {})
    for name, info in fields(model).items():
        if name in skip:
            continue
        counts = counted and not _uncounted(info)
        written = properties.get(name, {})
        words = _words(written, definitions)
        # where it says in its own words what is written, the model is not what is written
        inner = [] if WORDS in str(written) else list(_models_within(info.annotation, ""))
        yield _Row(f"{start}{name}", words, _default(info), counts, info.description or "")
        for path, found in inner:
            if found in above:  # a table that may hold itself
                continue
            yield from _rows(found, definitions, f"{start}{name}{path}.", frozenset(), counts, (*above, found))


def _models_within(annotation: Any, path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """The models that a value holds, each with how it is reached: itself, `[]` in a list, `.NAME` in a table."""
    direct = list(models_in(annotation))
    yield from ((path, model) for model in direct)
    origin = get_origin(annotation)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        yield from _models_within(get_args(annotation)[-1], f"{path}.NAME")
    elif origin in (list, tuple, set):
        for member in get_args(annotation):
            yield from _models_within(member, f"{path}[]")
    elif origin is not None:
        for member in get_args(annotation):
            if not list(models_in(member)):
                yield from _models_within(member, path)


def _uncounted(info: FieldInfo) -> bool:
    return isinstance(info.json_schema_extra, dict) and bool(info.json_schema_extra.get(UNCOUNTED))


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "-"
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "unset"
    if isinstance(value, BaseModel):
        return "its keys' defaults"
    if isinstance(value, list | tuple) and any(isinstance(item, BaseModel) for item in value):
        value = [item.model_dump(mode="json") if isinstance(item, BaseModel) else item for item in value]
    return f"`{canonical(value).decode()}`"


def _words(schema: Mapping[str, Json], definitions: Mapping[str, Json]) -> str:
    """A type in plain words."""
    if WORDS in schema:
        return str(schema[WORDS])
    if "$ref" in schema:
        return _words(definitions.get(schema["$ref"].rpartition("/")[2], {"type": "object"}), definitions)
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"`{canonical(value).decode()}`" for value in values)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_words(choice, definitions) for choice in schema["anyOf"]))
    match schema.get("type"):
        case "array":
            return _list_words(schema, definitions)
        case "object":
            values = schema.get("additionalProperties")
            if isinstance(values, dict) and "properties" not in schema:
                return f"table of names, each with {_words(values, definitions)}"
            return "table"
        case "string":
            formats = {"date": "date", "date-time": "time", "path": "path"}
            return formats.get(str(schema.get("format")), "text")
        case "integer" | "number" as kind:
            return ("whole number" if kind == "integer" else "number") + _bounds(schema)
        case "boolean":
            return "true or false"
        case _:
            return "any value"


def _list_words(schema: Mapping[str, Json], definitions: Mapping[str, Json]) -> str:
    if entries := schema.get("prefixItems"):
        return f"list of {len(entries)}: {', '.join(_words(entry, definitions) for entry in entries)}"
    least = schema.get("minItems")
    some = f", at least {least}" if least else ""
    words = _words(schema.get("items", {}), definitions)
    return f"list of ({words}){some}" if " or " in words and WORDS not in schema["items"] else f"list of {words}{some}"


def _bounds(schema: Mapping[str, Json]) -> str:
    said = {
        "exclusiveMinimum": "greater than",
        "minimum": "at least",
        "exclusiveMaximum": "less than",
        "maximum": "at most",
    }
    words = [f"{text} {canonical(schema[name]).decode()}" for name, text in said.items() if name in schema]
    return f" ({' and '.join(words)})" if words else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
