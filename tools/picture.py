"""Draw docs/images/demo.svg: what the program itself printed in a real run of the flights job.

    python tools/picture.py [--out docs/images/demo.svg] [--width 124]

Runs the demo in a temporary folder and home (nothing of the user's is touched), then draws the run's table, the
candidates for the engine, and the lineage of an answer, by the functions that draw them in a terminal. Times, figures
and digests are those of this run; only lines that don't fit are shortened, and what names this machine is left out.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, RenderableType
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from onejob.cli import output, run, trace
from onejob.errors import NotFoundError
from onejob.loop import commands
from onejob.loop.session import Session
from onejob.loop.views import Node

OUT = Path(__file__).parents[1] / "docs" / "images" / "demo.svg"
JOB = "flights"
TRIES = 50
FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace("Fira Code", "ui-monospace")
"""rich's own, without the fonts that it would load from somewhere else."""
THEME = TerminalTheme(
    (22, 27, 34),
    (214, 220, 228),
    [(22, 27, 34), (255, 123, 114), (126, 211, 135), (227, 179, 65), (121, 184, 255), (210, 168, 255), (86, 212, 221)],
    [(139, 148, 158), (255, 161, 152), (126, 211, 135), (227, 179, 65), (121, 184, 255), (210, 168, 255)],
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--width", type=int, default=124)
    options = parser.parse_args()
    out = options.out.absolute()
    with tempfile.TemporaryDirectory(prefix="onejob-picture-") as folder:
        os.chdir(folder)
        with commands.open(Path(folder) / "home") as session:
            try:
                console = draw(session, options.width)
            finally:
                commands.stop(session, JOB)
    out.parent.mkdir(parents=True, exist_ok=True)
    svg = console.export_svg(title="onejob", theme=THEME, unique_id="onejob", code_format=FORMAT)
    out.write_text("".join(f"{line.strip()}\n" for line in svg.splitlines() if line.strip()))
    print(f"{out}: {out.stat().st_size:,} bytes")


def draw(session: Session, width: int) -> Console:
    """The demo, and what it left, on a console that remembers."""
    console = Console(
        record=True,
        width=width,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        markup=False,
        emoji=False,
        highlight=False,
    )
    demo = commands.demo(session, JOB, JOB)
    show(console, f"onejob demo {JOB}", run.render(demo.run))
    chances = ", ".join(f"{answer['probability']:.3f}" for answer in demo.answer["predictions"])
    console.print(Text.assemble(("three flights asked about; chance to be late: ", "dim"), chances))
    show(console, f"onejob show {demo.run.run}/optimize.choose", candidates(session, demo.run.run))
    request = str(demo.answer["onejob_request_id"])
    show(console, f"onejob trace {request}", trace.tree(lineage(session, request)))
    show(console, f"onejob run {JOB}", run.render(commands.run(session, JOB)))
    return console


def candidates(session: Session, number: int) -> RenderableType:
    """What the choice measured, as `show` prints it, with fewer columns and only the latency of one row at a time."""
    measured = commands.show(session, f"{number}/optimize.choose").executions[-1].measured
    known = {
        name: {
            **{key: each[key] for key in ("accepted", "metric", "size", "reason")},
            "latency": [
                {key: latency[key] for key in ("batch", "p50_ms", "rows_per_second")}
                for latency in each["latency"]
                if latency["batch"] == 1
            ],
        }
        for name, each in measured["candidates"].items()
    }
    return output.sheet({"chosen": measured["chosen"], "why": measured["why"], "candidates": known})


def lineage(session: Session, request: str) -> list[Node]:
    """The trace of an answer, without what names this machine (where executions ran, where the source files lie), and
    without what is said twice.
    """
    for _ in range(TRIES):
        try:
            nodes = commands.trace(session, request).nodes
            break
        except NotFoundError:
            time.sleep(0.1)  # a replica writes down what it has answered five times a second
    kept: list[Node] = []
    above: list[Node] = []
    for node in nodes:
        above = [other for other in above if other.depth < node.depth]
        hidden = sum(other.kind == "execution" for other in above)
        above.append(node)
        if node.kind != "execution" and node.detail != "as above":
            detail = "" if node.kind == "file" else node.detail
            kept.append(replace(node, depth=node.depth - hidden, detail=detail))
    return kept


def show(console: Console, command: str, printed: RenderableType) -> None:
    """A prompt with a command, and what it printed."""
    console.print(Text.assemble(("\n$ ", "dim"), (command, "bold")))
    console.print(printed)


if __name__ == "__main__":
    main()
