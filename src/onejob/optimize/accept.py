"""Whether a candidate stays within the accuracy budget: the guarantee of [optimize], in pure numpy.

Candidate and reference answer the same held-out rows. The rows are resampled with a fixed seed, the same resamples for
both, and the metric's drop is taken on each: how far it scatters says how much the drop on new rows may differ from the
one seen here. A candidate is accepted if the upper end of that (one-sided, at the budget's confidence) is within the
budget. docs/optimize.md says what this guarantees, and what it doesn't.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Outputs = Mapping[str, Array]
Score = Callable[[Array, Outputs], Mapping[str, float]]
Statistic = Callable[[Array], float]
"""How often each row counts -> the metric over those rows."""

SEED = 20_011
"""Fixed: the same rows are judged the same way, whenever and by whomever."""

SAME = 1e-4
"""A candidate of the reference's precision whose outputs differ by no more than this on any row is the same model."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The budget: how much of which metric may be lost, and how sure that must be."""

    metric: str
    drop: float
    confidence: float
    higher_is_better: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """A candidate beside the reference, on the same held-out rows."""

    rows: int
    reference: float
    metric: float
    drop: float
    """How much worse the candidate is; negative where it is better."""
    bound: float
    """The drop is no greater than this, at the limit's confidence; inf where that can't be said."""
    difference: float
    """The greatest difference of any output on any row (see `difference`)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    accepted: bool
    reason: str


def resampled(statistic: Statistic, rows: int, resamples: int) -> Array:
    """The statistic on each of the resamples, which are the same for the same number of rows and resamples."""
    return np.array([statistic(counts) for counts in _resamples(rows, resamples)])


def compare(
    limit: Limit, label: Array, reference: Outputs, candidate: Outputs, score: Score, reference_resampled: Array
) -> Comparison:
    """The drop of the metric from the reference to a candidate, with its bound.

    `reference_resampled` is `resampled(statistic(metric, label, reference, score), ...)`, shared by all candidates.
    """
    rows, sign = len(label), 1.0 if limit.higher_is_better else -1.0
    of_reference = float(score(label, reference).get(limit.metric, math.nan))
    of_candidate = float(score(label, candidate).get(limit.metric, math.nan))
    values = resampled(statistic(limit.metric, label, candidate, score), rows, len(reference_resampled))
    drops = sign * (reference_resampled - values)
    drops = np.where(np.isfinite(drops), drops, np.inf)  # a metric without a value says nothing good
    drop = sign * (of_reference - of_candidate)
    bound = float(np.quantile(drops, limit.confidence, method="higher"))
    return Comparison(
        rows=rows,
        reference=of_reference,
        metric=of_candidate,
        drop=drop,
        bound=max(bound, drop),
        difference=difference(reference, candidate),
    )


def judge(limit: Limit, comparison: Comparison, *, same_precision: bool) -> Verdict:
    """Accept or reject, with the reason; `same_precision`: the candidate computes in the reference's precision."""
    drop, bound, metric = comparison.drop, comparison.bound, limit.metric
    if same_precision and comparison.difference <= SAME and drop <= limit.drop:
        return Verdict(True, f"the same outputs as the checkpoint, to {comparison.difference:.1e}")
    if not math.isfinite(drop):
        return Verdict(False, f"{metric} has no value on these rows")
    if drop > limit.drop:
        return Verdict(False, f"loses {drop:.6g} of {metric}; {limit.drop:.6g} may be lost")
    needed = rows_needed(limit, comparison)
    if needed > comparison.rows:
        return Verdict(False, f"cannot be certified: needs about {needed:,} held-out rows, has {comparison.rows:,}")
    sure = f"at {limit.confidence:.0%} confidence"
    return Verdict(True, f"loses at most {max(bound, 0.0):.6g} of {metric} {sure}; {limit.drop:.6g} may be lost")


def rows_needed(limit: Limit, comparison: Comparison) -> int:
    """About how many held-out rows would certify the budget, given the drop that was seen.

    Two needs. The bound must come down to the budget: its distance from the drop shrinks with the root of the rows.
    And there must be enough rows to see a loss at all: a fault on a share p of the rows is missed by n rows with the
    probability (1 - p)^n, so that fewer than ln(1 - confidence) / ln(1 - drop) rows can't rule out a loss of `drop`,
    however well they go.
    """
    fewest = math.ceil(math.log(1 - limit.confidence) / math.log(1 - min(limit.drop, 0.5)))
    margin = limit.drop - comparison.drop
    if comparison.bound <= limit.drop:
        return fewest
    if not math.isfinite(comparison.bound) or margin <= 0:
        return max(fewest, comparison.rows * 10)
    shrink = ((comparison.bound - comparison.drop) / margin) ** 2
    return max(fewest, math.ceil(comparison.rows * shrink), comparison.rows + 1)


def difference(reference: Outputs, candidate: Outputs) -> float:
    """The greatest difference of any output on any row; inf where a value is NaN or a shape differs.

    Absolute up to a size of 1, relative beyond it: a label in the thousands has no fourth decimal in float32.
    """
    return max((float(gaps.max()) for gaps in _gaps(reference, candidate) if gaps.size), default=0.0)


def worst_row(reference: Outputs, candidate: Outputs) -> int:
    """The row where an output differs the most."""
    return int(np.argmax(np.max(list(_gaps(reference, candidate)), axis=0)))


