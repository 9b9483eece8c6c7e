"""A gang comes together: every rank says that it is there, and waits for the others with a time limit.

Whoever doesn't arrive is named, every few seconds while the others wait and at the limit in the error. A rank that runs
other code, options or data than rank 0 is named before the first step, not as a hang in the middle of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from onejob.errors import RankError

EVERY = 5.0
PAUSE = 0.05


class Store(Protocol):
    """What all ranks can read and write (torch's TCPStore)."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""


def arrive(
    store: Store,
    rank: int,
    world: int,
    *,
    fingerprint: str,
    limit: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    say: Callable[[str], None],
) -> None:
    """Return once all ranks are there with the same fingerprint; RankError names who is missing or differs."""
    store.set(f"arrived/{rank}", fingerprint)
    started, told = clock(), 0
    while missing := [other for other in range(world) if not store.check([f"arrived/{other}"])]:
        waited = clock() - started
        if waited >= limit:
            raise missing_error(missing, limit, rank)
        if waited >= (told + 1) * EVERY:
            told = int(waited // EVERY)
            say(waiting(missing, waited, rank))
        sleep(PAUSE)
    for other in range(world):
        theirs = store.get(f"arrived/{other}").decode()
        if theirs != (first := store.get("arrived/0").decode()):
            raise RankError(
                f"rank {other} runs something else than rank 0: {theirs} instead of {first}",
                cure="All ranks need the same code, packages, options and dataset.",
            )


def waiting(missing: list[int], waited: float, rank: int) -> str:
    """The line for the log while ranks are missing."""
    return f"rank {rank}: waiting for {_names(missing)}, not arrived for {waited:.0f} s"


def missing_error(missing: list[int], limit: float, rank: int) -> RankError:
    return RankError(
        f"{_names(missing)} never arrived: rank {rank} waited {limit:g} s",
        cure="The log shows how far it came; a slow machine may need a longer [train] arrive.",
    )


def _names(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
