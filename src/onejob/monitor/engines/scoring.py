"""Scores models on captured rows: the family's own encoding, the engine that serving uses, a bounded loss a row.

Classes: log loss, bounded by clipping (`blocks.CLIP`). Numbers: the absolute error in spreads of the training labels,
at most 1. The reference forecast that a model must beat is the mean (or the shares) of the labels known at that time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from onejob.core.artifact import Json
from onejob.core.context import InputArtifact
from onejob.core.plugin import load
from onejob.engines import LoadedModel, open_model
from onejob.errors import DataError, StepError
from onejob.monitor.blocks import Grouping, distance_losses, log_losses, trailing_share
from onejob.monitor.engines.reading import Labelled, Reference

Array = np.ndarray[Any, Any]
Task = Literal["binary", "classes", "number"]
TASKS: Mapping[str, Task] = {"probability": "binary", "probabilities": "classes", "value": "number"}
"""The served output of a family that tells what kind of forecast it makes."""
METRICS: Mapping[Task, str] = {"binary": "log_loss", "classes": "log_loss", "number": "absolute_error"}

BATCH = 8192
SPREADS = 4.0
"""An error of so many standard deviations of the training labels counts as 1, and a greater one does too."""


class Scorer:
    """A model, ready to answer captured rows."""

    def __init__(self, family: str, artifact: InputArtifact, threads: int) -> None:
        self.digest = artifact.digest
        path = artifact.file("encoding.json")
        if not path.is_file():
            raise DataError(
                "the model has no encoding, so that captured rows can't be scored with it",
                place=str(artifact.path),
                cure="Serve a model of a family: one that [data] and [train] have left.",
            )
        self.encoding: Any = load(f"{family}.encode:load")(json.loads(path.read_text()))
        self._model: LoadedModel = open_model(artifact.path, artifact.meta, threads=threads)
        self.output, self.task = _task([spec.name for spec in self.encoding.served])

    @property
    def inputs(self) -> list[str]:
        return [spec.name for spec in self.encoding.inputs]

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The classes' names, in the order of the chances; None where the family has none, or doesn't tell."""
        return getattr(getattr(self.encoding, "label", None), "classes", None) or None

    def answer(self, columns: Mapping[str, Array]) -> Array:
        """The forecast of each row: [n] chances or values, or [n, classes]."""
        rows = len(next(iter(columns.values())))
        parts = []
        for start in range(0, rows, BATCH):
            part = {name: columns[name][start : start + BATCH] for name in self.inputs}
            parts.append(self.encoding.decode(self._model.infer(self.encoding.encode(part)))[self.output])
        found = np.concatenate(parts).astype(np.float64)
        bad = np.flatnonzero(~np.isfinite(found).reshape(len(found), -1).all(axis=1))
        if bad.size:
            raise StepError(f"the model's {self.output} is not a number in {bad.size} rows, the first is row {bad[0]}")
        return found if self.task == "classes" else found.reshape(-1)

    def close(self) -> None:
        self._model.close()


def answers(scorer: Scorer, rows: Labelled) -> Array:
    """The model's forecasts for captured rows.

    Where an input is private, captured values aren't those that were asked with: then what was served counts, and rows
    that another engine answered have NaN.
    """
    hidden = [name for name in scorer.inputs if name in rows.meta["private"]]
    if not hidden:
        require_inputs(scorer, rows)
        return scorer.answer(rows.inputs)
    served = rows.outputs().get(scorer.output)
    mine = rows.digest == scorer.digest
    if served is None or served.dtype == object or not mine.any():
        raise DataError(
            f"the model's input {hidden[0]!r} is private, so that captured rows can't be scored with another model",
            place="[monitor] capture.private",
            cure="Take the model's inputs out of the list, or watch this endpoint without a gate and probation.",
        )
    return np.where(mine[:, None] if served.ndim > 1 else mine, served, np.nan)


def require_inputs(scorer: Scorer, rows: Labelled) -> None:
    missing = [name for name in scorer.inputs if name not in rows.columns]
    if missing:
        raise DataError(
            f"the model's input {missing[0]!r} was never captured",
            cure=f"Captured: {', '.join(rows.inputs)}. A challenger must take the inputs that clients send.",
        )


