"""The command that brings labels: checked against the model that is served, and joined with its traffic later."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onejob.core.artifact import Json
from onejob.core.plugin import load
from onejob.core.records import Endpoint
from onejob.errors import NotFoundError, SourceError, UsageError
from onejob.loop.resolve import resolve
from onejob.loop.session import Session
from onejob.loop.traffic import seal_traffic
from onejob.serve.identify import Roles
from onejob.serve.labels import SHOWN, LabelLog, Names, Rows, parse

TYPES: Mapping[str, str] = {
    ".csv": "text/csv",
    ".jsonl": "application/x-ndjson",
    ".ndjson": "application/x-ndjson",
    ".json": "application/json",
}
PARQUET = (".parquet", ".pq")


@dataclass(frozen=True, slots=True)
class LabelView:
    """What became of a file of labels."""

    endpoint: str
    file: str
    accepted: int
    refused: int
    rows: tuple[Mapping[str, Json], ...] = ()
    """The first refused rows: {"line", "value", "reason"} each."""
    artifacts: tuple[str, ...] = ()
    """The `labels` artifacts made of it, and of what else was waiting; none if `onejob up` will make them."""


def label(
    session: Session,
    name: str,
    file: str | Path,
    *,
    columns: Mapping[str, str | None] | None = None,
    strict: bool = False,
) -> LabelView:
    """Take the labels of a file for an endpoint, whether it runs or not; with `strict` none if one is bad.

    `columns` names the file's columns: `key`, `request`, `row`, `label`, `time`; what is left out goes by the usual
    names and the job's own.
    """
    endpoint = _endpoint(session, name)
    monitor: Mapping[str, Json] = endpoint.options.get("monitor") or {}
    if not monitor:
        raise UsageError("this endpoint takes no labels", place=endpoint.name, cure="Add a [monitor] table to its job.")
    meta = session.ledger.get_artifact(endpoint.artifact).meta
    roles = Roles.of(meta)
    rows, text = _records(Path(file))
    log = LabelLog(
        session.home.endpoint(endpoint.name),
        roles,
        _check(session, endpoint, meta),
        private=monitor.get("capture", {}).get("private"),
        clock=session.clock,
    )
    batch = log.take(rows, Names.of(roles, columns), text=text, strict=strict)
    log.seal()
    made = [segment.digest for segment in seal_traffic(session, endpoint.name) if segment.kind == "labels"]
    refused = batch.to_json(accepted=0)["rows"][:SHOWN]
    return LabelView(endpoint.name, str(file), len(batch.labels), len(batch.refused), tuple(refused), tuple(made))


def _endpoint(session: Session, name: str) -> Endpoint:
    target = resolve(session, name)
    if target.kind != "endpoint" or target.endpoint is None:
        cure = "Name an endpoint; `onejob ps -a` lists them."
        raise UsageError(f"it is a {target.kind}, not an endpoint", place=name, cure=cure)
    return target.endpoint


def _check(session: Session, endpoint: Endpoint, meta: Mapping[str, Json]) -> Callable[[list[Any]], Any] | None:
    """The family's own check of a label; None for a model without a family."""
    artifact = session.ledger.get_artifact(endpoint.artifact)
    digest = next((entry.digest for entry in artifact.files if entry.path == "encoding.json"), None)
    if not meta.get("family") or digest is None:
        return None
    if project := endpoint.options.get("project"):
        sys.path.insert(0, str(project))  # a family of the user's own lives there
    encoding = load(f"{meta['family']}.encode").load(json.loads(session.blobs.get(digest).read_bytes()))
    check: Callable[[list[Any]], Any] = encoding.encode_label
    return check


def _records(path: Path) -> tuple[Rows, bool]:
    kind = path.suffix.lower()
    if not path.is_file():
        raise NotFoundError("there is no such file", place=str(path))
    if kind in PARQUET:
        return load("onejob.engines.table:parquet_records")(path), False
    if kind not in TYPES:
        known = ", ".join([*TYPES, *PARQUET])
        raise UsageError(
            f"labels can't be read from {kind or 'a file without an ending'!r}",
            place=str(path),
            cure=f"Known: {known}.",
        )
    try:
        return parse(path.read_bytes(), TYPES[kind])
    except OSError as error:
        raise SourceError(f"it can't be read: {error.strerror}", place=str(path)) from error
