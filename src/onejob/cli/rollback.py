"""`onejob rollback`: put back what an endpoint served before."""

from __future__ import annotations

import click
from rich.console import RenderableType

from onejob.cli.options import Call, verb
from onejob.core.artifact import short
from onejob.loop import commands
from onejob.loop.commands.promote import PromotionView


@verb(
    "rollback",
    examples=[
        ("onejob rollback flights", "what it served before the newest promotion that stands"),
        ("onejob rollback flights --reason 'wrong for the new terminal'", "with the reason, for `onejob why`"),
    ],
)
@click.argument("endpoint")
@click.option("--reason", default="", metavar="TEXT", help="Why; it is kept with the promotion.")
def command(call: Call, endpoint: str, reason: str) -> None:
    """Put back what an endpoint served before its promotion, in one step.

    An engine that was rolled back is never promoted by itself again; `onejob promote` may. Called again, it goes one
    promotion further back.
    """
    with call.session() as session:
        view = commands.rollback(session, endpoint, reason)
    call.show(view, render)


def render(view: PromotionView) -> RenderableType:
    """One line."""
    return f"endpoint {view.endpoint} serves {short(view.digest)} again; {short(view.former)} was rolled back"
