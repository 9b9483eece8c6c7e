"""What every verb takes (`--json`, `--home`, `-q`, `-v`), and the call that carries it into the verb."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import click
from rich.console import RenderableType

from onejob.cli import output
from onejob.loop import commands
from onejob.loop.session import Session
from onejob.loop.views import to_json

P = ParamSpec("P")
T = TypeVar("T")

REFS = """\b
REF names one thing:
  12                        run 12
  12/train                  a step of run 12
  flights/engine@champion   a ref: what a name points to
  91bc3fa0                  an artifact or execution, by the first digits of its digest or id
  flights                   an endpoint
  req-…                     a request, by the id that its answer carries"""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a verb: the options that all verbs share, and the way out."""

    home: str | None
    as_json: bool
    quiet: bool
    verbose: bool
    file: str | None = None
    """Where `--json FILE` wants the data, for a verb that takes one."""

    def session(self) -> Session:
        """The session of the home folder; a context manager."""
        return commands.open(self.home)

    def show(self, view: T, render: Callable[[T], RenderableType]) -> None:
        """Print a result on stdout: the view itself as JSON, or drawn for a person."""
        if self.as_json:
            output.write_json(to_json(view), sys.stdout)
        else:
            output.write(render(view), sys.stdout)

    def hints(self, *lines: tuple[str, str]) -> None:
        """Advice under a result, for a person who didn't ask for quiet: (command, what it does) each."""
        if not (self.quiet or self.as_json):
            output.write(output.commands(self.at_home(lines)), sys.stdout)

    def at_home(self, lines: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """The same commands for the same home, if this call named one."""
        home = f" --home {shlex.quote(self.home)}" if self.home else ""
        return [(f"{command}{home}" if command.startswith("onejob ") else command, note) for command, note in lines]


STDOUT = "-"
"""What `--json` without a file means, for a verb that takes one."""


def verb(
    name: str, *, examples: Sequence[tuple[str, str]], refs: bool = False, json_file: str = ""
) -> Callable[[Callable[Concatenate[Call, P], int | None]], click.Command]:
    """Make a verb of a function; `examples` are (command, what it does) and go below its help, as does what REF is.

    `json_file` makes `--json` take a file, and says what is written into it; alone it prints the document as ever.
    """
    epilog = "\b\nExamples:\n" + "\n".join(f"  {command}\n      {text}" for command, text in examples)
    if refs:
        epilog = f"{REFS}\n\n{epilog}"

    def decorate(function: Callable[Concatenate[Call, P], int | None]) -> click.Command:
        @functools.wraps(function)
        def wrapped(
            home: str | None, as_json: bool | str | None, quiet: bool, verbose: bool, *args: P.args, **kwargs: P.kwargs
        ) -> int | None:
            file = as_json if isinstance(as_json, str) and as_json != STDOUT else None
            return function(Call(home, bool(as_json) and file is None, quiet, verbose, file), *args, **kwargs)

        command: Any = wrapped
        for option in reversed(_shared(json_file)):
            command = option(command)
        made: click.Command = click.command(name, epilog=epilog)(command)
        return made

    return decorate


def sets(function: Callable[P, T]) -> Callable[P, T]:
    """`--set a.b=v`, as often as one likes."""
    return click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="TABLE.KEY=VALUE",
        help="Change one value of the job file for this call, such as train.lr=0.01; may be repeated.",
    )(function)


def _shared(json_file: str) -> list[Callable[[Any], Any]]:
    text = "Print one JSON document instead of text."
    as_file: dict[str, Any] = {"is_flag": False, "flag_value": STDOUT, "metavar": "[FILE]"}
    return [
        click.option(
            "--json", "as_json", help=f"{text} {json_file}".rstrip(), **as_file if json_file else {"is_flag": True}
        ),
        click.option(
            "--home",
            type=click.Path(file_okay=False),
            help="The home folder: ledger, blobs and work. Default: $ONEJOB_HOME, else ~/.onejob.",
        ),
        click.option("-q", "--quiet", is_flag=True, help="No progress and no advice."),
        click.option("-v", "--verbose", is_flag=True, help="More detail; the traceback of an error too."),
    ]
