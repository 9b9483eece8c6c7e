"""`onejob diff`: how two runs, steps or artifacts differ."""

from __future__ import annotations

import click
from rich.console import Group, RenderableType

from onejob.cli import output
from onejob.cli.options import Call, verb
from onejob.loop import commands
from onejob.loop.views import Change, DiffView


@verb(
    "diff",
    refs=True,
    examples=[
        ("onejob diff 11 12", "options, inputs, code, packages and metrics of two runs"),
        ("onejob diff flights/engine@champion flights/engine@latest", "two artifacts"),
    ],
)
@click.argument("a", metavar="REF")
@click.argument("b", metavar="REF")
def command(call: Call, a: str, b: str) -> None:
    """Compare two runs, steps or artifacts: only what differs is listed, first before, then now."""
    with call.session() as session:
        view = commands.diff(session, a, b)
    call.show(view, render)


def render(view: DiffView) -> RenderableType:
    """One row for each difference."""
    if not view.changes:
        return f"{view.a} and {view.b} don't differ"
    single = [change for change in view.changes if not isinstance(change.new, list | dict)]
    rows = [(c.component, output.cell(c.old), output.cell(c.new), _note(c)) for c in single]
    parts: list[RenderableType] = [output.table(["what", view.a, view.b, ""], rows)]
    if len(single) < len(view.changes):
        parts.append(output.muted(f"and {output.plural(len(view.changes) - len(single), 'list')}: --json has them"))
    return Group(*parts)


def _note(change: Change) -> str:
    """Digests of code say nothing to a person; which functions changed does."""
    return change.text if ".code." in f".{change.component}" else ""
