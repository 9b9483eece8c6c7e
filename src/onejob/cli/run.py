"""`onejob run`: carry out a job, only as far as its results aren't there yet."""

from __future__ import annotations

import click
from rich.console import Group, RenderableType

from onejob.cli import output, progress
from onejob.cli.options import Call, sets, verb
from onejob.errors import from_json
from onejob.loop import commands
from onejob.loop.views import EndpointView, RunView


@verb(
    "run",
    examples=[
        ("onejob run flights/job.toml", "run what isn't there yet; the second time that is nothing"),
        ("onejob run job.toml --set train.lr=0.01", "the same job with one value changed"),
        ("onejob run job.toml --from train", "run train and all that follows, even though its results are there"),
        ("onejob run job.toml --detach", "hand it to `onejob up`, which must be running, and return at once"),
    ],
)
@click.argument("job", type=click.Path(), default="job.toml")
@sets
@click.option("--force", is_flag=True, help="Run every step, even where its result is there.")
@click.option("--from", "start_from", metavar="STAGE", help="Run this stage or step and all that follow.")
@click.option("--detach", is_flag=True, help="Add the run and return; `onejob up` carries it out.")
def command(call: Call, job: str, sets: tuple[str, ...], force: bool, start_from: str | None, detach: bool) -> None:
    """Run a job file (default: job.toml here; a folder means the job.toml in it).

    Each step has a key made of its options, inputs, code, packages and seed. Where a result with that key is there
    already, the step is `cached` and takes no time; `onejob why` explains it. The run ends when all steps are done and
    the endpoint, if the job has one, is ready; the endpoint goes on serving. Ctrl-C stops the run; running it again
    goes on from there.
    """
    if force and start_from:
        raise click.UsageError("--force runs every step already; give one of --force and --from")
    with call.session() as session, progress.follow(call) as on_view:
        view = commands.run(session, job, sets=sets, force=force, start_from=start_from, detach=detach, on_view=on_view)
    call.show(view, render)
    if view.state == "done":
        shown = (f"onejob show {view.run}", "what it made and measured")
        call.hints(shown, (f"onejob why {view.run}", "why each step ran, or not"))
    elif detach:
        call.hints(("onejob up", "carries it out, if no other `onejob up` is running"))


def render(view: RunView) -> RenderableType:
    """How the run ended: a line, a table of its steps, its endpoint, its warnings and its error."""
    head = f"{view.job}: run {view.run} is {view.state}"
    if view.seconds is not None:
        head += f", {output.duration(view.seconds)}"
    parts: list[RenderableType] = [head, steps(view)]
    if view.endpoint:
        parts.append(serving(view.endpoint))
    parts += [f"warning: {warning}" for warning in view.warnings]
    if view.error:
        parts.append(f"error: {from_json({name: str(value) for name, value in view.error.items()})}")
    return Group(*parts)


def steps(view: RunView) -> RenderableType:
    """A table of steps."""
    rows = [
        (step.name, output.state(progress.verdict(step)), progress.times(step), progress.far(step), progress.note(step))
        for step in view.steps
    ]
    return output.table(["step", "state", "time", "progress", "note"], rows, right=["time"])


def serving(endpoint: EndpointView) -> str:
    """One line about the endpoint."""
    error = f": {endpoint.error.get('message', '')}" if endpoint.error else ""
    return f"endpoint {endpoint.name} is {endpoint.state} {endpoint.url}".rstrip() + error
