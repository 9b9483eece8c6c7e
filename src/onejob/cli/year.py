"""A year as it is played: a line a month, what happened beneath it, and a table at the end."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Group, RenderableType
from rich.live import Live

from onejob.cli import output, progress
from onejob.cli.options import Call
from onejob.loop.commands.year import YearView
from onejob.loop.views import RunView
from onejob.loop.year import CONSTANT, POLICIES, Figures, Month, Year

HEAD = """
A year of traffic. Month by month: AUC / log loss of
  static    the first model, never retrained
  loop      what the endpoint answered
  always    every new model put into service, whatever the gate said
  constant  no model: the late share of the last weeks (a forecast that ranks nothing: log loss only)
"""
INDENT = " " * 9
OnMonth = Callable[[Month], None]


@contextmanager
def follow(call: Call) -> Iterator[tuple[OnMonth, progress.OnView]]:
    """What the command calls with each month and with each look at a run: months go to stdout, runs are drawn live."""
    if call.quiet or call.as_json:
        yield (lambda month: None), (lambda view: None)
        return
    drawing = _Drawing() if sys.stderr.isatty() else None
    output.write(HEAD, sys.stdout)

    def on_month(month: Month) -> None:
        if drawing:
            drawing.end()
        output.write(block(month), sys.stdout)

    try:
        yield on_month, (drawing.show if drawing else lambda view: None)
    finally:
        if drawing:
            drawing.end()


class _Drawing:
    """The run that goes on, redrawn in place on stderr, and gone before anything else is written."""

    def __init__(self) -> None:
        self._live: Live | None = None

    def show(self, view: RunView) -> None:
        if self._live is None:
            self._live = Live(console=output.console(sys.stderr), auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(progress.draw(view), refresh=True)

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def block(month: Month) -> str:
    """A month in a line, and what happened at the end of it."""
    told = "   ".join(f"{name} {pair(month.policies[name])}" for name in POLICIES)
    constant = f"{CONSTANT} {value(month.policies[CONSTANT].log_loss)}"
    line = f"{month.month}  {month.n:,} flights, {month.late_share:.1%} late   {told}   {constant}"
    return "\n".join([line, *(f"{INDENT}{event}" for event in month.story)])


def render(view: YearView) -> RenderableType:
    """The table, the files, the champion and where it comes from."""
    year = view.year
    failed = (
        "no request failed" if not year.failed_requests else f"{output.plural(year.failed_requests, 'request')} failed"
    )
    parts: list[RenderableType] = [
        output.title(f"The year: {sum(month.n for month in year.months):,} flights, {failed}"),
        summary(year),
        output.title("What is served now"),
        *view.lineage,
        "",
        *(f"wrote {file}" for file in view.files),
    ]
    return Group(*parts, *([view.note] if view.note else []))


def summary(year: Year) -> RenderableType:
    """A row a month, and the means."""
    columns = ["month", "flights", "late", *POLICIES, CONSTANT, "gate"]
    rows = [
        (
            month.month,
            f"{month.n:,}",
            f"{month.late_share:.1%}",
            *(pair(month.policies[name]) for name in POLICIES),
            value(month.policies[CONSTANT].log_loss),
            month.gate.decision,
        )
        for month in year.months
    ]
    means = (*(pair(year.mean(name)) for name in POLICIES), value(year.mean(CONSTANT).log_loss))
    return output.table(columns, [*rows, ("mean", "", "", *means, "")], right=["flights", "late"])


def pair(figures: Figures) -> str:
    """`0.709 / 0.487`: AUC and log loss."""
    return f"{value(figures.auc)} / {value(figures.log_loss)}"


def value(number: float) -> str:
    return "-" if math.isnan(number) else f"{number:.3f}"
