"""How rows become arrays and outputs become answers: the same code in training and in serving, so the two can't skew.

A category becomes an int64 code: 0 is missing or unknown, the others are its training values sorted by name. A number
becomes a float32 `(x - mean) / std`, missing is 0, and a column that had nulls in training has an indicator beside it.
Statistics are exact sums (`math.fsum`), so they depend neither on the order of the rows nor on the processor.
numpy only: a serving replica pays for nothing else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np

from onejob.core.artifact import Json
from onejob.core.tensor import TensorSpec
from onejob.errors import DamagedError, DataError
from onejob.families.tabular.columns import (
    Array,
    Codes,
    Column,
    code_matrix,
    column_of,
    common_length,
    flat,
    number_matrix,
    numbers_of,
    text_of,
)

Task = Literal["binary", "multiclass", "regression"]

FORMAT = 1
CLASSES_MAX = 1000  # more classes than this are no classes: a number, or an identifier
CLASSES_FROM_NUMBERS_MAX = 100  # whole numbers with more distinct values than this are not taken for classes
EXTREME = 1e4  # standard deviations; beyond this a number says no more, and float32 must not overflow


@dataclass(frozen=True)
class Category:
    """A column of categories; the code of `values[i]` is i + 1."""

    name: str
    values: tuple[str, ...]

    @cached_property
    def codes(self) -> Codes:
        return {None: 0, **{value: code for code, value in enumerate(self.values, 1)}}


@dataclass(frozen=True)
class Number:
    """A column of numbers; `nulls` when it had nulls in training, and so has an indicator."""

    name: str
    mean: float
    std: float
    """0 where training saw one value, or none: nothing was learnt of it, so every value is then 0 to the model."""
    nulls: bool


@dataclass(frozen=True)
class Label:
    """What is learnt; `classes` of a multiclass label, `mean` and `std` of a regression's."""

    name: str
    task: Task
    classes: tuple[str, ...] = ()
    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class Encoding:
    """How this model's rows become arrays; made by `fit`, kept as JSON beside the weights."""

    label: Label
    categories: tuple[Category, ...]
    numbers: tuple[Number, ...]

    @property
    def task(self) -> Task:
        return self.label.task

    @cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The columns that a client sends."""
        texts = [TensorSpec(column.name, "BYTES", (-1, 1)) for column in self.categories]
        return (*texts, *(TensorSpec(column.name, "FP64", (-1, 1)) for column in self.numbers))

    @cached_property
    def features(self) -> tuple[TensorSpec, ...]:
        """What the module and the graph take; a feature without columns is left out."""
        width = len(self.numbers) + len(self._with_nulls)
        categories = TensorSpec("categories", "INT64", (-1, len(self.categories)))
        numbers = TensorSpec("numbers", "FP32", (-1, width))
        return tuple(spec for spec in (categories, numbers) if spec.shape[1])

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What the module and the graph give."""
        match self.task:
            case "binary":
                return (TensorSpec("logit", "FP32", (-1, 1)),)
            case "multiclass":
                return (TensorSpec("logits", "FP32", (-1, len(self.label.classes))),)
            case "regression":
                return (TensorSpec("value", "FP32", (-1, 1)),)

    @cached_property
    def served(self) -> tuple[TensorSpec, ...]:
        """What a client gets."""
        match self.task:
            case "binary":
                return (TensorSpec("probability", "FP32", (-1, 1)),)
            case "multiclass":
                probabilities = TensorSpec("probabilities", "FP32", (-1, len(self.label.classes)))
                return (probabilities, TensorSpec("label", "BYTES", (-1, 1)))
            case "regression":
                return (TensorSpec("value", "FP32", (-1, 1)),)

    def encode(self, columns: Mapping[str, Column]) -> dict[str, Array]:
        """Columns (arrays or lists, [n] or [n, 1]) -> {feature: array}; other columns than the inputs are not read.

        BadRequestError names the column, the row (from 0) and the value.
        """
        found = {spec.name: column_of(columns, spec.name) for spec in self.inputs}
        rows = common_length(found)
        features: dict[str, Array] = {}
        if self.categories:
            features["categories"] = code_matrix(self._vocabularies, found, rows)
        if self.numbers:
            features["numbers"] = self._scaled(number_matrix(self._number_names, found, rows))
        return features

    def encode_label(self, column: Column) -> Array:
        """A label's column -> float32 0/1 (binary), int64 class (multiclass), float64 (regression), shape [n]."""
        values = flat(column)
        _require_labels(self.label.name, values)
        match self.task:
            case "binary":
                return _label_numbers(self.label, values, lambda x: (x == 0) | (x == 1), "0/1 or yes/no").astype(
                    np.float32
                )
            case "multiclass":
                return self._classes(values)
            case "regression":
                return _label_numbers(self.label, values, np.isfinite, "a finite number")

    def decode(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """{model output: array} -> {served output: array}."""
        match self.task:
            case "binary":
                return {"probability": sigmoid(outputs["logit"]).astype(np.float32)}
            case "multiclass":
                probabilities = softmax(outputs["logits"]).astype(np.float32)
                names = np.array(self.label.classes, dtype=object)
                return {"probabilities": probabilities, "label": names[probabilities.argmax(axis=1)][:, None]}
            case "regression":
                return {"value": np.asarray(outputs["value"], np.float32)}

    def to_json(self) -> dict[str, Json]:
        data = asdict(self)
        for column in data["categories"]:
            column["values"] = list(column["values"])
        data["label"]["classes"] = list(data["label"]["classes"])
        return {"format": FORMAT, **data, "categories": list(data["categories"]), "numbers": list(data["numbers"])}

    @cached_property
    def _vocabularies(self) -> Mapping[str, Codes]:
        return {column.name: column.codes for column in self.categories}

    @cached_property
    def _number_names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.numbers)

    @cached_property
    def _with_nulls(self) -> list[int]:
        return [index for index, column in enumerate(self.numbers) if column.nulls]

    @cached_property
    def _means(self) -> Array:
        return np.array([column.mean for column in self.numbers])

    @cached_property
    def _scales(self) -> Array:
        return np.array([1.0 / column.std if column.std else 0.0 for column in self.numbers])

    def _scaled(self, values: Array) -> Array:
        """[n, numbers] float64 with NaN -> [n, numbers + indicators] float32 without."""
        missing = np.isnan(values)
        with np.errstate(over="ignore"):
            scaled = (values - self._means) * self._scales
        scaled = np.minimum(np.maximum(scaled, -EXTREME), EXTREME)  # np.clip costs three times as much for one row
        scaled[missing] = 0.0
        if self._with_nulls:
            scaled = np.concatenate([scaled, missing[:, self._with_nulls]], axis=1)
        return scaled.astype(np.float32)

    def _classes(self, values: list[Any]) -> Array:
        codes = {value: code for code, value in enumerate(self.label.classes)}
        found = np.fromiter((codes.get(_class_text(value), -1) for value in values), np.int64, len(values))
        if (unknown := np.flatnonzero(found < 0)).size:
            row = int(unknown[0])
            raise DataError(
                f"column {self.label.name!r}, row {row}: {values[row]!r} is no class seen in training "
                f"({unknown.size} such rows)",
                cure="Drop these rows in a step of [data], or split so that training sees every class.",
            )
        return found


