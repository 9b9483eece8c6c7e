"""`onejob logs`: what a step or an endpoint printed."""

from __future__ import annotations

import sys

import click

from onejob.cli.options import Call, verb
from onejob.loop import commands


@verb(
    "logs",
    refs=True,
    examples=[
        ("onejob logs 12/train", "what the step printed, all ranks together"),
        ("onejob logs 12/train -f", "the same, and go on until the step ends"),
        ("onejob logs flights | tail", "the last lines of an endpoint"),
    ],
)
@click.argument("ref")
@click.option("-f", "--follow", is_flag=True, help="Go on printing until it ends.")
def command(call: Call, ref: str, follow: bool) -> None:
    """Print what a step or an endpoint printed; values of secrets are taken out."""
    with call.session() as session:
        lines = commands.logs(session, ref, follow=follow)
        if call.as_json:
            call.show({"ref": ref, "lines": [line.rstrip("\n") for line in lines]}, str)
            return
        for line in lines:
            sys.stdout.write(line if line.endswith("\n") else f"{line}\n")
            sys.stdout.flush()
