"""Reads what a monitor's step is handed: labelled rows, and the dataset that a model was trained on."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from onejob.core.artifact import Json
from onejob.core.context import InputArtifact
from onejob.core.traffic import SECOND
from onejob.engines.dataset import read_split
from onejob.errors import DamagedError
from onejob.monitor.blocks import Grouping, group
from onejob.monitor.engines.labelled import DIGEST, LABEL_TIME, OUTPUT, REQUEST, ROWS, TIME

Array = np.ndarray[Any, Any]
UTC = datetime.UTC


@dataclass(frozen=True)
class Labelled:
    """Captured rows in the order of event time, some with a label; times are seconds since 1970."""

    meta: Mapping[str, Json]
    time: Array
    label_time: Array
    """NaN where there is no label."""
    label: Array
    """Objects; None where there is none."""
    request: Array
    digest: Array
    """Of the engine that answered."""
    columns: Mapping[str, Array]
    """The inputs and, under `onejob_output_…`, the outputs: numbers with NaN, or objects with None."""

    def __len__(self) -> int:
        return len(self.time)

    @property
    def known(self) -> Array:
        return np.isfinite(self.label_time)

    @property
    def inputs(self) -> dict[str, Array]:
        return {name: values for name, values in self.columns.items() if not name.startswith(OUTPUT)}

    def outputs(self) -> dict[str, Array]:
        return {name.removeprefix(OUTPUT): v for name, v in self.columns.items() if name.startswith(OUTPUT)}

    def take(self, rows: Array) -> Labelled:
        """These rows, by index or by a mask."""
        return Labelled(
            self.meta,
            self.time[rows],
            self.label_time[rows],
            self.label[rows],
            self.request[rows],
            self.digest[rows],
            {name: values[rows] for name, values in self.columns.items()},
        )


def read_labelled(artifact: InputArtifact) -> Labelled:
    """All rows of a `labelled` artifact; DamagedError where its file isn't what it should be."""
    path = artifact.file(ROWS)
    try:
        frame = pl.read_ipc(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        cure = "`onejob verify` says what is damaged."
        raise DamagedError(f"the labelled rows can't be read: {error}", place=str(path), cure=cure) from error
    label = artifact.meta["columns"]["label"]
    own = [name for name in frame.columns if not name.startswith("onejob_") or name.startswith(OUTPUT)]
    return Labelled(
        meta=artifact.meta,
        time=frame[TIME].to_numpy() / SECOND,
        label_time=frame[LABEL_TIME].cast(pl.Float64).fill_null(float("nan")).to_numpy() / SECOND,
        label=_objects(frame[label]),
        request=_objects(frame[REQUEST]),
        digest=_objects(frame[DIGEST]),
        columns={name: _array(frame[name]) for name in own if name != label},
    )


@dataclass(frozen=True)
class Reference:
    """The rows that a model was trained on."""

    columns: Mapping[str, Array]
    label: Array
    time: Array | None
    """Seconds since 1970; None where the dataset has no column of times."""


def read_reference(dataset: InputArtifact) -> Reference:
    """The training split."""
    roles = dataset.meta["columns"]
    names = [roles["label"], *roles["categories"], *roles["numbers"]]
    names += [roles["time"]] if roles.get("time") else []
    columns = read_split(dataset.path, dataset.meta, "train", names)
    times = moments(columns.pop(roles["time"])) if roles.get("time") else None
    return Reference(columns, columns.pop(roles["label"]), times)


def cut_of(dataset: InputArtifact) -> float | None:
    """The event time from which on no row was trained on; None where the dataset doesn't know times.

    A dataset of a retraining says so itself. One from the sources was trained on until its last training row.
    """
    extended = dataset.meta.get("extended")
    if extended is not None:
        return float(extended["cut"])
    name = dataset.meta["columns"].get("time")
    if not name:
        return None
    column = read_split(dataset.path, dataset.meta, "train", [name])[name]
    times = moments(column)
    if times is None or not np.isfinite(times).any():
        return None
    whole_days = column.dtype == "datetime64[D]"
    return float(np.nanmax(times)) + (86_400.0 if whole_days else 1 / SECOND)


def moments(column: Array) -> Array | None:
    """A dataset's column of times in seconds since 1970, NaN for null; None for numbers, whose unit nobody knows.

    A time without a zone is taken for UTC.
    """
    if column.dtype.kind == "M":
        known = ~np.isnat(column)
        seconds = column.astype("datetime64[us]").astype(np.int64) / SECOND
        return np.where(known, seconds, np.nan)
    if column.dtype != object:
        return None
    texts = {value: _seconds(value) for value in set(column.tolist())}
    if any(seconds is None for seconds in texts.values()):
        return None
    return np.array([texts[value] for value in column.tolist()], np.float64)


def blocks_of(times: Array, options: Mapping[str, Json]) -> Grouping:
    """Rows into blocks, by the job's rules."""
    return group(times, options["block"]["by"], options["block"]["zone"])


def _seconds(value: Any) -> float | None:
    if value is None:
        return float("nan")
    try:
        read = value if isinstance(value, datetime.datetime) else datetime.datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()


def _objects(column: pl.Series) -> Array:
    values = np.empty(len(column), object)
    values[:] = column.to_list()
    return values


def _array(column: pl.Series) -> Array:
    if column.dtype.is_numeric() or column.dtype == pl.Boolean:
        return column.cast(pl.Float64).fill_null(float("nan")).to_numpy()
    if column.dtype == pl.List:
        return np.array(column.to_list(), np.float64) if not column.null_count() else _objects(column)
    return _objects(column)
