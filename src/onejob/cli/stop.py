"""`onejob stop`: end a run or an endpoint."""

from __future__ import annotations

import click
from rich.console import RenderableType

from onejob.cli.options import Call, verb
from onejob.loop import commands
from onejob.loop.views import StopView


@verb(
    "stop",
    examples=[
        ("onejob stop 12", "cancel run 12: its steps get time to save their state"),
        ("onejob stop flights", "drain the endpoint: answers on their way are still given"),
        ("onejob stop flights --now", "end it without waiting"),
    ],
)
@click.argument("ref", metavar="RUN|ENDPOINT")
@click.option("--now", is_flag=True, help="Kill instead of asking.")
def command(call: Call, ref: str, now: bool) -> None:
    """Stop a run or an endpoint.

    Processes get SIGTERM, then time to save their state or to finish their answers, then SIGKILL. What was finished
    stays: running the job again goes on from there. To stop twice is to stop once.
    """
    with call.session() as session:
        view = commands.stop(session, ref, now=now)
    call.show(view, render)


def render(view: StopView) -> RenderableType:
    """One line."""
    return f"{view.kind} {view.ref} is {view.state}" + (f": {view.detail}" if view.detail else "")