@dataclass(frozen=True)
class Truth:
    """What the labels say, as numbers: 0/1, the class's number, or the value; NaN where there is no label."""

    task: Task
    values: Array
    classes: int
    scale: float
    strange: int
    """Labels that the model can't take, such as a class that it never saw; they count as not known."""

    def losses(self, forecast: Array) -> Array:
        known = np.isfinite(forecast.reshape(len(forecast), -1)).all(axis=1)
        label = np.where(known, self.values, np.nan)
        if self.task == "number":
            return distance_losses(label, forecast, scale=self.scale)
        return log_losses(label, np.where(np.isfinite(forecast), forecast, 0.5))


def truth_of(scorer: Scorer, label: Array, reference: Reference) -> Truth:
    """Read captured labels as the family does."""
    training = np.asarray(scorer.encoding.encode_label(reference.label), np.float64)
    known = np.array([value is not None for value in label.tolist()], bool)
    values = np.full(len(label), np.nan)
    values[known], strange = _encoded(scorer, label[known])
    width = next(spec.shape[-1] for spec in scorer.encoding.served if spec.name == scorer.output)
    scale = SPREADS * float(training.std()) or 1.0
    return Truth(scorer.task, values, int(width), scale, strange)


def reference_forecast(
    scorer: Scorer, rows: Labelled, truth: Truth, grouping: Grouping, reference: Reference, window: float
) -> Array:
    """For each row, what its block would have been forecast by the labels that were known when the block began."""
    training = np.asarray(scorer.encoding.encode_label(reference.label), np.float64)

    def share(label: Array, prior: float) -> Array:
        found = trailing_share(rows.time, rows.label_time, label, grouping.first, window=window, prior=prior)
        return np.asarray(found[grouping.index])

    if truth.task != "classes":
        return share(truth.values, float(training.mean()))
    known = np.isfinite(truth.values)
    columns = [
        share(np.where(known, truth.values == number, np.nan), float(np.mean(training == number)))
        for number in range(truth.classes)
    ]
    return np.column_stack(columns)


def flipped(one: Scorer, first: Array, other: Scorer, second: Array, scale: float) -> Array:
    """Whether two models decide differently: another class, or a number that differs by a tenth of the scale."""
    if one.task == "binary":
        return np.asarray((first >= 0.5) != (second >= 0.5))
    if one.task == "classes":
        return np.asarray(_chosen(one, first) != _chosen(other, second))
    return np.asarray(np.abs(first - second) > 0.1 * scale)


def height(task: Task, forecast: Array) -> Array:
    """One number a row by which rows are put into bands: the chance, the surest class's chance, the value."""
    return np.asarray(forecast.max(axis=1) if task == "classes" else forecast)


def _chosen(model: Scorer, forecast: Array) -> Array:
    """The surest class, by name: another model may know other classes, in another order."""
    surest: Array = forecast.argmax(axis=1)
    return surest if model.classes is None else np.array(model.classes, object)[surest]


def _task(served: list[str]) -> tuple[str, Task]:
    for name in served:
        if name in TASKS:
            return name, TASKS[name]
    raise DataError(
        f"the family serves {', '.join(served)}, and the monitor can't tell a loss from that",
        cure=f"A family that is to be watched serves one of {', '.join(TASKS)} (docs/families.md).",
    )


def _encoded(scorer: Scorer, label: Array) -> tuple[Array, int]:
    """Labels as numbers, and how many of them the family refuses."""
    if not len(label):
        return np.empty(0), 0
    try:
        return np.asarray(scorer.encoding.encode_label(label), np.float64), 0
    except DataError:
        each = {value: _one(scorer, value) for value in set(label.tolist())}
        found = np.array([each[value] for value in label.tolist()], np.float64)
        return found, int(np.isnan(found).sum())


def _one(scorer: Scorer, value: Json) -> float:
    try:
        return float(scorer.encoding.encode_label([value])[0])
    except DataError:
        return float("nan")
