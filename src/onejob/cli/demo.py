"""`onejob demo`: an example job, copied to where the user can change it, and run to an answered request."""

from __future__ import annotations

import json

import click
from rich.console import Group, RenderableType

from onejob.cli import output, progress, run
from onejob.cli.options import Call, verb
from onejob.loop import commands
from onejob.loop.views import DemoView


@verb(
    "demo",
    examples=[
        ("onejob demo flights", "all flights that left New York in 2013: which arrive late? Copied to ./flights"),
        ("onejob demo flights --folder /tmp/try", "the same, copied elsewhere"),
    ],
)
@click.argument("name", default="flights")
@click.option("--folder", type=click.Path(file_okay=False), help="Where to copy the example. Default: ./NAME.")
def command(call: Call, name: str, folder: str | None) -> None:
    """Copy an example here and run it: raw data, training, the fastest engine, an endpoint that answers.

    The copy is yours: change job.toml or the Python file beside it and `onejob run` it again; a file that you
    changed is never overwritten. At the end the endpoint is asked one question, and the screen says how to ask it
    yourself.
    """
    with call.session() as session, progress.follow(call) as on_view:
        view = commands.demo(session, name, folder or name, on_view=on_view)
    call.show(view, render)


def render(view: DemoView) -> RenderableType:
    """The run, then the question and its answer, then what to try."""
    parts: list[RenderableType] = [f"The example {view.name!r} is in {view.folder}", "", run.render(view.run)]
    if view.answer:
        parts += [
            output.title("One question, and the endpoint's answer"),
            json.dumps(view.question, ensure_ascii=False),
            json.dumps(view.answer, ensure_ascii=False),
        ]
    if view.command:
        parts += [output.title("Ask it yourself"), view.command]
    if view.tries:
        parts += [output.title("Try next"), *view.tries]
    return Group(*parts)
