"""`onejob trace`: from an answer, or any artifact, back to the source files."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from onejob.cli import output
from onejob.cli.options import Call, verb
from onejob.loop import commands
from onejob.loop.views import Node, TraceView


@verb(
    "trace",
    refs=True,
    examples=[
        ("onejob trace req-7f3a", "the answer with this request id: which model gave it, trained on what"),
        ("onejob trace flights/engine@champion", "the same for what a ref names"),
    ],
)
@click.argument("ref")
def command(call: Call, ref: str) -> None:
    """Walk from an answer or an artifact back: answer, engine, checkpoint, run, dataset, source files.

    Each line names what it comes from by its digest; indented lines are what the line above was made from. Every answer
    of an endpoint carries its request id and the digest of the engine that gave it.
    """
    with call.session() as session:
        view = commands.trace(session, ref)
    call.show(view, render)


def render(view: TraceView) -> RenderableType:
    """The chain as an indented tree."""
    return tree(view.nodes)


def tree(nodes: Sequence[Node]) -> RenderableType:
    """Kind and name, indented by depth, which holds in a narrow window too; digest; detail."""
    rows = [
        (Padding(Text(f"{node.kind}  {node.name}"), (0, 0, 0, 2 * node.depth)), output.digest(node.digest), node.detail)
        for node in nodes
    ]
    return output.table(["what", "digest", "detail"], rows)