def fit(columns: Mapping[str, Column], roles: Mapping[str, Any], options: Mapping[str, Json]) -> Encoding:
    """Learn an encoding from the training columns.

    `roles` says what the columns are: {"label": name, "categories": [names], "numbers": [names]}; `options` are the
    resolved [train.model] options, of which `task` and `min_count` matter here.
    """
    for name in (roles["label"], *roles["categories"], *roles["numbers"]):
        if name not in columns:
            raise DataError(f"the dataset has no column {name!r}", cure=f"It has: {', '.join(sorted(columns))}.")
    if not roles["categories"] and not roles["numbers"]:
        raise DataError("the dataset has neither categories nor numbers to learn from", cure="Name some in [data].")
    if not len(columns[roles["label"]]):
        raise DataError("the dataset's training split has no rows", cure="Look at what the steps of [data] dropped.")
    return Encoding(
        label=_fit_label(roles["label"], columns[roles["label"]], options["task"]),
        categories=tuple(_fit_category(name, columns[name], options["min_count"]) for name in roles["categories"]),
        numbers=tuple(_fit_number(name, columns[name]) for name in roles["numbers"]),
    )


def load(data: Mapping[str, Json]) -> Encoding:
    """The encoding that `to_json` wrote."""
    if data.get("format") != FORMAT:
        raise DamagedError(f"encoding.json has format {data.get('format')!r}, not {FORMAT}")
    return Encoding(
        label=Label(**{**data["label"], "classes": tuple(data["label"]["classes"])}),
        categories=tuple(Category(column["name"], tuple(column["values"])) for column in data["categories"]),
        numbers=tuple(Number(**column) for column in data["numbers"]),
    )


