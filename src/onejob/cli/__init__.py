"""The command line: one file per verb, each a thin call into loop/commands; this file finds them and ends the process.

`onejob --help` must be quick, so the list of verbs is a table in here, and a verb's module (with the ledger, pydantic
and rich behind it) is loaded only when the verb is called or its own help is asked for. Every error leaves through
`main`: text or JSON for the reader, and an exit code from the tree of errors for the shell.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence

import click
from click.shell_completion import CompletionItem

from onejob import __version__
from onejob.cli import failure
from onejob.core.plugin import load

VERBS: Mapping[str, Mapping[str, str]] = {
    "Start": {
        "demo": "Copy an example job here and run it, from raw data to an answer.",
        "init": "Write a commented job file to begin with.",
        "check": "Read a job file, plan it, and say what would run here, and why.",
        "run": "Run a job: only the steps whose results aren't there yet.",
        "up": "Keep runs and endpoints going until stopped.",
    },
    "Look": {
        "ps": "List runs and endpoints.",
        "show": "Show a run, step, artifact or endpoint, with its metrics as a plot.",
        "logs": "Print what a step or an endpoint printed.",
        "doctor": "Say what this machine can run; for the rest, why not and the cure.",
        "bench": "Send a load to servers, and tell how quickly they answer.",
    },
    "Explain": {
        "why": "Say what made a step run again, or spared it.",
        "diff": "Compare two runs, steps or artifacts.",
        "trace": "Walk from an answer or artifact back to the source files.",
        "verify": "Hash a whole lineage again and name what is damaged.",
    },
    "Improve": {
        "label": "Give an endpoint the labels of a file: what its answers should have been.",
        "signal": "Ask for a retraining of an endpoint's model.",
        "serve": "Serve a model file, a folder of models, or what a ref names.",
        "promote": "Let an endpoint serve another engine.",
        "rollback": "Put back what an endpoint served before.",
    },
    "Keep": {
        "stop": "Stop a run or an endpoint.",
        "gc": "Free what nothing refers to any more.",
        "backup": "Write the ledger and all blobs into one file.",
        "restore": "Read a backup back into a home folder.",
    },
}
"""Groups by what one wants -> verb -> one line. Verb `x` is `command` in the module `onejob.cli.x`."""

INTERRUPTED = 130
BROKEN_PIPE = 141


class Verbs(click.Group):
    """The verbs of the table above, loaded on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for verbs in VERBS.values() for name in verbs]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = load(f"onejob.cli.{cmd_name}:command")
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            near = failure.nearest(args[0], self.list_commands(ctx))
            hint = f" Did you mean {near!r}?" if near else ""
            ctx.fail(f"there is no verb {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, verbs in VERBS.items():
            with formatter.section(title):
                formatter.write_dl(list(verbs.items()), col_max=12)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """From the table: the usual way would load every verb at each press of the tab key."""
        verbs = [(name, text) for group in VERBS.values() for name, text in group.items()]
        return [CompletionItem(name, help=text) for name, text in verbs if name.startswith(incomplete)]


@click.command(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="onejob", message="%(prog)s %(version)s")
def group() -> None:
    """One file describes one AI job; one command takes it from raw data to a served model.

    New here? `onejob demo flights` runs a whole job on real data, and leaves its files for you to change.
    `onejob VERB --help` explains a verb, with examples.
    """


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command line and end the process with the exit code that its error has."""
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode is no reason to fail
    sys.exit(_run(args))


def _run(args: list[str]) -> int:
    try:
        code = group.main(args, prog_name="onejob", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        return _hang_up()
    except (click.Abort, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as asked:
        print(asked.format_message(), file=sys.stderr)
        return 2
    except Exception as error:
        return failure.report(error, as_json="--json" in args, verbose=bool({"-v", "--verbose"} & set(args)))
    return code if isinstance(code, int) else 0


def _hang_up() -> int:
    """The reader has gone (`onejob logs | head`): say nothing more, not even while Python shuts down."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE
