"""The watch over a champion: what its labelled traffic says about harm, beside warning, description and coverage.

Leaves `report.json`. Everything is scored anew on the captured inputs, by the champion and during probation by the
former one, so that both are judged on the same rows, whichever answered them. An earlier report of the same champion
gives the blocks that no label can change any more, so that a watch costs the same however long a champion serves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onejob.core.artifact import Json
from onejob.core.context import StepContext, write_json
from onejob.monitor import gate, harm, warning
from onejob.monitor.blocks import Block
from onejob.monitor.engines.compared import describe_all, warn_early
from onejob.monitor.engines.reading import Labelled, Reference, cut_of, read_labelled, read_reference
from onejob.monitor.engines.scoring import Scorer, Truth, answers, reference_forecast, truth_of
from onejob.monitor.engines.settled import Blocks, blocks
from onejob.monitor.spec import BLOCK_SECONDS

Array = np.ndarray[Any, Any]

FORMAT = 1
REPORT = "report.json"


@dataclass(frozen=True)
class Scored:
    """All rows of the window, with what was made of those since the champion began to serve; else NaN."""

    rows: Labelled
    blocks: Blocks
    mine: Array
    forecast: Array
    truth: Truth
    loss: Array
    reference_loss: Array
    former_loss: Array | None


def run(context: StepContext) -> None:
    """Reads `labelled`, `dataset`, `champion`, and `former` and `before` if there; leaves the output `report`."""
    inputs, options = context.inputs, context.options
    rows, reference = read_labelled(inputs["labelled"]), read_reference(inputs["dataset"])
    champion = Scorer(options["family"], inputs["champion"], context.threads)
    context.progress(1, 4, "steps")
    scored = _score(context, champion, rows, reference)
    if scored.truth.strange:
        context.warn(f"{scored.truth.strange} labels are none that the model can take: they count as not known")
    context.progress(2, 4, "steps")
    before = _before(context)
    told = _merged(_told(scored), before, options)
    rules = options["harm"]
    state = _state(harm.Harm(rules["alpha"], rules["run_length"]), told, "difference", options)
    reading = harm.read(state)
    probation = _probation(told, options)
    early = warn_early(champion, rows.take(scored.mine), scored.forecast[scored.mine], reference, options)
    context.progress(3, 4, "steps")
    fresh = _fresh(context, scored, before)
    signals = [*_harm_signals(state, reading), *_warning_signals(early), *_label_signals(fresh, told, options)]
    report = {
        "format": FORMAT,
        "champion": inputs["champion"].digest,
        "former": inputs["former"].digest if "former" in inputs else None,
        "since": options["since"],
        "now": rows.meta["now"],
        "blocks": told,
        "harm": {"state": state.to_json(), "reading": reading.to_json()},
        "warning": early.to_json() if early else None,
        "description": describe_all(rows.take(scored.mine), reference, options),
        "coverage": _coverage(rows.meta),
        "labels": fresh,
        "signals": signals,
        "probation": probation.to_json() if probation else None,
    }
    write_json(context.out("report") / REPORT, plain(report))
    champion.close()
    context.progress(4, 4, "steps")
    context.measure({"blocks": len(told), "signals": [each["kind"] for each in signals]})
    meta = {
        "format": FORMAT,
        "now": rows.meta["now"],
        "signals": len(signals),
        "harm": bool(reading.e_alarm or reading.run_alarms),
        "probation": probation.verdict if probation else None,
    }
    context.emit("report", "report", meta)


def plain(value: Json) -> Json:
    """As JSON, which has neither infinity nor NaN: null."""
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- what was made of the rows -----------------------------------------------------------------------------------


def _score(context: StepContext, champion: Scorer, rows: Labelled, reference: Reference) -> Scored:
    options = context.options
    truth = truth_of(champion, rows.label, reference)
    found = blocks(rows, options)
    window = options["harm"]["reference_blocks"] * BLOCK_SECONDS[options["block"]["by"]]
    usual = reference_forecast(champion, rows, truth, found.grouping, reference, window)
    mine = rows.time >= options["since"]
    forecast = _answered(champion, rows, mine)
    former = None
    if "former" in context.inputs:
        other = Scorer(options["family"], context.inputs["former"], context.threads)
        former = truth_of(other, rows.label, reference).losses(_answered(other, rows, mine))
        other.close()
    # where the champion's answer isn't known, neither is what the reference would have to be compared with
    loss = truth.losses(forecast)
    reference_loss = np.where(np.isfinite(loss), truth.losses(usual), np.nan)
    return Scored(rows, found, mine, forecast, truth, loss, reference_loss, former)


def _answered(model: Scorer, rows: Labelled, mine: Array) -> Array:
    """The model's forecasts of some rows; NaN for the others."""
    if not mine.any():
        return np.full((len(rows), 1), np.nan) if model.task == "classes" else np.full(len(rows), np.nan)
    some = answers(model, rows.take(mine))
    found = np.full((len(rows), *some.shape[1:]), np.nan)
    found[mine] = some
    return found


