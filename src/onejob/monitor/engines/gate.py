"""The gate's step: champion and challenger on the traffic that neither was trained on, and the decision.

Leaves `decision.json`. Only blocks that begin at the cut or later are compared, and of these only the ones whose labels
have been waited for. Older blocks tell what coverage of labels is usual: for the compared rows, and for the rows that
the challenger was trained on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onejob.core.artifact import Json
from onejob.core.context import StepContext, write_json
from onejob.errors import DataError, OnejobError
from onejob.monitor import gate
from onejob.monitor.blocks import Grouping, means
from onejob.monitor.engines.reading import Labelled, Reference, cut_of, read_labelled, read_reference
from onejob.monitor.engines.scoring import METRICS, Scorer, answers, flipped, height, truth_of
from onejob.monitor.engines.settled import Blocks, blocks
from onejob.monitor.engines.watch import plain

Array = np.ndarray[Any, Any]

FORMAT = 1
DECISION = "decision.json"
USUAL = 28
"""Blocks before the cut that count as those the challenger was trained on; those before them are the usual."""
FEW = 20
"""A category with more values than this is not taken apart into slices by itself."""
UNTOLD = 0.9
"""The share of rows that must have a label where no older blocks tell what is usual."""
REPEATS = 3
"""Each request is replayed so often, and its quickest answer counts: a busy machine is no fault of the model."""


@dataclass(frozen=True)
class Duel:
    """Both models' answers to the rows."""

    rows: Labelled
    blocks: Blocks
    difference: Array
    """The challenger's loss minus the champion's; NaN without a label that both can take."""
    flipped: Array
    score: Array
    """The height of the champion's score."""


def run(context: StepContext) -> None:
    """Reads `labelled`, `champion`, `challenger`, `dataset` and, if there, `champion_dataset`; leaves `decision`."""
    inputs, options = context.inputs, context.options
    rows, reference = read_labelled(inputs["labelled"]), read_reference(inputs["dataset"])
    cuts = [cut_of(inputs[name]) for name in ("dataset", "champion_dataset") if name in inputs]
    cut = max([each for each in cuts if each is not None], default=float("-inf"))
    champion, challenger = (
        Scorer(options["family"], inputs[name], context.threads) for name in ("champion", "challenger")
    )
    context.progress(1, 4, "steps")
    if (champion.output, champion.task) != (challenger.output, challenger.task):
        raise DataError(
            f"the challenger serves {challenger.output!r} and the champion {champion.output!r}: they can't be compared",
            cure="Promote it by hand: `onejob promote`.",
        )
    _check_metric(options["gate"]["metric"], champion)
    duel = _duel(rows, blocks(rows, options), champion, challenger, reference)
    context.progress(2, 4, "steps")
    compared = _compared(duel.blocks, cut)
    rules = _rules(options["gate"])
    least = options["block"]["rows_min"]
    comparison = gate.compare(_answers(duel, compared, options), rules, look=options["look"], min_rows=least)
    gaps = _gaps(duel, cut, rules)
    context.progress(3, 4, "steps")
    replay = _replay(rows, cut, champion, challenger, context.setup.get("replay", 0))
    decision = gate.decide(comparison, rules, gaps=gaps, replay=replay, look=options["look"])
    champion.close()
    challenger.close()
    _leave(context, duel, compared, decision, cut)


def _leave(context: StepContext, duel: Duel, compared: Array, decision: gate.Decision, cut: float) -> None:
    inputs = context.inputs
    told = {
        "format": FORMAT,
        "champion": inputs["champion"].digest,
        "challenger": inputs["challenger"].digest,
        "cut": cut,
        "now": duel.rows.meta["now"],
        "blocks": _blocks_told(duel, compared, context.options["block"]["rows_min"]),
        "waiting": [duel.blocks.grouping.ids[at] for at in np.flatnonzero(_after(duel.blocks, cut) & ~compared)],
        **decision.to_json(),
    }
    write_json(context.out("decision") / DECISION, plain(told))
    context.progress(4, 4, "steps")
    meta = {
        "format": FORMAT,
        "verdict": decision.verdict,
        "reasons": list(decision.reasons),
        "missing": list(decision.missing),
        "look": decision.look,
        "cut": plain(cut),
    }
    context.measure({"verdict": decision.verdict, "blocks": decision.comparison.overall.blocks})
    context.emit("decision", "decision", meta)


