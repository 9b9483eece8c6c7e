"""The command `signal`: a person asks for a retraining, as a finding of the monitor would."""

from __future__ import annotations

from dataclasses import dataclass

from onejob.core.records import NewSignal
from onejob.errors import NotFoundError, UsageError
from onejob.loop.closing import asked, scene_of
from onejob.loop.session import Session

STARTS = "the next pass of `onejob up` starts a retraining"


@dataclass(frozen=True, slots=True)
class SignalView:
    """A signal that was stored, and what becomes of it."""

    endpoint: str
    signal: int
    detail: str
    """What it waits for, or that nothing keeps a run from starting."""


def signal(session: Session, name: str, reason: str = "") -> SignalView:
    """Store a signal `hand`: the next pass of `onejob up` starts one retraining for all signals that wait."""
    if session.ledger.get_endpoint(name) is None:
        raise NotFoundError(f"there is no endpoint {name!r}", cure="`onejob ps` lists the endpoints.")
    scene = scene_of(session, name)
    if scene is None:
        cure = "Send it requests first; its job needs a [monitor] table."
        raise UsageError("nothing has come back from it yet", place=f"endpoint {name}", cure=cure)
    if scene.spec.retrain is None:
        cure = "Add [monitor.retrain] to its job, and run it."
        raise UsageError("its job has no rules for a retraining", place=f"endpoint {name}", cure=cure)
    evidence = {"reason": reason} if reason else {}
    (made,) = session.ledger.add_signals(name, [NewSignal("hand", evidence=evidence)], event_time=scene.now)
    answer = asked(session, scene)
    return SignalView(name, made.id, STARTS if answer.start else answer.reason)
