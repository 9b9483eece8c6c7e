"""The gate: may the challenger replace the champion? A pure decision on evidence, ready for the record.

Both answered the same rows, which neither was trained on. One observation is a block's mean difference of paired losses
(challenger's minus champion's). The bounds are Student's t on those block means, with blocks - 1 degrees of freedom:
clustered by block, with the correction that few blocks need. Rows would give bounds that are far too narrow (an equal
model "proven better" in a third of all trials, see bench/results/levels.txt).

The evidence itself is judged first. Where labels are missing in an unusual pattern, the losses are of other rows than
they seem to be, and no bound helps: with 60 % of the recent late labels missing, a worse challenger passed every plain
gate in trials. So the coverage of labels is compared with the usual, overall and by the height of the champion's score,
for the rows of the comparison and for those that the challenger was trained on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from onejob.core.artifact import Json
from onejob.monitor import harm
from onejob.monitor.blocks import MIN_ROWS, Array, Grouping, means

Verdict = Literal["promote", "hold", "reject"]

TAIL = 5
"""So many requests must lie above a percentile for it to be one."""
FLOOR_MS = 5.0
"""A p99 that is higher by no more than this is the machine's noise: two equal models gave 0.5 and 1.1 ms."""

PROBATION_BOUND = 0.1
"""Nats. Two models of the same kind seldom lie further apart in a block; see `harm.BOUND` and the bench."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the job asks of a challenger."""

    promote: Literal["better", "not_worse"]
    margin: float
    """Of the loss. `better`: so much lower, surely; `not_worse`: so much higher at most, surely."""
    min_blocks: int = 14
    confidence: float = 0.95
    """One-sided, of each bound."""
    slice_margin: float = 0.03
    """A slice that is surely worse, and by more than this, rejects the challenger."""
    coverage_fall: float = 0.02
    """A fall of the label coverage below the usual of no more than this is not looked at."""
    max_flips: float = 1.0
    """More changed answers than this share: a person must look at it."""
    max_slower: float = 2.0
    """The replay's p99 may be so many times the champion's."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What both models made of the same rows."""

    grouping: Grouping
    difference: Array
    """The challenger's loss minus the champion's, for each row; NaN without a label."""
    flipped: Array
    """Whether the two decide differently, for each row, labelled or not."""
    slices: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    """Column -> the slice that each row belongs to, as text."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A mean difference with its one-sided bounds; infinite with fewer than two blocks."""

    blocks: int
    rows: int
    mean: float
    spread: float
    """The standard deviation of the block means."""
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Slice:
    column: str
    value: str
    bound: Bound
    """With a confidence shared among all slices: of a hundred equal ones, none should be called worse."""
    fails: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """Champion and challenger, side by side."""

    overall: Bound
    small_blocks: int
    """Blocks with too few labelled rows to count."""
    flips: float
    slices: tuple[Slice, ...]
    """The worst first."""
    small_slices: int
    """Slices with too few blocks or rows for a bound."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Label coverage by block: the share of answered rows that have a label by now, overall and by height of score."""

    ids: tuple[str, ...]
    shares: Array
    """[blocks, 1 + bands]: overall, then for each band of the score; NaN where a block has no such rows."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A recent coverage that lies below the usual."""

    what: str
    usual: float
    recent: float
    allowed: float
    """The lowest that passes."""
    unusual: bool


@dataclass(frozen=True, slots=True)
class Replay:
    """Captured requests sent through both engines."""

    requests: int
    errors: int
    champion_errors: int
    tail_ms: float
    champion_tail_ms: float
    level: float = 0.99
    """Which percentile of latency the tails are: the highest that so many requests can tell."""


def tail_level(requests: int) -> float:
    """The highest percentile up to p99 above which TAIL of so many requests lie; the median where they are few.

    The largest of ten times is not a p99 but the machine's worst moment: on a busy one it would reject a sound engine.
    """
    return max(0.5, min(0.99, 1 - TAIL / max(requests, 1)))


@dataclass(frozen=True, slots=True)
class Decision:
    """What the gate says, why, and what it would take to say more."""

    verdict: Verdict
    reasons: tuple[str, ...]
    missing: tuple[str, ...]
    rules: Rules
    look: int
    comparison: Comparison
    gaps: tuple[Gap, ...]
    replay: Replay | None

    def to_json(self) -> dict[str, Json]:
        """Data for the record; an infinite bound is null, since JSON has no infinity."""
        told: dict[str, Json] = _finite(dataclasses.asdict(self))
        return told


@dataclass(frozen=True, slots=True)
class Probation:
    """How a new champion does against the former one, which is kept loaded and shadow-scored."""

    verdict: Literal["keep", "roll_back", "watch"]
    reason: str
    reading: harm.Reading

    def to_json(self) -> dict[str, Json]:
        return {"verdict": self.verdict, "reason": self.reason, "reading": self.reading.to_json()}