# ---- the comparison ----------------------------------------------------------------------------------------------


def _duel(rows: Labelled, found: Blocks, champion: Scorer, challenger: Scorer, reference: Reference) -> Duel:
    first, second = answers(champion, rows), answers(challenger, rows)
    truth = truth_of(champion, rows.label, reference)
    # each reads the labels itself: two models may know other classes
    difference = truth_of(challenger, rows.label, reference).losses(second) - truth.losses(first)
    flips = flipped(champion, first, challenger, second, truth.scale)
    return Duel(rows, found, difference, flips, height(champion.task, first))


def _after(found: Blocks, cut: float) -> Array:
    """Blocks of which no row lies before the cut: its weather was trained on, if any row of it was."""
    return np.asarray(found.begins >= cut)


def _compared(found: Blocks, cut: float) -> Array:
    return np.asarray(_after(found, cut) & found.settled)


def _answers(duel: Duel, compared: Array, options: Mapping[str, Json]) -> gate.Answers:
    inside = compared[duel.blocks.grouping.index]
    grouping = _only(duel.blocks.grouping, compared, inside)
    slices = _slices(duel.rows, inside, options["gate"]["slices"])
    return gate.Answers(grouping, duel.difference[inside], duel.flipped[inside], slices)


def _only(grouping: Grouping, chosen: Array, inside: Array) -> Grouping:
    """The grouping of the rows of some blocks, without the others' names."""
    number = np.cumsum(chosen) - 1
    ids = tuple(name for name, kept in zip(grouping.ids, chosen, strict=True) if kept)
    return Grouping(ids, number[grouping.index[inside]], grouping.first[chosen])


def _slices(rows: Labelled, inside: Array, asked: list[str] | None) -> dict[str, Array]:
    inputs = rows.inputs
    unknown = [name for name in asked or [] if name not in inputs]
    if unknown:
        raise DataError(
            f"there is no captured column {unknown[0]!r} to take apart",
            place="[monitor.gate] slices",
            cure=f"Captured: {', '.join(inputs)}.",
        )
    told = asked if asked is not None else [name for name, values in inputs.items() if values.dtype == object]
    found = {}
    for name in told:
        texts = np.array(["(none)" if value is None else str(value) for value in inputs[name][inside].tolist()], str)
        if asked is not None or len(np.unique(texts)) <= FEW:
            found[name] = texts
    return found


def _gaps(duel: Duel, cut: float, rules: gate.Rules) -> tuple[gate.Gap, ...]:
    """Label coverage of the compared time and of the trained time beside the usual, by height of the champion's score.

    Blocks count by age, not by coverage, else those with missing labels would be left out of the very question.
    """
    found = duel.blocks
    due, after = found.due, _after(found, cut)
    before = np.flatnonzero(due & ~after)
    half = len(before) // 2 if len(before) >= 4 else 0
    trained = before[len(before) - min(USUAL, half) :]
    usual = before[: len(before) - len(trained)]
    edges = _thirds(duel.score[np.isin(found.grouping.index, usual)])

    def coverage(chosen: Array) -> gate.Coverage:
        mask = np.zeros(len(found.grouping.ids), bool)
        mask[chosen] = True
        inside = mask[found.grouping.index]
        grouping = _only(found.grouping, mask, inside)
        return gate.coverage(grouping, duel.rows.known[inside], duel.score[inside], edges)

    known, recent = coverage(usual), coverage(np.flatnonzero(due & after))
    if len(usual) < 2:
        return _without_usual(recent)
    compared = gate.gaps(known, recent, rules, what="the compared traffic")
    return (*compared, *gate.gaps(known, coverage(trained), rules, what="the traffic trained on"))


