"""From a job to a plan: each stage plans in turn, and hands on what it will leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from onejob import plugins
from onejob.core.job import Job
from onejob.core.plan import Input, Output, Plan, Serving, Step, Upstream
from onejob.data import spec as data
from onejob.errors import JobFileError
from onejob.machines.inventory import threads_of
from onejob.monitor import spec as monitor
from onejob.optimize import spec as optimize
from onejob.runs.spec import RunSpec
from onejob.serve import spec as serve
from onejob.train import spec as train

STAGES: Mapping[str, type[Any]] = {
    "data": data.Spec,
    "train": train.Spec,
    "optimize": optimize.Spec,
    "serve": serve.Spec,
    "monitor": monitor.Spec,
}
RUN = RunSpec

PLANNERS: Mapping[str, Callable[[Any, Upstream], Plan]] = {
    "data": data.plan,
    "train": train.plan,
    "optimize": optimize.plan,
    "serve": serve.plan,
}

NEEDS: Mapping[str, tuple[str, ...]] = {
    "train": ("dataset",),
    "optimize": ("checkpoint", "dataset"),
    "serve": ("engine", "checkpoint"),
}
"""Stage -> kinds of artifact of which it needs: all; for serve, one."""

LEAK = (
    '[train] keep: "best" chooses the epoch by the held-out rows, and in a retraining these are the rows by which '
    '[monitor.gate] judges the model. Set keep = "last", and epochs to as many as it needs: `onejob logs RUN/train` '
    "shows the scores of each."
)


def plan_job(job: Job) -> Plan:
    """Plan every stage of a job; JobFileError where a stage lacks what an earlier one would leave."""
    upstream = _start(job)
    stages = _fitted(job.stages)
    _refuse_leak(job)
    steps: list[Step] = []
    serving: Serving | None = None
    for stage, spec in stages.items():
        if stage not in PLANNERS:
            continue
        _require(job, stage, upstream)
        with _placed(job):
            plan = PLANNERS[stage](spec, upstream)
        steps += [_with_run_options(step, job) for step in plan.steps]
        serving = plan.serving or serving
        left: dict[str, Input] = {name: Output(step.name, name) for step in plan.steps for name in step.outputs}
        upstream = replace(upstream, outputs={**upstream.outputs, **left})
    return Plan(tuple(steps), serving, _refs(job.name, upstream.outputs))


@contextmanager
def _placed(job: Job) -> Iterator[None]:
    """Mistakes that a stage finds name the job file, as those of its tables do."""
    try:
        yield
    except JobFileError as error:
        named = [text if text.startswith(str(job.path)) else f"{job.path} {text}" for text in error.mistakes]
        raise JobFileError(named) from None


def _fitted(stages: Mapping[str, Any]) -> dict[str, Any]:
    """[optimize] measures with the batch and threads that [serve] will use, unless it says otherwise itself."""
    fitted = dict(stages)
    if "optimize" in stages and "serve" in stages:
        told, serving = stages["optimize"], stages["serve"]
        served = {"batch": serving.batch.max, "threads": serving.threads or threads_of(serving.replicas)}
        unsaid = {name: value for name, value in served.items() if name not in told.model_fields_set}
        fitted["optimize"] = told.model_copy(update=unsaid)
    return fitted


def _start(job: Job) -> Upstream:
    family = ""
    if data_spec := job.stages.get("data"):
        family = plugins.resolve("family", data_spec.family, f"{job.path} [data] family")  # type: ignore[attr-defined]
    return Upstream(job.name, str(job.project), job.run.seed, {}, plugins.entries(), family)


def _require(job: Job, stage: str, upstream: Upstream) -> None:
    needed = NEEDS.get(stage, ())
    have = [kind for kind in needed if kind in upstream.outputs]
    if needed and (not have if stage == "serve" else len(have) < len(needed)):
        missing = " or a ".join(needed) if stage == "serve" else next(k for k in needed if k not in have)
        table = {"dataset": "data", "checkpoint": "train"}.get(missing, "train")
        raise JobFileError(
            [f"{job.path} [{stage}]: needs a {missing}, and no table leaves one. Add a [{table}] table."]
        )


def _refuse_leak(job: Job) -> None:
    """What judges a model must not have chosen it."""
    training, monitoring = (job.stages.get(stage) for stage in ("train", "monitor"))
    has_gate = isinstance(monitoring, monitor.Spec) and monitoring.gate is not None
    if has_gate and isinstance(training, train.Spec) and training.keep == "best":
        raise JobFileError([f"{job.path} {LEAK}"])


def _with_run_options(step: Step, job: Job) -> Step:
    """Options of [run] that every step sees: plain environment variables count in its key."""
    return replace(step, env=dict(job.run.env))


def _refs(job: str, outputs: Mapping[str, Input]) -> dict[str, Output]:
    kinds = [kind for kind in ("dataset", "checkpoint", "engine") if isinstance(outputs.get(kind), Output)]
    refs = {f"{job}/{kind}@latest": outputs[kind] for kind in kinds}
    if kinds and kinds[-1] != "dataset":
        refs[f"{job}/{kinds[-1]}@champion"] = outputs[kinds[-1]]
    return {name: output for name, output in refs.items() if isinstance(output, Output)}