def compare(answers: Answers, rules: Rules, *, look: int = 1, min_rows: int = MIN_ROWS) -> Comparison:
    """Measure the challenger against the champion. `look` counts how often this challenger has been before the gate."""
    found = means(answers.grouping, answers.difference, min_rows=min_rows)
    slices = _slices(answers, rules, look, min_rows)
    return Comparison(
        overall=bound(
            [block.value for block in found.blocks], sum(block.rows for block in found.blocks), _level(rules, look)
        ),
        small_blocks=len(found.small),
        flips=float(np.mean(answers.flipped)) if len(answers.flipped) else 0.0,
        slices=tuple(sorted((each for each in slices if each), key=lambda each: -each.bound.mean)),
        small_slices=sum(each is None for each in slices),
    )


def bound(values: Sequence[float] | Array, rows: int, level: float) -> Bound:
    """Student's t on block means: the true mean lies above `low`, and below `high`, each with probability `level`."""
    blocks = len(values)
    mean = float(np.mean(values)) if blocks else 0.0
    if blocks < 2:
        return Bound(blocks, rows, mean, 0.0, -math.inf, math.inf)
    spread = float(np.std(values, ddof=1))
    reach = t_quantile(level, blocks - 1) * spread / math.sqrt(blocks)
    return Bound(blocks, rows, mean, spread, mean - reach, mean + reach)


def coverage(grouping: Grouping, labelled: Array, score: Array, edges: Sequence[float]) -> Coverage:
    """Coverage by block, overall and in the bands of the champion's score between `edges` (the usual rows' thirds)."""
    band = np.searchsorted(np.asarray(edges), score)
    masks = [np.ones(len(score), bool), *(band == number for number in range(len(edges) + 1))]
    columns = []
    for mask in masks:
        rows = np.bincount(grouping.index[mask], minlength=len(grouping.ids))
        known = np.bincount(grouping.index[mask], weights=labelled[mask].astype(float), minlength=len(grouping.ids))
        columns.append(np.where(rows > 0, known / np.maximum(rows, 1), np.nan))
    return Coverage(grouping.ids, np.column_stack(columns))


def gaps(usual: Coverage, recent: Coverage, rules: Rules, *, what: str = "traffic") -> tuple[Gap, ...]:
    """Compare the recent coverage with the usual: one row overall, and one for each band of the score.

    Unusual is a fall by more than `coverage_fall` that also lies beyond what the usual blocks' own scatter explains, at
    one in a thousand for all bands together.
    """
    bands = usual.shares.shape[1]
    names = ["all rows", *(f"score band {number} of {bands - 1}" for number in range(1, bands))]
    found = []
    for position, name in enumerate(names):
        old, new = (side.shares[:, position][np.isfinite(side.shares[:, position])] for side in (usual, recent))
        if len(old) < 2 or not len(new):
            continue
        reach = (
            t_quantile(1 - 0.001 / bands, len(old) - 1)
            * float(np.std(old, ddof=1))
            * math.sqrt(1 / len(old) + 1 / len(new))
        )
        allowed = float(old.mean()) - max(rules.coverage_fall, reach)
        found.append(Gap(f"{what}: {name}", float(old.mean()), float(new.mean()), allowed, bool(new.mean() < allowed)))
    return tuple(found)


def decide(
    comparison: Comparison, rules: Rules, *, gaps: Sequence[Gap] = (), replay: Replay | None = None, look: int = 1
) -> Decision:
    """Promote, hold or reject, with every reason there is.

    A challenger that breaks, or is proven bad on sound evidence, is rejected; one that is proven good on sound evidence
    is promoted; all else is held, and `missing` says what it waits for.
    """
    doubts = _doubts(comparison, rules, gaps)
    against = _broken(replay, rules) + ([] if doubts else _proven_bad(comparison, rules))
    proof, lacking = _proof(comparison.overall, rules)
    if against:
        return Decision("reject", tuple(against), (), rules, look, comparison, tuple(gaps), replay)
    if doubts:
        reasons, missing = zip(*doubts, strict=True)
        return Decision("hold", reasons, missing, rules, look, comparison, tuple(gaps), replay)
    if lacking:
        return Decision("hold", (proof,), (lacking,), rules, look, comparison, tuple(gaps), replay)
    return Decision("promote", (proof,), (), rules, look, comparison, tuple(gaps), replay)


def on_probation(alpha: float = 0.05) -> harm.Harm:
    """The state in which a new champion's probation begins; count into it by `harm.update`."""
    return harm.Harm(alpha=alpha, bound=PROBATION_BOUND)


def probation(state: harm.Harm, blocks: int) -> Probation:
    """Judge a new champion by its blocks' differences to the former one (new minus former), counted in `state`.

    Harm at any time rolls back; `blocks` blocks without it end the probation. The chance that a champion that is no
    worse is rolled back is at most the state's alpha, however often this is asked.
    """
    reading = harm.read(state)
    if reading.e_alarm is not None:
        reason = (
            f"the former champion was better: by {reading.mean:.4f} on average over {reading.blocks} blocks "
            f"(e = {reading.e_peak:.3g} at its highest, {reading.e_threshold:g} is the threshold)"
        )
        return Probation("roll_back", reason, reading)
    if reading.blocks >= blocks:
        return Probation(
            "keep", f"no harm in {reading.blocks} blocks (e = {reading.e_peak:.3g} at its highest)", reading
        )
    return Probation("watch", f"{reading.blocks} of {blocks} blocks seen", reading)


