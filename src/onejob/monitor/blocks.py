"""Blocks: the unit of evidence. Rows that came together are one observation, because they share their weather.

Real traffic comes in clusters: a storm makes a whole day late, so a day's rows say little more than one of them does. A
test that takes each row for an observation of its own finds "proof" in chance (bench/results/levels.txt shows how
often). So everything that decides, decides on blocks of event time, a day unless the job says otherwise, and one
observation is a block's mean. numpy only; no clock, no file: times are seconds since 1970, in UTC.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
from numpy.typing import NDArray

from onejob.core.artifact import Json
from onejob.errors import DataError, UsageError

Array = NDArray[Any]
Kind = Literal["hour", "day", "week"]

CLIP = 0.01
"""A probability counts as no nearer to 0 or 1 than this, so that one row's log loss lies in [0.010, 4.605]."""
MIN_ROWS = 30
"""A block of fewer rows is left out (and counted): its mean is mostly noise."""
QUARTER = 900
"""Every zone's offset from UTC changes on a multiple of a quarter of an hour."""


@dataclass(frozen=True, slots=True)
class Block:
    """One observation: the mean of a block's rows. Ids sort in the order of time."""

    id: str
    rows: int
    value: float

    def to_json(self) -> dict[str, Json]:
        return {"id": self.id, "rows": self.rows, "value": self.value}

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Block:
        return cls(str(data["id"]), int(data["rows"]), float(data["value"]))


@dataclass(frozen=True, slots=True)
class Grouping:
    """Which block each row belongs to."""

    ids: tuple[str, ...]
    """The blocks' ids, oldest first."""
    index: Array
    """For each row, the position of its block in `ids`."""
    first: Array
    """For each block, the time of its earliest row."""

    def only(self, mask: Array) -> Grouping:
        """The same blocks with some of the rows; a block may be left with none."""
        return Grouping(self.ids, self.index[mask], self.first)


@dataclass(frozen=True, slots=True)
class Means:
    """The means of the blocks that have rows enough, and those of the others, which count for nothing."""

    blocks: tuple[Block, ...]
    small: tuple[Block, ...]

    @property
    def values(self) -> Array:
        return np.array([block.value for block in self.blocks])


def group(times: Array, kind: Kind = "day", zone: str = "UTC") -> Grouping:
    """Put rows into blocks by the time of their event, as a clock in `zone` shows it.

    Ids: `2013-03-10` (a day), `2013-W10` (a week, from Monday), `2013-11-03T05:00Z` (an hour, named by its beginning in
    UTC, since a clock repeats an hour each autumn).
    """
    times = _checked(times)
    local = times + _offsets(times, zone)
    if kind == "week":  # 1970-01-01 was a Thursday
        number = np.floor((local / 86400 + 3) / 7).astype(np.int64)
    elif kind == "day":
        number = np.floor(local / 86400).astype(np.int64)
    else:  # the beginning of the local hour, told in UTC: distinct for the two hours that a clock calls alike
        number = np.floor(times - np.mod(local, 3600) + 0.5).astype(np.int64)
    found, index = np.unique(number, return_inverse=True)
    first = np.full(len(found), np.inf)
    np.minimum.at(first, index, times)
    return Grouping(tuple(_name(int(value), kind) for value in found), index.reshape(-1), first)


def weekday_hour(times: Array, zone: str = "UTC") -> tuple[Array, Array]:
    """The weekday (0 is Monday) and the hour of each row, as a clock in `zone` shows them."""
    times = _checked(times)
    local = times + _offsets(times, zone)
    days = np.floor(local / 86400)
    return np.mod(days + 3, 7).astype(np.int64), np.floor(np.mod(local, 86400) / 3600).astype(np.int64)


