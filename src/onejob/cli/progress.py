"""A run as it goes on: one line for each step, with its state, a bar with the time left, and why it is as it is.

On a terminal the lines are redrawn in place on stderr; into a file or a pipe goes one line for each change of a step.
Both are drawn from `RunView`, a snapshot that the command hands over each time it has looked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from onejob.cli import output
from onejob.cli.options import Call
from onejob.loop.views import RunView, StepView

OnView = Callable[[RunView], None]
BAR_WIDTH = 20
STARTED = frozenset({"running", "done", "failed", "cancelled", "skipped"})
"""States of a step that are worth a line in a log."""


@contextmanager
def follow(call: Call) -> Iterator[OnView]:
    """What a command calls with each new view: draws, logs, or keeps quiet."""
    if call.quiet or call.as_json:
        yield _ignore
    elif sys.stderr.isatty():
        with _live() as on_view:
            yield on_view
    else:
        yield logging(sys.stderr.write)


@contextmanager
def _live() -> Iterator[OnView]:
    """Redrawn in place; gone at the end, when the command prints its result; left standing when it fails."""
    newest: list[RunView] = []
    console = output.console(sys.stderr)

    def on_view(view: RunView) -> None:
        newest[:] = [view]
        live.update(draw(view), refresh=True)

    with Live(console=console, auto_refresh=False, transient=True) as live:
        try:
            yield on_view
        except BaseException:
            live.stop()
            for view in newest:
                console.print(draw(view))
            raise


def draw(view: RunView) -> RenderableType:
    """The lines of a run: name, state, bar, how far, times, and the newest metric or the reason."""
    made = Table.grid(padding=(0, 2))
    made.title = Text(f"{view.job}  run {view.run}  {output.duration(view.seconds)}", style="bold")
    made.title_justify = "left"
    for _ in range(5):
        made.add_column(no_wrap=True)
    made.add_column()  # the note is what gives way where the window is narrow
    for step in view.steps:
        made.add_row(step.name, output.state(verdict(step)), _bar(step), far(step), times(step), _short(note(step)))
    if view.endpoint:
        made.add_row(view.endpoint.name, output.state(view.endpoint.state), "", "", "", _short(view.endpoint.url))
    return made


def logging(write: Callable[[str], object]) -> OnView:
    """One line for each change, for a log: remembers what it has said of each run."""
    seen: dict[int, RunView] = {}

    def on_view(view: RunView) -> None:
        for line in changes(seen.get(view.run), view):
            write(f"{line}\n")
        seen[view.run] = view

    return on_view


def changes(old: RunView | None, new: RunView) -> list[str]:
    """What is new since the last view, as lines: `run 12  train: done in 2.1 s`."""
    before = {step.name: verdict(step) for step in old.steps} if old else {}
    lines = [
        f"run {new.run}  {step.name}: {sentence(step)}"
        for step in new.steps
        if step.state in STARTED and before.get(step.name) != verdict(step)
    ]
    served = new.endpoint
    if served and (old is None or old.endpoint is None or old.endpoint.state != served.state):
        lines.append(f"run {new.run}  endpoint {served.name}: {served.state} {served.url}".rstrip())
    if old is not None and old.state != new.state:
        lines.append(f"run {new.run}  {new.state}")
    return lines


def sentence(step: StepView) -> str:
    """A step's state as a log says it."""
    text = verdict(step)
    if step.state == "done" and not step.cached and step.seconds is not None:
        text += f" in {output.duration(step.seconds)}"
    return f"{text} ({step.reason})" if step.reason else text


def verdict(step: StepView) -> str:
    """The state, where a step that was spared is `cached`."""
    return "cached" if step.cached and step.state == "done" else step.state


def far(step: StepView) -> str:
    """`120/400 rows`; nothing for a step that doesn't say, or is over."""
    if step.state != "running" or not step.total:
        return ""
    return f"{output.number(step.done)}/{output.number(step.total)} {step.unit}".rstrip()


def times(step: StepView) -> str:
    """`3.1 s, 4 s left`."""
    if step.cached or step.seconds is None:
        return ""
    spent = output.duration(step.seconds)
    return f"{spent}, {output.duration(step.eta)} left" if step.state == "running" and step.eta is not None else spent


def note(step: StepView) -> str:
    """What is most worth knowing: the newest metrics while it runs, else the reason."""
    if step.state == "running" and step.metric:
        return output.pairs({name: value for name, value in step.metric.items() if name not in {"time", "split"}})
    return step.reason


def _short(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _bar(step: StepView) -> RenderableType:
    if step.state != "running" or not step.total:
        return ""
    return ProgressBar(total=step.total, completed=min(step.done, step.total), width=BAR_WIDTH)


def _ignore(view: RunView) -> None:
    """For `--quiet` and `--json`."""
