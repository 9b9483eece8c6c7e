"""`onejob restore`: a backup, read back into a home folder."""

from __future__ import annotations

import click

from onejob.cli.backup import render
from onejob.cli.options import Call, verb
from onejob.loop import commands


@verb(
    "restore",
    examples=[
        ("onejob restore /mnt/backup/onejob.tar --home /srv/onejob", "into a new home folder"),
    ],
)
@click.argument("source", metavar="FILE", type=click.Path(exists=True, dir_okay=False))
def command(call: Call, source: str) -> None:
    """Read a backup into the home folder, which must be new or empty; every blob is hashed on the way in.

    Runs that were going on when the backup was made are picked up by the next `onejob run` or `onejob up`.
    """
    with call.session() as session:
        view = commands.restore(session, source)
    call.show(view, lambda made: render(made, "restored from"))
