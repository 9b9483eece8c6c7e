"""Description: how far a window's columns lie from the reference's, beside the distance that chance alone gives.

PSI, Jensen-Shannon and Wasserstein are distances, not tests: with few rows they are large though nothing has changed
(a window of 100 rows shows a PSI above 0.1 in 40 % of healthy cases), with many rows a harmless shift has them surely
above chance. So each stands beside the window's size and two figures of chance: its mean where nothing has changed,
and the value that only 5 % of healthy windows exceed. Chance is drawn with a fixed seed by moving whole blocks between
reference and window where the rows' blocks are known, and by moving rows where they are not; rows alone understate it
on clustered traffic. Nothing here ever triggers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from onejob.core.artifact import Json
from onejob.monitor.blocks import Array

BINS = 10
"""PSI and Jensen-Shannon of numbers: tenths of the reference. The customary thresholds belong to this count."""
GRID = 200
"""Wasserstein is taken between the two distribution functions at so many points."""
HALF = 0.5
"""Added to every count, since PSI is infinite where a bin is empty."""
DRAWS = 200
SEED = 20_011
HIGH = 0.95
RARE = 50
"""Categories beyond so many, the reference's most frequent ones first, count together."""


@dataclass(frozen=True, slots=True)
class Distance:
    """A distance, and what it would be if nothing had changed."""

    value: float
    chance: float
    """Its mean where nothing has changed."""
    chance_high: float
    """95 % of windows in which nothing has changed stay below."""


@dataclass(frozen=True, slots=True)
class Description:
    """One column in a window, beside the reference."""

    column: str
    rows: int
    reference_rows: int
    null_share: float
    reference_null_share: float
    unseen_share: float
    """The share of the window's rows in a category that the reference doesn't have."""
    unseen: tuple[str, ...]
    """The most frequent of them, at most ten."""
    by: str
    """What was moved to find the chance: `blocks` or `rows`."""
    psi: Distance | None
    jensen_shannon: Distance | None
    """The divergence's square root, in bits: 0 to 1."""
    wasserstein: Distance | None
    """In standard deviations of the reference; numbers only."""

    def to_json(self) -> dict[str, Json]:
        return {**dataclasses.asdict(self), "unseen": list(self.unseen)}


def describe_numbers(
    column: str, reference: Array, window: Array, *, blocks: tuple[Array, Array] | None = None
) -> Description:
    """Describe a column of numbers, NaN for null; `blocks` are the block of each row of reference and window."""
    known, known_window = np.isfinite(reference), np.isfinite(window)
    old, new = np.asarray(reference[known], np.float64), np.asarray(window[known_window], np.float64)
    shares = _shares(column, known, known_window)
    if not len(old) or not len(new):
        return Description(
            **shares, unseen_share=0.0, unseen=(), by="rows", psi=None, jensen_shannon=None, wasserstein=None
        )
    cuts = np.unique(np.quantile(old, np.linspace(0, 1, BINS + 1)[1:-1]))
    points = np.unique(np.quantile(np.concatenate([old, new]), np.linspace(0, 1, GRID)))
    spread = float(old.std())

    def distance(a: Array, b: Array) -> float:
        gaps = np.abs(np.cumsum(a / a.sum()) - np.cumsum(b / b.sum()))[:-1]
        return float(np.sum(gaps * np.diff(points)) / spread)

    coarse = _Counts.of(
        np.searchsorted(cuts, old), np.searchsorted(cuts, new), len(cuts) + 1, blocks, known, known_window
    )
    fine = _Counts.of(
        np.searchsorted(points, old), np.searchsorted(points, new), len(points), blocks, known, known_window
    )
    return Description(
        **shares,
        unseen_share=0.0,
        unseen=(),
        by=coarse.by,
        psi=coarse.measure(psi),
        jensen_shannon=coarse.measure(jensen_shannon),
        wasserstein=fine.measure(distance) if spread > 0 else None,
    )


