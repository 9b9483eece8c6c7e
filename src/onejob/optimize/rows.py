"""Rows of the dataset as the model takes them: what calibrates, checks and judges the candidates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onejob.core.context import InputArtifact
from onejob.core.plugin import load
from onejob.engines.dataset import read_split
from onejob.errors import DataError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rows:
    """Encoded rows: {feature: array} and the encoded label."""

    features: Mapping[str, Array]
    label: Array

    def __len__(self) -> int:
        return len(self.label)

    def take(self, rows: Any) -> dict[str, Array]:
        """Some rows' features (a slice, or row numbers), each array contiguous."""
        return {name: np.ascontiguousarray(values[rows]) for name, values in self.features.items()}


def load_encoding(family: str, model: InputArtifact) -> Any:
    """The encoding that came with a checkpoint or a candidate."""
    return load(f"{family}.encode:load")(json.loads(model.file("encoding.json").read_text()))


def read_rows(dataset: InputArtifact, encoding: Any, split: str, *, most: int | None = None) -> Rows:
    """Encode a split, or `most` rows of it, evenly spaced: the same ones each time, from the whole span of the data."""
    label = dataset.meta["columns"]["label"]
    names = list(dict.fromkeys([*(spec.name for spec in encoding.inputs), label]))
    columns = read_split(dataset.path, dataset.meta, split, names)
    total = len(columns[label])
    if not total:
        raise DataError(f"the dataset's split {split!r} has no rows", cure="Split off more rows in [data].")
    if most is not None and most < total:
        chosen = np.linspace(0, total - 1, most).astype(np.int64)
        columns = {name: values[chosen] for name, values in columns.items()}
    return Rows(encoding.encode(columns), encoding.encode_label(columns[label]))
