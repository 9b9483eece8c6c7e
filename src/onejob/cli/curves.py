"""A load as it goes on: requests a second and latency as curves, redrawn in place; into a pipe a line a second."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from onejob.cli import output
from onejob.cli.options import Call
from onejob.cli.plot import plot
from onejob.loop.commands.bench import Look, Tick

OnLook = Callable[[Look], object]
PLOT_HEIGHT = 5
LINES = 10
"""A turn is told in about so many lines, where it isn't drawn."""


@contextmanager
def follow(call: Call) -> Iterator[OnLook]:
    """What a command calls with each look at a load: draws, logs, or keeps quiet."""
    if call.quiet or call.as_json:
        yield lambda look: None
    elif sys.stderr.isatty():
        with Live(console=output.console(sys.stderr), auto_refresh=False, transient=True) as live:
            yield lambda look: live.update(draw(look), refresh=True)
    else:
        yield logging(sys.stderr.write)


def draw(look: Look) -> RenderableType:
    """Which turn it is, the newest figures, and both curves so far."""
    parts: list[RenderableType] = [Text(head(look), style="bold")]
    if look.ticks:
        parts.append(line(look.ticks[-1]))
    rates = [(tick.seconds, tick.rate) for tick in look.ticks]
    late = [(tick.seconds, tick.p99_ms) for tick in look.ticks if tick.p99_ms is not None]
    for title, points in (("requests/s by second", rates), ("p99 ms by second", late)):
        if len(points) > 1:
            parts += ["", plot(title, points, height=PLOT_HEIGHT)]
    return Group(*parts)


def logging(write: Callable[[str], object]) -> OnLook:
    """A line at the beginning of each turn, and then one for each second, or tenth of the turn if that is longer."""
    told = 0.0

    def on_look(look: Look) -> None:
        nonlocal told
        if not look.ticks:
            told = 0.0
            write(f"{head(look)}\n")
            return
        newest = look.ticks[-1]
        if newest.seconds - told >= max(1.0, (look.seconds or 10.0) / LINES) - 0.001:
            told = newest.seconds
            write(f"  {line(newest)}\n")

    return on_look


def head(look: Look) -> str:
    """`turn 2 of 10  http://…: closed loop, 16 connections`."""
    turn = "" if look.turns == 1 else f"turn {look.turn} of {look.turns}  " if look.turns else f"turn {look.turn}  "
    return f"{turn}{look.target}: {look.load}"


def line(tick: Tick) -> str:
    """`3.5 s  41,200/s  p50 0.52 ms  p99 1.3 ms  errors 0`."""
    parts = [
        f"{tick.seconds:.1f} s",
        f"{output.number(round(tick.rate, 1) if tick.rate < 100 else round(tick.rate))}/s",
    ]
    parts += [f"{name} {milliseconds(value)}" for name, value in (("p50", tick.p50_ms), ("p99", tick.p99_ms))]
    return "  ".join([*parts, f"errors {tick.errors:,}"])


def milliseconds(value: float | None) -> str:
    """`0.123 ms`; `-` for none."""
    return "-" if value is None else f"{output.number(float(value))} ms"
