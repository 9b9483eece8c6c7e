"""The search for the highest rate that keeps a goal, such as `p99_ms=10`: by steps, each an open loop at one rate.

Rates double until a step fails, and then the gap between the highest that held and the lowest that failed is halved
(as a ratio) until it is small. A step that fails is tried once more before it is believed: a neighbour's burst is no
limit of the server.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onejob.errors import UsageError
from onejob.serve.bench.outcome import Outcome

KEPT_UP = 0.97
"""The share of a step's requests that must have been answered when it ends, those on the way not counted."""
LOWEST = 0.5
"""Requests a second below which nothing is searched."""
_NAME = re.compile(r"mean_ms|max_ms|p\d{1,2}(\.\d+)?_ms|errors")


@dataclass(frozen=True, slots=True)
class Goals:
    """What must hold: a percentile of the corrected latency -> milliseconds, and the share of errors."""

    latency_ms: Mapping[str, float] = field(default_factory=dict)
    errors: float = 0.0

    def __str__(self) -> str:
        told = [f"{name} <= {value:g} ms" for name, value in self.latency_ms.items()]
        return ", ".join([*told, f"errors <= {self.errors:.4g}"])

    def broken_by(self, step: Outcome) -> str:
        """Why a step hasn't kept them; empty if it has."""
        if step.error_share > self.errors:
            return f"errors {step.error_share:.3%}"
        for name, limit in self.latency_ms.items():
            value = step.quantile_ms(name)
            if value is None or value > limit:
                return f"{name} {'unknown' if value is None else f'{value:.4g} ms'}"
        if step.arrived + step.load.connections < KEPT_UP * step.requests:
            return f"{step.arrived:,} of {step.requests:,} answered in time"
        return ""


def parse_goals(texts: Sequence[str]) -> Goals:
    """`p99_ms=10`, `errors=0.1%`; several in one text by commas. UsageError names what isn't known."""
    latency: dict[str, float] = {}
    errors = 0.0
    for text in (part.strip() for whole in texts for part in whole.split(",")):
        name, equals, value = text.partition("=")
        if not equals or not _NAME.fullmatch(name):
            cure = "Known: mean_ms, p50_ms, p90_ms, p99_ms, p99.9_ms (any percentile), max_ms, errors."
            raise UsageError(f"{text!r} is no goal", place="--slo", cure=cure)
        try:
            number = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
        except ValueError:
            raise UsageError(f"{value!r} is no number", place=f"--slo {name}", cure="Such as p99_ms=10.") from None
        if not math.isfinite(number) or number < 0 or (name != "errors" and number == 0):
            raise UsageError(f"{value!r} can't be kept", place=f"--slo {name}", cure="Such as p99_ms=10.")
        if name == "errors":
            errors = number
        else:
            latency[name.removesuffix("_ms")] = number
    if not latency:
        raise UsageError("a goal for the latency is missing", place="--slo", cure="Such as p99_ms=10.")
    return Goals(latency, errors)


class Search:
    """Which rate to try next, given which held; `next_rate` is None when it is over."""

    def __init__(self, start: float, *, within: float = 0.05, most: int = 60) -> None:
        self._start, self._within, self._left = max(start, LOWEST), within, most
        self._again = False
        self._rate: float | None = self._start
        self.held: float | None = None
        """The highest rate that held."""
        self.failed: float | None = None
        """The lowest that didn't, twice."""

    @property
    def next_rate(self) -> float | None:
        return self._rate

    def learn(self, held: bool) -> None:
        """Take in what became of the step at `next_rate`."""
        rate = self._rate
        assert rate is not None, "the search is over"
        self._left -= 1
        if not held and not self._again and self._left > 0:
            self._again = True
            return
        self._again = False
        if held:
            self.held = rate
        else:
            self.failed = rate
        self._rate = self._after() if self._left > 0 else None

    def _after(self) -> float | None:
        if self.failed is None:
            assert self.held is not None
            return self.held * 2
        if self.held is None:
            return self.failed / 2 if self.failed / 2 >= LOWEST else None
        if self.failed <= self.held * (1 + self._within):
            return None
        return math.sqrt(self.held * self.failed)
