"""One rank of a step: `python -m onejob.exec.step WORKDIR` reads `task.json`, calls the step's entry, and reports.

Exit codes: 0 done; 75 stopped on request, with its state saved; else the error's own, with `error.json` beside it. In a
gang the first rank that fails writes `error.json`: the others fail because of it. Nothing heavy is imported here, since
thread counts must be in the environment before numpy and torch are.
"""

from __future__ import annotations

import copy
import errno
import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from onejob.core.artifact import CHUNK, Json, canonical
from onejob.core.context import InputArtifact, StepContext, Stopped
from onejob.core.faults import reach
from onejob.core.plugin import load
from onejob.errors import JobFileError, OnejobError, SourceError, StepError, StorageFullError
from onejob.exec.folder import ARRIVED
from onejob.exec.redact import Redactor

STOPPED = 75
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "POLARS_MAX_THREADS",
    "RAYON_NUM_THREADS",
)
SHORTEST_SECRET = 8
"""A shorter secret isn't looked for in output files: chance alone would find it in binary data."""
LONGEST_MESSAGE = 2000


def main(argv: list[str], environ: Mapping[str, str] = os.environ) -> int:
    work = Path(argv[0])
    faulthandler.enable()
    _flush_lines()
    stopping = _catch_sigterm()
    task = json.loads((work / "task.json").read_bytes())
    redactor = Redactor({name: environ[name] for name in secret_names(task, environ) if environ.get(name)})
    prepare_process(task)
    context = make_context(task, work, environ, stopping, redactor)
    try:
        run_entry(task, context, redactor)
    except Stopped:
        return STOPPED
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        reported = as_onejob_error(error, context.name, context.project)
        write_error(work, context.rank, reported, redactor)
        return reported.exit_code
    reach("step.before_exit")
    return 0


def run_entry(task: Mapping[str, Json], context: StepContext, redactor: Redactor) -> None:
    """Load the entry, call it, and check what it left. Sources that changed meanwhile explain any other failure."""
    try:
        entry = load(task["entry"])
        reach("step.before_entry")
        (context.work / ARRIVED).mkdir(exist_ok=True)
        (context.work / ARRIVED / str(context.rank)).touch()
        entry(context)
    except Exception:
        check_sources(task.get("sources", {}))
        raise
    reach("step.after_entry")
    if context.rank == 0:
        check_sources(task.get("sources", {}))
        check_outputs(task["outputs"], context)
        check_secrets(context.work / "out", redactor, context.name)


@dataclass(frozen=True)
class RedactingContext(StepContext):
    """A context that never writes the value of a secret."""

    redactor: Redactor = field(default_factory=lambda: Redactor({}))

    def measure(self, values: Mapping[str, Json]) -> None:
        super().measure(self.redactor.json(values))

    def metric(self, values: Mapping[str, Json]) -> None:
        super().metric(self.redactor.json(values))

    def progress(self, done: int, total: int, unit: str) -> None:
        super().progress(done, total, self.redactor.text(unit))

    def warn(self, text: str) -> None:
        super().warn(self.redactor.text(text))

    def emit(self, name: str, kind: str, meta: Mapping[str, Json]) -> None:
        if secret := self.redactor.found(canonical(meta)):
            raise _secret_in(f"the metadata of output {name!r}", secret, self.name)
        super().emit(name, kind, meta)


def make_context(
    task: Mapping[str, Json],
    work: Path,
    environ: Mapping[str, str],
    stopping: Callable[[], bool],
    redactor: Redactor,
) -> StepContext:
    """The context that `task.json` and the environment describe."""
    inputs = {
        name: InputArtifact(i["digest"], i["kind"], i["meta"], Path(i["path"])) for name, i in task["inputs"].items()
    }
    return RedactingContext(
        name=task["name"],
        options=task["options"],
        setup=task["setup"],
        inputs=inputs,
        work=work,
        scratch=Path(task["scratch"]),
        project=Path(task["project"]),
        seed=task["seed"],
        threads=task["threads"],
        rank=int(environ.get("RANK", "0")),
        world=int(environ.get("WORLD_SIZE", "1")),
        stopping=stopping,
        redactor=redactor,
    )


def secret_names(task: Mapping[str, Json], environ: Mapping[str, str]) -> list[str]:
    """Names of environment variables that hold secrets: those that the task lists, and those that the shim knows of."""
    told = [name for name in environ.get("ONEJOB_SECRETS", "").split(",") if name]
    return sorted({*task.get("secrets", ()), *told})