def _gaps(reference: Outputs, candidate: Outputs) -> Iterator[Array]:
    """For each output the greatest difference in each row."""
    for name, expected in reference.items():
        rows, got = len(expected), candidate.get(name)
        if got is None or got.shape != expected.shape:
            yield np.full(rows, np.inf)
            continue
        exact = expected.astype(np.float64)
        gaps = np.abs(got.astype(np.float64) - exact) / np.maximum(1.0, np.abs(exact))
        yield np.where(np.isfinite(gaps), gaps, np.inf).reshape(rows, -1).max(axis=1, initial=0.0)


def churn(reference: Outputs, candidate: Outputs) -> float | None:
    """Share of rows that are decided otherwise, of *served* outputs; None where they hold no decision.

    A decision is an output of whole numbers, booleans or text; the greatest of several floats; or a probability beside
    one half. The metric alone hides churn: as many answers may get better as get worse.
    """
    changed: Array | None = None
    for name, expected in reference.items():
        before, after = _decisions(expected), _decisions(candidate[name])
        if before is None or after is None:
            continue
        differs = (before != after).reshape(len(before), -1).any(axis=1)
        changed = differs if changed is None else changed | differs
    return None if changed is None else float(np.mean(changed))


def _decisions(values: Array) -> Array | None:
    if values.dtype.kind in "biuOSU":
        return values
    if values.ndim > 1 and values.shape[-1] > 1:
        return np.asarray(np.argmax(values, axis=-1))
    if values.size and float(values.min()) >= 0 and float(values.max()) <= 1:
        return np.asarray(values >= 0.5)
    return None


def _resamples(rows: int, resamples: int) -> Iterator[Array]:
    chance = np.random.default_rng(SEED)
    for _ in range(resamples):
        yield np.bincount(chance.integers(0, rows, rows), minlength=rows)


# ---- statistics: what a metric is on a resample ------------------------------------------------------------------


def statistic(metric: str, label: Array, outputs: Outputs, score: Score) -> Statistic:
    """The metric as a function of how often each row counts.

    A fast form is taken only if it gives the family's own value on the rows as they are; else the family's metric is
    computed anew on every resample.
    """
    expected = float(score(label, outputs).get(metric, math.nan))
    for form in FAST.get(metric, ()):
        fast = form(label, outputs)
        if fast is not None and math.isclose(fast(np.ones(len(label))), expected, rel_tol=1e-7, abs_tol=1e-7):
            return fast

    def anew(counts: Array) -> float:
        rows = np.repeat(np.arange(len(label)), counts)
        return float(score(label[rows], {name: values[rows] for name, values in outputs.items()}).get(metric, math.nan))

    return anew


def _one(label: Array, outputs: Outputs) -> Array | None:
    """The single output of a two-class model, one value a row."""
    values = [array.reshape(-1) for array in outputs.values() if array.size == len(label)]
    two = label.ndim == 1 and np.isin(label, (0, 1)).all()
    return values[0].astype(np.float64) if two and len(values) == len(outputs) == 1 else None


def _auc(label: Array, outputs: Outputs) -> Statistic | None:
    """The area under the ROC curve by ranks: sorted once, then linear in the rows; ties count half."""
    scores = _one(label, outputs)
    if scores is None or not len(scores):
        return None
    order = np.argsort(scores, kind="stable")
    ranked = scores[order]
    starts = np.flatnonzero(np.concatenate(([True], ranked[1:] != ranked[:-1])))
    positive = label[order].astype(np.float64)

    def area(counts: Array) -> float:
        weight = counts[order].astype(np.float64)
        positives = np.add.reduceat(weight * positive, starts)
        negatives = np.add.reduceat(weight * (1 - positive), starts)
        pairs = positives.sum() * negatives.sum()
        if pairs == 0:
            return math.nan
        below = np.cumsum(negatives) - negatives
        return float((positives * (below + 0.5 * negatives)).sum() / pairs)

    return area


def _mean_of(rows: Callable[[Array, Array], Array]) -> Callable[[Array, Outputs], Statistic | None]:
    """A metric that is the mean of one value a row."""

    def form(label: Array, outputs: Outputs) -> Statistic | None:
        scores = _one(label, outputs)
        if scores is None or not len(scores):
            return None
        values = rows(label.astype(np.float64), scores)
        # not a dot product: that would wake the threads of BLAS, which then spin while candidates are timed
        return lambda counts: float((counts * values).sum() / counts.sum())

    return form


def _log_loss_of_logit(label: Array, logit: Array) -> Array:
    return np.asarray(np.logaddexp(0.0, logit) - label * logit)


def _log_loss_of_probability(label: Array, probability: Array) -> Array:
    sure = np.clip(probability, 1e-15, 1 - 1e-15)
    return np.asarray(-(label * np.log(sure) + (1 - label) * np.log1p(-sure)))


FAST: Mapping[str, tuple[Callable[[Array, Outputs], Statistic | None], ...]] = {
    "auc": (_auc,),
    "log_loss": (_mean_of(_log_loss_of_logit), _mean_of(_log_loss_of_probability)),
    "accuracy": (
        _mean_of(lambda label, logit: np.asarray((logit >= 0) == label, dtype=np.float64)),
        _mean_of(lambda label, probability: np.asarray((probability >= 0.5) == label, dtype=np.float64)),
    ),
}
"""Forms that are tried for a metric of this name; each must prove itself against the family's own value."""
