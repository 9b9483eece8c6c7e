"""The champion of an endpoint: since when it serves, what it was made from, and what may take its place.

Where a job has [monitor.gate], its endpoint belongs to the loop once an engine was promoted: `onejob run` of the same
job finds its old engine in the cache, and must not put it in the place of one that has learned from a year of traffic.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from zoneinfo import ZoneInfo

from onejob.core.artifact import Json, short
from onejob.core.records import Endpoint, Promotion, Run, Segment
from onejob.core.state import PromotionState, RunState
from onejob.core.traffic import STRAYS
from onejob.errors import NotFoundError
from onejob.loop.lineage import producer
from onejob.loop.session import Session

MADE_FROM = ("data", "train", "optimize")
"""Tables of which a change means that a person wants another model."""
RECENT = 16
"""Segments of which the newest requests say what time it is. Replicas seal independently, so the last one alone would
make the clock jump back; and what is wrong about its time is forgotten once so many others have come."""
STRAY_SHARE = 0.01
"""A request that doesn't tell its event time is of today, though all others may be of last year: requests with up to
this share of the recent rows (and no more than STRAYS of them) can't move the clock."""


def event_now(session: Session, name: str) -> float | None:
    """The event time of an endpoint: that of its newest traffic, but for a few strays; None without any."""
    newest = session.ledger.list_segments(name, kind="traffic", newest=RECENT)
    segments = [segment for segment in newest if segment.rows]
    if not segments:
        return None
    numbers = tuple(segment.number for segment in segments)
    if (told := session.clocks.get(name)) is None or told[0] != numbers:
        metas = [session.ledger.get_artifact(segment.digest).meta for segment in segments]
        told = session.clocks[name] = (numbers, clock_of(metas))
    return told[1]


def clock_of(metas: Sequence[Mapping[str, Json]]) -> float:
    """The event time of the newest request of some traffic artifacts, but for a few strays."""
    newest = sorted((request for meta in metas for request in meta["newest"]), reverse=True)[: STRAYS + 1]
    spared = STRAY_SHARE * sum(meta["rows"] for meta in metas)
    while len(newest) > 1 and newest[0][1] <= spared:
        spared -= newest.pop(0)[1]
    return float(newest[0][0])


def newest_event(segments: Sequence[Segment]) -> float | None:
    """When the newest of what these segments hold happened."""
    return max((segment.ends for segment in segments), default=None)


def block_begins(time: float, by: str, zone: str) -> float:
    """The beginning of the block of event time that a moment lies in."""
    local = datetime.datetime.fromtimestamp(time, ZoneInfo(zone))
    if by == "hour":
        return time - (local.minute * 60 + local.second + local.microsecond / 1e6)
    midnight = local.replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    if by == "week":
        midnight -= datetime.timedelta(days=midnight.weekday())
    return midnight.timestamp()


def serving_since(endpoint: Endpoint, promotions: Sequence[Promotion]) -> float:
    """Event time from which on the champion serves; 0 for the first one. `promotions`: newest first."""
    for promotion in promotions:
        if promotion.state is PromotionState.ROLLED_BACK and promotion.former == endpoint.artifact:
            return promotion.ended or 0.0
        if promotion.state is not PromotionState.ROLLED_BACK and promotion.digest == endpoint.artifact:
            return promotion.event_time
    return 0.0


def dataset_of(session: Session, digest: str, execution: str | None) -> str:
    """Digest of the dataset that an engine or checkpoint was trained on."""
    made = producer(session, digest, execution)
    while made is not None:  # a choice, a candidate and a training name it; an export names the checkpoint only
        if dataset := made.inputs.get("dataset"):
            return dataset
        earlier = made.inputs.get("checkpoint") or made.inputs.get("base")
        made = producer(session, earlier) if earlier else None
    raise NotFoundError("no dataset is known that it was trained on", place=f"artifact {short(digest)}")


def base_of(session: Session, dataset: str) -> str:
    """Digest of the first dataset of the line: the one that came from the sources."""
    while extended := session.ledger.get_artifact(dataset).meta.get("extended"):
        dataset = extended["base"]
    return dataset


def is_rolled_back(digest: str, promotions: Sequence[Promotion]) -> bool:
    """Whether an engine was put back once: then only a person may promote it again."""
    found = next((promotion for promotion in promotions if promotion.digest == digest), None)
    return found is not None and found.state is PromotionState.ROLLED_BACK


def keeps_champion(session: Session, run: Run, name: str, digest: str) -> str:
    """Why the engine of a person's run must not take the champion's place by itself; "" where it may."""
    endpoint = session.ledger.get_endpoint(name)
    if run.forced or endpoint is None or endpoint.artifact == digest or not (run.spec.get("monitor") or {}).get("gate"):
        return ""
    promotions = session.ledger.list_promotions(name)
    serves = f"endpoint {name} keeps {short(endpoint.artifact)}"
    cure = f"`onejob promote {run.id}` or `onejob run --from train` serves it all the same"
    if is_rolled_back(digest, promotions):
        return f"{serves}: this run's engine {short(digest)} was rolled back before; {cure}"
    standing = (p for p in promotions if p.digest == endpoint.artifact and p.state is not PromotionState.ROLLED_BACK)
    promotion = next(standing, None)
    if promotion is None or promotion.cause.get("kind") == "run":
        return ""
    earlier = _run_before(session, run, name)
    if earlier is None or _made_from(earlier) != _made_from(run):
        return ""
    tables = "its tables data, train and optimize are those of run"
    return f"{serves}, which was promoted since, not this run's {short(digest)}: {tables} {earlier.id}; {cure}"


def _run_before(session: Session, run: Run, name: str) -> Run | None:
    """The newest earlier run by a person that served this endpoint."""
    for other in session.ledger.list_runs(job=run.job, states=[RunState.DONE]):
        serving = other.plan.get("serving") or {}
        if other.id < run.id and other.cause.get("kind") == "person" and serving.get("name") == name:
            return other
    return None


def _made_from(run: Run) -> Mapping[str, Json]:
    return {table: run.spec.get(table) for table in MADE_FROM}