def means(grouping: Grouping, values: Array, *, min_rows: int = MIN_ROWS) -> Means:
    """The mean of each block's rows; NaN is "not known" (no label yet, or never) and doesn't count as a row."""
    known = np.isfinite(values)
    rows = np.bincount(grouping.index[known], minlength=len(grouping.ids))
    sums = np.bincount(grouping.index[known], weights=values[known], minlength=len(grouping.ids))
    blocks = [
        Block(name, int(n), float(total / n)) for name, n, total in zip(grouping.ids, rows, sums, strict=True) if n
    ]
    enough = tuple(block for block in blocks if block.rows >= min_rows)
    return Means(enough, tuple(block for block in blocks if block.rows < min_rows))


def log_losses(label: Array, probability: Array, *, clip: float = CLIP) -> Array:
    """One log loss a row, in nats and in [-ln(1 - clip), -ln clip]; NaN where the label is.

    Two classes: labels 0 and 1, the chance of 1, both [n]. More: labels 0 … k-1, and chances [n, k].
    """
    known = np.isfinite(label)
    if probability.ndim == 2 and probability.shape[1] > 1:
        truth = np.where(known, label, 0).astype(np.int64)
        chance = probability[np.arange(len(label)), truth]
    else:
        chance = np.where(label > 0.5, probability.reshape(-1), 1 - probability.reshape(-1))
    return np.where(known, -np.log(np.clip(chance, clip, 1 - clip)), np.nan)


def largest_difference(clip: float = CLIP) -> float:
    """How far two rows' log losses can lie apart: ln((1 - clip) / clip), 4.595 nats for 0.01."""
    return math.log((1 - clip) / clip)


def distance_losses(label: Array, value: Array, *, scale: float) -> Array:
    """One loss a row for a number that was forecast, in [0, 1]: |error| / scale, at most 1; NaN where the label is."""
    return np.asarray(np.minimum(np.abs(value.reshape(-1) - label) / scale, 1.0))


def trailing_share(
    event: Array, known: Array, label: Array, at: Array, *, window: float = 28 * 86400.0, least: int = 200, prior: float
) -> Array:
    """The reference forecast: for each moment of `at`, the mean label of the events in the `window` before it.

    Only labels that were *known* by then count (`known`: when each label came), else the reference would be judged
    with what nobody knew. With fewer than `least` of them, `prior`: the share of the training rows.
    """
    usable = np.isfinite(label) & np.isfinite(known)
    event, known, label = event[usable], np.maximum(known[usable], event[usable]), label[usable]
    shares = np.full(len(at), float(prior))
    for position, moment in enumerate(at):
        mask = (known <= moment) & (event >= moment - window)
        if int(mask.sum()) >= least:
            shares[position] = float(label[mask].mean())
    return shares


def _checked(times: Array) -> Array:
    times = np.asarray(times, np.float64)
    bad = np.flatnonzero(~np.isfinite(times))
    if bad.size:
        raise DataError(
            f"{bad.size} rows have no event time, the first is row {bad[0]}",
            cure="Name the column of the event's time in the job, or leave it out: then the time of the request counts",
        )
    return times


def _offsets(times: Array, zone: str) -> Array:
    """Seconds to add to UTC for the time on the wall; the zone's rules are asked once for each quarter of an hour."""
    if zone == "UTC":
        return np.zeros(len(times))
    try:
        rules = ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError):
        raise UsageError(
            f"no time zone is called {zone!r}", cure="Names are such as 'UTC' and 'America/New_York'"
        ) from None
    quarters, index = np.unique(np.floor(times / QUARTER), return_inverse=True)
    offsets = [_offset(int(quarter) * QUARTER, rules) for quarter in quarters]
    return np.array(offsets, np.float64)[index.reshape(-1)]


def _offset(moment: int, rules: ZoneInfo) -> float:
    offset = datetime.fromtimestamp(moment, rules).utcoffset()
    assert offset is not None
    return offset.total_seconds()


def _name(number: int, kind: Kind) -> str:
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    if kind == "hour":
        return (epoch + timedelta(seconds=number)).strftime("%Y-%m-%dT%H:%MZ")
    if kind == "day":
        return (epoch + timedelta(days=number)).strftime("%Y-%m-%d")
    year, week, _ = (epoch + timedelta(days=number * 7 - 3)).isocalendar()
    return f"{year:04d}-W{week:02d}"
