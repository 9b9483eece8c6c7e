"""What is printed: one table a case, medians over the turns, and ratios within each turn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from serve.cases import ENGINE, Measured, Turn
from serve.wrk import Figures

FIRST = ("onejob", "onejob-python")
"""Whom the others are held against: the first of these that is in a case."""


def table(measured: Measured) -> str:
    """The case's table. `times` is how often onejob's figure is better, in each turn: median (least to most)."""
    case, turns = measured.case, len(next(iter(measured.turns.values())))
    lines = [
        f"\n{case.title} ({turns} turns)",
        f"  {'':16} {'requests/s':>10}  {'p50':>7} {'p99':>7} ms  {'CPU us/request':>22}"
        f"  {'times by CPU':>22}  {'times by rate':>22}  {'failed':>6}  {'load':>5}  {'idle':>5}  {'MiB':>5}",
    ]
    for name, own in measured.turns.items():
        rate, cpu = _median([turn.rate for turn in own]), _spread([turn.cpu for turn in own], ".1f")
        figures = [turn.figures for turn in own if turn.figures is not None]
        line = f"  {name:16} {rate:10.0f}  {_latency(figures)}  {cpu:>22}  {_times(measured, name)}"
        if figures:
            failed, load = sum(one.failed for one in figures), _median([one.load for one in figures])
            line += f"  {failed:6}  {load:5.0%}  {measured.idle[name]:5.1%}  {measured.memory[name]:5.0f}"
        lines.append(line)
    return "\n".join(lines)


def _latency(figures: Sequence[Figures]) -> str:
    if not figures:
        return " " * 18
    return f"{_median([one.p50 for one in figures]):7.3f} {_median([one.p99 for one in figures]):7.3f}   "


def _times(measured: Measured, name: str) -> str:
    """onejob beside another: by CPU time and by rate; of the engine alone, what part of its rate onejob reaches."""
    first = next((one for one in FIRST if one in measured.turns), None)
    own = measured.turns.get(first or "")
    if own is None or name == first:
        return f"{'':22}  {'':22}"
    pairs: list[tuple[Turn, Turn]] = list(zip(own, measured.turns[name], strict=True))
    form = ".3f" if name == ENGINE else ".2f"
    by_cpu = _spread([other.cpu / mine.cpu for mine, other in pairs], form)
    by_rate = _spread([mine.rate / other.rate for mine, other in pairs], form)
    return f"{by_cpu:>22}  {by_rate:>22}"


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _spread(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"
