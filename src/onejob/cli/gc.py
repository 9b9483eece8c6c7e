"""`onejob gc`: free what nothing refers to any more."""

from __future__ import annotations

import click
from rich.console import Group, RenderableType

from onejob.cli import output
from onejob.cli.options import Call, verb
from onejob.loop import commands
from onejob.loop.views import GcView


@verb(
    "gc",
    examples=[
        ("onejob gc --dry-run", "what would be freed"),
        ("onejob gc", "free it"),
    ],
)
@click.option("--dry-run", is_flag=True, help="Only say what would be freed.")
def command(call: Call, dry_run: bool) -> None:
    """Free what nothing refers to any more; safe while runs are going on.

    What a ref names, an endpoint serves, or a kept run made or reads, stays, with everything that it was made from.
    """
    with call.session() as session:
        view = commands.gc(session, dry_run=dry_run)
    call.show(view, render)


def render(view: GcView) -> RenderableType:
    """One line, and details."""
    what = ", ".join(
        output.plural(count, noun)
        for count, noun in ((view.artifacts, "artifact"), (view.blobs, "blob"), (view.folders, "folder"))
        if count
    )
    word = "would free" if view.dry_run else "freed"
    head = f"{word} {output.size(view.freed)}: {what}" if what else f"nothing to free; {output.size(view.kept)} in use"
    return Group(head, *view.details)
