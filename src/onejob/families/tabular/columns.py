"""Raw columns as a client or a dataset gives them, checked and read as codes and numbers.

Quick for one row and for a million: columns are read whole, and only what is odd is looked at value by value, so as to
name it. BadRequestError names the column, the row (from 0) and the value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onejob.errors import BadRequestError

Array = NDArray[Any]
Column = Array | Sequence[Any]
Codes = Mapping[str | None, int]
PLAIN = frozenset({float, int, bool, type(None)})


def column_of(columns: Mapping[str, Column], name: str) -> Column:
    try:
        column = columns[name]
    except KeyError:
        raise BadRequestError(
            f"column {name!r} is missing", cure=f"Sent: {', '.join(sorted(columns)) or 'nothing'}."
        ) from None
    if not isinstance(column, np.ndarray | list | tuple):
        raise BadRequestError(f"column {name!r} is {column!r}, not a list of values")
    if isinstance(column, np.ndarray) and column.ndim != 1:
        if column.ndim != 2 or column.shape[1] != 1:
            raise BadRequestError(f"column {name!r} has shape {list(column.shape)}, not [rows] or [rows, 1]")
        return column[:, 0]
    return column


def common_length(columns: Mapping[str, Column]) -> int:
    lengths = {name: len(column) for name, column in columns.items()}
    first, rows = next(iter(lengths.items()))
    for name, length in lengths.items():
        if length != rows:
            raise BadRequestError(f"column {name!r} has {length} rows, but column {first!r} has {rows}")
    return rows


def code_matrix(vocabularies: Mapping[str, Codes], columns: Mapping[str, Column], rows: int) -> Array:
    """Texts -> int64 codes [n, columns]: one dictionary look-up a value."""
    matrix = np.empty((rows, len(vocabularies)), np.int64)
    for index, (name, codes) in enumerate(vocabularies.items()):
        values = flat(columns[name])
        try:
            matrix[:, index] = np.fromiter(map(codes.get, values, repeat(-1)), np.int64, rows)
        except TypeError:  # something that can't be a key, such as a list
            matrix[:, index] = -1
    if matrix.size and matrix.min() < 0:
        _look_closely(matrix, vocabularies, columns)
    return matrix


def _look_closely(matrix: Array, vocabularies: Mapping[str, Codes], columns: Mapping[str, Column]) -> None:
    """Values that no vocabulary holds as they are: unknown text, text in another guise, or a mistake."""
    for index, (name, codes) in enumerate(vocabularies.items()):
        values = flat(columns[name])
        for row in np.flatnonzero(matrix[:, index] < 0).tolist():
            matrix[row, index] = codes.get(text_of(name, row, values[row]), 0)


def text_of(name: str, row: int, value: Any) -> str | None:
    """A category's value as the text that it has in the dataset; null and NaN are None."""
    match value:
        case str():
            return value
        case None:
            return None
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return None if math.isnan(value) else str(value)
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                raise BadRequestError(f"column {name!r}, row {row}: {value!r} is not UTF-8 text") from None
    raise BadRequestError(f"column {name!r}, row {row}: {value!r} is not text")


def number_matrix(names: Sequence[str], columns: Mapping[str, Column], rows: int) -> Array:
    """Columns -> float64 [n, columns] with NaN for null."""
    matrix = np.empty((rows, len(names)))
    for index, name in enumerate(names):
        matrix[:, index] = _floats(name, columns[name])
    if np.isinf(matrix).any():
        for name in names:
            numbers_of(name, columns[name])
    return matrix


def numbers_of(name: str, column: Column) -> Array:
    """A column -> float64 with NaN for null; BadRequestError for what isn't a finite number."""
    values = _floats(name, column)
    if (infinite := np.flatnonzero(np.isinf(values))).size:
        row = int(infinite[0])
        raise BadRequestError(f"column {name!r}, row {row}: {values[row]} is not a finite number")
    return values


def _floats(name: str, column: Column) -> Array:
    if isinstance(column, np.ndarray) and column.dtype.kind in "fiub":
        return column.astype(np.float64)
    values = flat(column)
    if PLAIN.issuperset(map(type, values)):
        try:
            return np.array(values, dtype=np.float64)  # None becomes NaN
        except OverflowError:
            pass
    return np.array([_number(name, row, value) for row, value in enumerate(values)], dtype=np.float64)


def _number(name: str, row: int, value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool | int | float | np.number | np.bool_):
        try:
            return float(value)
        except OverflowError:
            raise BadRequestError(f"column {name!r}, row {row}: {str(value)[:20]}… is too large") from None
    raise BadRequestError(f"column {name!r}, row {row}: {value!r} is not a number")


def flat(column: Column) -> list[Any]:
    """A column as a list of plain Python values."""
    if isinstance(column, np.ndarray):
        return column.reshape(-1).tolist()
    return column if isinstance(column, list) else list(column)
