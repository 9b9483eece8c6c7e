"""`onejob backup`: ledger and blobs in one file, written while work goes on."""

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
        ("onejob backup /mnt/backup/onejob.tar", "everything that this home remembers"),
    ],
)
@click.argument("target", metavar="FILE", type=click.Path(dir_okay=False))
def command(call: Call, target: str) -> None:
    """Write the ledger and all blobs that it names into one tar file; safe while runs are going on.

    What endpoints have recorded, and isn't in the ledger yet, is in it too, with the keys of private columns: the file
    is made readable for its owner only. It is whole or not there: it is written aside and then renamed. `onejob
    restore` reads it back, into SQLite or PostgreSQL, whichever the backup came from.
    """
    with call.session() as session:
        view = commands.backup(session, target)
    call.show(view, lambda made: render(made, "backed up to"))


def render(view: BackupView, what: str) -> RenderableType:
    """One line."""
    blobs = f"{output.plural(view.blobs, 'blob')} ({output.size(view.size)})"
    files = f", {output.plural(view.files, 'file')} of endpoints" if view.files else ""
    return f"{what} {view.path}: {output.plural(view.runs, 'run')}, {blobs}{files}"
