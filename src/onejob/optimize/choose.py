"""Which candidate becomes the engine: a pure function of the figures.

The fastest accepted one wins, if it is faster beyond the noise; of candidates that are as fast as one another the
simpler wins. Faster is judged round by round, against the other's time in the same round.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

from onejob.core.artifact import Json
from onejob.errors import StepError
from onejob.optimize.accept import Comparison
from onejob.optimize.measure import Latency

GAIN = 0.03
"""Less than this is not worth a less simple engine, however surely it was measured."""

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Figures:
    """What is known of a candidate; one that failed has no comparison, one that wasn't measured no latency."""

    name: str
    accepted: bool
    reason: str
    precision: str = ""
    size: int = 0
    comparison: Comparison | None = None
    churn: float | None = None
    latency: Mapping[str, Latency] | None = None
    """By target: "latency" at one row, "throughput" at a full batch."""

    def to_json(self) -> dict[str, Json]:
        """As the execution keeps it; numbers that don't exist are null."""
        seen = self.comparison
        return {
            "accepted": self.accepted,
            "reason": self.reason,
            "precision": self.precision,
            "size": self.size,
            "metric": _finite(seen.metric) if seen else None,
            "drop": _finite(seen.drop) if seen else None,
            "bound": _finite(seen.bound) if seen else None,
            "difference": _finite(seen.difference) if seen else None,
            "rows": seen.rows if seen else None,
            "churn": self.churn,
            "latency": [_latency(one) for one in (self.latency or {}).values()],
        }


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    why: str
    """One sentence for a person."""


def choose(candidates: Sequence[Figures], target: str, *, base: str) -> Choice:
    """The engine among the candidates, which come in order from the simplest; StepError if none is within the budget.

    A candidate is in the race if it was accepted and measured; `base` is the one that the others were made from.
    """
    racing = [one for one in candidates if one.accepted and one.latency]
    if not racing:
        reasons = "; ".join(f"{one.name}: {one.reason}" for one in candidates)
        raise StepError(
            f"no candidate is within the budget: {reasons}",
            place="[optimize] budget",
            cure="Allow a greater drop, hold out more rows, or leave [optimize] out to serve the checkpoint itself.",
        )
    times = {one.name: _rounds(one, target) for one in racing}
    fastest = min(racing, key=lambda one: statistics.median(times[one.name]))
    for one in racing:  # from the simplest
        if one is fastest or not clearly_faster(times[fastest.name], times[one.name]):
            return Choice(one.name, _why(one, fastest, racing, candidates, target, base))
    raise AssertionError("the fastest is one of the racing")


def clearly_faster(times: Sequence[float], than: Sequence[float]) -> bool:
    """Whether the median of the paired ratios is below 1 - GAIN with confidence, by the order statistics of the sample.

    No assumption on how noise is spread: the upper end of the interval of a median is one of the sorted values.
    """
    ratios = sorted(one / other for one, other in zip(times, than, strict=True))
    return ratios[_upper_rank(len(ratios))] < 1 - GAIN


def _upper_rank(n: int) -> int:
    """The smallest position whose value is no less than the median, with CONFIDENCE (binomial); else the last."""
    below, total = 0, 2**n
    for position in range(n):
        below += comb(n, position)
        if below / total >= CONFIDENCE:
            return position
    return n - 1


def _why(
    chosen: Figures, fastest: Figures, racing: Sequence[Figures], everyone: Sequence[Figures], target: str, base: str
) -> str:
    mine = _rounds(chosen, target)
    what = "one row" if target == "latency" else f"a full batch of {_at(chosen, target).batch}"
    took = f"{chosen.name} answers {what} in {_at(chosen, target).p50:.3g} ms"
    if len(racing) == 1:
        others = [one.name for one in everyone if one is not chosen]
        return f"{took}; nothing else may be taken ({', '.join(others)})." if others else f"{took}."
    if chosen is not fastest:
        return f"{took}; {fastest.name} is not clearly faster, and {chosen.name} is simpler."
    rival = next((one for one in racing if one.name == base and one is not chosen), None)
    rival = rival or min((one for one in racing if one is not chosen), key=lambda one: _at(one, target).p50)
    ratio = statistics.median(b / a for a, b in zip(mine, _rounds(rival, target), strict=True))
    return f"{took}, the fastest within the budget: {ratio:.2f} times as fast as {rival.name}."


def _at(one: Figures, target: str) -> Latency:
    assert one.latency is not None, f"{one.name} was not measured"
    return one.latency[target]


def _rounds(one: Figures, target: str) -> tuple[float, ...]:
    return _at(one, target).rounds


def _latency(one: Latency) -> dict[str, Json]:
    return {
        "batch": one.batch,
        "p50_ms": one.p50,
        "p90_ms": one.p90,
        "cpu_ms": one.cpu,
        "rows_per_second": round(one.batch / one.p50 * 1000, 1) if one.p50 else None,
        "calls": one.calls,
    }


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None  # NaN compares false
