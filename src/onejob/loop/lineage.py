"""Lineage: from an artifact back over the executions that made it to the source files, as a chain of nodes."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from onejob.core.artifact import Artifact, Json, short
from onejob.core.records import Execution
from onejob.errors import NotFoundError
from onejob.loop.session import Session
from onejob.loop.views import Node


def lineage(session: Session, digest: str, execution: str | None = None, depth: int = 0) -> list[Node]:
    """The artifact, the execution that left it (the one named, else the newest), its run and inputs, and so on down.

    What two branches share (a dataset that both training and choosing read) is written out once.
    """
    return _walk(session, digest, execution, depth, set())


def _walk(session: Session, digest: str, execution: str | None, depth: int, seen: set[str]) -> list[Node]:
    artifact = session.ledger.get_artifact(digest)
    names = ", ".join(ref.name for ref in session.ledger.list_refs() if ref.digest == artifact.digest)
    if artifact.digest in seen:
        return [Node(depth, artifact.kind, names or short(digest), artifact.digest, "as above")]
    seen.add(artifact.digest)
    nodes = [Node(depth, artifact.kind, names or short(digest), artifact.digest, _about(artifact))]
    if artifact.kind == "source":
        return nodes + _files(session, artifact, depth + 1)
    made = producer(session, artifact.digest, execution)
    if made is None:
        given = session.ledger.locations(artifact.digest)
        return nodes + (_files(session, artifact, depth + 1) if given else [])
    nodes.append(_step_node(session, made, depth + 1))
    for name in sorted(made.inputs, key=lambda name: (name != "dataset", name)):
        nodes += _walk(session, made.inputs[name], None, depth + 2, seen)
    return nodes


def producer(session: Session, digest: str, execution: str | None = None) -> Execution | None:
    """The execution that left an artifact: the one named, else the newest; None for a source."""
    if execution:
        try:
            return session.ledger.get_execution(execution)
        except NotFoundError:
            pass
    made = session.ledger.producers(digest)
    return made[0] if made else None


def _step_node(session: Session, made: Execution, depth: int) -> Node:
    at = datetime.datetime.fromtimestamp(made.created).isoformat(" ", "seconds")
    where = made.host.partition("/")[0]
    return Node(depth, "execution", f"{made.run}/{made.step}", "", f"{made.id} on {where}, {at}, key {short(made.key)}")


def _files(session: Session, artifact: Artifact, depth: int) -> list[Node]:
    places = session.ledger.locations(artifact.digest)
    return [Node(depth, "file", entry.path, entry.digest, places.get(entry.path, "")) for entry in artifact.files]


def _about(artifact: Artifact) -> str:
    meta = artifact.meta
    match artifact.kind:
        case "dataset":
            splits = meta.get("splits", {})
            return ", ".join(f"{name} {split['rows']:,} rows" for name, split in splits.items()) + _extended(meta)
        case "checkpoint":
            train = meta.get("train", {})
            return ", ".join(f"{key} {value:,}" for key, value in train.items() if isinstance(value, int))
        case "engine" | "candidate":
            return " ".join(str(meta[name]) for name in ("engine", "precision") if meta.get(name))
    return f"{len(artifact.files)} file{'s' if len(artifact.files) != 1 else ''}"


def _extended(meta: Mapping[str, Json]) -> str:
    """How many of its rows came back from the endpoint, and of which time."""
    told = meta.get("extended")
    if not told:
        return ""
    moments = [told.get(name) for name in ("begins", "ends")]
    days = [datetime.datetime.fromtimestamp(at, datetime.UTC).date().isoformat() for at in moments if at is not None]
    return f"; {told['captured_rows']:,} of them captured" + (f", {' to '.join(days)}" if days else "")
