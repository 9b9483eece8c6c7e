"""Counters of an endpoint: what a replica counts, how counts add up, and how a reader finds them in the endpoint's
folder.

Serving writes them and monitoring reads them, so the vocabulary lies here. A replica only counts up; it leaves a
snapshot in `metrics/<pid>.json`. When it has ended, the host folds its last snapshot into `metrics/retired.json`,
which remembers whom it has folded, so that no count is lost or taken twice, whenever the host dies.

    metrics/<pid>.json     {"id": "<pid>:<start>", "digest", "generation", "time", "pending",
                            "values": {name: n}, "latency": [n, …], "engines": {digest: {"values", "latency"}},
                            "models": {"<name>/<version>": {"values", "latency"}}}
    metrics/retired.json   {"folded": ["<pid>:<start>", …], "values": …, "latency": …, "engines": …, "models": …}

Names of `values`: success, failure.<REASON>, rows, executions; request_ns, queue_ns, input_ns, infer_ns, output_ns;
fallback (a new engine couldn't answer, the old one did); batch.<rows> and batch_ns.<rows>; log_dropped; capture_rows,
capture_dropped.<reason>, labels, labels_refused.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from onejob.core.artifact import Json

BOUNDS_US: tuple[float, ...] = tuple(16 * 2 ** (step / 4) for step in range(92))
"""Upper bounds of the latency buckets in microseconds: four an octave, 16 us to 112 s; one more takes the rest."""
BOUNDS_NS: tuple[float, ...] = tuple(bound * 1000 for bound in BOUNDS_US)
BUCKETS = len(BOUNDS_US) + 1
RETIRED = "retired.json"
PARTS = ("engines", "models")
"""What the counters are told apart by, beside their sum."""


@dataclass
class Counters:
    """Named counts and a histogram of latency; only ever counts up."""

    values: dict[str, int] = field(default_factory=dict)
    latency: list[int] = field(default_factory=lambda: [0] * BUCKETS)

    def count(self, name: str, amount: int = 1) -> None:
        self.values[name] = self.values.get(name, 0) + amount

    def observe(self, nanoseconds: int) -> None:
        """Count one answered request's latency."""
        self.latency[bisect_left(BOUNDS_NS, nanoseconds)] += 1

    def get(self, name: str) -> int:
        return self.values.get(name, 0)

    @property
    def failures(self) -> int:
        return sum(amount for name, amount in self.values.items() if name.startswith("failure."))

    def __add__(self, other: Counters) -> Counters:
        names = {**self.values, **other.values}
        values = {name: self.get(name) + other.get(name) for name in names}
        return Counters(values, [a + b for a, b in zip(self.latency, other.latency, strict=True)])

    def since(self, earlier: Counters) -> Counters:
        """What was counted after `earlier`; a count that fell was started afresh, so all of it is new."""
        values = {name: _grown(now, earlier.get(name)) for name, now in self.values.items()}
        latency = [_grown(now, then) for now, then in zip(self.latency, earlier.latency, strict=True)]
        return Counters(values, latency)

    def to_json(self) -> dict[str, Json]:
        return {"values": dict(self.values), "latency": list(self.latency)}

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Counters:
        latency = [int(n) for n in data.get("latency", ())][:BUCKETS]
        values = {str(name): int(n) for name, n in data.get("values", {}).items()}
        return cls(values, latency + [0] * (BUCKETS - len(latency)))


def _grown(now: int, then: int) -> int:
    return now - then if now >= then else now


def quantile(latency: Sequence[int], q: float) -> float | None:
    """The q-quantile in milliseconds, interpolated in its bucket (a quarter octave wide); None without requests."""
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
