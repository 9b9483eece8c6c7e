"""Plans: what a job file becomes. Pure data, made by each stage's `plan`, carried out by the loop.

A `Step` names the work; its key is known once its inputs are. The loop turns a step into a task when it is due.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from onejob.core.artifact import Json

Hardware = Literal["none", "device", "exact"]
"""How much of the machine counts in the key: nothing; cpu or which GPU model; the CPU's model and instructions too."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Resources of a task as plain numbers; cpus and gpus are for one process of the gang."""

    cpus: float = 1.0
    memory: int | None = None
    gpus: float = 0.0
    processes: int = 1


@dataclass(frozen=True, slots=True)
class Source:
    """Files outside onejob that a step reads: a logical name for each, and where it lies now."""

    files: tuple[tuple[str, str], ...]
    """(logical name, absolute path); only names and bytes count, never where the file lies."""


@dataclass(frozen=True, slots=True)
class Output:
    """The named output of an earlier step of the same plan."""

    step: str
    name: str


@dataclass(frozen=True, slots=True)
class Existing:
    """An artifact that is there already, by digest."""

    digest: str


Input = Source | Output | Existing


@dataclass(frozen=True)
class Step:
    """One planned step: everything that decides its result, and where and how it may run."""

    name: str
    """Unique in the plan: the stage, or `stage.part` where a stage has several steps (`optimize.export`)."""
    stage: str
    entry: str
    """`package.module:function`, called as `function(context)` in a process of its own."""
    options: Mapping[str, Json]
    """The resolved options that count in the key (see core.spec.counted)."""
    inputs: Mapping[str, Input]
    outputs: tuple[str, ...]
    """Names of the artifacts it leaves."""
    needs: Needs = field(default_factory=Needs)
    seed: int | None = None
    threads: int = 1
    """Threads of one process; counts in the key, since sums depend on their order."""
    hardware: Hardware = "none"
    roots: tuple[str, ...] = ()
    """Modules beside the entry that the step loads by name: the user's (`helper`), the family's package."""
    imports: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    timeout: float | None = None
    retries: int = 2
    env: Mapping[str, str] = field(default_factory=dict)
    """Plain environment variables that the step's processes get; they count in the key."""
    setup: Mapping[str, Json] = field(default_factory=dict)
    """Options the step is given that don't count in its key."""

    def to_json(self) -> dict[str, Json]:
        data = asdict(self)
        data["inputs"] = {name: _input_to_json(value) for name, value in self.inputs.items()}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Step:
        plain = dict(data)
        plain["needs"] = Needs(**plain["needs"])
        plain["inputs"] = {name: _input_from_json(value) for name, value in plain["inputs"].items()}
        for name in ("outputs", "roots", "imports", "reads"):
            plain[name] = tuple(plain[name])
        return cls(**plain)


@dataclass(frozen=True)
class Serving:
    """What the serve stage wants: an endpoint of this name, on the artifact that a step leaves."""

    name: str
    artifact: Output | Existing
    options: Mapping[str, Json]


@dataclass(frozen=True)
class Plan:
    """The steps of a job in an order in which they can run, and what is to be served at the end."""

    steps: tuple[Step, ...]
    serving: Serving | None = None
    refs: Mapping[str, Output] = field(default_factory=dict)
    """Refs to set when the run is done: `flights/engine@champion` -> the output that it will name."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """What the stages before this one hand on: output kinds to where they come from, and run-wide options."""

    job: str
    project: str
    """Absolute path of the folder of the job file."""
    seed: int
    outputs: Mapping[str, Input]
    """By kind: "dataset", "checkpoint", "engine"."""
    plugins: Mapping[str, str] = field(default_factory=dict)
    """Names resolved by the one door, plugins.py: "train/torch" -> "onejob.train.engines.torch:train"."""
    family: str = ""
    """The family's package, resolved: "onejob.families.tabular", or the user's own dotted path."""


def _input_to_json(value: Input) -> Json:
    match value:
        case Source(files):
            return {"source": [list(pair) for pair in files]}
        case Output(step, name):
            return {"step": step, "output": name}
        case Existing(digest):
            return {"digest": digest}


def _input_from_json(value: Mapping[str, Json]) -> Input:
    if "source" in value:
        return Source(tuple((name, path) for name, path in value["source"]))
    if "step" in value:
        return Output(value["step"], value["output"])
    return Existing(value["digest"])
