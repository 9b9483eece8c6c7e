"""The step that judges and measures every candidate and leaves the chosen one as the engine.

Each candidate answers all held-out rows; what stays within the budget is timed, in turn with the others; the choice is
made from the figures (`optimize.choose`), which the execution keeps for the rejected ones too. A candidate that can't
be loaded, fails or answers NaN is rejected with the reason: it doesn't fail the step.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onejob.core.artifact import Json
from onejob.core.context import InputArtifact, StepContext, Stopped
from onejob.core.faults import reach
from onejob.core.plugin import load
from onejob.engines import LoadedModel, open_model
from onejob.errors import OnejobError, StepError
from onejob.optimize.accept import (
    Limit,
    Outputs,
    Score,
    churn,
    compare,
    difference,
    judge,
    resampled,
    statistic,
)
from onejob.optimize.choose import Choice, Figures, choose
from onejob.optimize.measure import Call, Latency, measure
from onejob.optimize.rows import Rows, load_encoding, read_rows
from onejob.optimize.spec import BASE

Array = np.ndarray[Any, Any]

BATCH = 4096
"""Rows in one call while judging: the outputs of a row don't depend on its batch."""
DISTINCT = 64
"""Different batches that the timed calls go through."""


@dataclass(frozen=True)
class Exam:
    """The held-out rows, the reference's answers to them, and the budget."""

    encoding: Any
    rows: Rows
    limit: Limit
    score: Score
    reference: Outputs
    reference_resampled: Array
    precision: str
    """The reference's."""


def run(context: StepContext) -> None:
    """dataset + checkpoint + every candidate -> engine."""
    exam = _exam(context)
    names = list(context.options["candidates"])
    figures: dict[str, Figures] = {}
    models: dict[str, LoadedModel] = {}
    try:
        for done, name in enumerate(names):
            if context.stopping():
                raise Stopped
            figures[name] = _judged(exam, name, context.inputs[name], context.options["threads"], models)
            context.progress(done + 1, len(names), "candidates")
        for name, latency in _measured(context, exam.rows, models).items():
            figures[name] = replace(figures[name], latency=latency)
    finally:
        for model in models.values():
            model.close()
    reach("choose.measured")
    _decide(context, exam, figures)


def _exam(context: StepContext) -> Exam:
    options, checkpoint = context.options, context.inputs["checkpoint"]
    family, budget = options["family"], options["budget"]
    encoding = load_encoding(family, checkpoint)
    rows = read_rows(context.inputs["dataset"], encoding, "holdout")
    score = load(f"{family}.metrics:score")
    model = open_model(checkpoint.path, checkpoint.meta, threads=options["threads"])
    reference, precision = _answers(model, rows), model.precision
    model.close()
    metric = budget["metric"]
    known = score(rows.label, reference)
    if metric not in known:
        raise StepError(
            f"the metric {metric!r} has no value on the held-out rows",
            place="[optimize] budget.metric",
            cure=f"These have: {', '.join(sorted(known))}.",
        )
    higher = bool(load(f"{family}.metrics:HIGHER_IS_BETTER")[metric])
    limit = Limit(metric, budget["drop"], budget["confidence"], higher)
    values = resampled(statistic(metric, rows.label, reference, score), len(rows), options["resamples"])
    return Exam(encoding, rows, limit, score, reference, values, precision)


def _answers(model: LoadedModel, rows: Rows) -> dict[str, Array]:
    """The model's outputs for all rows; StepError names the first row without a number."""
    parts = [model.infer(rows.take(slice(start, start + BATCH))) for start in range(0, len(rows), BATCH)]
    outputs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    for name, values in outputs.items():
        bad = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
        if bad.size:
            raise StepError(f"output {name!r} is not a number in {bad.size} held-out rows, first in row {bad[0]}")
    return outputs


def _judged(exam: Exam, name: str, candidate: InputArtifact, threads: int, models: dict[str, LoadedModel]) -> Figures:
    """Open a candidate and hold its answers against the reference's; one that answers soundly is put into `models`."""
    size = sum(path.stat().st_size for _, path in _files(candidate.path))
    figures = Figures(name, False, "", precision=str(candidate.meta["precision"]), size=size)
    if failed := candidate.meta.get("failed"):
        return replace(figures, reason=f"could not be made: {failed}")
    try:
        model = open_model(candidate.path, candidate.meta, threads=threads)
        outputs = _answers(model, exam.rows)
        if difference(exam.reference, outputs) == float("inf"):
            raise StepError("its outputs have other names or shapes than the checkpoint's")
        comparison = compare(exam.limit, exam.rows.label, exam.reference, outputs, exam.score, exam.reference_resampled)
    except OnejobError as error:
        return replace(figures, reason=f"does not answer: {error}")
    models[name] = model
    verdict = judge(exam.limit, comparison, same_precision=model.precision == exam.precision)
    return replace(
        figures,
        accepted=verdict.accepted,
        reason=verdict.reason,
        precision=model.precision,
        comparison=comparison,
        churn=churn(exam.encoding.decode(exam.reference), exam.encoding.decode(outputs)),
    )


def _measured(context: StepContext, rows: Rows, models: Mapping[str, LoadedModel]) -> dict[str, dict[str, Latency]]:
    """Latency at one row and at a full batch, of rejected candidates too: what a greater budget would buy is worth
    knowing, though only the accepted are in the race."""
    if not models:
        return {}
    options = context.options
    found: dict[str, dict[str, Latency]] = {name: {} for name in models}
    for target, size in (("latency", 1), ("throughput", options["batch"])):
        batches = _batches(rows, size)
        calls = {name: _call(model, batches) for name, model in models.items()}
        for name, latency in measure(calls, size, rounds=options["rounds"], calls=options["calls"]).items():
            found[name][target] = latency
    return found


def _batches(rows: Rows, size: int) -> list[dict[str, Array]]:
    """Batches of real rows, from all over the split; rows repeat where there are too few."""
    chosen = np.linspace(0, len(rows) - 1, DISTINCT * size).astype(np.int64).reshape(size, DISTINCT).T
    return [rows.take(batch) for batch in chosen]


def _call(model: LoadedModel, batches: list[dict[str, Array]]) -> Call:
    infer, count = model.infer, len(batches)
    return lambda n: infer(batches[n % count])


def _decide(context: StepContext, exam: Exam, figures: Mapping[str, Figures]) -> None:
    """Choose, keep the figures whatever comes of it, and leave the engine."""
    skipped = {name: Figures(name, False, f"skipped: {why}") for name, why in context.setup.get("skipped", {}).items()}
    everyone = {**figures, **skipped}
    report: dict[str, Json] = {
        "candidates": {name: one.to_json() for name, one in everyone.items()},
        "metric": exam.limit.metric,
        "reference": float(exam.score(exam.rows.label, exam.reference)[exam.limit.metric]),
        "budget": dict(context.options["budget"]),
        "rows": len(exam.rows),
        "chosen": None,
    }
    context.measure(report)
    choice: Choice = choose(list(everyone.values()), context.options["target"], base=BASE)
    chosen, out = context.inputs[choice.name], context.out("engine")
    for name, path in _files(chosen.path):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, out / name)
    reach("choose.copied")
    context.measure({"chosen": choice.name, "why": choice.why})
    context.emit("engine", "engine", dict(chosen.meta))


def _files(folder: Path) -> list[tuple[str, Path]]:
    """(name in the artifact, path) of all its files; they may be links to where the bytes are kept."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(path.relative_to(folder).as_posix(), path) for path in paths]