def t_quantile(probability: float, degrees: int) -> float:
    """Student's t: by bisection of its distribution function, which for whole degrees is a finite sum."""
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    low, high = 0.0, 1.0
    while _t_distribution(high, degrees) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_distribution(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _t_distribution(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0; Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(3 if odd else 2, degrees - 1, 2):
        term *= square * (k - 1) / k
        total += term
    within = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 + within / 2


def _level(rules: Rules, look: int) -> float:
    """Each look at the same challenger spends half, a sixth, a twelfth … of the error allowed, and all looks all of it.

    The first look alone would be entitled to the whole of it only if no second could follow.
    """
    return 1 - (1 - rules.confidence) / (look * (look + 1))


def _slices(answers: Answers, rules: Rules, look: int, min_rows: int) -> list[Slice | None]:
    texts = {column: rows.astype(str) for column, rows in answers.slices.items()}
    names = [(column, str(value)) for column, text in texts.items() for value in np.unique(text)]
    level = 1 - (1 - _level(rules, look)) / max(1, len(names))
    found: list[Slice | None] = []
    for column, value in names:
        mask = texts[column] == value
        blocks = means(answers.grouping.only(mask), answers.difference[mask], min_rows=1).blocks
        rows = sum(block.rows for block in blocks)
        if len(blocks) < rules.min_blocks or rows < min_rows * rules.min_blocks / 2:
            found.append(None)
            continue
        limits = bound([block.value for block in blocks], rows, level)
        found.append(Slice(column, value, limits, limits.low > 0 and limits.mean > rules.slice_margin))
    return found


def _doubts(comparison: Comparison, rules: Rules, gaps: Sequence[Gap]) -> list[tuple[str, str]]:
    """Why the evidence can't be used yet, each with what would mend it."""
    found = []
    lacking = rules.min_blocks - comparison.overall.blocks
    if lacking > 0:
        reason = f"{comparison.overall.blocks} blocks with labels, and {rules.min_blocks} are asked"
        found.append((reason, f"{lacking} more blocks"))
    for gap in gaps:
        if gap.unusual:
            shares = f"{gap.recent:.1%} have one, usually {gap.usual:.1%}"
            reason = f"labels are missing in an unusual pattern in {gap.what}: {shares}"
            found.append((reason, f"labels of {gap.what} for at least {gap.allowed:.1%}, or a promotion by hand"))
    if comparison.flips > rules.max_flips:
        reason = f"{comparison.flips:.1%} of the answers change, and {rules.max_flips:.1%} may"
        found.append((reason, "a promotion by hand"))
    return found


def _broken(replay: Replay | None, rules: Rules) -> list[str]:
    if replay is None:
        return []
    found = []
    if replay.errors > replay.champion_errors:
        found.append(
            f"{replay.errors} of {replay.requests} replayed requests failed, {replay.champion_errors} with the champion"
        )
    slower = replay.tail_ms - replay.champion_tail_ms
    if replay.tail_ms > rules.max_slower * replay.champion_tail_ms and slower > FLOOR_MS:
        which = f"p{100 * replay.level:.3g} of {replay.requests} replayed requests"
        found.append(f"{which} is {replay.tail_ms:.1f} ms, the champion's {replay.champion_tail_ms:.1f} ms")
    return found


def _proven_bad(comparison: Comparison, rules: Rules) -> list[str]:
    limits, threshold = comparison.overall, _threshold(rules)
    found = []
    if limits.low > threshold:
        asked = f"{rules.margin:g} better" if rules.promote == "better" else f"within {rules.margin:g}"
        found.append(f"surely not {asked}: the loss differs by {limits.mean:+.4f}, at least {limits.low:+.4f}")
    for each in comparison.slices:
        if each.fails:
            by = f"by {each.bound.mean:+.4f}, at least {each.bound.low:+.4f}"
            found.append(f"worse where {each.column} is {each.value!r}: {by}")
    return found


def _proof(limits: Bound, rules: Rules) -> tuple[str, str]:
    """What the bounds say about the rule, and what is missing ("" if nothing is)."""
    threshold = _threshold(rules)
    said = f"the loss differs by {limits.mean:+.4f} (at most {limits.high:+.4f}) over {limits.blocks} blocks"
    asked = f"{'better by' if rules.promote == 'better' else 'not worse by more than'} {rules.margin:g}"
    if limits.high <= threshold and limits.high < math.inf and not (rules.promote == "better" and limits.high >= 0):
        return f"proven {asked}: {said}", ""
    if limits.mean >= threshold:
        return f"not proven {asked}: {said}", "a better challenger: more blocks alone would hardly do"
    reach = (limits.high - limits.mean) / (threshold - limits.mean)
    blocks = limits.blocks * reach**2 if math.isfinite(reach) else 2
    return f"not proven {asked}: {said}", f"about {max(1, math.ceil(blocks) - limits.blocks)} more blocks"


def _threshold(rules: Rules) -> float:
    return -rules.margin if rules.promote == "better" else rules.margin


def _finite(value: Json) -> Json:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
