"""`onejob promote`: let an endpoint serve another engine."""

from __future__ import annotations

import click
from rich.console import RenderableType

from onejob.cli.options import Call, verb
from onejob.core.artifact import short
from onejob.loop import commands
from onejob.loop.commands.promote import PromotionView


@verb(
    "promote",
    refs=True,
    examples=[
        ("onejob promote flights", "the challenger that the gate let through, and that waits for a person"),
        ("onejob promote flights/engine@challenger", "the newest challenger, whatever the gate said"),
        ("onejob promote 12", "what run 12 has left"),
        ("onejob promote 91bc3fa0 flights-eu", "an engine, at another endpoint"),
    ],
)
@click.argument("ref")
@click.argument("endpoint", required=False)
def command(call: Call, ref: str, endpoint: str | None) -> None:
    """Let an endpoint serve an engine or checkpoint, in the place of the one that it serves.

    The endpoint is that of the job that made it. Where the job has [monitor.gate], the new champion is on probation:
    it is compared with the former one, which comes back by itself if it was better.
    """
    with call.session() as session:
        view = commands.promote(session, ref, endpoint)
    call.show(view, render)
    call.hints((f"onejob rollback {view.endpoint}", "put the former engine back"))


def render(view: PromotionView) -> RenderableType:
    """One line."""
    text = f"endpoint {view.endpoint} serves {short(view.digest)}, in the place of {short(view.former)}"
    return f"{text}; on probation" if view.promotion == "probation" else text
