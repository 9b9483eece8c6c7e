"""Commands that explain: why a step ran or didn't, and how two things differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from onejob.core import key as keys
from onejob.core.artifact import Json
from onejob.core.key import StepKey
from onejob.core.records import Execution, Run, StepRow
from onejob.core.state import StepState
from onejob.errors import NotFoundError, UsageError
from onejob.loop.commands.look import newest_run
from onejob.loop.commands.run import check, load_job
from onejob.loop.resolve import Target, resolve
from onejob.loop.session import Session
from onejob.loop.story import outlook, story
from onejob.loop.views import Change, DiffView, StepWhy, WhyView

WOULD_BE_CACHED = "would be cached"


def why(session: Session, ref: str) -> WhyView:
    """Which component of its key made each step run, or what made it a hit.

    For a run, a step, or an artifact: what happened; for an endpoint its story, too. For a job file: what happened in
    its newest run, and for a job that has been changed since, what would happen now.
    """
    target = resolve(session, ref)
    match target.kind:
        case "job":
            return WhyView(ref, tuple(_why_job(session, target)))
        case "run":
            assert target.run is not None
            return WhyView(ref, tuple(_why_row(session, target.run, r) for r in _rows(session, target.run)))
        case "step":
            assert target.run is not None
            assert target.step is not None
            return WhyView(ref, (_why_row(session, target.run, target.step),))
        case "artifact" | "execution":
            return WhyView(ref, tuple(_why_artifact(session, target)))
        case "endpoint":
            assert target.endpoint is not None
            endpoint = target.endpoint
            made = Target("artifact", digest=endpoint.artifact)
            steps = tuple(_why_artifact(session, made, endpoint.execution))
            return WhyView(ref, steps, tuple(story(session, endpoint.name)), outlook(session, endpoint.name))
    raise UsageError(f"{target.noun} has no key", place=ref, cure="Name a run, a step, a ref, a digest or a job file.")


def _why_job(session: Session, target: Target) -> Iterator[StepWhy]:
    """What each step of a job would do now, against what it did last."""
    assert target.path is not None
    job = load_job(target.path)
    for planned in check(session, target.path).steps:
        verdict = {"cached": WOULD_BE_CACHED, "run": "would run"}.get(planned.verdict, "unknown")
        if planned.key is None:
            yield StepWhy(planned.name, None, verdict, planned.reason)
            continue
        try:
            components: Mapping[str, Json] = session.ledger.get_key(planned.key)
        except NotFoundError:
            components = {}
        if planned.verdict == "cached" and (row := _row_with_key(session, job.name, planned.name, planned.key)):
            yield _why_row(session, session.ledger.get_run(row.run), row, verdict=verdict, reason=planned.reason)
            continue
        yield StepWhy(planned.name, None, verdict, planned.reason, key=planned.key, components=components)


def _row_with_key(session: Session, job: str, step: str, key: str) -> StepRow | None:
    for run in session.ledger.list_runs(job=job, limit=20):
        for row in session.ledger.list_steps(run.id):
            if row.name == step and row.key == key:
                return row
    return None


def _why_artifact(session: Session, target: Target, execution: str | None = None) -> Iterator[StepWhy]:
    made = target.execution or _maker(
        session, target.digest, execution or (target.ref.execution if target.ref else None)
    )
    run = session.ledger.get_run(made.run)
    for row in _rows(session, run):
        if row.name == made.step:
            yield _why_row(session, run, row)


def _maker(session: Session, digest: str, execution: str | None) -> Execution:
    if execution:
        return session.ledger.get_execution(execution)
    made = session.ledger.producers(digest)
    if not made:
        raise NotFoundError("no execution left this artifact; it is a source", place=digest)
    return made[0]


def _rows(session: Session, run: Run) -> list[StepRow]:
    return session.ledger.list_steps(run.id)


def _why_row(session: Session, run: Run, row: StepRow, *, verdict: str = "", reason: str = "") -> StepWhy:
    if row.key is None:
        return StepWhy(row.name, run.id, row.state, row.reason)
    components = session.ledger.get_key(row.key)
    cached = (row.cached and row.state is StepState.DONE) or verdict == WOULD_BE_CACHED
    other = None if cached else session.ledger.last_step_with_other_key(run.job, row.name, row.key, run.id)
    changes: tuple[Change, ...] = ()
    if other and other.key:
        changes = _changes(session.ledger.get_key(other.key), components)
    return StepWhy(
        step=row.name,
        run=run.id,
        verdict=verdict or ("cached" if cached else "ran" if row.execution else str(row.state)),
        reason=reason or _reason(session, run, row, cached, changes),
        compared=f"{other.run}/{other.name}" if other else "",
        changes=changes,
        key=row.key,
        components=components,
    )


def _reason(session: Session, run: Run, row: StepRow, cached: bool, changes: tuple[Change, ...]) -> str:
    if cached and row.execution:
        made = session.ledger.get_execution(row.execution)
        return f"every component of its key is the same as in run {made.run}"
    if row.name in run.forced:
        return "it was forced (--force or --from)"
    return "; ".join(change.text for change in changes) or row.reason or "first time"


def _changes(old: Mapping[str, Json], new: Mapping[str, Json]) -> tuple[Change, ...]:
    found: list[Any] = keys.explain(StepKey(old), StepKey(new))
    return tuple(Change(c.component, c.old, c.new, c.sentence()) for c in found)


# ---- diff --------------------------------------------------------------------------------------------------------


def diff(session: Session, a: str, b: str) -> DiffView:
    """How two runs, steps or artifacts differ: what went in (their keys), and what was measured."""
    left, right = _sides(session, a), _sides(session, b)
    changes: list[Change] = []
    for step in dict.fromkeys([*left, *right]):
        one, two = left.get(step), right.get(step)
        if one is None or two is None:
            changes.append(Change(step, _short(one), _short(two), f"{step} is only in {b if one is None else a}"))
            continue
        where = f"{step}." if len(left) > 1 or len(right) > 1 else ""
        same = _changes(session.ledger.get_key(one.key), session.ledger.get_key(two.key))
        changes += [Change(where + c.component, c.old, c.new, f"{step}: {c.text}" if where else c.text) for c in same]
        changes += list(_measured(where, one.measured, two.measured))
    return DiffView(a, b, tuple(changes))


def _sides(session: Session, ref: str) -> dict[str, Execution]:
    target = resolve(session, ref)
    if target.kind in ("artifact", "execution"):
        made = target.execution or _maker(session, target.digest, target.ref.execution if target.ref else None)
        return {made.step: made}
    if target.kind == "endpoint" and target.endpoint:
        made = _maker(session, target.endpoint.artifact, target.endpoint.execution)
        return {made.step: made}
    if target.kind == "request":
        raise UsageError("requests can't be compared", place=ref, cure="Name two runs, steps or artifacts.")
    run = target.run or newest_run(session, target.path)
    rows = [target.step] if target.step else _rows(session, run)
    return {row.name: session.ledger.get_execution(row.execution) for row in rows if row.execution}


def _short(execution: Execution | None) -> Json:
    return execution.id if execution else None


def _measured(where: str, old: Mapping[str, Json], new: Mapping[str, Json], path: str = "measured") -> Iterator[Change]:
    for name in dict.fromkeys([*old, *new]):
        before, after, place = old.get(name), new.get(name), f"{path}.{name}"
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _measured(where, before, after, place)
        elif before != after:
            yield Change(where + place, before, after, f"{where}{place} {_number(before)} -> {_number(after)}")


def _number(value: Json) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
