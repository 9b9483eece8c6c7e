"""What came of a load on a target: latencies, errors, bytes and CPU time, added up over processes and turns; and the
ratio of two targets, from turns that were taken side by side. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from onejob.core.artifact import Json
from onejob.serve.bench.histogram import Histogram
from onejob.serve.bench.schedule import OPEN, PACED, Load

PERCENTILES: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
COARSE = 0.05
"""Seconds of CPU time below which the kernel's count, in hundredths, says too little."""
MS = 1e6
"""Nanoseconds in a millisecond."""


@dataclass(frozen=True, slots=True)
class Tick:
    """What was answered in one short stretch of a turn."""

    seconds: float
    """Its end, from the beginning of the measured time on."""
    length: float
    arrived: int
    errors: int
    p50_ms: float | None
    p99_ms: float | None

    @property
    def rate(self) -> float:
        return self.arrived / self.length

    def to_json(self) -> dict[str, Json]:
        figures = {"p50_ms": self.p50_ms, "p99_ms": self.p99_ms}
        return {"seconds": round(self.seconds, 3), "requests_per_s": self.rate, "errors": self.errors, **figures}


@dataclass
class Outcome:
    """What is known of one target under one load."""

    load: Load
    seconds: float = 0.0
    """That were measured."""
    latency: Histogram = field(default_factory=Histogram)
    """Of good answers; in an open loop from when the request was due, else from when it was sent."""
    service: Histogram = field(default_factory=Histogram)
    """Of an open loop: from when the request was sent."""
    late: Histogram = field(default_factory=Histogram)
    """Of an open loop: how late this program was itself with what was due and had a free connection."""
    arrived: int = 0
    """Good answers that came within the measured time, whenever they were asked for."""
    errors: Counter[str] = field(default_factory=Counter)
    samples: dict[str, str] = field(default_factory=dict)
    """The first text that came with each kind of error."""
    unfinished: int = 0
    """Requests that were given up because a person stopped it all."""
    sent_bytes: int = 0
    received_bytes: int = 0
    reconnects: int = 0
    cpu: float = 0.0
    """Seconds of CPU time that the load itself took."""
    processes: int = 1
    server_cpu: float | None = None
    """Seconds of CPU time of the server's processes; None where they can't be seen."""
    server_arrived: int = 0
    """Answers (and errors) in the time in which `server_cpu` was spent."""
    server_processes: int = 0
    server_memory: int = 0
    ticks: list[Tick] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """All that were due, or sent, in the measured time."""
        return self.latency.total + self.failed + self.unfinished

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    @property
    def error_share(self) -> float:
        return self.failed / self.requests if self.requests else 0.0

    @property
    def rate(self) -> float:
        """Good answers a second."""
        return self.arrived / self.seconds if self.seconds else 0.0

    @property
    def cpu_us(self) -> float | None:
        """CPU time of the server for a request, in microseconds; None where too little was spent to tell."""
        if self.server_cpu is None or self.server_cpu < COARSE or not self.server_arrived:
            return None
        return self.server_cpu / self.server_arrived * 1e6

    @property
    def corrected(self) -> Histogram:
        """The latencies that clients would have met, whatever this one's connections waited for."""
        interval = self.load.interval
        return self.latency if interval is None else self.latency.corrected(round(interval * 1e9))

    @property
    def correction(self) -> str:
        """How they were corrected for coordinated omission, in words."""
        if self.load.loop == OPEN:
            return "corrected for coordinated omission: from when each request was due"
        if self.load.loop == PACED and (interval := self.load.interval):
            return f"corrected for coordinated omission: by the expected interval of {interval * 1000:.4g} ms"
        return "not corrected for coordinated omission: a closed loop has no schedule"

    def quantile_ms(self, name: str) -> float | None:
        """`p99`, `p99.9`, `mean` or `max` of the corrected latencies, in milliseconds."""
        return value_ms(self.corrected, name)

    def add(self, other: Outcome) -> None:
        """What another turn of the same load on the same target came to, too."""
        shift = self.ticks[-1].seconds if self.ticks else 0.0
        self.ticks += [replace(tick, seconds=tick.seconds + shift) for tick in other.ticks]
        self.seconds += other.seconds
        for mine, its in ((self.latency, other.latency), (self.service, other.service), (self.late, other.late)):
            mine.add(its)
        self.arrived += other.arrived
        self.errors += other.errors
        self.samples = {**other.samples, **self.samples}
        self.unfinished += other.unfinished
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes
        self.reconnects += other.reconnects
        self.cpu += other.cpu
        self.processes = max(self.processes, other.processes)
        if other.server_cpu is not None:
            self.server_cpu = (self.server_cpu or 0.0) + other.server_cpu
            self.server_arrived += other.server_arrived
            self.server_processes = max(self.server_processes, other.server_processes)
            self.server_memory = max(self.server_memory, other.server_memory)


def value_ms(histogram: Histogram, name: str) -> float | None:
    """`p99`, `p99.9` (any percentile), `mean` or `max`, in milliseconds; None without values."""
    if name == "mean":
        return in_ms(histogram.mean)
    return in_ms(histogram.quantile(1.0 if name == "max" else float(name.removeprefix("p")) / 100))


def percentiles(histogram: Histogram) -> dict[str, float | None]:
    """The figures of a histogram that are reported, in milliseconds."""
    return {name: value_ms(histogram, name) for name in ("mean", *PERCENTILES, "max")}


def in_ms(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / MS


# ---- two targets beside each other

T_95: tuple[float, ...] = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t, two-sided 95 %, for 1 to 30 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of one target over that of the first, and the interval in which its mean lies with 95 %."""

    what: str
    """`requests_per_s`, `p50_ms`, `p99_ms` or `cpu_us`."""
    load: str
    """In words."""
    target: str
    to: str
    ratio: float
    low: float | None
    """None with one round only."""
    high: float | None
    rounds: int


def ratio(
    what: str, load: str, target: str, to: str, pairs: Sequence[tuple[float | None, float | None]]
) -> Ratio | None:
    """The geometric mean of what each round gave: (the target's figure, the first one's) a round.

    What slows a round down slows both, so the ratio of a round is steadier than its figures. None if no round has both.
    """
    logs = [math.log(mine / its) for mine, its in pairs if mine and its]
    if not logs:
        return None
    count, mean = len(logs), sum(logs) / len(logs)
    if count == 1:
        return Ratio(what, load, target, to, math.exp(mean), None, None, 1)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in logs) / (count - 1))
    t = T_95[count - 2] if count - 2 < len(T_95) else 1.96 + 2.5 / (count - 1)
    half = t * deviation / math.sqrt(count)
    return Ratio(what, load, target, to, math.exp(mean), math.exp(mean - half), math.exp(mean + half), count)
