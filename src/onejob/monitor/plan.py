"""The monitor's steps: labelled rows, the watch over them, the gate. Pure: the loop says what to look at, and when.

All moments are seconds since 1970 of *event time*. A step's inputs are artifacts, so it has a key and a lineage like
any other; what it finds is an artifact too (`report`, `decision`), of which the loop makes signals and promotions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onejob.core.artifact import Json
from onejob.core.plan import Existing, Input, Needs, Step
from onejob.core.records import Segment
from onejob.core.spec import counted
from onejob.errors import UsageError
from onejob.monitor import slo
from onejob.monitor.spec import BLOCK_SECONDS, Gate, Slo, Spec

LABELLED, WATCH, GATE = "monitor.labelled", "monitor.watch", "monitor.gate"
"""Names of the steps; their outputs are `labelled`, `report` and `decision`."""

ENGINES = ("onejob.engines.onnxruntime", "onejob.engines.openvino", "onejob.engines.pytorch")
"""Modules that scoring loads by name."""

USUAL_BLOCKS = 28
"""Blocks before the cut that say what coverage of labels is usual; the gate looks at as many again before these."""

USUAL_WATCHED = 14
"""Blocks before those that a watch looks at anew; they say what coverage of labels is usual."""


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of event time, from `since` up to but without `until`, looked at when it was `now`."""

    since: float
    until: float
    now: float


@dataclass(frozen=True, slots=True)
class Earlier:
    """An earlier report of a watch, whose blocks that began before `settled_until` will change no more."""

    report: Input
    settled_until: float


def labelled_step(spec: Spec, segments: Sequence[Segment], window: Window) -> Step:
    """The captured rows of a window with their labels; `segments` are the endpoint's, of both kinds."""
    used = [each for each in segments if _matters(each, window)]
    inputs: dict[str, Input] = {f"{each.kind}.{each.number:06d}": Existing(each.digest) for each in used}
    if not any(each.kind == "traffic" for each in used):
        raise UsageError(
            "no traffic was captured in this window", place=LABELLED, cure="`onejob show ENDPOINT` tells what was."
        )
    options = {"from": window.since, "until": window.until, "now": window.now, "horizon": spec.horizon}
    return _step(spec, LABELLED, "labelled", options, inputs, "labelled", ())


def watch_step(
    spec: Spec,
    *,
    family: str,
    labelled: Input,
    dataset: Input,
    champion: Input,
    since: float,
    former: Input | None = None,
    before: Earlier | None = None,
    fresh_from: float | None = None,
) -> Step:
    """Watch a champion from `since` on (when it began to serve).

    `dataset` is what it was trained on; `former` is given during probation; `before` is an earlier report of the same
    champion, whose blocks count as they were found where all their labels had been waited for; labels count as fresh
    from `fresh_from` on (the cut of the last retraining; else of the champion's dataset).
    """
    inputs: dict[str, Input] = {"labelled": labelled, "dataset": dataset, "champion": champion}
    inputs |= {"former": former} if former is not None else {}
    inputs |= {"before": before.report} if before is not None else {}
    values = counted(spec)
    options = {name: values[name] for name in ("block", "horizon", "harm")}
    options |= {
        "family": family,
        "since": since,
        "fresh_from": fresh_from,
        "settled_until": before.settled_until if before is not None else None,
        "labels_min": spec.retrain.labels_min if spec.retrain else None,
        "probation": _blocks(spec, spec.gate.probation) if spec.gate and former is not None else None,
    }
    return _step(spec, WATCH, "watch", options, inputs, "report", _models(family))


