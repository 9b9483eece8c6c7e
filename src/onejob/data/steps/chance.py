"""Chance that a seed decides, row by row: the same on every machine, thread count and version of any library."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import polars as pl

Words = np.ndarray[Any, np.dtype[np.uint64]]


def of_rows(seed: int) -> pl.Expr:
    """A number in [0, 1) for each row, from the seed and the row's place."""
    return pl.int_range(pl.len(), dtype=pl.UInt64).map_batches(
        lambda rows: pl.Series(_unit(_mix(rows.to_numpy() ^ _mix(np.array([seed % 2**64], dtype=np.uint64))))),
        return_dtype=pl.Float64,
    )


def of_values(column: str, seed: int) -> pl.Expr:
    """A number in [0, 1) for each row, the same for rows with the same value of a column."""

    def numbers(values: pl.Series) -> pl.Series:
        different = values.unique(maintain_order=True)
        chances = pl.Series([_chance(str(value), seed) for value in different.to_list()], dtype=pl.Float64)
        return values.replace_strict(different, chances, return_dtype=pl.Float64)

    return pl.col(column).cast(pl.String).fill_null("").map_batches(numbers, return_dtype=pl.Float64)


def _chance(value: str, seed: int) -> float:
    digest = hashlib.blake2b(f"{seed}:{value}".encode(), digest_size=8).digest()
    return float(_unit(np.array([int.from_bytes(digest, "little")], dtype=np.uint64))[0])


def _unit(words: Words) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The upper 53 bits as a fraction: all that a float can hold."""
    return (words >> np.uint64(11)).astype(np.float64) / float(2**53)


def _mix(words: Words) -> Words:
    """splitmix64 (Steele, Lea and Flood 2014): every bit of the result hangs on every bit of the input."""
    with np.errstate(over="ignore"):
        words = words + np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return words ^ (words >> np.uint64(31))
