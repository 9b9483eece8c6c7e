"""`onejob check`: read and plan a job file without running it; `--schema` prints what a job file may hold."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping

import click
from rich.console import Group, RenderableType

from onejob.cli import output
from onejob.cli.options import Call, sets, verb
from onejob.errors import UnavailableError
from onejob.loop import commands
from onejob.loop.views import CheckView

WORDS: Mapping[str, str] = {"run": "to run", "unknown": "not known before that"}


@verb(
    "check",
    examples=[
        ("onejob check flights/job.toml", "every mistake of the file at once; else what each step would do"),
        ("onejob check job.toml --set train.epochs=8", "the same with one value changed"),
        ("onejob check --schema > job.schema.json", "the JSON Schema, for an editor that completes TOML"),
    ],
)
@click.argument("job", type=click.Path(), default="job.toml")
@sets
@click.option("--schema", is_flag=True, help="Print the JSON Schema of job files and end.")
def command(call: Call, job: str, sets: tuple[str, ...], schema: bool) -> int | None:
    """Read a job file, plan it, and say per step what would happen and why.

    `cached` means that the result is there; `run` that it isn't, with what changed since the last time; `unknown` that
    it depends on the result of a step that runs first. What the job needs and this machine lacks is listed with its
    cure, and makes the exit code 8. Nothing is run.
    """
    if schema:
        output.write_json(commands.schema(), sys.stdout)
        return None
    with call.session() as session:
        view = commands.check(session, job, sets)
    call.show(view, render)
    return UnavailableError.exit_code if view.missing else None


def render(view: CheckView) -> RenderableType:
    """A line, the steps, what is missing, what is worth a warning."""
    rows = [(step.name, output.state(step.verdict), step.reason) for step in view.steps]
    verdicts = Counter(step.verdict for step in view.steps)
    counts = ", ".join(f"{count} {WORDS.get(verdict, verdict)}" for verdict, count in verdicts.items())
    parts: list[RenderableType] = [
        f"{view.path}: the job {view.job!r} is sound: {output.plural(len(view.steps), 'step')}: {counts}",
        output.table(["step", "would be", "why"], rows),
    ]
    if view.endpoint:
        parts.append(f"then serves the endpoint {view.endpoint}")
    parts += [f"missing: {lack.kind} {lack.name}: {lack.detail}\n  cure: {lack.cure}" for lack in view.missing]
    parts += [f"warning: {warning}" for warning in view.warnings]
    return Group(*parts)
