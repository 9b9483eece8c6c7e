"""Commands to begin with: demo, init, doctor, schema."""

from __future__ import annotations

import csv
import difflib
import json
import platform
import re
import shlex
import shutil
import urllib.request
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path

from onejob import __version__, plugins
from onejob.core import reference
from onejob.core.artifact import Json
from onejob.core.plugin import load
from onejob.core.ports import Support
from onejob.errors import ConflictError, NotFoundError, OnejobError, SourceError
from onejob.loop.commands.run import run
from onejob.loop.commands.year import SEALS, has_year
from onejob.loop.planning import RUN, STAGES
from onejob.loop.session import Session
from onejob.loop.views import DemoView, DoctorView, InitView, RunView
from onejob.machines.environment import python_version

SAMPLE = 2000
YES_AND_NO = frozenset({"0", "1", "0.0", "1.0", "true", "false"})
"""Values that a label of two answers has; two words are the names of two classes, as are any more."""
FEW = 20
"""A text column with at most this many distinct values in the sample, or numbers with as few, count as categories."""


# ---- demo --------------------------------------------------------------------------------------------------------


def demo(
    session: Session,
    name: str,
    folder: str | Path,
    on_view: Callable[[RunView], None] | None = None,
    *,
    year: bool = False,
) -> DemoView:
    """Copy an example (a file that is there is left as it is), run it, and ask its endpoint one question.

    `year` readies the endpoint for `play_year`.
    """
    place = copy_example(name, Path(folder))
    view = run(session, place / "job.toml", SEALS if year and has_year(place) else (), on_view=on_view)
    question = json.loads((place / "example_request.json").read_text())
    answer: Json = {}
    command = ""
    if view.endpoint and view.endpoint.url:
        url = f"{view.endpoint.url}/v1/models/{view.endpoint.name}:predict"
        answer = ask(url, question)
        command = f"curl -s {url} -d {shlex.quote(f'@{place}/example_request.json')}"
    return DemoView(
        name=name,
        folder=str(place),
        run=view,
        question=question,
        answer=answer,
        command=command,
        tries=_tries(view, place, answer.get("onejob_request_id", "")),
    )


def looked_after(session: Session, view: DemoView) -> bool:
    """Whether the loop has been at work on the demo's endpoint: its year was played in this home before."""
    served = view.run.endpoint
    return served is not None and bool(session.ledger.list_turns(served.name, limit=1))


def copy_example(name: str, folder: Path) -> Path:
    """The example's files, copied where the user can change them; a file that is there already is never overwritten."""
    examples = files("onejob") / "examples"
    if name not in list_examples():
        raise NotFoundError(f"no example is called {name!r}", cure=f"Examples: {', '.join(list_examples())}.")
    if folder.exists() and not folder.is_dir():
        raise ConflictError("is a file, not a folder", place=str(folder), cure="Name another with --folder.")
    with as_file(examples / name) as source:
        for path in sorted(source.rglob("*")):
            target = folder / path.relative_to(source)
            if path.is_file() and "__pycache__" not in path.parts and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    return folder


def list_examples() -> list[str]:
    """Names of the examples that ship with the package."""
    folders = (files("onejob") / "examples").iterdir()
    return sorted(each.name for each in folders if each.is_dir() and each.name not in ("skeleton", "__pycache__"))


def ask(url: str, question: Json) -> dict[str, Json]:
    """Send one question to an endpoint, as any client would; gives its answer, with the ids from its headers."""
    body = json.dumps(question).encode()
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        answer: dict[str, Json] = json.loads(reply.read())
        ids = {"onejob_request_id": reply.headers["x-request-id"], "onejob_engine": reply.headers["x-onejob-engine"]}
    return {**answer, **ids}


def _tries(view: RunView, place: Path, request: str) -> tuple[tuple[str, str], ...]:
    """Commands that work as they stand, from the folder where the demo was called."""
    folder, job = shlex.quote(str(place)), shlex.quote(str(place / "job.toml"))
    served = view.endpoint.name if view.endpoint else ""
    endpoint = (f"onejob show {served}", "the model's figures, the engines it was chosen from, requests and latency")
    stop = (f"onejob stop {served}", "end the endpoint")
    return (
        *([endpoint] if served else []),
        *([(f"onejob trace {request}", "from that answer back to the source files")] if request else []),
        (f"onejob show {view.run}", "the run: what each step made and measured, with curves"),
        (f"onejob run {folder}", "again: nothing has changed, so nothing runs"),
        (f"onejob run {folder} --set train.epochs=6", "one value changed: only what depends on it runs"),
        (f"onejob why {job}", "what would run now, and why"),
        *([stop] if served else []),
    )


# ---- init --------------------------------------------------------------------------------------------------------


def init(folder: str | Path, name: str | None = None, source: str | Path | None = None) -> InitView:
    """Write a commented job.toml; with a CSV file, its columns are guessed from a sample of its rows."""
    place = Path(folder)
    target = place / "job.toml"
    if target.exists():
        raise ConflictError("is there already", place=str(target), cure="Change it, or name another folder.")
    job = name or re.sub(r"[^a-z0-9_-]+", "-", place.resolve().name.lower()).strip("-") or "job"
    if not job[0].isalpha():
        job = f"job-{job}"
    text = (files("onejob") / "examples" / "skeleton" / "job.toml").read_text()
    values, notes = _guess(Path(source)) if source else ({}, ())
    values = {
        "name": job,
        "source": json.dumps("data.csv"),
        "label": json.dumps("label"),
        "categories": "[]",
        "numbers": "[]",
        "metric": "auc",
        "model": "",
        **values,
    }
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    place.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    return InitView(str(place), (str(target),), notes)


