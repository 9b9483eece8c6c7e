"""The loop, closed: from what an endpoint's traffic says to a watch, a retraining, a promotion, and back again.

Level-triggered, like everything here: a pass looks at what the ledger says of an endpoint, does the next thing, and
forgets. Each thing that must happen once is one transaction of the ledger, so dying between any two lines loses nothing
and does nothing twice. docs/design/closing.md tells what happens when; all times are event time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial

from onejob.core.artifact import Json
from onejob.core.faults import reach
from onejob.core.records import Decision, Endpoint, NewRun, NewSignal, NewTurn, Run, Signal, Turn
from onejob.core.state import EndpointState, PromotionState, RunState
from onejob.errors import ConflictError, DamagedError, NotFoundError, OnejobError, StoreError, UsageError
from onejob.loop.background import (
    Scene,
    challenger_of,
    has_gate,
    has_rows,
    look_run,
    retrain_cut,
    retrain_run,
    watch_facts,
    watch_run,
)
from onejob.loop.champion import RECENT, event_now, is_rolled_back, newest_event
from onejob.loop.session import Session
from onejob.loop.trigger import Answer, Facts, Rules, decide
from onejob.monitor.plan import GATE, WATCH
from onejob.monitor.spec import DAY, Spec

WATCHED, RETRAIN, LOOK = "watch", "retrain", "look"
JUDGED = (RETRAIN, LOOK)
"""Turns that may end with another engine: one at a time, or what one is held against has gone when it ends."""
UP = (EndpointState.STARTING, EndpointState.READY, EndpointState.FAILED)
LOOKS = 4
"""So often a challenger is held on evidence that would do; then it is given up."""
WAITS = "promote"
OTHER_CHAMPION = "not promoted: the endpoint serves another engine than the one it was compared with"
"""The outcome of a decision that came too late; its challenger is held against the engine that serves now."""
FAILED = "failed"


def close(session: Session, name: str) -> None:
    """One pass over one endpoint that has [monitor] and wasn't stopped; nothing if nothing has happened since."""
    newest = session.ledger.newest_event()
    endpoint = session.ledger.get_endpoint(name)
    if endpoint is None or not endpoint.options.get("monitor") or endpoint.state not in UP:
        return
    if session.closed.get(name) == newest or not session.is_here((endpoint.handle or {}).get("host", "")):
        return
    if session.hold("endpoint", name) is None:
        return
    for turn in reversed(session.ledger.list_turns(name, taken=False)):
        if session.ledger.get_run(turn.run).state in (RunState.DONE, RunState.FAILED, RunState.CANCELLED):
            _take_over(session, turn)
    _settle(session, name)
    _judge_probation(session, name)
    for due in (_watch, _look_again, _retrain):
        if (scene := scene_of(session, name)) is not None:
            due(session, scene)
    session.closed[name] = newest


def scene_of(session: Session, name: str) -> Scene | None:
    """How an endpoint stands; None while nothing has come back from it, or it has no [monitor]."""
    endpoint, now = session.ledger.get_endpoint(name), event_now(session, name)
    if endpoint is None or now is None or not endpoint.options.get("monitor"):
        return None
    promotions = tuple(session.ledger.list_promotions(name))
    return Scene(endpoint, Spec.model_validate(endpoint.options["monitor"]), now, promotions)


def standing(session: Session, endpoint: Endpoint) -> Scene:
    """How an endpoint stands, also before anything has come back from it: then its time is 0."""
    spec = Spec.model_validate(endpoint.options.get("monitor") or {})
    now = event_now(session, endpoint.name) or 0.0
    return Scene(endpoint, spec, now, tuple(session.ledger.list_promotions(endpoint.name)))


def champion_ref(job: str, kind: str) -> str:
    """The ref that names what an endpoint serves."""
    return f"{job}/{kind}@champion"


# ---- what a run has found ----------------------------------------------------------------------------------------


def _take_over(session: Session, turn: Turn) -> None:
    """Take over how a run of ours has ended: its signals, or its decision, with the end of the turn."""
    run = session.ledger.get_run(turn.run)
    if run.state is not RunState.DONE:
        error = (run.error or {}).get("message", "")
        session.ledger.end_turn(turn.run, f"{FAILED}: {error}" if error else str(run.state))
        return
    try:
        if turn.kind == WATCHED:
            _take_report(session, turn)
        elif has_gate(run):
            _take_decision(session, turn, run)
        else:
            session.ledger.end_turn(turn.run, "trained; without [monitor.gate] nothing is promoted by itself")
    except (DamagedError, NotFoundError) as error:
        session.ledger.end_turn(turn.run, f"{FAILED}: {error}")


