"""`onejob demo`: an example job, copied to where the user can change it, and run to an answered request."""

from __future__ import annotations

import json
from collections.abc import Mapping

import click
from rich.console import Group, RenderableType

from onejob.cli import output, progress, run
from onejob.cli.options import Call, verb
from onejob.core.artifact import Json
from onejob.loop import commands
from onejob.loop.views import DemoView

FEW = 5
"""Columns of a question that are shown: enough to tell its rows apart."""


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
    call.show(view, lambda made: render(made, call))


def render(view: DemoView, call: Call) -> RenderableType:
    """What was made, how to ask it, what to try next; every command can be pasted as it stands."""
    parts: list[RenderableType] = [f"The example {view.name!r} is in {view.folder}", "", run.render(view.run)]
    if view.answer:
        parts += [output.title("One question, and the endpoint's answer"), *dialogue(view.question, view.answer)]
    if view.command:
        parts += [output.title("Ask it yourself"), view.command]
    if view.tries:
        parts += [output.title("Try next"), output.commands(call.at_home(view.tries))]
    return Group(*parts)


def dialogue(question: Mapping[str, Json], answer: Mapping[str, Json]) -> list[RenderableType]:
    """Each row that was asked, beside what was said of it; anything of another shape as JSON."""
    asked, told = question.get("instances"), answer.get("predictions")
    if not (isinstance(asked, list) and isinstance(told, list) and len(asked) == len(told)):
        return [json.dumps(question, ensure_ascii=False), json.dumps(answer, ensure_ascii=False)]
    rows = [
        (
            output.pairs(dict(list(row.items())[:FEW])) + " ...",
            output.pairs(said) if isinstance(said, dict) else str(said),
        )
        for row, said in zip(asked, told, strict=True)
    ]
    ids = {"request": str(answer.get("onejob_request_id", "")), "engine": str(answer.get("onejob_engine", ""))}
    return [output.table(["row", "answer"], rows), "", output.panel(ids)]
