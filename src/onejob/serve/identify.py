"""The event time and the key that a request may carry beside the model's inputs: the job's `columns.time` and
`columns.id`. They never reach the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import numpy as np

from onejob.core.artifact import Json
from onejob.core.traffic import key_text, moment
from onejob.errors import BadRequestError
from onejob.serve.model import Column

T = TypeVar("T")


@dataclass(frozen=True)
class Roles:
    """Which columns of the job are its label, its event time, its key; None where it has none."""

    label: str | None = None
    time: str | None = None
    id: str | None = None

    @classmethod
    def of(cls, meta: Mapping[str, Json]) -> Roles:
        columns = meta.get("columns") or {}
        return cls(columns.get("label"), columns.get("time"), columns.get("id"))

    @property
    def extras(self) -> tuple[str, ...]:
        """Names that a request may carry although the model doesn't take them."""
        return tuple(name for name in (self.time, self.id) if name)

    def to_json(self) -> dict[str, Json]:
        return {"label": self.label, "time": self.time, "id": self.id}


class Told(NamedTuple):
    """When a request arrived (microseconds), and the event time and key of each row, where it said so."""

    arrived: int
    times: Sequence[int | None] | None = None
    keys: Sequence[str | None] | None = None

    def times_of(self, rows: int) -> list[int]:
        """The time of arrival for what says nothing."""
        if self.times is None:
            return [self.arrived] * rows
        return [self.arrived if time is None else time for time in self.times]

    def keys_of(self, rows: int) -> Sequence[str | None]:
        return self.keys if self.keys is not None else list(repeat(None, rows))


def identify(columns: Mapping[str, Column], roles: Roles, rows: int, arrived: int) -> Told:
    """Read event time and key; BadRequestError names column, row and value."""
    times = _read(columns, roles.time, rows, moment)
    keys = _read(columns, roles.id, rows, key_text)
    return Told(arrived, times, keys)


def _read(
    columns: Mapping[str, Column], name: str | None, rows: int, read: Callable[[Any], T]
) -> list[T | None] | None:
    column = columns.get(name) if name else None
    if column is None:
        return None
    values = column.reshape(-1).tolist() if isinstance(column, np.ndarray) else column
    if len(values) != rows:
        raise BadRequestError(f"inputs differ in their number of rows: {name} has {len(values)}, not {rows}")
    found: list[T | None] = []
    for row, value in enumerate(values):
        try:
            found.append(None if value is None or value != value else read(value))
        except ValueError as error:
            raise BadRequestError(f"column {name!r}, row {row}: {value!r:.80} {error}", place="request") from None
    return found
