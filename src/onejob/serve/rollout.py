"""What the host does next, as pure functions: when a dead replica is started again, and when a new generation takes
over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

BACKOFF_FIRST = 0.2
BACKOFF_CAP = 30.0
HEALTHY_SECONDS = 30.0
"""A replica that has been ready for so long is forgiven its earlier deaths."""
START_TRIES = 3
"""So often a replica may die at its start without a word, before its generation is given up."""

Verdict = Literal["wait", "switch", "give up"]


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
