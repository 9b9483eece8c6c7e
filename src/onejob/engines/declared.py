"""Values that a user's code gave, as the arrays that it declared: checked, so that nobody gets what nobody promised."""

from __future__ import annotations

from typing import Any

import numpy as np

from onejob.core.tensor import DATATYPES, TensorSpec
from onejob.errors import InferenceError

Array = np.ndarray[Any, Any]
BY_NUMPY = {name: datatype for datatype, name in DATATYPES.items() if datatype != "BF16"}  # numpy has none


def fit(spec: TensorSpec, value: Any, place: str, noun: str = "output") -> Array:
    """A value as an array of the declared datatype and shape; no number changes, but for a float's last digits."""
    if spec.datatype == "BYTES":
        array = value if isinstance(value, np.ndarray) else np.array(value, dtype=object)
        array = _texts(spec, array, place, noun)
    else:
        array = np.asarray(value)
        array = _numbers(spec, array, np.dtype(DATATYPES[spec.datatype]), place, noun)
    sizes = zip(array.shape, spec.shape, strict=False)
    if array.ndim != len(spec.shape) or any(wanted not in (-1, size) for size, wanted in sizes):
        told = f"{noun} {spec.name!r} has shape {list(array.shape)}, not {list(spec.shape)} as declared"
        raise InferenceError(told, place=place)
    return array


def _numbers(spec: TensorSpec, array: Array, dtype: np.dtype[Any], place: str, noun: str) -> Array:
    if array.dtype == dtype:
        return array
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        fits = not array.size or bool(array.min() >= limits.min and array.max() <= limits.max)
    else:
        fits = array.dtype.kind in "iuf" and dtype.kind == "f"
    if not fits:
        given = BY_NUMPY.get(array.dtype.name, str(array.dtype))
        raise InferenceError(f"{noun} {spec.name!r} is {given}, not {spec.datatype} as declared", place=place)
    return array.astype(dtype)


def _texts(spec: TensorSpec, array: Array, place: str, noun: str) -> Array:
    if array.dtype.kind in "US":
        return array.astype(object)
    bad = next((value for value in array.reshape(-1).tolist() if not isinstance(value, str | bytes | None)), None)
    if bad is not None or not array.dtype.hasobject:
        told = f"holds {bad!r}" if bad is not None else f"is {BY_NUMPY.get(array.dtype.name, array.dtype)}"
        raise InferenceError(f"{noun} {spec.name!r} {told}, where text is declared", place=place)
    return array