def sigmoid(logits: Array) -> Array:
    """Logits -> probabilities in float64; never overflows."""
    values = np.asarray(logits, np.float64)
    small = np.exp(-np.abs(values))
    return cast(Array, np.where(values >= 0, 1.0, small) / (1.0 + small))


def softmax(logits: Array) -> Array:
    """Logits [n, classes] -> probabilities in float64; never overflows."""
    values = np.asarray(logits, np.float64)
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    return cast(Array, powers / powers.sum(axis=1, keepdims=True))


# ---- fitting -----------------------------------------------------------------------------------------------------


def _fit_category(name: str, column: Column, min_count: int) -> Category:
    counts = Counter(text_of(name, row, value) for row, value in enumerate(flat(column)))
    return Category(name, tuple(sorted(v for v, count in counts.items() if v is not None and count >= min_count)))


def _fit_number(name: str, column: Column) -> Number:
    values = numbers_of(name, column)
    known = values[~np.isnan(values)]
    mean, std = _moments(known)
    return Number(name, mean, std, nulls=len(known) < len(values))


def _moments(known: Array) -> tuple[float, float]:
    """Mean and standard deviation; (mean, 0) for a constant column, (0, 0) for an empty one."""
    if not len(known):
        return 0.0, 0.0
    mean = math.fsum(known.tolist()) / len(known)
    deviations = known - mean
    std = math.sqrt(math.fsum((deviations * deviations).tolist()) / len(known))
    return mean, std if std > 1e-12 * max(1.0, abs(mean)) else 0.0


def _fit_label(name: str, column: Column, task: Task | None) -> Label:
    values = flat(column)
    _require_labels(name, values)
    task = task or _infer_task(name, values)
    if task == "multiclass":
        return Label(name, task, classes=_fit_classes(name, values))
    if task == "regression":
        mean, std = _moments(_label_numbers(Label(name, task), values, np.isfinite, "a finite number"))
        return Label(name, task, mean=mean, std=std or 1.0)
    return Label(name, task)


def _infer_task(name: str, values: list[Any]) -> Task:
    distinct = set(values)
    if any(isinstance(value, str) for value in distinct):
        return "multiclass"
    if distinct <= {0, 1}:  # False and True are among them
        return "binary"
    if not all(isinstance(value, int) for value in distinct):
        return "regression"
    if len(distinct) > CLASSES_FROM_NUMBERS_MAX:
        raise DataError(
            f"column {name!r}: whole numbers with {len(distinct)} different values may be classes or a quantity",
            cure='Say which in [train.model]: task = "regression" or "multiclass".',
        )
    return "multiclass"


def _fit_classes(name: str, values: list[Any]) -> tuple[str, ...]:
    classes = {_class_text(value) for value in values}
    if not 2 <= len(classes) <= CLASSES_MAX:
        raise DataError(
            f"column {name!r} has {len(classes)} classes; a multiclass label has 2 to {CLASSES_MAX}",
            cure="Check [data] label, or set task in [train.model].",
        )
    numeric = all(value.lstrip("-").isdecimal() for value in classes)
    return tuple(sorted(classes, key=int) if numeric else sorted(classes))


def _require_labels(name: str, values: list[Any]) -> None:
    missing = [row for row, value in enumerate(values) if value is None or value != value]  # NaN differs from itself
    if missing:
        raise DataError(
            f"column {name!r}: {len(missing)} rows have no label, the first is row {missing[0]}",
            cure="Drop them in a step of [data].",
        )


def _label_numbers(label: Label, values: list[Any], good: Callable[[Array], Array], expected: str) -> Array:
    try:
        numbers = np.array(values, dtype=np.float64) if not any(isinstance(v, str) for v in values) else None
    except (TypeError, ValueError, OverflowError):
        numbers = None
    if numbers is None:
        row = next(r for r, value in enumerate(values) if not isinstance(value, bool | int | float))
    elif (bad := np.flatnonzero(~good(numbers))).size:
        row = int(bad[0])
    else:
        return numbers
    raise DataError(
        f"column {label.name!r}, row {row}: {values[row]!r} is not {expected}, as a {label.task} label must be",
        cure="Set task in [train.model], or convert the column in a step of [data].",
    )


def _class_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
