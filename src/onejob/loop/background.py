"""The runs that the loop adds by itself: what monitoring, retraining and another look at a challenger are planned from.

Each plan is steps like any other, on artifacts that are there: so they have keys, are found in the cache when they are
asked for twice, and are as reproducible as a person's run. A retraining is planned from the plan that made the
champion: the same steps, on more rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from onejob.core.artifact import Json
from onejob.core.plan import Existing, Output, Plan, Step, Upstream
from onejob.core.records import Decision, Endpoint, NewRun, Promotion, Run, Turn
from onejob.core.spec import counted
from onejob.core.state import PromotionState
from onejob.data import spec as data
from onejob.errors import JobFileError, NotFoundError
from onejob.loop.champion import base_of, block_begins, dataset_of, serving_since
from onejob.loop.lineage import producer
from onejob.loop.planning import LEAK
from onejob.loop.session import Session
from onejob.monitor.plan import (
    GATE,
    LABELLED,
    Earlier,
    Window,
    gate_since,
    gate_step,
    labelled_step,
    watch_since,
    watch_step,
)
from onejob.monitor.spec import Spec

FROM_CHAMPION = ("train", "optimize")
LEFT = ("dataset", "checkpoint", "engine")
ROWS = Output(LABELLED, "labelled")


@dataclass(frozen=True)
class Scene:
    """An endpoint at a moment of event time."""

    endpoint: Endpoint
    spec: Spec
    now: float
    promotions: tuple[Promotion, ...]
    """Newest first."""

    @property
    def name(self) -> str:
        return self.endpoint.name

    @property
    def until(self) -> float:
        """Where the last whole block ends."""
        return self.begins(self.now)

    @property
    def since(self) -> float:
        return serving_since(self.endpoint, self.promotions)

    @property
    def probation(self) -> Promotion | None:
        """The promotion that is on probation: only the newest can be."""
        newest = self.promotions[0] if self.promotions else None
        on = newest is not None and newest.state is PromotionState.PROBATION
        return newest if on and newest is not None and newest.digest == self.endpoint.artifact else None

    def begins(self, time: float) -> float:
        return block_begins(time, self.spec.block.by, self.spec.block.zone)


def watch_run(session: Session, scene: Scene, fresh_from: float | None, last: Turn | None = None) -> NewRun:
    """Watch the champion, up to the last whole block; what the `last` watch has settled isn't looked at again."""
    made = maker(session, scene.endpoint)
    family, env = _family(made), _env(made)
    before = _earlier(scene, last)
    since = scene.since if before is None else before.settled_until
    window = Window(watch_since(scene.spec, since), scene.until, scene.now)
    labelled = labelled_step(scene.spec, session.ledger.list_segments(scene.name), window)
    former = scene.probation.former if scene.probation and scene.spec.gate else None
    watch = watch_step(
        scene.spec,
        family=family,
        labelled=ROWS,
        dataset=Existing(dataset_of(session, scene.endpoint.artifact, scene.endpoint.execution)),
        champion=Existing(scene.endpoint.artifact),
        since=scene.since,
        former=Existing(former) if former else None,
        before=before,
        fresh_from=fresh_from,
    )
    cause: dict[str, Json] = {"kind": "monitor", "endpoint": scene.name, "reason": "a block has ended"}
    return _new(made, (labelled, watch), env, cause)


def watch_facts(scene: Scene) -> dict[str, Json]:
    """What a later watch must agree on to go on from this one's report."""
    values = counted(scene.spec)
    return {"since": scene.since, "rules": {name: values[name] for name in ("block", "horizon", "harm")}}


def _earlier(scene: Scene, last: Turn | None) -> Earlier | None:
    """The last watch's report, if it is of the same champion under the same rules and spares some rows.

    What had no label by then counts as settled only if later labels had come: they may just have been sealed later than
    the traffic.
    """
    if last is None or not last.facts.get("report") or last.champion != scene.endpoint.artifact:
        return None
    settled_until = scene.begins(min(last.event_time, last.facts["labels_until"] or 0.0) - scene.spec.horizon)
    if not watch_facts(scene).items() <= last.facts.items() or settled_until <= scene.since:
        return None
    return Earlier(Existing(last.facts["report"]), settled_until)


def retrain_cut(scene: Scene) -> float:
    """From here on a retraining holds rows out, for the gate."""
    assert scene.spec.retrain is not None
    return scene.begins(scene.now - scene.spec.retrain.hold_out)


