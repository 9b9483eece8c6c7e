"""What is reported of a load: figures, ratios, and what should keep a reader from believing them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onejob.core.artifact import Json
from onejob.serve.bench.outcome import Outcome, Ratio, percentiles, ratio, value_ms
from onejob.serve.bench.schedule import CLOSED, Load

BUSY = 0.9
"""The share of a core from which on a process of the load is itself what limits."""
LATE_MS = 1.0
FEW = 100
"""Requests a percentile needs beyond it, so that it isn't a single one's story: 100 for p99."""


@dataclass(frozen=True, slots=True)
class Server:
    """What the processes of a local server took meanwhile."""

    cpu_us: float | None
    """CPU time for a request, in microseconds; None where too little was spent to tell."""
    cores: float
    """Cores that were busy, on average."""
    processes: int
    memory: int
    """Resident bytes at the end, shared pages counted in each process."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One target under one load."""

    target: str
    load: str
    """In words."""
    settings: Mapping[str, Json]
    """The same as data: loop, connections, rate, rate_to, arrivals."""
    seconds: float
    requests: int
    """Due, or sent, in the measured time."""
    requests_per_s: float
    """Good answers a second."""
    due_per_s: float | None
    """Of an open loop: requests a second that were due."""
    latency_ms: Mapping[str, float | None]
    """mean, p50, p90, p99, p99.9, max of good answers, corrected for coordinated omission."""
    correction: str
    """How: see docs/bench.md."""
    uncorrected_ms: Mapping[str, float | None] | None
    """From sending to the answer, where that is something else."""
    errors: int
    errors_by_kind: Mapping[str, int]
    samples: Mapping[str, str]
    """A text of each kind."""
    unfinished: int
    sent_bytes_per_s: float
    received_bytes_per_s: float
    reconnects: int
    server: Server | None
    client_cpu_us: float | None
    """CPU time of the load itself for a request, in microseconds."""
    client_cores: float
    late_ms: float | None
    """Of an open loop: the 99th percentile of how late the load itself was with what was due."""
    series: tuple[Mapping[str, Json], ...]
    """By half seconds: seconds, requests_per_s, errors, p50_ms, p99_ms."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the search for the highest rate that keeps a goal."""

    rate: float
    requests_per_s: float
    latency_ms: Mapping[str, float | None]
    errors: int
    held: bool
    why: str
    """What it broke; empty if it held."""


@dataclass(frozen=True, slots=True)
class Searched:
    """The end of such a search."""

    target: str
    goals: str
    held: float | None
    """The highest rate that kept them; None if none did."""
    failed: float | None
    """The lowest that didn't."""
    steps: tuple[Step, ...]


def measured(target: str, outcome: Outcome) -> Measured:
    """An outcome's figures."""
    load, latency = outcome.load, outcome.corrected
    raw = None
    if load.loop != CLOSED:
        raw = percentiles(outcome.service if outcome.service.total else outcome.latency)
    seconds = outcome.seconds
    return Measured(
        target=target,
        load=str(load),
        settings=load.to_json(),
        seconds=seconds,
        requests=outcome.requests,
        requests_per_s=outcome.rate,
        due_per_s=outcome.requests / seconds if load.rate is not None and seconds else None,
        latency_ms=percentiles(latency),
        correction=outcome.correction,
        uncorrected_ms=raw,
        errors=outcome.failed,
        errors_by_kind=dict(outcome.errors.most_common()),
        samples=dict(outcome.samples),
        unfinished=outcome.unfinished,
        sent_bytes_per_s=outcome.sent_bytes / seconds if seconds else 0.0,
        received_bytes_per_s=outcome.received_bytes / seconds if seconds else 0.0,
        reconnects=outcome.reconnects,
        server=_server(outcome),
        client_cpu_us=outcome.cpu / outcome.arrived * 1e6 if outcome.arrived else None,
        client_cores=outcome.cpu / seconds if seconds else 0.0,
        late_ms=value_ms(outcome.late, "p99"),
        series=tuple(tick.to_json() for tick in outcome.ticks),
    )


def step_of(outcome: Outcome, rate: float, why: str) -> Step:
    """A step's figures."""
    return Step(rate, outcome.rate, percentiles(outcome.corrected), outcome.failed, not why, why)


def ratios(names: Sequence[str], load: Load, rounds: Sequence[Sequence[Outcome]]) -> list[Ratio]:
    """Each target beside the first, from one list of rounds a target: round by round, since they were taken in turns.

    In an open loop the rate is given, so only latencies and costs are compared.
    """
    wanted = ["requests_per_s"] if load.loop == CLOSED else []
    found: list[Ratio] = []
    for what in [*wanted, "p50_ms", "p99_ms", "cpu_us"]:
        first = [_figure(outcome, what) for outcome in rounds[0]]
        for name, its in zip(names[1:], rounds[1:], strict=True):
            pairs = [(_figure(outcome, what), other) for outcome, other in zip(its, first, strict=False)]
            if made := ratio(what, str(load), name, names[0], pairs):
                found.append(made)
    return found


def warnings_of(target: str, outcome: Outcome) -> list[str]:
    """What a reader should know before believing the figures; each with what would help."""
    told: list[str] = []
    busy = outcome.cpu / outcome.seconds / outcome.processes if outcome.seconds else 0.0
    if busy > BUSY:
        told.append(f"the load itself used {busy:.0%} of a core in each process: more --processes would send more")
    late, p99 = value_ms(outcome.late, "p99"), outcome.quantile_ms("p99")
    if late and p99 and late > LATE_MS and late > p99 / 10:
        told.append(
            f"the load itself was late: p99 {late:.3g} ms of the latencies are its own; give it cores with --cpus"
        )
    good = outcome.latency.total
    if 0 < good < FEW:
        told.append(f"{good} answers are too few for a p99: measure longer")
    if good and outcome.reconnects > max(good / 10, outcome.failed):
        told.append("the server closes connections: much of what was measured is connecting again")
    if not good:
        told.append("no request got a good answer")
    return [f"{target}: {text}" for text in told]


def _figure(outcome: Outcome, what: str) -> float | None:
    if what == "requests_per_s":
        return outcome.rate
    if what == "cpu_us":
        return outcome.cpu_us
    return outcome.quantile_ms(what.removesuffix("_ms"))


def _server(outcome: Outcome) -> Server | None:
    if outcome.server_cpu is None or not outcome.seconds:
        return None
    cores = outcome.server_cpu / outcome.seconds
    return Server(outcome.cpu_us, cores, outcome.server_processes, outcome.server_memory)
