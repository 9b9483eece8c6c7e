"""`onejob doctor`: what this machine can run; for the rest, why not and the cure."""

from __future__ import annotations

from rich.console import Group, RenderableType

from onejob.cli import output
from onejob.cli.options import Call, verb
from onejob.errors import UnavailableError
from onejob.loop import commands
from onejob.loop.views import DoctorView

SIZES = frozenset({"memory", "disk_free"})
"""Facts that are bytes."""


@verb(
    "doctor",
    examples=[
        ("onejob doctor", "engines, executors, families and stores: here, or why not"),
        ("onejob doctor --json", "the same for a program"),
    ],
)
def command(call: Call) -> int | None:
    """Say what this machine can run: engines, executors and plugins, each available, or why not and the cure.

    Nothing here is needed in full: a job needs the engines that it names (`onejob check JOB`). The exit code is 8 only
    if no job at all could run.
    """
    with call.session() as session:
        view = commands.doctor(session)
    call.show(view, render)
    return UnavailableError.exit_code if view.problems else None


def render(view: DoctorView) -> RenderableType:
    """Facts, then a row for each plugin, then problems."""
    facts = {name: output.size(value) if name in SIZES else output.cell(value) for name, value in view.facts.items()}
    rows = [
        (s.kind, s.name, output.state("available" if s.available else "not here"), s.detail, s.cure)
        for s in view.supports
    ]
    return Group(
        output.panel({"onejob": view.version, "home": view.home, **facts}),
        "",
        output.table(["kind", "name", "state", "detail", "cure"], rows),
        *[f"problem: {problem}" for problem in view.problems],
    )
