"""`onejob verify`: hash a lineage again, byte by byte."""

from __future__ import annotations

import click
from rich.console import Group, RenderableType

from onejob.cli import output
from onejob.cli.options import Call, verb
from onejob.errors import DamagedError
from onejob.loop import commands
from onejob.loop.views import VerifyView


@verb(
    "verify",
    refs=True,
    examples=[
        ("onejob verify flights/engine@champion", "the engine, its checkpoint, its dataset and the source files"),
        ("onejob verify 12", "all that run 12 made and read"),
    ],
)
@click.argument("ref")
def command(call: Call, ref: str) -> int | None:
    """Hash all files of an artifact and of everything that it was made from again; name what is damaged.

    The exit code is 6 if a byte differs or a file is gone; the cure is listed with it.
    """
    with call.session() as session:
        view = commands.verify(session, ref)
    call.show(view, render)
    return DamagedError.exit_code if view.damaged else None


def render(view: VerifyView) -> RenderableType:
    """What was read, and a row for each damaged file."""
    read = f"{output.plural(view.artifacts, 'artifact')}, {output.plural(view.files, 'file')}, {output.size(view.size)}"
    if view.damaged:
        head = f"{view.ref}: {output.plural(len(view.damaged), 'file')} damaged, of {read}"
    else:
        head = f"{view.ref}: sound: {read} hashed again"
    found = (*view.damaged, *view.changed)
    if not found:
        return head
    rows = [(output.state(d.problem), d.path, d.kind, output.digest(d.artifact), d.where, d.cure) for d in found]
    return Group(head, output.table(["problem", "file", "of a", "artifact", "where", "cure"], rows))
