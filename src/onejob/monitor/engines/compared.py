"""Live rows beside the training rows, column by column: the early warning, and the description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onejob.core.artifact import Json
from onejob.monitor import warning
from onejob.monitor.blocks import Grouping
from onejob.monitor.describe import describe_categories, describe_numbers
from onejob.monitor.engines.reading import Labelled, Reference, blocks_of
from onejob.monitor.engines.scoring import Scorer, height

Array = np.ndarray[Any, Any]

SCORE = "onejob_score"
DESCRIBED = 30_000
"""Rows of each side that a description looks at, evenly spaced: with more, distances hardly change."""
LATEST = 100_000
"""The last training rows with which the warning compares."""


def warn_early(
    model: Scorer, rows: Labelled, forecast: Array, reference: Reference, options: Mapping[str, Json]
) -> warning.Reading | None:
    """Read the martingale over the score and the numbers; None without live rows, or without times to compare by."""
    if not len(rows) or reference.time is None or any(name not in reference.columns for name in model.inputs):
        return None
    latest = np.flatnonzero(np.isfinite(reference.time))[-LATEST:]
    times = reference.time[latest]
    columns = {name: values[latest] for name, values in reference.columns.items()}
    numbers = [name for name, values in columns.items() if values.dtype != object and name in rows.columns]
    old = {name: columns[name] for name in numbers} | {SCORE: height(model.task, model.answer(columns))}
    new = {name: rows.columns[name] for name in numbers} | {SCORE: height(model.task, forecast)}
    over = _ended(rows, options)
    state = warning.Watch(
        alpha=options["harm"]["alpha"],
        reference=_observed(times, old, options),
        live=_observed(rows.time, new, options),
    )
    known = {each.id for each in state.live}
    kept = tuple(each for each in state.reference if each.id not in known)
    live = tuple(each for each in state.live if each.id in over)
    return warning.read(warning.Watch(state.alpha, state.seed, kept, live))


def describe_all(rows: Labelled, reference: Reference, options: Mapping[str, Json]) -> list[dict[str, Json]]:
    """Every input over the last blocks, beside the training rows."""
    if not len(rows):
        return []
    live = blocks_of(rows.time, options)
    first = max(0, len(live.ids) - int(options["harm"]["reference_blocks"]))
    recent = _spaced(np.flatnonzero(live.index >= first))
    past = _spaced(np.arange(len(reference.label)))
    sides = _sides(reference, past, live, recent, options)
    told = []
    for name, values in rows.inputs.items():
        if name not in reference.columns or name in rows.meta["private"]:
            continue
        describe = describe_categories if values.dtype == object else describe_numbers
        old = reference.columns[name]
        if (old.dtype == object) == (values.dtype == object):
            told.append(describe(name, old[past], values[recent], blocks=sides).to_json())
    return told


def _observed(
    times: Array, columns: Mapping[str, Array], options: Mapping[str, Json]
) -> tuple[warning.Observation, ...]:
    rules = options["block"]
    grouping = blocks_of(times, options)
    return warning.observe(grouping, times, columns, kind=rules["by"], zone=rules["zone"], min_rows=rules["rows_min"])


def _ended(rows: Labelled, options: Mapping[str, Json]) -> set[str]:
    running = blocks_of(np.array([float(rows.meta["now"])]), options).ids[0]
    return {name for name in blocks_of(rows.time, options).ids if name < running}


def _sides(
    reference: Reference, past: Array, live: Grouping, recent: Array, options: Mapping[str, Json]
) -> tuple[Array, Array] | None:
    """The block of each row of both sides; None where the training rows' times aren't known."""
    if reference.time is None or not np.isfinite(reference.time[past]).all():
        return None
    return blocks_of(reference.time[past], options).index, live.index[recent]


def _spaced(rows: Array) -> Array:
    if len(rows) <= DESCRIBED:
        return rows
    return np.asarray(rows[np.linspace(0, len(rows) - 1, DESCRIBED).astype(np.int64)])