def _take_report(session: Session, turn: Turn) -> None:
    digest = _output(session, turn.run, WATCH, "report")
    report = _read(session, digest, "report.json")
    signals = [_signal_of(told) for told in report["signals"]]
    facts = {"report": digest, "fresh": report["labels"]["fresh"], "probation": report["probation"]}
    reach("closing.before_signals")
    session.ledger.add_signals(
        turn.endpoint,
        signals,
        event_time=turn.event_time,
        champion=turn.champion,
        report=digest,
        turn=turn.run,
        facts=facts,
    )
    reach("closing.after_signals")


def _signal_of(told: Mapping[str, Json]) -> NewSignal:
    return NewSignal(told["kind"], told["block"] or "", told["value"], told["threshold"], told["evidence"] or {})


def _take_decision(session: Session, turn: Turn, run: Run) -> None:
    digest = _output(session, turn.run, GATE, "decision")
    told = _read(session, digest, "decision.json")
    challenger, execution = challenger_of(session, run)
    decision = Decision(
        run=turn.run,
        endpoint=turn.endpoint,
        verdict=told["verdict"],
        reasons=tuple(told["reasons"]),
        missing=tuple(told["missing"]),
        champion=turn.champion,
        challenger=challenger or turn.facts["challenger"],
        execution=execution or turn.facts.get("execution"),
        artifact=digest,
        event_time=turn.event_time,
        look=told["look"],
    )
    reach("closing.before_decision")
    session.ledger.add_decision(decision)
    reach("closing.after_decision")


def _output(session: Session, run: int, step: str, name: str) -> str:
    row = next(row for row in session.ledger.list_steps(run) if row.name == step)
    return session.ledger.get_execution(row.execution or "").outputs[name]


def _read(session: Session, digest: str, file: str) -> dict[str, Json]:
    entry = next(entry for entry in session.ledger.get_artifact(digest).files if entry.path == file)
    found: dict[str, Json] = json.loads(session.blobs.get(entry.digest).read_bytes())
    return found


# ---- decisions and probation -------------------------------------------------------------------------------------


def _settle(session: Session, name: str) -> None:
    """Let something come of each decision, once; only the newest may promote."""
    decisions = [decision for decision in session.ledger.list_decisions(name, limit=16) if decision.applied is None]
    for older in reversed(decisions[1:]):
        session.ledger.settle_decision(older.run, "another challenger came")
    scene = scene_of(session, name)
    if not decisions or scene is None:
        return
    newest = decisions[0]
    if outcome := _outcome(scene, newest):
        session.ledger.settle_decision(newest.run, outcome)
    elif not waits_for_a_person(scene, newest):
        promote_decided(session, scene, newest, {"kind": "gate", "run": newest.run})


def _outcome(scene: Scene, decision: Decision) -> str:
    """Why nothing more is to be done about a decision; "" where there is something."""
    if decision.verdict != "promote":
        return {"hold": "held", "reject": "rejected"}[decision.verdict]
    if scene.spec.gate is None:
        return "not promoted: the job has no [monitor.gate] any more"
    if decision.challenger == scene.endpoint.artifact:
        return "it serves already"
    if decision.champion != scene.endpoint.artifact:
        return OTHER_CHAMPION
    if is_rolled_back(decision.challenger, scene.promotions):
        return "not promoted: it was rolled back before, and only a person may promote it again"
    return ""


def waits_for_a_person(scene: Scene, decision: Decision) -> bool:
    """Whether a decision is to promote, and a person must approve of it."""
    by_hand = scene.spec.gate is not None and scene.spec.gate.approve == "hand"
    return by_hand and decision.verdict == WAITS and decision.applied is None


