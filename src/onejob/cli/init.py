"""`onejob init`: a commented job file to begin with."""

from __future__ import annotations

import shlex

import click
from rich.console import Group, RenderableType

from onejob.cli.options import Call, verb
from onejob.loop import commands
from onejob.loop.views import InitView


@verb(
    "init",
    examples=[
        ("onejob init", "a job.toml in this folder, to be filled in"),
        ("onejob init churn --from data/customers.csv", "a folder churn/ with a job.toml that reads this file"),
    ],
)
@click.argument("folder", type=click.Path(file_okay=False), default=".")
@click.option("--name", help="The job's name. Default: the folder's.")
@click.option("--from", "source", type=click.Path(), help="A CSV file: its columns are guessed from.")
def command(call: Call, folder: str, name: str | None, source: str | None) -> None:
    """Write a job.toml with a comment on every line that matters; asks nothing.

    With --from, the columns of a CSV file are looked at: the label, which columns are categories, which are numbers.
    What was guessed is listed; look at it, then `onejob check`. A job.toml that is there already is never overwritten.
    """
    view = commands.init(folder, name=name, source=source)
    call.show(view, render)
    call.hints((f"onejob check {shlex.quote(view.files[0])}", "whether it is sound, and what would run"))


def render(view: InitView) -> RenderableType:
    """Files that were written, and guesses to look at."""
    return Group(*[f"wrote {name}" for name in view.files], *[f"guessed: {note}" for note in view.notes])