def _guess(path: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """Label, categories and numbers of a CSV file, from its first rows; every guess is told."""
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.csv")], 1)
        cure = f"Did you mean {str(path.parent / near[0])!r}?" if near else "Name a CSV file that is there."
        raise SourceError("there is no such file", place=str(path), cure=cure)
    try:
        with path.open(newline="") as file:
            rows = [row for _, row in zip(range(SAMPLE), csv.DictReader(file), strict=False)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"is not a CSV file: {error}", place=str(path)) from error
    if not rows:
        raise SourceError("has no rows under a header line", place=str(path))
    columns = [name for name in rows[0] if name]
    kinds = {name: _kind([row[name] for row in rows]) for name in columns}
    label = _guess_label(columns, kinds)
    features = [name for name in columns if name != label]
    categories = [name for name in features if kinds[name] == "category"]
    numbers = [name for name in features if kinds[name] == "number"]
    left = [name for name in features if kinds[name] == "text"]
    metric, model = _guess_task({row[label] for row in rows}, kinds[label])
    notes = [
        f"the label is {label!r}, judged by {metric}",
        f"categories: {', '.join(categories) or 'none'}",
        f"numbers: {', '.join(numbers) or 'none'}",
    ]
    if left:
        notes.append(f"left out, since nearly every value is another: {', '.join(left)}")
    values = {
        "metric": metric,
        "model": model,
        "source": json.dumps(str(path.resolve()), ensure_ascii=False),
        "label": json.dumps(label, ensure_ascii=False),
        "categories": json.dumps(categories, ensure_ascii=False),
        "numbers": json.dumps(numbers, ensure_ascii=False),
    }
    return values, tuple(notes)


def _kind(values: list[str | None]) -> str:
    present = [value for value in values if value not in (None, "", "NA")]
    distinct = len(set(present))
    if present and all(_is_number(value or "") for value in present):
        return "category" if distinct <= 2 else "number"
    return "category" if distinct <= max(FEW, len(present) // 10) else "text"


def _guess_label(columns: list[str], kinds: dict[str, str]) -> str:
    for word in ("label", "target", "y", "class", "outcome", "churn", "late"):
        for name in columns:
            if name.lower() == word:
                return name
    return next((name for name in reversed(columns) if kinds[name] != "text"), columns[-1])


def _guess_task(labels: set[str | None], kind: str) -> tuple[str, str]:
    """What to judge by; and where the values alone don't tell what is learnt, a line that does.

    Whole numbers may be classes or a quantity. Yes or no (as a table's reader knows it) is judged by AUC, names of
    classes by accuracy, a quantity by R2.
    """
    present = {str(label).lower() for label in labels - {None, "", "NA"}}
    if present <= YES_AND_NO:
        return "auc", ""
    if kind == "text" or not all(map(_is_number, present)):
        return "accuracy", ""
    if all(label.lstrip("-").isdecimal() for label in present):
        task, metric = ("multiclass", "accuracy") if len(present) <= FEW else ("regression", "r2")
        return (
            metric,
            f'# or "{"regression" if task == "multiclass" else "multiclass"}"\nmodel = {{ task = "{task}" }}\n',
        )
    return "r2", ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# ---- doctor and schema -------------------------------------------------------------------------------------------


def doctor(session: Session) -> DoctorView:
    """Engines, executors, families and stores: available here, or why not and the cure."""
    supports = [_plugin(name, path) for name, path in sorted(plugins.entries().items())]
    supports += [_engine(name, module) for name, module in load("onejob.engines:MODULES").items()]
    supports.append(_store(session))
    capacity = session.executors["local"].capacity()
    usage = shutil.disk_usage(session.home.root)
    facts = {
        "python": python_version(),
        "platform": platform.platform(),
        "cpus": capacity["cpus"],
        "memory": capacity.get("memory"),
        "gpus": len(capacity["gpus"]),
        "ledger": re.sub(r"://[^@/]*@", "://", session.home.ledger_url),
        "disk_free": usage.free,
    }
    return DoctorView(__version__, str(session.home.root), facts, tuple(supports), ())


def _plugin(name: str, path: str) -> Support:
    kind, _, short = name.partition("/")
    try:
        load(path)
    except OnejobError as error:
        missing = re.search(r"module '(\w+)'", error.message)
        return Support(short, kind, False, error.message, plugins.cure(missing[1]) if missing else error.cure)
    return Support(short, kind, True, path)


PACKAGES = {"onnxruntime": "onnxruntime", "openvino": "openvino", "pytorch": "torch"}
"""What an engine needs that takes long to import; the others are asked themselves."""


def _engine(name: str, path: str) -> Support:
    if name not in PACKAGES:
        found: Support = load(f"{path}:supported")()
        return found
    module = PACKAGES[name]
    if plugins.is_missing(module):
        return Support(name, "engine", False, f"{module} is not installed", plugins.cure(module))
    return Support(name, "engine", True, plugins.version_of(module))


def _store(session: Session) -> Support:
    kind = "sqlite" if session.home.ledger_url.startswith("sqlite") else "postgresql"
    return Support(kind, "store", True, "the ledger of this home")


def schema() -> Json:
    """The JSON Schema of a job file, for editors."""
    return reference.schema(STAGES, RUN)
