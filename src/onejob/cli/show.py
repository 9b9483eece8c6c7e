"""`onejob show`: all there is to know about one run, step, artifact, endpoint or request."""

from __future__ import annotations

import time

import click
from rich.columns import Columns
from rich.console import Group, RenderableType

from onejob.cli import output, plot, ps, run, trace
from onejob.cli.options import Call, verb
from onejob.errors import from_json
from onejob.loop import commands
from onejob.loop.views import ArtifactView, ExecutionView, ShowView

MOST_PLOTS = 6
MOST_FILES = 12


@verb(
    "show",
    refs=True,
    examples=[
        ("onejob show 12", "a run: its steps, what they made and measured, its curves"),
        ("onejob show 12/train", "one step: options, times, metrics as a plot"),
        ("onejob show flights/engine@champion", "an artifact: files, who made it and from what"),
        ("onejob show flights", "an endpoint: what it serves, how it is doing"),
    ],
)
@click.argument("ref")
def command(call: Call, ref: str) -> None:
    """Show a run, step, artifact, endpoint or request.

    Loss is plotted by step, scores on held-out rows by epoch. The lineage lists what the thing was made from, each line
    made from the lines that are indented below it.
    """
    with call.session() as session:
        view = commands.show(session, ref)
    now = time.time()
    call.show(view, lambda shown: render(shown, now, verbose=call.verbose))


def render(view: ShowView, now: float, *, verbose: bool = False) -> RenderableType:
    """The parts that this thing has, one below the other."""
    parts: list[RenderableType] = []
    if view.details:
        parts.append(output.sheet(view.details))
    if view.run:
        parts.append(run.render(view.run))
    if view.endpoint:
        parts.append(ps.endpoints((view.endpoint,)))
    if view.executions and (verbose or not view.run):
        parts += [output.title("Executions"), executions(view.executions, now)]
    parts += [measured(execution) for execution in view.executions if execution.measured or execution.error]
    parts += curves(view)
    if len(view.artifacts) == 1:
        parts += [output.title("Artifact"), artifact(view.artifacts[0], now, verbose=verbose)]
    elif view.artifacts:
        parts += [output.title("Artifacts"), artifacts(view.artifacts)]
    if view.lineage:
        parts += [output.title("Lineage"), trace.tree(view.lineage)]
    return Group(*parts)


def executions(views: tuple[ExecutionView, ...], now: float) -> RenderableType:
    """A table of tries."""
    rows = [
        (
            e.step,
            output.digest(e.id),
            str(e.run),
            output.state(e.state),
            output.duration(e.seconds),
            output.ago(e.created, now),
            f"{e.executor} {e.host.partition('/')[0]}".strip(),
        )
        for e in views
    ]
    return output.table(["step", "execution", "run", "state", "took", "started", "where"], rows, right=["run", "took"])


def measured(view: ExecutionView) -> RenderableType:
    """What an execution measured, and the error that ended it."""
    values = dict(view.measured)
    if view.error:
        values["error"] = str(from_json({name: str(value) for name, value in view.error.items()}))
    return Group(output.title(f"{view.step}: measured" if view.measured else view.step), output.sheet(values))


def curves(view: ShowView) -> list[RenderableType]:
    """A plot for each metric of each step, side by side as the width allows."""
    drawn = [
        plot.plot(f"{step}: {title}", points)
        for step, lines in view.metrics.items()
        for title, points in plot.series(lines).items()
    ]
    parts: list[RenderableType] = ["", Columns(drawn[:MOST_PLOTS], padding=(1, 4))] if drawn else []
    if len(drawn) > MOST_PLOTS:
        parts.append(output.muted(f"and {len(drawn) - MOST_PLOTS} more curves: --json has every line"))
    return parts


def artifact(view: ArtifactView, now: float, *, verbose: bool) -> RenderableType:
    """One artifact with its files and metadata."""
    head = output.panel(
        {
            "digest": view.digest,
            "kind": view.kind,
            "size": output.size(view.size),
            "refs": ", ".join(view.refs),
            "made": output.ago(view.created, now),
        }
    )
    most = len(view.files) if verbose else MOST_FILES
    rows = [(str(f["path"]), output.digest(str(f["digest"])), output.size(f["size"])) for f in view.files[:most]]
    parts: list[RenderableType] = [head, "", output.table(["file", "digest", "size"], rows, right=["size"])]
    if len(view.files) > most:
        parts.append(output.muted(f"and {len(view.files) - most} more files: -v lists them"))
    if view.meta:
        parts.append(output.sheet(view.meta))
    return Group(*parts)


def artifacts(views: tuple[ArtifactView, ...]) -> RenderableType:
    """Several artifacts, a row each."""
    rows = [
        (a.kind, output.digest(a.digest), output.size(a.size), output.plural(len(a.files), "file"), ", ".join(a.refs))
        for a in views
    ]
    return output.table(["kind", "digest", "size", "files", "refs"], rows, right=["size", "files"])
