"""What a person asks of a load, checked: how it is sent, for how long, with which bodies. Pure.

Contradictions are told at once, before anything is started.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onejob.core.spec import parse_duration
from onejob.errors import UsageError
from onejob.serve.bench.body import BINARY
from onejob.serve.bench.schedule import CLOSED, OPEN, PACED, Load
from onejob.serve.bench.search import Goals

SECONDS = 10.0
"""That are measured, if nothing is said."""
CONNECTIONS_CLOSED, CONNECTIONS_OPEN = 16, 128
ROUNDS = 5
"""Turns of each target where several are compared."""


@dataclass(frozen=True, slots=True)
class Wish:
    """All that `onejob bench` can be asked for, beside the targets."""

    connections: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    ramp: tuple[float, float] | None = None
    closed: bool = False
    arrivals: str = "poisson"
    seconds: float | None = None
    requests: int | None = None
    warmup: float = 1.0
    timeout: float = 10.0
    rounds: int | None = None
    processes: int = 1
    cpus: tuple[int, ...] = ()
    goals: Goals | None = None
    model: str = ""
    batch: int = 1
    form: str = BINARY
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    bodies: int = 8
    """How many different ones are made."""
    data: tuple[bytes, ...] = ()
    """Bodies of the person's own, sent in turn; empty: made from the model's metadata."""
    data_type: str = ""
    """Their Content-Type."""
    headers: tuple[tuple[str, str], ...] = ()
    method: str = ""
    seed: int = 0

    @property
    def measured(self) -> float | None:
        """Seconds to measure; None: until the requests are answered."""
        return SECONDS if self.seconds is None and self.requests is None else self.seconds


def loads_of(wish: Wish) -> list[Load]:
    """The loads to measure, one after the other; UsageError for a contradiction."""
    if wish.ramp and (wish.rates or wish.closed):
        raise UsageError("a ramp has its own rates, in an open loop", place="--ramp", cure="Leave --rate and --closed.")
    if wish.ramp and wish.measured is None:
        raise UsageError("a ramp takes its time", place="--ramp", cure="Give --duration in the place of --requests.")
    if wish.closed and not wish.rates:
        raise UsageError(
            "a closed loop is what there is without --rate", place="--closed", cure="Add --rate, or leave it."
        )
    if len(wish.rates) > 1 and len(wish.connections) > 1:
        raise UsageError("only one of them may be a list", place="--rate, --connections")
    if wish.goals and (wish.ramp or wish.closed or len(wish.rates) > 1 or len(wish.connections) > 1 or wish.requests):
        cure = "Give at most one --rate (to begin with) and one --connections."
        raise UsageError("the search chooses the rates, in an open loop, by time", place="--slo", cure=cure)
    open_loop = bool(wish.rates or wish.ramp) and not wish.closed
    counts = wish.connections or (CONNECTIONS_OPEN if open_loop else CONNECTIONS_CLOSED,)
    if min(counts) < wish.processes:
        raise UsageError(
            f"{wish.processes} processes can't share {min(counts)} connections",
            place="--processes",
            cure="Each needs one of its own.",
        )
    if wish.ramp:
        return [Load(OPEN, count, *wish.ramp, wish.arrivals) for count in counts]
    if not wish.rates:
        return [Load(CLOSED, count) for count in counts]
    kind = PACED if wish.closed else OPEN
    arrivals = "even" if wish.closed else wish.arrivals
    return [Load(kind, count, rate, None, arrivals) for count in counts for rate in wish.rates]


def numbers(text: str, place: str, *, whole: bool = False) -> tuple[float, ...]:
    """`1000` or `1000,2000,4000`: each above zero."""
    found: list[float] = []
    for part in text.split(","):
        try:
            value = float(int(part)) if whole else float(part)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            kind = "a whole number" if whole else "a number"
            raise UsageError(
                f"{part.strip()!r} is not {kind} above zero", place=place, cure="Such as 100 or 100,200,400."
            )
        found.append(value)
    return tuple(found)


def ramp(text: str) -> tuple[float, float]:
    """`100:5000`."""
    begin, colon, end = text.partition(":")
    if not colon:
        raise UsageError(f"{text!r} is no ramp", place="--ramp", cure="FROM:TO, such as 100:5000.")
    return numbers(begin, "--ramp")[0], numbers(end, "--ramp")[0]


def seconds(text: str, place: str, *, zero: bool = False) -> float:
    """`10`, `500ms`, `2m`."""
    try:
        plain = float(text)
    except ValueError:
        try:
            plain = float(parse_duration(text))
        except ValueError as error:
            raise UsageError(f"{text!r}: {error}", place=place) from None
    if not math.isfinite(plain) or plain < 0 or (plain == 0 and not zero):
        raise UsageError(f"{text!r} is no time to wait", place=place, cure="Such as 10s or 2m.")
    return plain


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """`NAME:3,224,224`."""
    name, colon, sizes = text.rpartition(":")
    if not colon or not name:
        raise UsageError(f"{text!r} is no shape", place="--shape", cure="NAME:SIZES, such as image:3,224,224.")
    return name, tuple(int(size) for size in numbers(sizes, f"--shape {name}", whole=True))


def cpus(text: str, place: str, allowed: Sequence[int]) -> tuple[int, ...]:
    """`0` or `0,2-3`: cores of this machine that may be used."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.strip().isdigit() or (dash and not last.strip().isdigit()):
            raise UsageError(f"{part!r} names no core", place=place, cure="Such as 0 or 0,2-3.")
        found += range(int(first), int(last if dash else first) + 1)
    if foreign := sorted(set(found) - set(allowed)):
        raise UsageError(
            f"core {foreign[0]} can't be used here", place=place, cure=f"Cores: {', '.join(map(str, allowed))}."
        )
    return tuple(found)
