"""`onejob backup`: ledger and blobs, copied into one folder while work goes on."""

from __future__ import annotations

import click
from rich.console import RenderableType

from onejob.cli import output
from onejob.cli.options import Call, verb
from onejob.loop import commands
from onejob.loop.views import BackupView


@verb(
    "backup",
    examples=[
        ("onejob backup /mnt/backup/onejob", "the first time everything, later only what is new"),
    ],
)
@click.argument("target", type=click.Path(file_okay=False))
def command(call: Call, target: str) -> None:
    """Copy the ledger and all blobs into a folder; safe while runs are going on.

    Blobs that the folder holds already are not copied again. `onejob restore` reads it back.
    """
    with call.session() as session:
        view = commands.backup(session, target)
    call.show(view, lambda made: render(made, "backed up to"))


def render(view: BackupView, what: str) -> RenderableType:
    """One line."""
    new = f"{output.plural(view.blobs, 'blob')} ({output.size(view.size)})"
    return f"{what} {view.path}: {output.plural(view.runs, 'run')}, {new}, {view.skipped:,} there already"
