"""How a command that failed says so: the message, the cure and the exit code; as text, or as JSON.

What the tree of errors doesn't know is a bug of ours: the reader gets one line and the file that holds the traceback.
Standard library and click only, since it must work when nothing else can be loaded.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from onejob.errors import JobFileError, OnejobError, UsageError

BUG = 70
"""Exit code of a bug of ours (EX_SOFTWARE of sysexits.h)."""


def report(error: Exception, *, as_json: bool, verbose: bool) -> int:
    """Tell the error on stderr, or as JSON on stdout, and give the exit code."""
    code, data = describe(error)
    if as_json:
        print(json.dumps({"error": data}, indent=2, ensure_ascii=False))
    else:
        print(text(data), file=sys.stderr)
    if verbose:
        traceback.print_exception(error, file=sys.stderr)
    return code


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """An exit code, and the error as data: class, place, message, cure, exit code."""
    known = _from_click(error) if isinstance(error, click.ClickException) else error
    if isinstance(known, OnejobError):
        data: dict[str, Any] = {**known.to_json(), "exit_code": known.exit_code}
        if isinstance(known, JobFileError):
            data["mistakes"] = known.mistakes
        return known.exit_code, data
    return BUG, {
        "error": "Bug",
        "place": "",
        "message": f"this is a bug of onejob: {type(error).__name__}: {error}",
        "cure": f"The traceback is in {_keep(error)}; please report it together with the command.",
        "exit_code": BUG,
    }


def text(data: Mapping[str, Any]) -> str:
    """What a person reads: `error: place: message`, each mistake of a job file on its own line, then the cure."""
    mistakes = data.get("mistakes", [])
    if len(mistakes) > 1:
        lines = [f"error: {data['place'] or 'the job file'}: {len(mistakes)} mistakes"]
        lines += [f"  {mistake}" for mistake in mistakes]
    else:
        place = f"{data['place']}: " if data["place"] and not mistakes else ""
        lines = [f"error: {place}{data['message']}"]
    if data["cure"]:
        lines.append(f"cure: {data['cure']}")
    return "\n".join(lines)


def nearest(word: str, known: Sequence[str]) -> str:
    """The known word that was probably meant, or nothing."""
    return next(iter(difflib.get_close_matches(word, known, n=1)), "")


def _from_click(error: click.ClickException) -> OnejobError:
    """What click says of arguments, in our words; it knows the verb's own help."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = context.command_path if context else "onejob"
    return UsageError(error.format_message(), place=path, cure=f"`{path} --help` explains it.")


def _keep(error: Exception) -> str:
    """Write the traceback where it can be found again; "(nowhere: …)" if even that can't be done."""
    try:
        handle, name = tempfile.mkstemp(prefix="onejob-bug-", suffix=".txt")
        with os.fdopen(handle, "w") as file:
            file.write(" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]) + "\n\n")
            traceback.print_exception(error, file=file)
    except OSError as problem:
        return f"(nowhere: {problem.strerror}; `-v` prints it)"
    return name
