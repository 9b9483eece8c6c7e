"""Commands that change what an endpoint serves: promote, and rollback."""

from __future__ import annotations

import getpass
import os
import time
from dataclasses import dataclass

from onejob.core.artifact import Json, short
from onejob.core.records import Decision, Endpoint, Promotion
from onejob.core.state import EndpointState, PromotionState
from onejob.errors import ConflictError, NotFoundError, UsageError, from_json
from onejob.loop.background import Scene, challenger_of
from onejob.loop.closing import champion_ref, promote_decided, roll_back, standing, waits_for_a_person
from onejob.loop.commands.run import QUICK
from onejob.loop.endpoints import tend_endpoint
from onejob.loop.lineage import producer
from onejob.loop.resolve import resolve
from onejob.loop.session import Session

SERVABLE = ("engine", "checkpoint")


@dataclass(frozen=True, slots=True)
class PromotionView:
    """What an endpoint serves now, and what it served before."""

    endpoint: str
    state: str
    """Of the endpoint."""
    digest: str
    former: str
    promotion: str
    """`probation`, `kept` or `rolled_back`."""
    reason: str = ""


def promote(session: Session, ref: str, name: str | None = None) -> PromotionView:
    """Let an endpoint serve what `ref` names: an engine or checkpoint, what a run has left, or the waiting challenger.

    The endpoint is that of the job that made it, unless one is named. It goes on probation where the job has rules.
    """
    target = resolve(session, ref)
    if target.kind == "endpoint" and target.endpoint is not None and name is None:
        return _approve(session, target.endpoint)
    digest, execution = target.digest, target.ref.execution if target.ref else None
    if target.kind == "run" and target.run is not None:
        digest, execution = challenger_of(session, target.run)
    if not digest or session.ledger.get_artifact(digest).kind not in SERVABLE:
        cure = "Name an engine, a checkpoint, or a run that has left one."
        raise UsageError(f"{target.noun} can't be served", place=ref, cure=cure)
    made = producer(session, digest, execution)
    endpoint = _endpoint(session, name or (made.job if made else ""))
    if endpoint.artifact == digest:
        raise ConflictError(f"it serves {short(digest)} already", place=f"endpoint {endpoint.name}")
    scene = standing(session, endpoint)
    if waiting := _waiting(session, scene, digest):
        return _approve_decision(session, scene, waiting)
    kind = session.ledger.get_artifact(digest).kind
    promotion = session.ledger.promote(
        endpoint.name,
        digest=digest,
        execution=made.id if made else None,
        cause=_person(),
        event_time=scene.now,
        state=PromotionState.PROBATION if scene.spec.gate else PromotionState.KEPT,
        expect=endpoint.artifact,
        ref=champion_ref(made.job if made else endpoint.name, kind),
    )
    return _served(session, promotion)


def _approve(session: Session, endpoint: Endpoint) -> PromotionView:
    """The challenger that the gate let through, and that waits for a person."""
    scene = standing(session, endpoint)
    waiting = _waiting(session, scene)
    if waiting is None:
        cure = "Name an engine, a checkpoint or a run; `onejob show ENDPOINT` tells what the gate has decided."
        raise NotFoundError("no challenger waits for a promotion", place=f"endpoint {endpoint.name}", cure=cure)
    return _approve_decision(session, scene, waiting)


def _approve_decision(session: Session, scene: Scene, decision: Decision) -> PromotionView:
    promote_decided(session, scene, decision, {**_person(), "run": decision.run})
    promotion = session.ledger.list_promotions(scene.name, limit=1)[0]
    if promotion.digest != decision.challenger:
        raise ConflictError("the endpoint serves another engine by now", place=f"endpoint {scene.name}")
    return _served(session, promotion)


def _waiting(session: Session, scene: Scene, digest: str | None = None) -> Decision | None:
    newest = session.ledger.list_decisions(scene.name, limit=1)
    found = next((decision for decision in newest if waits_for_a_person(scene, decision)), None)
    return found if found is not None and digest in (None, found.challenger) else None


def rollback(session: Session, name: str, reason: str = "") -> PromotionView:
    """Put back what an endpoint served before the promotion that stands; it isn't promoted again by itself."""
    endpoint = _endpoint(session, name)
    scene = standing(session, endpoint)
    promoted = [
        p for p in scene.promotions if p.digest == endpoint.artifact and p.state is not PromotionState.ROLLED_BACK
    ]
    if not promoted:
        cure = f"`onejob why {name}` tells its story; `onejob promote REF {name}` serves any engine."
        raise ConflictError("it serves no engine that was promoted", place=f"endpoint {name}", cure=cure)
    roll_back(session, scene, reason or "by hand", _person())
    done = next(p for p in session.ledger.list_promotions(name) if p.id == promoted[0].id)
    return _served(session, done)


def _endpoint(session: Session, name: str) -> Endpoint:
    endpoint = session.ledger.get_endpoint(name) if name else None
    if endpoint is None:
        known = ", ".join(each.name for each in session.ledger.list_endpoints())
        cure = f"Endpoints: {known}." if known else "A job with [serve] makes one: `onejob run job.toml`."
        raise NotFoundError(f"there is no endpoint {name!r}", cure=cure)
    return endpoint


def _person() -> dict[str, Json]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return {"kind": "person", "user": user}


def _served(session: Session, promotion: Promotion) -> PromotionView:
    """Wait until it serves what it should, if it is up; raises why it can't."""
    while (endpoint := tend_endpoint(session, promotion.endpoint)).state is EndpointState.STARTING:
        time.sleep(QUICK)
    if endpoint.state is EndpointState.FAILED and endpoint.error:
        raise from_json({name: str(value) for name, value in endpoint.error.items()})
    back = promotion.state is PromotionState.ROLLED_BACK
    return PromotionView(
        endpoint=endpoint.name,
        state=endpoint.state,
        digest=promotion.former if back else promotion.digest,
        former=promotion.digest if back else promotion.former,
        promotion=promotion.state,
        reason=promotion.reason,
    )