def _told(scored: Scored) -> list[dict[str, Json]]:
    """Each block since the champion began to serve, in figures."""
    found, grouping = scored.blocks, scored.blocks.grouping
    count = len(grouping.ids)
    mine = np.bincount(grouping.index[scored.mine], minlength=count)
    label = scored.truth.values if scored.truth.task != "classes" else np.full(len(scored.rows), np.nan)
    columns = {
        "label_mean": label,
        "loss": scored.loss,
        "reference_loss": scored.reference_loss,
        "difference": scored.loss - scored.reference_loss,
    }
    if scored.former_loss is not None:
        columns |= {"former_loss": scored.former_loss, "former_difference": scored.loss - scored.former_loss}
    figures = {name: _block_means(grouping.index, values, count) for name, values in columns.items()}
    compared = np.bincount(grouping.index[np.isfinite(scored.loss)], minlength=count)
    told: list[dict[str, Json]] = [
        {
            "block": grouping.ids[at],
            "begins": float(found.begins[at]),
            "rows": int(mine[at]),
            "labelled": int(compared[at]),
            "coverage": float(found.coverage[at]),
            "settled": bool(found.settled[at]),
            **{name: float(values[at]) for name, values in figures.items()},
        }
        for at in np.flatnonzero(mine)
    ]
    return [dict(plain(each)) for each in told]


def _block_means(index: Array, values: Array, count: int) -> Array:
    known = np.isfinite(values)
    rows = np.bincount(index[known], minlength=count)
    sums = np.bincount(index[known], weights=values[known], minlength=count)
    return np.asarray(np.where(rows > 0, sums / np.maximum(rows, 1), np.nan))


# ---- an earlier report -------------------------------------------------------------------------------------------


def _before(context: StepContext) -> dict[str, Json] | None:
    """The earlier report, if it is of this champion and this stretch of service."""
    if "before" not in context.inputs:
        return None
    report: dict[str, Json] = json.loads(context.inputs["before"].file(REPORT).read_text())
    if report["champion"] != context.inputs["champion"].digest or report["since"] != context.options["since"]:
        context.warn("the earlier report is of another champion: its blocks don't count")
        return None
    same = "former" in context.inputs and report["former"] == context.inputs["former"].digest
    gone = () if same else ("former_loss", "former_difference")
    blocks = [{name: value for name, value in each.items() if name not in gone} for each in report["blocks"]]
    return {**report, "blocks": blocks}


def _merged(
    told: list[dict[str, Json]], before: Mapping[str, Json] | None, options: Mapping[str, Json]
) -> list[dict[str, Json]]:
    """The earlier report's blocks up to where they may have changed; then the window's own."""
    if before is None:
        return told
    until = options["settled_until"]
    earlier = [each for each in before["blocks"] if each["begins"] < until]
    return [*earlier, *(each for each in told if each["begins"] >= until)]


