"""`onejob up`: the loop that carries out runs and keeps endpoints alive, until it is stopped."""

from __future__ import annotations

import sys

from onejob.cli import progress
from onejob.cli.options import Call, verb
from onejob.loop import commands
from onejob.loop.views import RunView


@verb(
    "up",
    examples=[
        ("onejob up", "keep everything of this home going; Ctrl-C ends the loop, not what it looks after"),
        ("onejob up --json", "the same for a program: one JSON document when it ends"),
    ],
)
def command(call: Call) -> None:
    """Keep runs and endpoints going until stopped.

    The same loop that `onejob run` turns until its run ends, here for ever: it carries out runs that were added with
    `run --detach`, starts replicas that died again, and picks up what a killed onejob left behind. It may run beside
    any number of `onejob run`; leases see to it that nothing is done twice. One line for each change goes to stderr.
    """
    on_view = _ignore if call.quiet or call.as_json else progress.logging(sys.stderr.write)
    with call.session() as session:
        if not (call.quiet or call.as_json):
            sys.stderr.write(f"keeping runs and endpoints of {session.home.root} going; Ctrl-C ends it\n")
        commands.up(session, on_view=on_view)
    if call.as_json:
        call.show({"state": "stopped"}, str)


def _ignore(view: RunView) -> None:
    """For `--quiet` and `--json`."""
