"""`onejob demo`: an example job, copied to where the user can change it, run to an answered request; then its year."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Group, RenderableType

from onejob.cli import output, progress, run, year
from onejob.cli.options import Call, verb
from onejob.core.artifact import Json
from onejob.loop import commands
from onejob.loop.views import DemoView

FEW = 5
"""Columns of a question that are shown: enough to tell its rows apart."""


PLAYED = "Its year was played in this home before (the folder's year/ has the plot); another --home plays it again."


@verb(
    "demo",
    examples=[
        ("onejob demo flights", "all flights that left New York in 2013: which arrive late? Copied to ./flights"),
        ("onejob demo flights --folder /tmp/try", "the same, copied elsewhere"),
        ("onejob demo flights --no-year", "only to the first answer, without the year that follows"),
        ("onejob demo flights --json year.json", "the year's figures as data too"),
    ],
    json_file="With a FILE: write the year's figures there, and print text.",
)
@click.argument("name", default="flights")
@click.option("--folder", type=click.Path(file_okay=False), help="Where to copy the example. Default: ./NAME.")
@click.option("--no-year", is_flag=True, help="Stop after the first answer; don't play the year that follows.")
def command(call: Call, name: str, folder: str | None, no_year: bool) -> None:
    """Copy an example here and run it: raw data, training, the fastest engine, an endpoint that answers.

    The copy is yours: change job.toml or the Python file beside it and `onejob run` it again; a file that you
    changed is never overwritten. The endpoint is asked one question, and the screen says how to ask it yourself.

    Then a year is played in a few minutes: traffic in its own order, labels a day late. The loop watches, retrains,
    and lets a new model take over by the rules in the job file's [monitor]. Month by month the screen shows what that
    was worth, beside a model that is never retrained and one that is always replaced.
    """
    place = folder or name
    _check_file(call)
    with call.session() as session:
        with progress.follow(call) as on_view:
            view = commands.demo(session, name, place, on_view=on_view, year=not no_year)
        if no_year or not commands.has_year(place):
            call.show(view, lambda made: Group(render(made), advice(made, call)))
            return
        if not call.file and commands.looked_after(session, view):
            call.show(view, lambda made: Group(render(made), "", PLAYED, advice(made, call)))
            return
        if not call.as_json:
            output.write(render(view), sys.stdout)
        with year.follow(call) as (on_month, on_run):
            played = commands.play_year(session, place, on_month, on_run)
    figures = played.year.to_json()
    if call.file:
        with open(call.file, "w") as file:
            output.write_json(figures, file)
    call.show(replace(view, year=figures), lambda made: Group(year.render(played), advice(made, call)))


def _check_file(call: Call) -> None:
    """What would go wrong after minutes is told at once."""
    if call.file is None:
        return
    if call.file in commands.list_examples():
        raise click.UsageError(f"--json takes a file here, and {call.file!r} is an example: write --json after it")
    if not Path(call.file).absolute().parent.is_dir():
        raise click.UsageError(f"--json {call.file}: there is no such folder")


def render(view: DemoView) -> RenderableType:
    """What was made, and the first answer."""
    parts: list[RenderableType] = [f"The example {view.name!r} is in {view.folder}", "", run.render(view.run)]
    if view.answer:
        parts += [output.title("One question, and the endpoint's answer"), *dialogue(view.question, view.answer)]
    return Group(*parts)


def advice(view: DemoView, call: Call) -> RenderableType:
    """How to ask it, and what to try next; every command can be pasted as it stands."""
    parts: list[RenderableType] = []
    if view.command:
        parts += [output.title("Ask it yourself"), view.command]
    if view.tries:
        served = view.run.endpoint if view.year is not None else None
        story = [(f"onejob why {served.name}", "what happened to it, in order")] if served else []
        parts += [output.title("Try next"), output.commands(call.at_home([*story, *view.tries]))]
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
