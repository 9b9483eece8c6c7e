"""Early warning before labels come: do the live blocks look like the reference's of the same weekday and hour?

A conformal test martingale for each watched column (the scores, the inputs). One observation is a block's mean of that
column. Its p-value is its rank among all earlier blocks of the same stratum (the weekday; for blocks of an hour, the
weekday and the hour), the reference's and the live ones: were the blocks of a stratum exchangeable, the p-values would
be independent and uniform. A gambler bets against that (the "simple jumper", which follows the side that pays); the
wealths of all columns are averaged, so that many columns need no correction. `docs/monitor-decides.md` has the sources.

On blocks drawn independently the level holds. Whether it holds on real traffic, where a week resembles the week before,
is for the bench to show: `DESCRIPTIVE_ONLY` is its verdict.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from onejob.core.artifact import Json
from onejob.monitor.blocks import Array, Grouping, Kind, means, weekday_hour

DESCRIPTIVE_ONLY = True
"""Whether the warning is shown and triggers nothing. See bench/results/levels.txt, "warning"."""

SIDES = (-1.6, 0.0, 1.6)
"""Bets on small p-values, on none, on large ones: 1 + side·(p - 1/2), always positive, 1 on average."""
JUMP = 0.01
"""The share of the wealth that changes sides at each block, so that the bet can turn with the stream."""
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
LEAST = 5
"""Earlier blocks of a stratum before its p-values are bet on: with fewer they are too coarse to say anything."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A block's statistics, one for each watched column; a column may be missing."""

    id: str
    stratum: str
    values: Mapping[str, float]

    def to_json(self) -> dict[str, Json]:
        return {"id": self.id, "stratum": self.stratum, "values": dict(self.values)}

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Observation:
        values = {str(name): float(value) for name, value in data["values"].items()}
        return cls(str(data["id"]), str(data["stratum"]), values)


@dataclass(frozen=True, slots=True)
class Watch:
    """The reference's blocks and the live ones: a value that serialises to JSON."""

    alpha: float = 0.01
    seed: int = 7
    reference: tuple[Observation, ...] = ()
    live: tuple[Observation, ...] = ()

    def to_json(self) -> dict[str, Json]:
        return {
            "alpha": self.alpha,
            "seed": self.seed,
            "reference": [each.to_json() for each in self.reference],
            "live": [each.to_json() for each in self.live],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Watch:
        reference = tuple(map(Observation.from_json, data["reference"]))
        return cls(float(data["alpha"]), int(data["seed"]), reference, tuple(map(Observation.from_json, data["live"])))


@dataclass(frozen=True, slots=True)
class Reading:
    """What the live blocks say."""

    blocks: int
    silent: int
    """Live blocks that weren't bet on, having too few earlier ones in their stratum."""
    value: float
    """The mean of the columns' wealths, now."""
    peak: float
    threshold: float
    alarm: str | None
    """The block at which the threshold was first reached."""
    columns: Mapping[str, float]
    """Each column's wealth now: where it looks different."""
    descriptive_only: bool

    def to_json(self) -> dict[str, Json]:
        return {**dataclasses.asdict(self), "columns": dict(self.columns)}


def observe(
    grouping: Grouping,
    times: Array,
    columns: Mapping[str, Array],
    *,
    kind: Kind = "day",
    zone: str = "UTC",
    min_rows: int,
) -> tuple[Observation, ...]:
    """Make observations of rows: each block's means, with its stratum. Blocks that are too small are left out."""
    weekdays, hours = weekday_hour(times, zone)
    strata: dict[str, str] = {}
    for name, row in zip(grouping.ids, _first_rows(grouping), strict=True):
        weekday = "" if kind == "week" else WEEKDAYS[int(weekdays[row])]
        strata[name] = f"{weekday} {int(hours[row]):02d}h" if kind == "hour" else weekday
    values: dict[str, dict[str, float]] = {}
    for column, data in columns.items():
        for block in means(grouping, data, min_rows=min_rows).blocks:
            values.setdefault(block.id, {})[column] = block.value
    return tuple(Observation(name, strata[name], values[name]) for name in grouping.ids if name in values)


def update(state: Watch, observation: Observation) -> Watch:
    """Count a live block; the same id again replaces it, in whatever order they come."""
    return update_all(state, [observation])


def update_all(state: Watch, observations: Iterable[Observation]) -> Watch:
    merged = {each.id: each for each in (*state.live, *observations)}
    return dataclasses.replace(state, live=tuple(merged[name] for name in sorted(merged)))


def read(state: Watch) -> Reading:
    """Work out the martingale from the list of blocks."""
    columns = sorted({name for each in (*state.reference, *state.live) for name in each.values})
    ranks = {name: p_values(state, name) for name in columns}
    wealth = {name: jumper(found) for name, found in ranks.items()}
    mixed = np.mean([wealth[name] for name in columns], axis=0) if columns and state.live else np.ones(0)
    over = np.flatnonzero(mixed >= 1 / state.alpha)
    silent = [np.isnan(found) for found in ranks.values()]
    return Reading(
        blocks=len(state.live),
        silent=int(np.all(silent, axis=0).sum()) if silent else len(state.live),
        value=float(mixed[-1]) if mixed.size else 1.0,
        peak=float(max(1.0, mixed.max())) if mixed.size else 1.0,
        threshold=1 / state.alpha,
        alarm=state.live[int(over[0])].id if over.size else None,
        columns={name: float(path[-1]) for name, path in wealth.items() if path.size},
        descriptive_only=DESCRIPTIVE_ONLY,
    )


def p_values(state: Watch, column: str) -> Array:
    """Each live block's rank among all earlier blocks of its stratum, in (0, 1); NaN where there are too few.

    Ties are broken by chance, as validity needs; the chance is a digest of seed, column and block, so that reading
    twice says the same.
    """
    bags: dict[str, list[float]] = {}
    for each in state.reference:
        if column in each.values:
            bags.setdefault(each.stratum, []).append(each.values[column])
    found = np.full(len(state.live), np.nan)
    for position, each in enumerate(state.live):
        if column not in each.values:
            continue
        bag, value = bags.setdefault(each.stratum, []), each.values[column]
        if len(bag) >= LEAST:
            earlier = np.array(bag)
            below, equal = int(np.sum(earlier < value)), int(np.sum(earlier == value))
            found[position] = (below + _chance(state.seed, column, each.id) * (equal + 1)) / (len(bag) + 1)
        bag.append(value)
    return found


def jumper(p: Array) -> Array:
    """The simple jumper's wealth after each p-value; a NaN is not bet on."""
    sides = np.array(SIDES)
    shares = np.full(len(sides), 1 / len(sides))
    path = np.ones(len(p))
    for position, value in enumerate(p):
        if np.isfinite(value):
            shares = (1 - JUMP) * shares + JUMP * shares.sum() / len(sides)
            shares = shares * (1 + sides * (value - 0.5))
        path[position] = min(float(shares.sum()), 1e300)
        shares = shares * (path[position] / shares.sum())
    return path


def _chance(seed: int, column: str, block: str) -> float:
    digest = hashlib.sha256(f"{seed}\0{column}\0{block}".encode()).digest()
    return (int.from_bytes(digest[:7]) + 0.5) / 2**56


def _first_rows(grouping: Grouping) -> Array:
    first = np.zeros(len(grouping.ids), np.int64)
    first[grouping.index[::-1]] = np.arange(len(grouping.index))[::-1]
    return first
