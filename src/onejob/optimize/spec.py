"""The table [optimize] of the job file, and its plan: export, one step for each further candidate, and the choice.

`PASSES` is the seam for more candidates: a row names the step's entry and what it needs, and `choose` takes whatever
artifacts of kind `candidate` it is handed. The choice is a step with a key like any other, so a completed choice is
never measured again.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from onejob.core.artifact import Json
from onejob.core.plan import Hardware, Input, Needs, Output, Plan, Step, Upstream
from onejob.core.plugin import load
from onejob.core.spec import Model, StageSpec, counted
from onejob.errors import JobFileError, UnavailableError

EXPORT = "optimize.export"
CHOOSE = "optimize.choose"
BASE = "onnxruntime-fp32"
"""The candidate that the export itself leaves: every other is made from it, and it wins where nothing else may."""

ENGINES = ("onejob.engines.onnxruntime", "onejob.engines.openvino", "onejob.engines.pytorch")
"""Modules that measuring loads by name."""


@dataclass(frozen=True, slots=True)
class Pass:
    """How a candidate is made."""

    entry: str
    needs: tuple[str, ...]
    """Modules that must be installed, to make it or to run it."""
    cure: str
    inputs: tuple[str, ...] = ("base",)
    """Which of base (the exported graph), dataset and checkpoint the step reads."""
    options: tuple[str, ...] = ()
    """Fields of [optimize] that decide its bytes."""
    hardware: Hardware = "none"


CURE = "Install it: `pip install 'onejob[optimize]'`."

PASSES: Mapping[str, Pass] = {
    BASE: Pass(
        "onejob.optimize.passes.export:run",
        ("torch", "onnx", "onnxscript", "onnxruntime"),
        CURE,
        inputs=("checkpoint", "dataset"),
        hardware="none",
    ),
    "openvino-fp32": Pass("onejob.optimize.passes.openvino:run", ("openvino",), CURE),
    # calibration runs the fp32 graph, whose last bits depend on the processor
    "onnxruntime-int8": Pass(
        "onejob.optimize.passes.int8:run",
        ("onnx", "onnxruntime"),
        CURE,
        inputs=("base", "dataset"),
        options=("calibration_rows",),
        hardware="exact",
    ),
}
"""Name of a candidate -> its pass, the simplest first: of two that are equally fast the simpler wins."""

DEFAULT = [BASE, "onnxruntime-int8", "openvino-fp32"]


class Budget(Model):
    """How much of a metric may be lost, and how sure that must be."""

    metric: str = Field(description="A metric of the family, such as 'auc' or 'log_loss'.")
    drop: float = Field(gt=0, description="Most that may be lost, in the metric's own unit; 0.005 is half a point.")
    confidence: float = Field(
        0.95, gt=0.5, lt=1, description="How sure it must be that no more is lost, judged on the held-out rows."
    )


class Spec(StageSpec):
    """[optimize]: turn the checkpoint into the fastest engine that stays within the accuracy budget."""

    budget: Budget = Field(description="How much accuracy may be given up for speed.")
    target: Literal["latency", "throughput"] = Field(
        "latency", description="'latency': the fastest answer to one row; 'throughput': the most rows a second."
    )
    candidates: list[str] = Field(
        DEFAULT, min_length=1, description=f"What is tried; {BASE} always is, as the others are made from it."
    )
    calibration_rows: int = Field(512, ge=1, description="Training rows that calibrate a quantised candidate.")
    threads: int = Field(1, ge=1, description="Threads of one replica; unset beside [serve]: as many as that has.")
    batch: int = Field(64, ge=1, description="Rows of a full batch, as [serve] will make them.")
    rounds: int = Field(
        31, ge=5, description="Rounds of measuring; in each round every candidate is measured once, in turn."
    )
    calls: int = Field(50, ge=1, description="Calls of a candidate in one round.")
    resamples: int = Field(1000, ge=100, description="Resamples of the held-out rows behind the confidence bound.")


def plan(spec: Spec, upstream: Upstream, *, installed: Callable[[str], bool] | None = None) -> Plan:
    """The steps of this stage; `installed` says whether a module is there.

    JobFileError: an unknown candidate or metric, or nothing to optimize. UnavailableError: a candidate that the job
    names can't be made here; one that is merely a default is left out, and the choice keeps the reason.
    """
    installed = installed or _installed
    known = {**PASSES, **_plugged(upstream)}
    _check(spec, upstream, known)
    wanted = [BASE, *(name for name in known if name in spec.candidates and name != BASE)]
    missing = {name: _missing(known[name], installed) for name in wanted}
    named = "candidates" in spec.model_fields_set
    for name, modules in missing.items():
        if modules and (named or name == BASE):
            place = f"[optimize] candidate {name!r}"
            raise UnavailableError(f"needs {modules}, which is not installed", place=place, cure=known[name].cure)
    made = [name for name in wanted if not missing[name]]
    skipped = {name: f"needs {modules}, which is not installed" for name, modules in missing.items() if modules}
    steps = [_candidate(spec, upstream, name, known[name]) for name in made]
    return Plan(steps=(*steps, _choice(spec, upstream, made, skipped)))


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _missing(entry: Pass, installed: Callable[[str], bool]) -> str:
    return ", ".join(module for module in entry.needs if not installed(module))


def _plugged(upstream: Upstream) -> dict[str, Pass]:
    """Candidates that plugins bring: "optimize/<name>" -> the entry of a step that reads all three inputs."""
    return {
        name.removeprefix("optimize/"): Pass(entry, (), "", inputs=("base", "checkpoint", "dataset"), hardware="exact")
        for name, entry in upstream.plugins.items()
        if name.startswith("optimize/") and name.removeprefix("optimize/") not in PASSES
    }


def _check(spec: Spec, upstream: Upstream, known: Mapping[str, Pass]) -> None:
    mistakes = [
        f"[optimize] candidates: unknown candidate {name!r}.{_nearest(name, list(known))}"
        for name in spec.candidates
        if name not in known
    ]
    metrics = _metrics(upstream.family)
    if metrics and spec.budget.metric not in metrics:
        name = spec.budget.metric
        mistakes.append(f"[optimize] budget.metric: unknown metric {name!r}.{_nearest(name, metrics)}")
    mistakes += [
        f"[optimize]: there is no {kind} to work on. Add the table [{stage}], or name an artifact."
        for kind, stage in (("dataset", "data"), ("checkpoint", "train"))
        if kind not in upstream.outputs
    ]
    if mistakes:
        raise JobFileError(mistakes)


def _metrics(family: str) -> list[str]:
    """The family's metrics; none if it can't be loaded from here (the step will say so, with its own folder)."""
    if not family:
        return []
    try:
        return sorted(load(f"{family}.metrics:HIGHER_IS_BETTER"))
    except UnavailableError:
        return []


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return (f" Did you mean {close[0]!r}?" if close else "") + f" Known: {', '.join(known)}."


def _candidate(spec: Spec, upstream: Upstream, name: str, entry: Pass) -> Step:
    inputs: dict[str, Input] = {
        "base": Output(EXPORT, "candidate"),
        "dataset": upstream.outputs["dataset"],
        "checkpoint": upstream.outputs["checkpoint"],
    }
    values = counted(spec)
    options: dict[str, Json] = {"family": upstream.family, **{field: values[field] for field in entry.options}}
    return _step(
        spec,
        upstream,
        name=_step_name(name),
        entry=entry.entry,
        options=options,
        inputs={kind: inputs[kind] for kind in entry.inputs},
        outputs=("candidate",),
        roots=(upstream.family,),
        hardware=entry.hardware,
        threads=1,
    )


def _choice(spec: Spec, upstream: Upstream, made: list[str], skipped: Mapping[str, str]) -> Step:
    values = counted(spec)
    fields = ("budget", "target", "threads", "batch", "rounds", "calls", "resamples")
    return _step(
        spec,
        upstream,
        name=CHOOSE,
        entry="onejob.optimize.engines.choose:run",
        options={"family": upstream.family, "candidates": made, **{field: values[field] for field in fields}},
        inputs={
            "dataset": upstream.outputs["dataset"],
            "checkpoint": upstream.outputs["checkpoint"],
            **{name: Output(_step_name(name), "candidate") for name in made},
        },
        outputs=("engine",),
        roots=(upstream.family, *ENGINES),
        hardware="exact",
        threads=spec.threads,
        setup={"skipped": dict(skipped)},
    )


def _step_name(candidate: str) -> str:
    return EXPORT if candidate == BASE else f"optimize.{candidate}"


def _step(
    spec: Spec,
    upstream: Upstream,
    *,
    name: str,
    entry: str,
    options: Mapping[str, Json],
    inputs: Mapping[str, Input],
    outputs: tuple[str, ...],
    roots: tuple[str, ...],
    hardware: Hardware,
    threads: int,
    setup: Mapping[str, Json] | None = None,
) -> Step:
    resources = spec.resources
    return Step(
        name=name,
        stage="optimize",
        entry=entry,
        options=options,
        inputs=inputs,
        outputs=outputs,
        needs=Needs(cpus=resources.cpus, memory=resources.memory, gpus=resources.gpus),
        seed=None,  # nothing here is drawn by chance: the resampling has a seed of its own
        threads=threads,
        hardware=hardware,
        roots=roots,
        imports=tuple(spec.imports),
        reads=tuple(spec.reads),
        timeout=spec.timeout,
        retries=spec.retries,
        setup=setup or {},
    )
