"""What comes back from endpoints, made into artifacts: sealed traffic and batches of labels.

Level-triggered: whatever lies sealed in an endpoint's folder is kept in the blobs, then numbered in the ledger in one
transaction, then removed from the folder. An artifact depends on its file alone, so doing it again after a crash, at
whatever line, finds the same digest and is doing it once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onejob.core.artifact import Artifact, FileEntry, Json
from onejob.core.faults import reach
from onejob.core.plugin import load
from onejob.core.records import Endpoint, Segment
from onejob.core.traffic import CAPTURE, LABELS, OPEN, SEALED, SECOND
from onejob.errors import DamagedError, UnavailableError
from onejob.loop.session import Session
from onejob.monitor.collect import counted
from onejob.serve.spool import rescue, sealed_in

RECENT_ROWS = 50_000
"""Of so many of the newest rows `onejob show` tells the coverage and the delay of the labels."""


@dataclass(frozen=True)
class _Kind:
    """One kind of what comes back: where it lies, and who reads it (by name: a base installation has no Arrow)."""

    name: str
    folder: str
    file: str
    mend: str
    summary: str


KINDS = (
    _Kind("traffic", CAPTURE, "segment.arrows", "onejob.serve.segment:mend", "onejob.monitor.capture:summary"),
    _Kind("labels", LABELS, "labels.jsonl", "onejob.serve.labels:mend", "onejob.monitor.labels:summary"),
)


def seal_traffic(session: Session, name: str) -> list[Segment]:
    """Make artifacts of all that an endpoint's writers have sealed, and of what dead ones left; gives the new ones."""
    endpoint = session.ledger.get_endpoint(name)
    if endpoint is None or not session.is_here((endpoint.handle or {}).get("host", "")):
        return []
    root = session.home.endpoint(name)
    due = [kind for kind in KINDS if _has_files(root / kind.folder)]
    if not due or session.hold("endpoint", name) is None:
        return []
    made: list[Segment] = []
    for kind in due:
        folder = root / kind.folder
        rescue(folder, load(kind.mend))
        files = sealed_in(folder)
        summary = load(kind.summary) if files else None
        made += [segment for path in files if (segment := _keep(session, endpoint, kind, path, summary))]
    return made


def _has_files(folder: Path) -> bool:
    return any(True for place in (OPEN, SEALED) for _ in (folder / place).glob("*"))


def _keep(session: Session, endpoint: Endpoint, kind: _Kind, path: Path, summary: Any) -> Segment | None:
    try:
        meta: Mapping[str, Json] = summary(path)
    except DamagedError as error:
        _put_aside(session, endpoint, path, error)
        return None
    digest, size = session.blobs.put(path)
    artifact = Artifact(kind.name, (FileEntry(kind.file, digest, size),), {**meta, "endpoint": endpoint.name})
    session.blobs.put(artifact.manifest_bytes())
    reach("traffic.before_add")
    segment = session.ledger.add_segment(
        endpoint.name, artifact, begins=meta["begins"], ends=meta["ends"], rows=meta["rows"]
    )
    reach("traffic.after_add")
    path.unlink(missing_ok=True)
    return segment


def _put_aside(session: Session, endpoint: Endpoint, path: Path, error: DamagedError) -> None:
    """A file that can't be read is kept, out of the way, and told of once."""
    aside = path.parent.parent / "damaged"
    aside.mkdir(exist_ok=True)
    path.rename(aside / path.name)
    told = {"file": str(aside / path.name), "text": error.message}
    session.ledger.add_event(f"endpoint/{endpoint.name}", "warning", told)


# ---- reading -------------------------------------------------------------------------------------------------------


def files_of(session: Session, segments: list[Segment]) -> list[Path]:
    """The verified files of segments, in their order."""
    artifacts = [session.ledger.get_artifact(segment.digest) for segment in segments]
    return [session.blobs.get(entry.digest) for artifact in artifacts for entry in artifact.files]


def told_of(session: Session, endpoint: Endpoint) -> dict[str, Json]:
    """What was recorded of an endpoint, for `onejob show`: nothing without [monitor]."""
    if not endpoint.options.get("monitor"):
        return {}
    values = counted(session.home.endpoint(endpoint.name))
    traffic = session.ledger.list_segments(endpoint.name, kind="traffic")
    labels = session.ledger.list_segments(endpoint.name, kind="labels")
    told: dict[str, Json] = {
        "captured": values.get("capture_rows", 0),
        "dropped": sum(n for name, n in values.items() if name.startswith("capture_dropped.")),
        "traffic": f"{sum(s.rows for s in traffic):,} rows in {len(traffic)} segments",
        "labels": sum(s.rows for s in labels),
    }
    return {**told, **_coverage(session, endpoint, traffic)} if traffic else told


def labels_of(session: Session, endpoint: Endpoint, request: str) -> list[tuple[int, Json, float | None]]:
    """(row, label or None, when it became known) of each captured row of a request; [] if it wasn't captured."""
    if not endpoint.options.get("monitor"):
        return []
    try:
        read_traffic: Callable[..., Any] = load("onejob.monitor.capture:read_traffic")
        read_labels: Callable[..., Any] = load("onejob.monitor.labels:read_labels")
        join: Callable[..., Any] = load("onejob.monitor.joined:join")
    except UnavailableError:
        return []
    for segment in reversed(session.ledger.list_segments(endpoint.name, kind="traffic")):
        found = read_traffic(files_of(session, [segment]))
        rows = [index for index, name in enumerate(found.request.tolist()) if name == request]
        if not rows:
            continue
        labels = session.ledger.list_segments(endpoint.name, kind="labels")
        joined = join(found.take(rows), read_labels(files_of(session, labels)))
        known = zip(joined.traffic.row.tolist(), joined.label.tolist(), joined.label_time.tolist(), strict=True)
        told = [(row, label, when / SECOND if label is not None else None) for row, label, when in known]
        return sorted(told, key=lambda each: each[0])
    return []


def _coverage(session: Session, endpoint: Endpoint, traffic: list[Segment]) -> dict[str, Json]:
    """How complete and how late the labels of the newest rows are."""
    rows, recent = 0, []
    for segment in reversed(traffic):
        recent.append(segment)
        rows += segment.rows
        if rows >= RECENT_ROWS:
            break
    begins = min(segment.begins for segment in recent)
    labels = session.ledger.list_segments(endpoint.name, kind="labels", since=begins)
    try:
        read_traffic: Callable[..., Any] = load("onejob.monitor.capture:read_traffic")
        overall: Callable[..., Any] = load("onejob.monitor.joined:overall")
    except UnavailableError:
        return {}
    found = read_traffic(files_of(session, recent[::-1]))
    read_labels: Callable[..., Any] = load("onejob.monitor.labels:read_labels")
    joined = load("onejob.monitor.joined:join")(found, read_labels(files_of(session, labels)))
    counts = asdict(joined.counts)
    if len(recent) < len(traffic):
        del counts["waiting"], counts["unknown"]  # they may well be for rows that weren't read
    return {**overall(joined), **{f"labels_{name}": value for name, value in counts.items() if value}}
