"""The JSON Schema and the page docs/job.md, from the models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from onejob.core.reference import reference, schema
from onejob.core.spec import Duration, Model, Resources, StageSpec, uncounted
from onejob.loop.reference import PAGE, page


class Inner(Model):
    """Within."""

    rate: float = Field(0.1, gt=0, lt=1, description="A share | of it.")


class Spec(StageSpec):
    """Stage 1."""

    source: str = Field(description="Where.")
    kind: Literal["a", "b"] = "a"
    inner: Inner | None = Field(None, description="A table.")
    many: list[Inner] = Field([])
    named: dict[str, str | Inner] = Field({})
    wait: Duration = uncounted(5.0, description="How long.")


Data = Spec


class Serve(StageSpec):
    """Stage 5."""

    resources: Resources = uncounted(Resources(cpus=0.5), description="Another meaning.")


class Run(Model):
    """Stage 3."""

    seed: int = 0


STAGES: dict[str, type[StageSpec]] = {"data": Data, "serve": Serve}


def rows(text: str) -> dict[str, list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.replace("\\|", "!").strip("|").split("|")] for line in lines]
    return {cell[0].strip("`"): cell[1:] for cell in cells}


def test_every_key_has_a_row_with_type_default_and_sentence() -> None:
    table = rows(reference(STAGES, Run))
    assert table["source"] == ["text", "-", "yes", "Where."]
    assert table["kind"] == ['`"a"` or `"b"`', '`"a"`', "yes", ""]
    assert table["inner"] == ["table", "unset", "yes", "A table."]
    for start in ("inner", "many[]", "named.NAME"):
        assert table[f"{start}.rate"] == ["number (greater than 0 and less than 1)", "`0.1`", "yes", "A share ! of it."]
    assert table["named"][0] == "table of names, each with text or table"
    assert table["wait"] == ["duration: seconds, or text such as '15m'", "`5.0`", "no", "How long."]
    assert table["retries"][2] == "no"
    assert table["seed"] == ["whole number", "`0`", "yes", ""]


def test_what_every_stage_has_is_told_once_unless_a_stage_changes_it() -> None:
    text = reference(STAGES, Run)
    assert text.count("| `retries` |") == 1
    serve = text[text.index("## [serve]") :]
    assert "| `resources` | table | its keys' defaults | no | Another meaning. |" in serve
    assert "| `resources.processes` | whole number (at least 1) | `1` | no |" in serve


def test_tables_come_in_the_order_of_the_page() -> None:
    text = reference(STAGES, Run, {"data": [("More", Inner)]})
    titles = [line for line in text.splitlines() if line.startswith("#")]
    assert titles == [
        "# The job file",
        "## name",
        "## Every stage",
        "## [data]",
        "### More",
        "## [run]",
        "## [serve]",
    ]


def walk(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(inner)


def test_the_schema_refuses_unknown_keys_everywhere_and_knows_no_null() -> None:
    whole = schema(STAGES, Run)
    assert whole["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert whole["title"] == "onejob job file"
    assert list(whole["properties"]) == ["name", "data", "run", "serve"]
    assert whole["required"] == ["name"]
    tables = [part for part in walk(whole) if "properties" in part]
    assert len(tables) == 6
    assert all(table["additionalProperties"] is False for table in tables)
    assert "null" not in json.dumps(whole)


def test_the_schema_takes_what_a_person_may_write() -> None:
    whole = schema(STAGES, Run)
    data = whole["$defs"]["Spec"]["properties"]
    assert {choice["type"] for choice in data["wait"]["anyOf"]} == {"number", "string"}
    assert {choice["type"] for choice in data["timeout"]["anyOf"]} == {"number", "string"}
    assert data["timeout"]["description"].startswith("Longest time")
    assert data["source"] == {"description": "Where.", "type": "string"}


def test_models_of_one_name_are_kept_apart() -> None:
    other = type("Spec", (StageSpec,), {"__module__": "elsewhere", "__doc__": "Another."})
    whole = schema({"data": Data, "train": other}, Run)
    assert whole["properties"]["data"]["$ref"] != whole["properties"]["train"]["$ref"]


def test_the_page_in_docs_is_the_page_of_the_models() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "`python -m onejob.loop.reference` writes it again"