def promote_decided(session: Session, scene: Scene, decision: Decision, cause: Mapping[str, Json]) -> None:
    """Carry out a decision to promote: one transaction, and once."""
    run = session.ledger.get_run(decision.run)
    kind = session.ledger.get_artifact(decision.challenger).kind
    reach("closing.before_promote")
    try:
        session.ledger.promote(
            scene.name,
            digest=decision.challenger,
            execution=decision.execution,
            cause=cause,
            event_time=scene.now,
            state=PromotionState.PROBATION,
            expect=decision.champion,
            decision=decision.run,
            ref=champion_ref(run.job, kind),
        )
    except ConflictError as error:
        session.ledger.settle_decision(decision.run, f"not promoted: {error.message}")
    reach("closing.after_promote")


def _judge_probation(session: Session, name: str) -> None:
    """Keep the newest promotion, or put the former engine back: what the newest watch of it says, or that it failed."""
    endpoint = session.ledger.get_endpoint(name)
    assert endpoint is not None
    scene = standing(session, endpoint)
    if (promotion := scene.probation) is None:
        return
    if scene.endpoint.state is EndpointState.FAILED:
        error = (scene.endpoint.error or {}).get("message", "it doesn't start")
        roll_back(session, scene, f"it failed: {error}", {"kind": "failure"})
        return
    watched = session.ledger.list_turns(name, kind=WATCHED, taken=True, limit=1)
    if not watched or watched[0].facts.get("promotion") != promotion.id:
        return
    told = watched[0].facts.get("probation") or {}
    if told.get("verdict") == "roll_back":
        roll_back(session, scene, told["reason"], {"kind": "probation", "run": watched[0].run})
    elif told.get("verdict") == "keep":
        session.ledger.keep_promotion(promotion.id, reason=told["reason"], event_time=scene.now)


def roll_back(session: Session, scene: Scene, reason: str, cause: Mapping[str, Json]) -> None:
    """Put the former engine back in the place of the newest promotion that stands."""
    standing = next(p for p in scene.promotions if p.digest == scene.endpoint.artifact)
    made = session.ledger.get_artifact(standing.former)
    refs = [ref.name for ref in session.ledger.list_refs() if ref.digest == standing.digest]
    ref = next((name for name in refs if name.endswith(f"/{made.kind}@champion")), None)
    reach("closing.before_roll_back")
    session.ledger.roll_back(standing.id, reason=reason, cause=cause, event_time=scene.now, ref=ref)
    reach("closing.after_roll_back")


# ---- what is due -------------------------------------------------------------------------------------------------


def _watch(session: Session, scene: Scene) -> None:
    """A block has ended since the last watch, or labels of another block's time have come: they may be the last."""
    last = session.ledger.list_turns(scene.name, kind=WATCHED, limit=1)
    labels = newest_event(session.ledger.list_segments(scene.name, kind="labels", newest=RECENT))
    seen = {"until": scene.until, "labels_until": None if labels is None else scene.begins(labels)}
    if last and (last[0].taken is None or seen.items() <= last[0].facts.items()):
        return
    facts = {**seen, **watch_facts(scene), "promotion": scene.probation.id if scene.probation else None}
    plan = partial(watch_run, session, scene, _fresh_from(session, scene), last[0] if last else None)
    _start(session, scene, WATCHED, plan, facts)


def _fresh_from(session: Session, scene: Scene) -> float | None:
    """The cut of the last retraining that came to an end: later labels were not trained on, by anyone."""
    for turn in session.ledger.list_turns(scene.name, kind=RETRAIN, taken=True):
        if not turn.outcome.startswith((FAILED, RunState.CANCELLED)):
            cut: float = turn.facts["cut"]
            return cut
    return None


def _look_again(session: Session, scene: Scene) -> None:
    """Let the gate look again at a challenger: a few times at one that was held, when blocks have ended since; at once
    where another engine has come to serve in the meantime."""
    decisions = session.ledger.list_decisions(scene.name, limit=LOOKS * 8)
    if not decisions or scene.spec.gate is None:
        return
    held, champion = decisions[0], scene.endpoint.artifact
    too_late = held.outcome == OTHER_CHAMPION and held.challenger != champion
    if not too_late and (held.verdict != "hold" or held.champion != champion):
        return
    turns = {turn.run: turn for turn in session.ledger.list_turns(scene.name)}
    if any(turn.kind in JUDGED and turn.taken is None for turn in turns.values()):
        return
    facts = turns[held.run].facts
    same = [d for d in decisions if (d.challenger, d.champion) == (held.challenger, champion)]
    looks = 1 + sum(_was_enough(session, decision, scene.spec) for decision in same)
    if not too_late:
        newest_look = next((turn for turn in turns.values() if turn.kind == LOOK), None)
        until = facts["until"] if newest_look is None else max(facts["until"], newest_look.facts["until"])
        wait = scene.spec.gate.blocks_min // 2 if looks > 1 else 1
        if looks > LOOKS or scene.until < scene.begins(until + (max(1, wait) + 0.5) * _block_seconds(scene)):
            return
    told = {
        "until": scene.until,
        "cut": facts["cut"],
        "look": looks,
        "challenger": held.challenger,
        "execution": held.execution,
    }
    _start(session, scene, LOOK, partial(look_run, session, scene, held, facts["cut"], looks), told)