def prepare_process(task: Mapping[str, Json]) -> None:
    """Thread counts into the environment, the project's folder on the module path and as the current folder."""
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(task["threads"])))
    # `python -m` put the work folder first, where `in` and `out` would pass for packages
    here = os.getcwd()
    sys.path[:] = [task["project"], *(path for path in sys.path if path not in ("", here, task["project"]))]
    if os.path.isdir(task["project"]):
        os.chdir(task["project"])


def check_sources(sources: Mapping[str, Json]) -> None:
    """SourceError if a source file isn't what it was when the step was planned: its digest would be a lie."""
    for path, (size, mtime_ns) in sources.items():
        try:
            now = os.stat(path)
        except FileNotFoundError:
            raise SourceError("was removed while it was read", place=path, cure="Put it back, and run again.") from None
        if [now.st_size, now.st_mtime_ns] != [size, mtime_ns]:
            raise SourceError(
                "changed while it was read", place=path, cure="Run again once nothing writes to it any more."
            )


def check_outputs(outputs: list[str], context: StepContext) -> None:
    """StepError if the entry returned without an output that it owes."""
    missing = [name for name in outputs if not (context.work / "out" / f"{name}.json").exists()]
    if missing:
        names = ", ".join(map(repr, missing))
        cure = f"Its entry must call context.emit({missing[0]!r}, kind, meta) before it returns."
        raise StepError(f"ended without its output {names}", place=context.name, cure=cure)


def check_secrets(folder: Path, redactor: Redactor, step: str) -> None:
    """StepError if a file to be kept holds the value of a secret, in its name or in its bytes."""
    redactor = Redactor({n: v for n, v in redactor.secrets.items() if len(v) >= SHORTEST_SECRET}, lines=False)
    if not redactor.secrets:
        return
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if secret := redactor.found(os.fsencode(name)):
            raise _secret_in("the name of an output file", secret, step)
        if path.is_file() and (secret := find_secret(path, redactor)):
            raise _secret_in(f"output file {name!r}", secret, step)


def find_secret(path: Path, redactor: Redactor) -> str | None:
    """The name of a secret whose value is in a file, also across the pieces in which it is read."""
    tail = b""
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            if secret := redactor.found(tail + piece):
                return secret
            tail = (tail + piece)[-redactor.longest :]
    return None


def as_onejob_error(error: BaseException, step: str, project: Path) -> OnejobError:
    """Any exception as an error of the tree: a full disk by its name, the rest as StepError with the user's line."""
    if isinstance(error, OnejobError):
        return _with_line(error, project)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFullError(f"no space left ({error.filename or 'unnamed file'})", place=step, cure="Free some.")
    text = str(error)[:LONGEST_MESSAGE]
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return StepError(message, place=place_of(error, project) or step, cure="The full traceback is in the step's log.")


def _with_line(error: OnejobError, project: Path) -> OnejobError:
    """An engine's own error about the user's code also names the line in which it went wrong."""
    where = place_of(error.__cause__, project) if error.__cause__ else ""
    if not where or where in str(error) or isinstance(error, JobFileError):
        return error
    told = copy.copy(error)
    told.message = f"{error.message} ({where})"
    return told


def place_of(error: BaseException, project: Path) -> str:
    """`file:line in function` of the innermost frame in the user's project; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename and _inside(error.filename, project):
        return f"{_inside(error.filename, project)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if name := _inside(frame.filename, project):
            return f"{name}:{frame.lineno} in {frame.name}"
    return ""


def write_error(work: Path, rank: int, error: OnejobError, redactor: Redactor) -> None:
    """Leave `error.json`, unless another rank has: the first to fail knows why."""
    report = {**error.to_json(), "retryable": error.retryable, "rank": rank}
    aside = work / f".error.json.{rank}"
    with aside.open("wb") as file:
        file.write(canonical(redactor.json(report)))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(aside, work / "error.json")
    except FileExistsError:
        pass
    finally:
        aside.unlink()


def _secret_in(what: str, secret: str, step: str) -> StepError:
    cure = "Results are kept and shown: leave it out of what the step writes."
    return StepError(f"{what} holds the value of the secret {secret!r}", place=step, cure=cure)


def _inside(filename: str, project: Path) -> str:
    """A file's path inside the project, without what is installed there (a virtual environment); empty if outside."""
    path = Path(os.path.abspath(filename))
    if not path.is_relative_to(os.path.abspath(project)):
        return ""
    inside = path.relative_to(os.path.abspath(project)).as_posix()
    return "" if "site-packages" in inside.split("/") else inside


def _flush_lines() -> None:
    """So that the log is live, and that a rank that is killed has said what it had to say."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _catch_sigterm() -> Callable[[], bool]:
    asked: list[bool] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(True)

    signal.signal(signal.SIGTERM, note)
    return lambda: bool(asked)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