# ---- what it means -----------------------------------------------------------------------------------------------


def _state(start: harm.Harm, told: Sequence[Mapping[str, Json]], figure: str, options: Mapping[str, Json]) -> harm.Harm:
    """The blocks that count, with one of their differences."""
    counted = [
        Block(each["block"], each["labelled"], each[figure])
        for each in told
        if each["settled"] and each["labelled"] >= options["block"]["rows_min"] and each.get(figure) is not None
    ]
    return harm.update_all(start, counted)


def _probation(told: Sequence[Mapping[str, Json]], options: Mapping[str, Json]) -> gate.Probation | None:
    if options["probation"] is None:
        return None
    return gate.probation(_state(gate.on_probation(), told, "former_difference", options), options["probation"])


def _harm_signals(state: harm.Harm, reading: harm.Reading) -> list[dict[str, Json]]:
    """One for each block at which a form alarmed; where both did, the probability speaks."""
    bets = harm.fractions(np.array([block.value for block in state.blocks]), state.bound)
    path, _ = harm.restarted(bets, state.run_length)
    runs = {block.id: float(value) for block, value in zip(state.blocks, path, strict=True)}
    found = {name: ("restarted", runs[name], reading.run_threshold) for name in reading.run_alarms}
    if reading.e_alarm is not None:
        found[reading.e_alarm] = ("e_process", reading.e_peak, reading.e_threshold)
    says = reading.says()
    return [
        {
            "kind": "harm",
            "block": name,
            "value": value,
            "threshold": threshold,
            "evidence": {"form": form, "says": says[form], "blocks": reading.blocks, "mean": reading.mean},
        }
        for name, (form, value, threshold) in sorted(found.items())
    ]


def _warning_signals(early: warning.Reading | None) -> list[dict[str, Json]]:
    if early is None or early.alarm is None or early.descriptive_only:
        return []
    evidence = {"columns": dict(early.columns), "blocks": early.blocks, "peak": early.peak}
    return [
        {
            "kind": "warning",
            "block": early.alarm,
            "value": early.peak,
            "threshold": early.threshold,
            "evidence": evidence,
        }
    ]


def _fresh(context: StepContext, scored: Scored, before: Mapping[str, Json] | None) -> dict[str, Json]:
    """Labelled rows that no training has seen yet, and how many of them are of each block."""
    rows, grouping = scored.rows, scored.blocks.grouping
    told = context.options["fresh_from"]
    since = told if told is not None else cut_of(context.inputs["dataset"])
    new = rows.known if since is None else rows.known & (rows.time >= since)
    counts = np.bincount(grouping.index[new], minlength=len(grouping.ids))
    found = [[float(scored.blocks.begins[at]), int(counts[at])] for at in np.flatnonzero(counts)]
    if before is not None:
        until, earlier = context.options["settled_until"], before["labels"]
        same = earlier["fresh_from"] == since
        kept = [each for each in earlier["blocks"] if each[0] < until and (same or since is None or each[0] >= since)]
        found = [*kept, *(each for each in found if each[0] >= until)]
    return {"fresh": sum(count for _, count in found), "fresh_from": since, "blocks": found}


def _label_signals(
    fresh: Mapping[str, Json], told: Sequence[Mapping[str, Json]], options: Mapping[str, Json]
) -> list[dict[str, Json]]:
    least = options["labels_min"]
    if least is None or fresh["fresh"] < least:
        return []
    block = told[-1]["block"] if told else None
    evidence = {name: fresh[name] for name in ("fresh", "fresh_from")}
    return [{"kind": "labels", "block": block, "value": fresh["fresh"], "threshold": least, "evidence": evidence}]


def _coverage(meta: Mapping[str, Json]) -> dict[str, Json]:
    told = ("rows", "labelled", "label_coverage", "label_delay_median", "label_delay_p90")
    return {**meta["counts"], **{name: meta.get(name) for name in told}}