def _without_usual(recent: gate.Coverage) -> tuple[gate.Gap, ...]:
    """Nobody knows yet what coverage is usual, so a low one is no proof of anything."""
    if not recent.ids:
        return ()
    share = float(recent.shares[:, 0].mean())
    what = "the compared traffic: all rows (no older blocks tell what is usual)"
    return (gate.Gap(what, 1.0, share, UNTOLD, share < UNTOLD),)


def _thirds(score: Array) -> list[float]:
    score = score[np.isfinite(score)]
    return [float(edge) for edge in np.quantile(score, [1 / 3, 2 / 3])] if len(score) else []


def _blocks_told(duel: Duel, compared: Array, least: int) -> list[dict[str, Json]]:
    kept = {name for name, chosen in zip(duel.blocks.grouping.ids, compared, strict=True) if chosen}
    found = means(duel.blocks.grouping, duel.difference, min_rows=least).blocks
    return [{"block": each.id, "rows": each.rows, "difference": each.value} for each in found if each.id in kept]


def _rules(told: Mapping[str, Json]) -> gate.Rules:
    return gate.Rules(told["promote"], told["margin"], min_blocks=told["blocks_min"])


def _check_metric(asked: str | None, scorer: Scorer) -> None:
    if asked is not None and asked != METRICS[scorer.task]:
        raise DataError(
            f"{asked!r} has no meaning for the model's {scorer.output}",
            place="[monitor.gate] metric",
            cure=f"Use {METRICS[scorer.task]!r}, or leave it out.",
        )


# ---- replay ------------------------------------------------------------------------------------------------------


def _replay(rows: Labelled, cut: float, champion: Scorer, challenger: Scorer, most: int) -> gate.Replay | None:
    """Captured requests, evenly spaced over the compared time, answered by both in turn."""
    requests = _requests(rows, cut, most)
    if not requests:
        return None
    inputs = rows.inputs
    taken: dict[str, list[float]] = {"champion": [], "challenger": []}
    errors = dict.fromkeys(taken, 0)
    models = {"champion": champion, "challenger": challenger}
    for number, chosen in enumerate(requests):
        columns = {name: values[chosen] for name, values in inputs.items()}
        for name in ("champion", "challenger") if number % 2 else ("challenger", "champion"):
            seconds = _asked(models[name], columns)
            if seconds is None:
                errors[name] += 1
            else:
                taken[name].append(seconds)
    level = gate.tail_level(len(requests))
    return gate.Replay(
        requests=len(requests),
        errors=errors["challenger"],
        champion_errors=errors["champion"],
        tail_ms=_tail(taken["challenger"], level),
        champion_tail_ms=_tail(taken["champion"], level),
        level=level,
    )


def _requests(rows: Labelled, cut: float, most: int) -> list[Array]:
    """The rows of each request that is replayed."""
    later = np.flatnonzero(rows.time >= cut)
    if not most or not len(later):
        return []
    names, index = np.unique(rows.request[later].astype(str), return_inverse=True)
    order = np.argsort(index, kind="stable")
    parts = np.split(later[order], np.cumsum(np.bincount(index))[:-1])
    chosen = np.unique(np.linspace(0, len(names) - 1, min(most, len(names))).astype(np.int64))
    return [parts[at] for at in chosen.tolist()]


def _asked(model: Scorer, columns: Mapping[str, Array], clock: Callable[[], float] = time.perf_counter) -> float | None:
    """The quickest of a few answers, in seconds; None where the model failed or answered no number."""
    taken = []
    for _ in range(REPEATS):
        begun = clock()
        try:
            model.answer(columns)
        except OnejobError:
            return None
        taken.append(clock() - begun)
    return min(taken)


def _tail(seconds: list[float], level: float) -> float:
    return round(1000 * float(np.quantile(seconds, level)), 3) if seconds else 0.0