def gate_step(
    spec: Spec,
    *,
    family: str,
    labelled: Input,
    champion: Input,
    challenger: Input,
    dataset: Input,
    champion_dataset: Input | None = None,
    look: int = 1,
) -> Step:
    """Hold a challenger against the champion; `look` counts how often this one has been before the gate.

    `dataset` is the challenger's, `champion_dataset` the champion's: rows of the time that either has seen are left
    out. The window of `labelled` must reach back before the cut (`gate_since`), to tell what coverage is usual.
    """
    if spec.gate is None:
        raise UsageError("there are no rules for a promotion", place="[monitor.gate]", cure="Add the table to the job.")
    inputs = {"labelled": labelled, "champion": champion, "challenger": challenger, "dataset": dataset}
    inputs |= {"champion_dataset": champion_dataset} if champion_dataset is not None else {}
    values = counted(spec)
    rules = _rules(spec.gate)
    options = {"family": family, "look": look, "block": values["block"], "horizon": spec.horizon, "gate": rules}
    setup: dict[str, Json] = {"replay": spec.gate.replay}
    return _step(spec, GATE, "gate", options, inputs, "decision", _models(family), setup)


def gate_since(spec: Spec, cut: float) -> float:
    """How far back the labelled rows of a gate must reach, at least."""
    return cut - 2 * USUAL_BLOCKS * BLOCK_SECONDS[spec.block.by]


def watch_since(spec: Spec, since: float) -> float:
    """How far back the labelled rows of a watch of blocks from `since` on must reach.

    That is for the reference's forecast of the first block, and for what coverage of labels is usual.
    """
    return since - (max(spec.harm.reference_blocks, USUAL_WATCHED) + 1) * BLOCK_SECONDS[spec.block.by]


def slo_signals(rules: Slo, lines: Iterable[Mapping[str, Json]], now: float) -> list[dict[str, Json]]:
    """Signals of the service, from the collected series (`monitor/collect.py`); `now` is by the wall clock."""
    series = list(lines)
    found: list[slo.Alert] = []
    if rules.error_rate is not None:
        found += slo.alerts(slo.failed(series), slo.Objective("error_rate", 1 - rules.error_rate), now)
    if rules.p99_ms is not None:
        found += slo.alerts(slo.slow(series, rules.p99_ms), slo.Objective("p99_ms", 0.99), now)
    return [
        {
            "kind": "slo",
            "block": None,
            "value": alert.long.rate,
            "threshold": alert.threshold,
            "evidence": alert.to_json(),
        }
        for alert in found
    ]


def _matters(segment: Segment, window: Window) -> bool:
    """Traffic of the window; and every label from its beginning on, however late it came."""
    if segment.kind == "traffic":
        return segment.begins < window.until and segment.ends >= window.since
    return segment.kind == "labels" and segment.ends >= window.since


def _blocks(spec: Spec, duration: float) -> int:
    return max(1, math.ceil(duration / BLOCK_SECONDS[spec.block.by]))


def _rules(gate: Gate) -> dict[str, Json]:
    """What of [monitor.gate] decides; when and by whom it is applied is the loop's."""
    values = counted(gate)
    return {name: values[name] for name in ("promote", "margin", "metric", "blocks_min", "slices")}


def _models(family: str) -> tuple[str, ...]:
    return (f"{family}.encode", *ENGINES)


def _step(
    spec: Spec,
    name: str,
    module: str,
    options: Mapping[str, Json],
    inputs: Mapping[str, Input],
    output: str,
    roots: tuple[str, ...],
    setup: Mapping[str, Json] | None = None,
) -> Step:
    resources = spec.resources
    return Step(
        name=name,
        stage="monitor",
        entry=f"onejob.monitor.engines.{module}:run",
        options=options,
        inputs=inputs,
        outputs=(output,),
        needs=Needs(cpus=resources.cpus, memory=resources.memory, gpus=resources.gpus),
        seed=None,
        hardware="exact" if roots else "none",  # scores depend on the processor in their last bits
        roots=roots,
        imports=tuple(spec.imports),
        reads=tuple(spec.reads),
        timeout=spec.timeout,
        retries=spec.retries,
        setup=setup or {},
    )
