"""`onejob ps`: runs and endpoints, as they stand now."""

from __future__ import annotations

import time

import click
from rich.console import Group, RenderableType
from rich.text import Text

from onejob.cli import output
from onejob.cli.options import Call, verb
from onejob.cli.progress import verdict
from onejob.loop import commands
from onejob.loop.views import EndpointView, ListView, RunView


@verb(
    "ps",
    examples=[
        ("onejob ps", "what is going on, and the newest runs"),
        ("onejob ps -a --json", "everything that the ledger remembers, for a program"),
    ],
)
@click.option("-a", "--all", "everything", is_flag=True, help="Every run and endpoint, not only the newest.")
def command(call: Call, everything: bool) -> None:
    """List runs and endpoints.

    A run is one execution of a job; its steps are listed as `done 3, cached 2`. An endpoint is a served name; `2/2`
    says how many of its replicas are ready.
    """
    with call.session() as session:
        view = commands.ps(session, all=everything)
    now = time.time()
    call.show(view, lambda listed: render(listed, now))


def render(view: ListView, now: float) -> RenderableType:
    """Two tables; a line of advice when there is nothing yet."""
    if not view.runs and not view.endpoints:
        return output.muted("No runs yet. `onejob demo flights` makes the first one.")
    parts: list[RenderableType] = []
    if view.runs:
        rows = [_run(run, now) for run in view.runs]
        parts.append(output.table(["run", "job", "state", "steps", "started", "took", "cause"], rows, right=["run"]))
    if view.endpoints:
        if parts:
            parts.append("")
        parts.append(endpoints(view.endpoints))
    return Group(*parts)


def endpoints(views: tuple[EndpointView, ...]) -> RenderableType:
    """A table of endpoints."""
    columns = ["endpoint", "state", "replicas", "url", "serves", "requests"]
    rows = [
        (
            e.name,
            output.state(e.state),
            f"{e.ready}/{e.replicas}",
            e.url,
            output.digest(e.digest),
            "" if e.requests is None else output.number(e.requests),
        )
        for e in views
    ]
    return output.table(columns, rows, right=["requests"])


def _run(run: RunView, now: float) -> tuple[str | Text, ...]:
    counts: dict[str, int] = {}
    for step in run.steps:
        counts[verdict(step)] = counts.get(verdict(step), 0) + 1
    steps = ", ".join(f"{word} {count}" for word, count in counts.items())
    cause = str(run.cause.get("kind", ""))
    return (
        str(run.run),
        run.job,
        output.state(run.state),
        steps,
        output.ago(run.created, now),
        output.duration(run.seconds),
        cause,
    )