def retrain_run(session: Session, scene: Scene, cause: Mapping[str, Json]) -> NewRun:
    """The champion's steps once more, on its rows and those that came back since; then the gate, if there are rules."""
    rules = scene.spec.retrain
    assert rules is not None
    made, cut = maker(session, scene.endpoint), retrain_cut(scene)
    steps = [step for step in _steps(made) if step.stage in FROM_CHAMPION]
    if scene.spec.gate is not None and any(step.options.get("keep") == "best" for step in steps):
        raise JobFileError([LEAK], place=f"run {made.id}")  # promoted by hand; a job with a gate can't be planned so
    trained_on = dataset_of(session, scene.endpoint.artifact, scene.endpoint.execution)
    labelled = labelled_step(scene.spec, session.ledger.list_segments(scene.name), _retrain_window(scene))
    family, env = _family(made), _env(made)
    upstream = Upstream(made.job, made.project, 0, {}, {}, family)
    base = Existing(base_of(session, trained_on))
    spec = data.Spec.model_validate(made.spec["data"])
    extend = data.plan_extend(spec, upstream, base=base, labelled=ROWS, cut=cut, history=rules.history).steps
    left = {name: Output(step.name, name) for step in (*extend, *steps) for name in step.outputs if name in LEFT}
    gate: tuple[Step, ...] = ()
    if scene.spec.gate is not None:
        gate = (
            gate_step(
                scene.spec,
                family=family,
                labelled=ROWS,
                champion=Existing(scene.endpoint.artifact),
                challenger=left.get("engine", left["checkpoint"]),
                dataset=left["dataset"],
                champion_dataset=Existing(trained_on),
            ),
        )
    refs = {f"{made.job}/{kind}@challenger": output for kind, output in left.items()}
    return _new(made, (labelled, *extend, *steps, *gate), env, cause, refs)


def _retrain_window(scene: Scene) -> Window:
    """Whose rows a retraining reads: those to train on, and those that the gate needs."""
    assert scene.spec.retrain is not None
    history, cut = scene.spec.retrain.history, retrain_cut(scene)
    since = 0.0 if history == "all" else min(cut - history, gate_since(scene.spec, cut))
    return Window(since, scene.until, scene.now)


def has_rows(session: Session, scene: Scene) -> bool:
    """Whether there is anything that came back to retrain on."""
    window = _retrain_window(scene)
    found = session.ledger.list_segments(scene.name, kind="traffic", since=window.since, until=window.until, newest=1)
    return bool(found)


def look_run(session: Session, scene: Scene, held: Decision, cut: float, look: int) -> NewRun:
    """A challenger that the gate has held, before it again, with the labels that have come since."""
    made = maker(session, scene.endpoint)
    window = Window(gate_since(scene.spec, cut), scene.until, scene.now)
    labelled = labelled_step(scene.spec, session.ledger.list_segments(scene.name), window)
    gate = gate_step(
        scene.spec,
        family=_family(made),
        labelled=ROWS,
        champion=Existing(scene.endpoint.artifact),
        challenger=Existing(held.challenger),
        dataset=Existing(dataset_of(session, held.challenger, held.execution)),
        champion_dataset=Existing(dataset_of(session, scene.endpoint.artifact, scene.endpoint.execution)),
        look=look,
    )
    cause: dict[str, Json] = {"kind": "monitor", "endpoint": scene.name, "reason": "a held challenger, again"}
    return _new(made, (labelled, gate), _env(made), cause)


def challenger_of(session: Session, run: Run) -> tuple[str, str | None]:
    """(digest, execution) of the engine, else the checkpoint, that a run has left; ("", None) if none."""
    found: tuple[str, str | None] = ("", None)
    for row in session.ledger.list_steps(run.id):
        if row.execution is None:
            continue
        outputs = session.ledger.get_execution(row.execution).outputs
        if digest := outputs.get("engine") or (outputs.get("checkpoint") if not found[0] else None):
            found = (digest, row.execution)
    return found


def maker(session: Session, endpoint: Endpoint) -> Run:
    """The run that made what an endpoint serves."""
    made = producer(session, endpoint.artifact, endpoint.execution)
    if made is None:
        raise NotFoundError("no run is known that made what it serves", place=f"endpoint {endpoint.name}")
    return session.ledger.get_run(made.run)


def has_gate(run: Run) -> bool:
    """Whether a run's plan ends with the gate."""
    return any(step["name"] == GATE for step in run.plan["steps"])


def _steps(run: Run) -> list[Step]:
    return [Step.from_json(step) for step in run.plan["steps"]]


def _family(run: Run) -> str:
    """The family's package, as training was told."""
    trained = next((step for step in _steps(run) if step.name == "train"), None)
    if trained is None or not trained.options.get("family"):
        raise NotFoundError("it has no training step of a family", place=f"run {run.id}")
    return str(trained.options["family"])


def _env(run: Run) -> Mapping[str, str]:
    return next((step.env for step in _steps(run) if step.name == "train"), {})


def _new(
    made: Run,
    steps: Sequence[Step],
    env: Mapping[str, str],
    cause: Mapping[str, Json],
    refs: Mapping[str, Output] | None = None,
) -> NewRun:
    with_env = tuple(replace(step, env=dict(env)) for step in steps)
    return NewRun(made.job, made.project, made.spec, Plan(with_env, None, refs or {}), cause)
