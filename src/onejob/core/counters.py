"""Counters of an endpoint: what a replica counts, how counts add up, and how a reader finds them in the endpoint's
folder.

Serving writes them and monitoring reads them, so the vocabulary lies here. A replica only counts up; it leaves a
snapshot in `metrics/<pid>.json`. When it has ended, the host folds its last snapshot into `metrics/retired.json`,
which remembers whom it has folded, so that no count is lost or taken twice, whenever the host dies.

    metrics/<pid>.json     {"id": "<pid>:<start>", "digest", "generation", "time", "pending", "machine",
                            COUNTERS, "engines": {digest: COUNTERS},
                            "models": {"<name>/<version>": {COUNTERS, "now": {…}}}}
    metrics/retired.json   {"folded": ["<pid>:<start>", …], COUNTERS, "engines": …, "models": …}
    COUNTERS               "values": {name: n}, "latency": [n, …], "parts": {name: [n, …]}, "last": milliseconds

Names of `values`: success, failure.<REASON>, rows, executions; request_ns, queue_ns, input_ns, infer_ns, output_ns;
fallback (a new engine couldn't answer, the old one did); batch.<rows> and batch_ns.<rows>; log_dropped; capture_rows,
capture_dropped.<reason>, labels, labels_refused. Names of `parts`: queue, input, infer, output (of answered requests),
batch (of batches).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from onejob.core.artifact import Json

_SERIES = (100, 112, 125, 140, 160, 180, 200, 224, 250, 280, 315, 355, 400, 450, 500, 560, 630, 710, 800, 900)
"""The Renard series R20: twenty even steps a decade, and 1, 2.5 and 5 are among them."""
BOUNDS_NS: tuple[int, ...] = (*(step * 10**power for power in range(2, 9) for step in _SERIES), 100 * 10**9)
"""Upper bounds of the latency buckets in nanoseconds: twenty a decade, 10 us to 100 s; one more takes the rest."""
BOUNDS_US: tuple[float, ...] = tuple(bound / 1000 for bound in BOUNDS_NS)
BUCKETS = len(BOUNDS_US) + 1
EDGES_NS: tuple[int, ...] = tuple(step * 10**power for power in range(2, 9) for step in (100, 250, 500))
"""Upper bounds of the coarse buckets, which every histogram of a duration is told in: 10 us, 25 us, 50 us … 50 s."""
PART_NAMES = ("queue", "input", "infer", "output", "batch")
RETIRED = "retired.json"
PARTS = ("engines", "models")
"""What the counters are told apart by, beside their sum."""


@dataclass
class Counters:
    """Named counts, a fine histogram of latency, and coarse ones of what it is made of; only ever counts up."""

    values: dict[str, int] = field(default_factory=dict)
    latency: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    parts: dict[str, list[int]] = field(default_factory=dict)
    """By name: how many took up to each of EDGES_NS, and longer than the last; those that were ever counted."""
    last: int = 0
    """When a request was answered last, in milliseconds since the epoch."""

    def count(self, name: str, amount: int = 1) -> None:
        self.values[name] = self.values.get(name, 0) + amount

    def observe(self, nanoseconds: int) -> None:
        """Count one answered request's latency."""
        self.latency[bisect_left(BOUNDS_NS, nanoseconds)] += 1

    def make_parts(self) -> dict[str, list[int]]:
        """Begin the parts' histograms; not before they are needed, for most of many models are never asked."""
        self.parts = {name: [0] * (len(EDGES_NS) + 1) for name in PART_NAMES}
        return self.parts

    def get(self, name: str) -> int:
        return self.values.get(name, 0)

    def copy(self) -> Counters:
        """As they are now; may be called from another thread than the one that counts."""
        parts = {name: counts.copy() for name, counts in self.parts.copy().items()}
        return Counters(self.values.copy(), self.latency.copy(), parts, self.last)

    @property
    def failures(self) -> int:
        return sum(amount for name, amount in self.values.items() if name.startswith("failure."))

    def __add__(self, other: Counters) -> Counters:
        names = {**self.values, **other.values}
        values = {name: self.get(name) + other.get(name) for name in names}
        latency = [a + b for a, b in zip(self.latency, other.latency, strict=True)]
        parts = {**self.parts, **other.parts}
        for name in self.parts.keys() & other.parts.keys():
            parts[name] = [a + b for a, b in zip(self.parts[name], other.parts[name], strict=True)]
        return Counters(values, latency, parts, max(self.last, other.last))

    def since(self, earlier: Counters) -> Counters:
        """What was counted after `earlier`; a count that fell was started afresh, so all of it is new."""
        values = {name: _grown(now, earlier.get(name)) for name, now in self.values.items()}
        parts = {name: _all_grown(now, earlier.parts.get(name, [0] * len(now))) for name, now in self.parts.items()}
        return Counters(values, _all_grown(self.latency, earlier.latency), parts, self.last)

    def to_json(self) -> dict[str, Json]:
        parts = {name: list(counts) for name, counts in self.parts.items()}
        return {"values": dict(self.values), "latency": list(self.latency), "parts": parts, "last": self.last}

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Counters:
        values = {str(name): int(n) for name, n in data.get("values", {}).items()}
        parts = {str(name): _sized(counts, len(EDGES_NS) + 1) for name, counts in data.get("parts", {}).items()}
        return cls(values, _sized(data.get("latency", ()), BUCKETS), parts, int(data.get("last", 0)))


