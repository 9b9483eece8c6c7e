"""`onejob signal`: ask for a retraining by hand."""

from __future__ import annotations

import click
from rich.console import RenderableType

from onejob.cli.options import Call, verb
from onejob.loop import commands
from onejob.loop.commands.signal import SignalView


@verb(
    "signal",
    examples=[
        ("onejob signal flights", "retrain the model of this endpoint on all that has come back"),
        ("onejob signal flights --reason 'new schedule'", "with the reason, for `onejob why`"),
    ],
)
@click.argument("endpoint")
@click.option("--reason", default="", metavar="TEXT", help="Why; it is the signal's evidence.")
def command(call: Call, endpoint: str, reason: str) -> None:
    """Ask for a retraining, as a finding of the monitor would; `onejob up` starts it.

    It needs no fresh labels and waits for no cool-down, but for a retraining that goes on, and for the budget of the
    day. Several signals start one run.
    """
    with call.session() as session:
        view = commands.signal(session, endpoint, reason)
    call.show(view, render)


def render(view: SignalView) -> RenderableType:
    """One line."""
    return f"signal {view.signal} for {view.endpoint}: {view.detail}"
