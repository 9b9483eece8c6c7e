"""`onejob show`: all there is to know about one run, step, artifact, endpoint or request."""

from __future__ import annotations

import time
from collections.abc import Mapping

import click
from rich.columns import Columns
from rich.console import Group, RenderableType

from onejob.cli import candidates, output, plot, ps, run, trace, why
from onejob.cli.options import Call, verb
from onejob.core.artifact import Json
from onejob.errors import from_json
from onejob.loop import commands
from onejob.loop.views import ArtifactView, EndpointView, ExecutionView, ShowView

MOST_PLOTS = 6
MOST_FILES = 12
NEWEST = 12
"""Lines of an endpoint's story that are shown without -v."""
COUNTS = ("requests", "errors", "rows")
QUANTILES = ("p50_ms", "p90_ms", "p99_ms")
"""What was counted of an endpoint, in the order in which it is told."""


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
    if view.run:
        parts.append(run.render(view.run))
    if view.endpoint:
        parts.append(endpoint(view.endpoint, view.details))
        if view.story or view.outlook:
            parts += [output.title("Story"), why.story(view.story if verbose else view.story[-NEWEST:], view.outlook)]
    elif view.details:
        parts.append(details(view.details))
    if view.executions and (verbose or not view.run):
        parts += [output.title("Made by" if view.endpoint else "Executions"), executions(view.executions, now)]
    parts += [measured(e, verbose=verbose) for e in view.executions if e.measured or e.error]
    parts += curves(view)
    if len(view.artifacts) == 1:
        parts += [output.title("Artifact"), artifact(view.artifacts[0], now, verbose=verbose)]
    elif view.artifacts:
        parts += [output.title("Artifacts"), artifacts(view.artifacts)]
    if view.lineage:
        parts += [output.title("Lineage"), trace.tree(view.lineage)]
    return Group(*parts)


def endpoint(view: EndpointView, counted: Mapping[str, Json]) -> RenderableType:
    """What is served, how to ask it, and how it is doing."""
    told = {name: output.number(counted[name]) for name in COUNTS if counted.get(name) is not None}
    quantiles = [
        f"{name.partition('_')[0]} {output.number(counted[name])} ms" for name in QUANTILES if counted.get(name)
    ]
    model = "MODEL" if view.repository else view.name
    sheet = {
        **({"models": f"{view.url}/v2/repository/index, of {view.repository}"} if view.url and view.repository else {}),
        **({"asked at": f"{view.url}/v1/models/{model}:predict"} if view.url else {}),
        **({"takes and gives": f"{view.url}/v2/models/{model}"} if view.url else {}),
        **told,
        "latency": ", ".join(quantiles) or "no answers yet",
        **recorded(counted),
        "error": str(from_json({name: str(value) for name, value in view.error.items()})) if view.error else "",
    }
    return Group(ps.endpoints((view,)), "", output.panel(sheet))


def recorded(counted: Mapping[str, Json]) -> dict[str, str]:
    """What was captured of its answers, and how complete and late their labels are; nothing without [monitor]."""
    if "captured" not in counted:
        return {}
    rows = f"{output.plural(counted['captured'], 'row')}, {output.number(counted['dropped'])} dropped"
    told = [output.number(counted["labels"])]
    if (coverage := counted.get("label_coverage")) is not None:
        told.append(f"coverage {coverage:.1%}")
    if (median := counted.get("label_delay_median")) is not None:
        told.append(f"delay {output.duration(median)} (90 %: {output.duration(counted['label_delay_p90'])})")
    odd = {name.removeprefix("labels_"): n for name, n in counted.items() if name.startswith("labels_")}
    told += [f"{output.number(n)} {name}" for name, n in odd.items()]
    return {"captured": f"{rows}; {counted['traffic']}", "labels": ", ".join(told)}


def details(values: Mapping[str, Json]) -> RenderableType:
    """What belongs to no other part; a time as a person reads it."""
    time = {"time": output.moment(values["time"])} if isinstance(values.get("time"), int | float) else {}
    return output.sheet({**values, **time})


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


def measured(view: ExecutionView, *, verbose: bool = False) -> RenderableType:
    """What an execution measured, and the error that ended it; -v leaves nothing out."""
    parts: list[RenderableType] = [output.title(f"{view.step}: measured" if view.measured else view.step)]
    choice = candidates.is_choice(view.measured)
    if choice:
        parts.append(candidates.render(view.measured))
    if not choice or verbose:
        parts.append(output.sheet(view.measured))
    if view.error:
        parts.append(f"error: {from_json({name: str(value) for name, value in view.error.items()})}")
    return Group(*parts)


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
