"""The [train] table of the job file, and the one step that it becomes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from onejob.core.artifact import Json, canonical
from onejob.core.mistakes import mistakes_of, nearest, spell
from onejob.core.plan import Needs, Plan, Step, Upstream
from onejob.core.plugin import load
from onejob.core.spec import Duration, StageSpec, counted, uncounted
from onejob.errors import JobFileError

ENTRY = "onejob.train.engines.torch:train"
PLACED = ("resources", "imports", "reads", "threads")
"""Options that the step carries in fields of its own."""


class Spec(StageSpec):
    """How a model is trained."""

    engine: str = Field("torch", description="What trains: `torch`, or an engine that a plugin brings.")
    epochs: int = Field(4, ge=1, description="How often training goes through all rows.")
    batch: int = Field(1024, ge=1, description="Rows of a global batch; the processes of a gang share them.")
    lr: float = Field(1e-3, gt=0, description="Learning rate, at its highest.")
    schedule: Literal["cosine", "constant"] = Field(
        "cosine", description="How the learning rate goes on after the warm-up: down along a cosine to 0, or constant."
    )
    warmup: int = Field(0, ge=0, description="Steps in which the learning rate rises from 0.")
    weight_decay: float = Field(0.01, ge=0, description="Pull of weights (not biases) towards zero.")
    optimizer: Literal["adamw", "sgd"] = Field(
        "adamw", description="AdamW, or stochastic gradient descent with momentum 0.9."
    )
    clip: float = Field(1.0, ge=0, description="Longest gradient, over all parameters together; 0 means no limit.")
    keep: Literal["last", "best"] = Field(
        "last",
        description="Which model is left: the last, or the best epoch's by `metric` on the held-out rows. "
        "With [monitor.gate], which judges by these rows, only the last.",
    )
    metric: str | None = Field(
        None, description="Score by which the best model is told; unset: the family's most telling one."
    )
    checkpoint: int = uncounted(
        100, ge=1, description="Steps between checkpoints, from which a killed training goes on to the same result."
    )
    threads: int = Field(1, ge=1, description="Threads of each process; counts in the key, since sums depend on it.")
    arrive: Duration = uncounted(
        60.0, description="How long the processes of a gang wait for each other at the start, such as '60s'."
    )
    model: dict[str, Any] = Field({}, description="Options of the family's model: the table [train.model].")


def plan(spec: Spec, upstream: Upstream) -> Plan:
    """One step, `train`; JobFileError with all mistakes in [train] and [train.model]."""
    mistakes: list[str] = []
    entry = upstream.plugins.get(f"train/{spec.engine}", ENTRY if spec.engine == "torch" else "")
    if not entry:
        engines = {"torch", *(name.removeprefix("train/") for name in upstream.plugins if name.startswith("train/"))}
        mistakes.append(f"[train] engine: no engine is called {spec.engine!r}.{_hint(spec.engine, sorted(engines))}")
    if spec.engine == "torch" and spec.resources.gpus:
        mistakes.append(f"[train] resources.gpus: {spec.resources.gpus:g}: the torch engine trains on CPUs. Use 0.")
    if "dataset" not in upstream.outputs:
        mistakes.append("[train]: there is no dataset to train on. Add the table [data].")
    model: Mapping[str, Json] = {}
    if upstream.family:
        with _project(upstream.project):
            model = _model(spec, upstream.family, mistakes)
            _check_metric(spec, upstream.family, mistakes)
    if mistakes:
        raise JobFileError(mistakes)
    return Plan((_step(spec, upstream, entry, model),))


def _step(spec: Spec, upstream: Upstream, entry: str, model: Mapping[str, Json]) -> Step:
    options = {name: value for name, value in counted(spec).items() if name not in PLACED}
    resources = spec.resources
    return Step(
        name="train",
        stage="train",
        entry=entry,
        options={**options, "family": upstream.family, "model": dict(model)},
        inputs={"dataset": upstream.outputs["dataset"]},
        outputs=("checkpoint",),
        needs=Needs(resources.cpus, resources.memory, resources.gpus, resources.processes),
        seed=upstream.seed,
        threads=spec.threads,
        hardware="device",
        roots=tuple(f"{upstream.family}.{part}" for part in ("encode", "model", "metrics")),
        imports=tuple(spec.imports),
        reads=tuple(spec.reads),
        timeout=spec.timeout,
        retries=spec.retries,
        setup={"checkpoint": spec.checkpoint, "arrive": spec.arrive},
    )


def _model(spec: Spec, family: str, mistakes: list[str]) -> Mapping[str, Json]:
    """[train.model] as the family's own options see it, with every default filled in."""
    options: type[BaseModel] = load(f"{family}.options:Options")
    try:
        # JSON's strict mode, as for the rest of the job file
        return options.model_validate_json(canonical(spec.model), strict=True).model_dump(mode="json")
    except ValidationError as error:
        found = mistakes_of(options, spec.model, error)
        mistakes += [f"[train] {spell(('model', *mistake.path))}: {mistake.text}" for mistake in found]
        return {}


def _check_metric(spec: Spec, family: str, mistakes: list[str]) -> None:
    if spec.metric is None:
        return
    known = list(load(f"{family}.metrics:HIGHER_IS_BETTER"))
    if spec.metric not in known:
        mistakes.append(f"[train] metric: the family has no score {spec.metric!r}.{_hint(spec.metric, known)}")


def _hint(name: str, known: list[str]) -> str:
    return nearest(name, known) or f" Known: {', '.join(known)}."


@contextmanager
def _project(folder: str) -> Iterator[None]:
    """The project's modules can be imported here, for a family of the user's own; none of them stays behind.

    One process may plan jobs of many projects, whose modules may bear the same names, and may have changed since.
    """
    before = set(sys.modules)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:
            if _lies_in(getattr(sys.modules[name], "__file__", None), folder):
                del sys.modules[name]


def _lies_in(file: str | None, folder: str) -> bool:
    return file is not None and Path(file).is_relative_to(folder)