def describe_categories(
    column: str, reference: Array, window: Array, *, blocks: tuple[Array, Array] | None = None
) -> Description:
    """Describe a column of categories: object arrays of str, None for null."""
    known = np.array([value is not None for value in reference], bool)
    known_window = np.array([value is not None for value in window], bool)
    old, new = reference[known].astype(str), window[known_window].astype(str)
    names, counts = np.unique(old, return_counts=True)
    names = names[np.argsort(-counts, kind="stable")]
    code = {name: min(position, RARE) for position, name in enumerate(names.tolist())}
    last = max(code.values(), default=-1) + 1  # the unseen, all together
    codes, codes_window = (
        np.array([code.get(value, last) for value in side.tolist()], np.int64) for side in (old, new)
    )
    strange, often = np.unique(new[codes_window == last], return_counts=True)
    told = tuple(strange[np.argsort(-often, kind="stable")][:10].tolist())
    shares = _shares(column, known, known_window)
    unseen = float(np.mean(codes_window == last)) if len(new) else 0.0
    if not len(old) or not len(new):
        return Description(
            **shares, unseen_share=unseen, unseen=told, by="rows", psi=None, jensen_shannon=None, wasserstein=None
        )
    table = _Counts.of(codes, codes_window, last + 1, blocks, known, known_window)
    return Description(
        **shares,
        unseen_share=unseen,
        unseen=told,
        by=table.by,
        psi=table.measure(psi),
        jensen_shannon=table.measure(jensen_shannon),
        wasserstein=None,
    )


def psi(reference: Array, window: Array) -> float:
    """The population stability index of two rows of counts: Σ (q - p) ln(q / p)."""
    p, q = _proportions(reference), _proportions(window)
    return float(np.sum((q - p) * np.log(q / p)))


def jensen_shannon(reference: Array, window: Array) -> float:
    """The Jensen-Shannon distance of two rows of counts: the square root of the divergence in bits."""
    p, q = _proportions(reference), _proportions(window)
    middle = (p + q) / 2
    bits = np.sum(p * np.log2(p / middle) + q * np.log2(q / middle)) / 2
    return math.sqrt(max(0.0, float(bits)))


def psi_by_chance(bins: int, rows: int, reference_rows: int, share: float = HIGH) -> tuple[float, float]:
    """Mean and quantile of the PSI of *independent* rows where nothing has changed.

    PSI · nN / (n + N) follows chi² with bins - 1 degrees of freedom, about; the quantile by Wilson and Hilferty.
    """
    degrees, scale = bins - 1, 1 / rows + 1 / reference_rows
    third = 2 / (9 * degrees)
    quantile = degrees * (1 - third + NormalDist().inv_cdf(share) * math.sqrt(third)) ** 3
    return degrees * scale, quantile * scale


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counts by block and bin of both sides; without blocks, each side is one."""

    reference: Array
    window: Array
    by: str

    @classmethod
    def of(
        cls, old: Array, new: Array, bins: int, blocks: tuple[Array, Array] | None, known: Array, known_window: Array
    ) -> _Counts:
        if blocks is None:
            return cls(_by_bin(old, bins), _by_bin(new, bins), "rows")
        return cls(
            _by_block(old, bins, np.asarray(blocks[0])[known]),
            _by_block(new, bins, np.asarray(blocks[1])[known_window]),
            "blocks",
        )

    def measure(self, distance: Callable[[Array, Array], float]) -> Distance:
        drawn = np.array([distance(a, b) for a, b in self._draws()])
        value = distance(self.reference.sum(axis=0), self.window.sum(axis=0))
        return Distance(value, float(drawn.mean()), float(np.quantile(drawn, HIGH)))

    def _draws(self) -> Iterator[tuple[Array, Array]]:
        """Reference and window as they might have been, had chance dealt the same blocks (or rows) otherwise."""
        generator = np.random.default_rng(SEED)
        if self.by == "rows":
            pooled = self.reference.sum(axis=0) + self.window.sum(axis=0)
            dealt = generator.multivariate_hypergeometric(pooled, int(self.window.sum()), size=DRAWS)
            yield from ((pooled - counts, counts) for counts in dealt)
            return
        table = np.concatenate([self.reference, self.window])
        total = table.sum(axis=0)
        for _ in range(DRAWS):
            chosen = table[generator.permutation(len(table))[: len(self.window)]].sum(axis=0)
            yield total - chosen, chosen


def _by_bin(codes: Array, bins: int) -> Array:
    return np.bincount(codes, minlength=bins)[None, :]


def _by_block(codes: Array, bins: int, blocks: Array) -> Array:
    names, index = np.unique(blocks, return_inverse=True)
    flat = np.bincount(index.reshape(-1) * bins + codes, minlength=len(names) * bins)
    return flat.reshape(len(names), bins)


def _proportions(counts: Array) -> Array:
    return np.asarray((counts + HALF) / (counts.sum() + HALF * len(counts)))


def _shares(column: str, known: Array, known_window: Array) -> dict[str, Any]:
    return {
        "column": column,
        "rows": len(known_window),
        "reference_rows": len(known),
        "null_share": _null_share(known_window),
        "reference_null_share": _null_share(known),
    }


def _null_share(known: Sequence[bool] | Array) -> float:
    return float(1 - np.mean(known)) if len(known) else 0.0
