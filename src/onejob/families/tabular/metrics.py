"""How good a tabular model's outputs are; numpy only, in float64.

Takes encoded labels and either the model's outputs (`logit`, `logits`, `value`) or the served ones (`probability`,
`probabilities`, `value`). A metric that has no meaning for the rows at hand is left out: AUC where one class is alone,
R² where the label never changes, everything where there are no rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onejob.errors import InferenceError
from onejob.families.tabular.columns import Array
from onejob.families.tabular.encode import sigmoid, softmax

HIGHER_IS_BETTER: Mapping[str, bool] = {
    "auc": True,
    "log_loss": False,
    "accuracy": True,
    "brier": False,
    "rmse": False,
    "mae": False,
    "r2": True,
}
"""Every metric of the family, the most telling first."""

SURE = 1e-7  # a float32 probability can be exactly 0 or 1; its logarithm must stay finite


def score(label: Array, outputs: Mapping[str, Array]) -> dict[str, float]:
    """{metric: value} of encoded labels [n] and outputs [n, k]; InferenceError if an output is not finite."""
    if not len(label):
        return {}
    for name, values in outputs.items():
        _require_finite(name, values)
    if "logit" in outputs:
        return _binary(label, sigmoid(outputs["logit"]))
    if "probability" in outputs:
        return _binary(label, outputs["probability"])
    if "logits" in outputs:
        return _multiclass(label, softmax(outputs["logits"]))
    if "probabilities" in outputs:
        return _multiclass(label, outputs["probabilities"])
    return _regression(label, outputs["value"])


def auc(label: Array, scores: Array) -> float | None:
    """The chance that a positive row scores above a negative one, ties counting half; None if a class is missing.

    Mann-Whitney: from the sum of the positives' average ranks, exact for any ties.
    """
    positive = np.asarray(label) > 0.5
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if not positives or not negatives:
        return None
    _, group, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    rank = last - (counts - 1) / 2  # average rank, from 1, of the rows with equal score
    above = float(rank[group.reshape(-1)][positive].sum()) - positives * (positives + 1) / 2
    return above / (positives * negatives)


def _require_finite(name: str, values: Array) -> None:
    if values.dtype.kind != "f":
        return
    bad = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
    if bad.size:
        raise InferenceError(f"output {name!r} is not finite in {bad.size} rows, the first is row {bad[0]}")


def _binary(label: Array, probability: Array) -> dict[str, float]:
    truth = np.asarray(label, np.float64).reshape(-1)
    chance = np.asarray(probability, np.float64).reshape(-1)
    safe = np.clip(chance, SURE, 1 - SURE)
    area = auc(truth, chance)
    return {
        **({} if area is None else {"auc": area}),
        "log_loss": float(-np.mean(truth * np.log(safe) + (1 - truth) * np.log1p(-safe))),
        "accuracy": float(np.mean((chance >= 0.5) == (truth > 0.5))),
        "brier": float(np.mean((chance - truth) ** 2)),
    }


def _multiclass(label: Array, probabilities: Array) -> dict[str, float]:
    truth = np.asarray(label, np.int64).reshape(-1)
    chances = np.asarray(probabilities, np.float64)
    of_truth = np.clip(chances[np.arange(len(truth)), truth], SURE, 1.0)
    return {
        "log_loss": float(-np.mean(np.log(of_truth))),
        "accuracy": float(np.mean(chances.argmax(axis=1) == truth)),
    }


def _regression(label: Array, value: Array) -> dict[str, float]:
    truth = np.asarray(label, np.float64).reshape(-1)
    error = np.asarray(value, np.float64).reshape(-1) - truth
    spread = float(np.sum((truth - truth.mean()) ** 2))
    return {
        "rmse": float(np.sqrt(np.mean(error**2))),
        "mae": float(np.mean(np.abs(error))),
        **({"r2": 1.0 - float(np.sum(error**2)) / spread} if spread > 0 else {}),
    }
