"""`onejob why`: which part of a step's key made it run again, or that none did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click
from rich.console import Group, RenderableType

from onejob.cli import output
from onejob.cli.options import Call, verb
from onejob.core.artifact import Json
from onejob.loop import commands
from onejob.loop.views import Change, StepWhy, StoryLine, WhyView


@verb(
    "why",
    refs=True,
    examples=[
        ("onejob why 12", "each step of run 12: why it ran, or didn't have to"),
        ("onejob why 12/train -v", "one step, with every component of its key"),
        ("onejob why flights", "the story of an endpoint: signals, runs, decisions of the gate, promotions"),
        ("onejob why flights/job.toml", "what would run now, and why, without running it"),
    ],
)
@click.argument("ref")
def command(call: Call, ref: str) -> None:
    """Say which component of its key made a step run again, or what made it a hit.

    A key is made of the step's options, the digests of its inputs, the code that it can reach, the packages that this
    code imports, seed, world size and threads. Comments and formatting don't count, nor where the step runs. The
    comparison is with the newest earlier step of that name that had another key.
    """
    with call.session() as session:
        view = commands.why(session, ref)
    call.show(view, lambda answer: render(answer, verbose=call.verbose))


def render(view: WhyView, *, verbose: bool = False) -> RenderableType:
    """A sentence for each step, and what differs below it."""
    parts: list[RenderableType] = []
    if view.story or view.outlook:
        parts += [story(view.story, view.outlook), output.title("The engine that it serves")]
    for step in view.steps:
        parts.append(sentence(step))
        if step.changes:
            parts.append(table(step.changes))
        if verbose and step.components:
            parts.append(output.sheet(components(step)))
    return Group(*parts)


def sentence(step: StepWhy) -> str:
    """`train ran in run 12: helper.py changed (function scale); compared with 11/train`."""
    where = f" in run {step.run}" if step.run is not None and not step.verdict.startswith("would") else ""
    against = f"; compared with {step.compared}" if step.compared else ""
    return f"{step.step} {step.verdict}{where}: {step.reason}{against}"


def story(lines: Sequence[StoryLine], outlook: str) -> RenderableType:
    """What happened to an endpoint, by the time of its traffic, and what its loop waits for."""
    rows = [(output.moment(line.time) if line.time else "", line.kind, line.text) for line in lines]
    table = output.table(["event time", "what", "it"], rows)
    return Group(table, output.muted(f"waiting: {outlook}")) if outlook else table


def components(step: StepWhy) -> dict[str, Json]:
    """Every component of the key; of a module its digest, not that of each function in it."""
    return {name: _digests(value) if name.startswith("code") else value for name, value in step.components.items()}


def _digests(modules: Json) -> Json:
    if not isinstance(modules, Mapping):
        return modules
    return modules["digest"] if "digest" in modules else {name: _digests(value) for name, value in modules.items()}


def table(changes: tuple[Change, ...]) -> RenderableType:
    """What differs, old and new side by side."""
    rows = [(change.component, output.cell(change.old), output.cell(change.new)) for change in changes]
    return output.table(["what", "before", "now"], rows)
