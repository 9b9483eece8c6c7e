"""`onejob diff`: how two runs, steps or artifacts differ."""

from __future__ import annotations

import click
from rich.console import RenderableType

from onejob.cli import output
from onejob.cli.options import Call, verb
from onejob.loop import commands
from onejob.loop.views import DiffView


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
    rows = [(c.component, output.cell(c.old), output.cell(c.new), c.text) for c in view.changes]
    return output.table(["what", view.a, view.b, ""], rows)