def _sized(counts: Sequence[Json], size: int) -> list[int]:
    known = [int(n) for n in counts][:size]
    return known + [0] * (size - len(known))


def _all_grown(now: Sequence[int], then: Sequence[int]) -> list[int]:
    return [_grown(a, b) for a, b in zip(now, then, strict=True)]


def _grown(now: int, then: int) -> int:
    return now - then if now >= then else now


def quantile(latency: Sequence[int], q: float) -> float | None:
    """The q-quantile in milliseconds, interpolated in its bucket (an eighth wide); None without requests."""
    total = sum(latency)
    if not total:
        return None
    rank, seen = q * total, 0
    for index, amount in enumerate(latency):
        if amount and seen + amount >= rank:
            low = BOUNDS_US[index - 1] if index else 0.0
            high = BOUNDS_US[index] if index < len(BOUNDS_US) else BOUNDS_US[-1]
            return (low + (high - low) * (rank - seen) / amount) / 1000
        seen += amount
    return BOUNDS_US[-1] / 1000


@dataclass(frozen=True)
class Snapshots:
    """What the replicas of an endpoint have left: each live one's counters, and the sum of those that ended."""

    live: Mapping[str, Mapping[str, Json]]
    """By identity (`<pid>:<start>`): the snapshot as it was written."""
    retired: Counters
    folded: tuple[str, ...]
    retired_parts: Mapping[str, Mapping[str, Counters]] = field(default_factory=dict)
    """Of replicas that ended, for each kind of PARTS; those that counted last."""

    def with_own(self, snapshot: Mapping[str, Json]) -> Snapshots:
        """The same, with a replica's snapshot of now in the place of the one that it left."""
        return replace(self, live={**self.live, str(snapshot["id"]): snapshot})

    def by(self, part: str) -> dict[str, Counters]:
        """The counters of each engine (by digest), or of each model (`name/version`), over all replicas."""
        total = dict(self.retired_parts.get(part, {}))
        for snapshot in self.live.values():
            for name, counters in parts_of(snapshot, part).items():
                total[name] = total.get(name, Counters()) + counters
        return total

    def total(self, *, without: str = "") -> Counters:
        """The sum over all replicas, living and ended; `without` leaves one out, by identity."""
        total = self.retired
        for identity, snapshot in self.live.items():
            if identity != without:
                total = total + Counters.from_json(snapshot)
        return total


def read_snapshots(folder: Path) -> Snapshots:
    """Read the `metrics` folder; the living first, so that one folded in between is seen in both, and counted once."""
    live: dict[str, Mapping[str, Json]] = {}
    for path in sorted(folder.glob("*.json")):
        snapshot = _read(path) if path.name != RETIRED else {}
        if "id" in snapshot:
            live[str(snapshot["id"])] = snapshot
    retired = _read(folder / RETIRED)
    folded = tuple(str(identity) for identity in retired.get("folded", ()))
    unfolded = {identity: snapshot for identity, snapshot in live.items() if identity not in folded}
    return Snapshots(unfolded, Counters.from_json(retired), folded, {part: parts_of(retired, part) for part in PARTS})


def parts_of(snapshot: Mapping[str, Json], part: str) -> dict[str, Counters]:
    """A snapshot's counters by engine, or by model."""
    return {str(name): Counters.from_json(data) for name, data in snapshot.get(part, {}).items()}


def _read(path: Path) -> Mapping[str, Json]:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}  # gone in between, or another's leftover: not a snapshot
    return data if isinstance(data, dict) else {}
