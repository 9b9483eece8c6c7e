"""What the host does next, as pure functions: when a dead replica is started again, when a new generation takes over,
and whether an engine that is tried on a share of the requests goes on, takes all of them, or goes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from onejob.core.artifact import Json
from onejob.core.counters import BUCKETS, quantile

BACKOFF_FIRST = 0.2
BACKOFF_CAP = 30.0
HEALTHY_SECONDS = 30.0
"""A replica that has been ready for so long is forgiven its earlier deaths."""
START_TRIES = 3
"""So often a replica may die at its start without a word, before its generation is given up."""

DEATHS = 1
"""So many deaths of a replica are forgiven while it tries an engine: they may have another cause."""
FLOOR_MS = 1.0
"""A difference in latency that is smaller doesn't count: on quick models it is the scheduler's. Neither do the
milliseconds that a request may wait for company: in a small share it finds less."""
WIDTH, LAST_WIDTH = 3.0, 1.0
"""So many standard deviations what was measured must lie beyond a limit: while the trial lasts, since it is looked at
again and again; and at its end."""

Verdict = Literal["wait", "switch", "give up"]
Word = Literal["wait", "full", "back"]


@dataclass(frozen=True, slots=True)
class Standing:
    """How one replica of a starting generation stands."""

    ready: bool
    reported: bool
    """It said what is wrong: trying again would not help."""
    deaths: int
    overdue: bool


def backoff(deaths: int) -> float:
    """Seconds to wait before a replica is started again, after its n-th death in a row; doubles up to a cap."""
    return 0.0 if deaths <= 0 else min(BACKOFF_CAP, BACKOFF_FIRST * 2.0 ** min(deaths - 1, 16))


def judge(replicas: Sequence[Standing]) -> Verdict:
    """Whether a starting generation takes over, is given up, or is waited for."""
    if any(r.reported or r.overdue or r.deaths >= START_TRIES for r in replicas):
        return "give up"
    return "switch" if all(r.ready for r in replicas) else "wait"


# ---- an engine that is tried


@dataclass(frozen=True)
class Trial:
    """What `[serve] rollout` says."""

    share: float
    hold: float
    requests: int
    shadow: bool
    max_errors: float
    max_slower: float
    floor_ms: float = FLOOR_MS

    @classmethod
    def of(cls, options: Mapping[str, Json]) -> Trial | None:
        """The rules; None when the next engine takes over at once."""
        told: Mapping[str, Json] = options.get("rollout") or {}
        if not told.get("canary"):
            return None
        return cls(
            share=float(told["canary"]),
            hold=float(told.get("hold", 600.0)),
            requests=int(told.get("requests", 100)),
            shadow=bool(told.get("shadow", False)),
            max_errors=float(told.get("max_errors", 0.01)),
            max_slower=float(told.get("max_slower", 1.5)),
            floor_ms=FLOOR_MS + float((options.get("batch") or {}).get("wait_ms", 2.0)),
        )


@dataclass(frozen=True)
class Tally:
    """How one engine's requests went since the trial began."""

    answered: int = 0
    failed: int = 0
    latency: tuple[int, ...] = (0,) * BUCKETS

    @classmethod
    def of(cls, told: Mapping[str, Json]) -> Tally:
        return cls(int(told["answered"]), int(told["failed"]), tuple(told["latency"]))

    def __add__(self, other: Tally) -> Tally:
        latency = tuple(a + b for a, b in zip(self.latency, other.latency, strict=True))
        return Tally(self.answered + other.answered, self.failed + other.failed, latency)

    @property
    def requests(self) -> int:
        return self.answered + self.failed

    @property
    def error_share(self) -> float:
        return self.failed / self.requests if self.requests else 0.0

    def p90_ms(self, widths: float = 0.0) -> float | None:
        """The 90th percentile of latency, or its bound so many standard deviations above (below: negative)."""
        level = 0.9 + widths * (0.9 * 0.1 / max(sum(self.latency), 1)) ** 0.5
        return quantile(self.latency, min(max(level, 0.0), 1.0))

    def to_json(self) -> dict[str, Json]:
        p90 = self.p90_ms()
        return {"requests": self.requests, "failed": self.failed, "p90_ms": None if p90 is None else round(p90, 3)}


@dataclass(frozen=True)
class Readings:
    """How a trial stands: the tallies of both engines, how long it has lasted, and what befell its replicas."""

    former: Tally
    new: Tally
    seconds: float
    deaths: int = 0
    faulty: str = ""
    """What a replica says is wrong with the new engine."""


def weigh(trial: Trial, now: Readings) -> tuple[Word, str]:
    """What becomes of an engine that is tried, and why when it goes back."""
    if now.faulty:
        return "back", now.faulty
    if now.deaths > DEATHS:
        return "back", f"{now.deaths} replicas ended while they tried it"
    over = now.seconds >= trial.hold and now.new.requests >= trial.requests
    if why := _fails(trial, now, over=over) or _is_slow(trial, now, over=over):
        return "back", why
    return ("full" if over else "wait"), ""


def _fails(trial: Trial, now: Readings, *, over: bool) -> str:
    new, former = now.new, now.former
    allowed = (former.error_share + trial.max_errors) * new.requests
    if new.failed <= (allowed if over else allowed + WIDTH * (allowed**0.5 + 1)):
        return ""
    return (
        f"{new.failed} of its {new.requests} requests failed ({new.error_share:.2%}), {former.failed} of "
        f"{former.requests} with the old engine ({former.error_share:.2%}); max_errors is {trial.max_errors:g}"
    )


def _is_slow(trial: Trial, now: Readings, *, over: bool) -> str:
    widths = LAST_WIDTH if over else WIDTH
    new, former = now.new.p90_ms(-widths), now.former.p90_ms(widths)
    if new is None or former is None or min(now.new.requests, now.former.requests) < max(trial.requests, 1):
        return ""
    if new <= former * trial.max_slower or new - former < trial.floor_ms:
        return ""
    return (
        f"its 90th percentile of latency is {now.new.p90_ms():.2f} ms over {now.new.requests} requests, "
        f"{now.former.p90_ms():.2f} ms over {now.former.requests} with the old engine; max_slower is "
        f"{trial.max_slower:g}"
    )
