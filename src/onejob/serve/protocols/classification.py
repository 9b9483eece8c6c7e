"""Triton's classification extension: instead of an output, its best classes as text, "score:index" or
"score:index:label"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onejob.errors import BadRequestError

Array = np.ndarray[Any, Any]

WHOLE = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
SCORED = (*WHOLE, "FP32", "FP64")
"""Datatypes that can be asked for as classes."""


def check_scored(datatype: str) -> None:
    """BadRequestError for an output that has no classes."""
    if datatype not in SCORED:
        raise BadRequestError(f"class result not available for output due to unsupported type '{datatype}'")


def classify(array: Array, classes: int, datatype: str, labels: Sequence[str] = (), *, batched: bool = True) -> Array:
    """The `classes` highest values as text, best first, of each row (of the whole array if it has no batch).

    Shape [rows, classes] or [classes], with as many classes as there are values if that is less. Of equal values the
    first comes first.
    """
    check_scored(datatype)
    rows = array.reshape(len(array), -1) if batched else array.reshape(1, -1)
    count = min(classes, rows.shape[1])
    # sorted upwards from the end, then turned round: downwards, and stable
    best = rows.shape[1] - 1 - np.argsort(rows[:, ::-1], axis=1, kind="stable")[:, ::-1][:, :count]
    scores = np.take_along_axis(rows, best, axis=1).tolist()
    form = "%d" if datatype in WHOLE else "%f"
    texts = [
        f"{form % score}:{index}" + (f":{labels[index]}" if index < len(labels) else "")
        for row, indexes in zip(scores, best.tolist(), strict=True)
        for score, index in zip(row, indexes, strict=True)
    ]
    answer = np.empty(len(texts), dtype=object)
    answer[:] = texts
    return answer.reshape((len(rows), count) if batched else (count,))