def _block_seconds(scene: Scene) -> float:
    return {"hour": DAY / 24, "day": DAY, "week": 7 * DAY}[scene.spec.block.by]


def _was_enough(session: Session, decision: Decision, spec: Spec) -> bool:
    """Whether a look has spent some of the error allowed: one with too few blocks could not have promoted."""
    assert spec.gate is not None
    told = _read(session, decision.artifact, "decision.json")
    return bool(told["comparison"]["overall"]["blocks"] >= spec.gate.blocks_min)


def _retrain(session: Session, scene: Scene) -> None:
    """One run for all signals that ask for a retraining, if it may start now."""
    answer = asked(session, scene)
    if not answer.start:
        return
    cause: dict[str, Json] = {
        "kind": "signal",
        "endpoint": scene.name,
        "signals": list(answer.consumes),
        "reason": answer.reason,
    }
    facts = {"until": scene.until, "cut": retrain_cut(scene)}
    _start(session, scene, RETRAIN, partial(retrain_run, session, scene, cause), facts, answer)


def asked(session: Session, scene: Scene) -> Answer:
    """What the trigger says of an endpoint now: start, or what it waits for."""
    rules = scene.spec.retrain
    if rules is None:
        return Answer(False)
    every = session.ledger.list_turns(scene.name)
    turns = [turn for turn in every if turn.kind == RETRAIN]
    last = turns[0] if turns else None
    watched = session.ledger.list_turns(scene.name, kind=WATCHED, taken=True, limit=1)
    fresh = watched[0].facts.get("fresh") if watched and (last is None or watched[0].run > last.run) else None
    first = every[-1:] if last is None else turns[:1]
    facts = Facts(
        now=scene.now,
        champion=scene.endpoint.artifact,
        signals=_fresh_signals(session, scene),
        fresh=fresh,
        since=first[0].event_time if first else None,
        last=last.event_time if last else None,
        today=sum(turn.event_time // DAY == scene.now // DAY for turn in turns),
        is_open=any(turn.kind in JUDGED and turn.taken is None for turn in every),
        stopped=scene.endpoint.state not in UP,
        has_rows=has_rows(session, scene),
    )
    return decide(Rules(rules.on, rules.labels_min, rules.every, rules.cooldown, rules.budget), facts)


def _fresh_signals(session: Session, scene: Scene) -> list[Signal]:
    return session.ledger.list_signals(scene.name, fresh=True)


def _start(
    session: Session,
    scene: Scene,
    kind: str,
    plan: Callable[[], NewRun],
    facts: Mapping[str, Json],
    answer: Answer | None = None,
) -> None:
    """Plan a run and add it, with the signals that it consumes, in one transaction; what can't be planned is told."""
    try:
        new = plan()
    except StoreError:
        raise
    except UsageError:
        return  # no traffic in the window: a block that nothing came in
    except OnejobError as error:
        _warn_once(session, scene.name, f"{kind}: {error}")
        return
    turn = NewTurn(scene.name, kind, scene.now, scene.endpoint.artifact, facts)
    reach("closing.before_add")
    session.ledger.add_turn(
        new, turn, signals=answer.consumes if answer else (), raised=answer.raised if answer else ()
    )
    reach("closing.after_add")


def _warn_once(session: Session, name: str, text: str) -> None:
    subject = f"endpoint/{name}/closing"
    if not any(event.data.get("text") == text for event in session.ledger.events(subject=subject)):
        session.ledger.add_event(subject, "warning", {"text": text})
