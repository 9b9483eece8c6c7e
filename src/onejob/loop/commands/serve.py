"""The command that serves a model without a job: a file, a folder of models in Triton's layout, or what a ref names."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from onejob.core.artifact import Artifact, FileEntry, Json
from onejob.core.faults import reach
from onejob.core.plan import Existing, Plan, Serving
from onejob.core.records import NewRun
from onejob.core.state import RunState
from onejob.errors import CancelledError, ConflictError, UsageError
from onejob.loop.commands.run import drive, user
from onejob.loop.commands.stop import stop
from onejob.loop.endpoints import DOWN
from onejob.loop.resolve import resolve
from onejob.loop.session import Session
from onejob.loop.snapshots import run_view
from onejob.loop.views import RunView
from onejob.serve.repository import ENGINES, Version, is_model, one_file, scan
from onejob.serve.spec import Spec

SERVED = ("engine", "checkpoint")
REPOSITORY = "repository"


@dataclass(frozen=True)
class _Found:
    """What is to be served, in the ledger."""

    digest: str
    name: str
    """What it may be called."""
    execution: str | None = None
    project: str = ""
    options: Mapping[str, Json] | None = None
    """What its own configuration says."""
    folder: Path | None = None
    """Of a repository, from which models are loaded later."""


def serve(
    session: Session,
    what: str,
    *,
    name: str | None = None,
    on_view: Callable[[RunView], None] | None = None,
    **options: Any,
) -> RunView:
    """Serve a model until it is stopped, and wait until it answers; `options` are those of [serve].

    `what` is a model file, a folder of models, or anything that stands for an engine or a checkpoint. An endpoint of
    that name serves it in the place of what it served; a job's endpoint is left alone (ConflictError).
    """
    found = _file_or_folder(session, Path(what)) if Path(what).exists() else _by_ref(session, what)
    try:
        spec = Spec(name=name or found.name, **{key: value for key, value in options.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        words = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"{words}: {first['input']!r}", place=f"--{first['loc'][0]}") from None
    assert spec.name is not None
    _check_free(session, spec.name)
    told = _merged(spec.options(), found.options or {})
    if found.folder is not None:
        told[REPOSITORY] = str(found.folder)
    plan = Plan((), Serving(spec.name, Existing(found.digest), told), {})
    cause = {"kind": "person", "user": user(), "command": " ".join(sys.argv), "served": what}
    new = NewRun(spec.name, found.project or str(Path.cwd()), {"serve": spec.model_dump(mode="json")}, plan, cause)
    reach("serve.before_run")
    run = session.ledger.add_run(new)
    known = session.ledger.get_endpoint(spec.name)
    drive(session, run.id, on_view)
    view = run_view(session, session.ledger.get_run(run.id))
    if view.state == RunState.CANCELLED:
        if (known is None or known.state in DOWN) and session.ledger.get_endpoint(spec.name) is not None:
            stop(session, spec.name)  # it was to start, and no longer is
        raise CancelledError(f"serving {spec.name} was stopped before it answered", place=spec.name)
    return view


def _merged(options: dict[str, Json], own: Mapping[str, Json]) -> dict[str, Json]:
    """What the model's configuration says of its batches, where nobody has said otherwise."""
    if batch := own.get("batch"):
        return {**options, "batch": {**options["batch"], **batch}}
    return options


def _check_free(session: Session, name: str) -> None:
    """A job's endpoint is its own: serving something else in its place would be promoting it."""
    runs = [run for run in session.ledger.list_runs() if (run.plan.get("serving") or {}).get("name") == name]
    if session.ledger.get_endpoint(name) is not None and runs and runs[0].plan["steps"]:
        cure = f"Choose another --name; `onejob promote REF {name}` puts an engine in its place."
        raise ConflictError(f"endpoint {name} belongs to the job {runs[0].job}", place=name, cure=cure)


def _by_ref(session: Session, what: str) -> _Found:
    if Path(what).suffix in {Path(file).suffix for file, _ in ENGINES}:
        raise UsageError("there is no such file", place=what)
    target = resolve(session, what)
    digest, execution = target.digest, target.execution.id if target.execution else None
    if target.kind == "ref" and target.ref is not None:
        digest, execution = target.ref.digest, target.ref.execution
    elif target.endpoint is not None:
        digest, execution = target.endpoint.artifact, target.endpoint.execution
    if not digest:
        cure = "Name an engine: a ref such as flights/engine@champion, a digest, a file, or a folder of models."
        raise UsageError(f"{target.noun} is nothing that can be served", place=what, cure=cure)
    kind = session.ledger.get_artifact(digest).kind
    if kind not in SERVED:
        raise UsageError(f"it is a {kind}, and an engine or a checkpoint is wanted", place=what)
    made = session.ledger.get_execution(execution) if execution else next(iter(session.ledger.producers(digest)), None)
    project = session.ledger.get_run(made.run).project if made else ""
    return _Found(digest, _named(made.job if made else digest[:12]), made.id if made else None, project)


def _file_or_folder(session: Session, path: Path) -> _Found:
    if path.suffix == ".toml" or (path.is_dir() and (path / "job.toml").is_file()):
        raise UsageError("it is a job, not a model", place=str(path), cure=f"`onejob run {path}` trains and serves it.")
    path = path.resolve()
    if path.is_file() or any((path / file).is_file() for file, _ in ENGINES):
        file = path if path.is_file() else next(path / name for name, _ in ENGINES if (path / name).is_file())
        name = _named(file.parent.name if file.stem == "model" else file.stem)
        version = one_file(file, name) if path.is_file() else Version(name, "1", path, file.name, False, {})
        artifact, files = version.artifact()
        _keep(session, artifact, files)
        return _Found(artifact.digest, name, project=str(file.parent))
    versions = scan(path)
    models: list[Json] = []
    entries: list[FileEntry] = []
    places: dict[str, Path] = {}
    for version in versions:
        artifact, files = version.artifact()
        _keep(session, artifact, files)
        inside = f"{version.name}/{version.version}"
        models.append(
            {
                "name": version.name,
                "version": version.version,
                "digest": artifact.digest,
                "meta": dict(artifact.meta),
                "options": dict(version.options),
            }
        )
        for entry in artifact.files:
            entries.append(FileEntry(f"{inside}/{entry.path}", entry.digest, entry.size))
            places[f"{inside}/{entry.path}"] = files[entry.path]
    whole = Artifact(REPOSITORY, tuple(entries), {"format": 1, "engine": REPOSITORY, "models": models})
    _keep(session, whole, places)
    return _Found(whole.digest, _named(path.name), folder=path.parent if is_model(path) else path)


def _keep(session: Session, artifact: Artifact, files: Mapping[str, Path]) -> None:
    """Into the blobs and the catalogue; doing it again changes nothing."""
    for entry in artifact.files:
        digest, _ = session.blobs.put(files[entry.path])
        if digest != entry.digest:
            raise ConflictError("it changed while it was read", place=str(files[entry.path]), cure="Serve it again.")
    session.blobs.put(artifact.manifest_bytes())
    reach("serve.before_add")
    session.ledger.add_artifact(artifact, locations={name: str(path) for name, path in files.items()})


def _named(text: str) -> str:
    """A name that an endpoint can have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:64] or "model"
