"""The ranks of a gang arrive, or are named; on a clock that the test sets."""

import pytest

from onejob.errors import RankError
from onejob.train.ranks import arrive


class World:
    """A store and a clock; `comes` says when (in seconds) another rank arrives, and with what."""

    def __init__(self, comes: dict[int, tuple[float, str]]) -> None:
        self.comes, self.now = comes, 0.0
        self.values: dict[str, str] = {}
        self.said: list[str] = []

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        for rank, (when, what) in self.comes.items():
            if self.now >= when:
                self.values[f"arrived/{rank}"] = what
        return all(key in self.values for key in keys)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def arrive(self, limit: float) -> None:
        arrive(
            self,
            0,
            len(self.comes) + 1,
            fingerprint="torch 2",
            limit=limit,
            clock=lambda: self.now,
            sleep=self.sleep,
            say=self.said.append,
        )


def test_all_there_at_once():
    world = World({1: (0, "torch 2"), 2: (0, "torch 2")})
    world.arrive(60)
    assert (world.now, world.said) == (0.0, [])


def test_who_is_late_is_named_every_five_seconds():
    world = World({1: (0, "torch 2"), 2: (12, "torch 2")})
    world.arrive(60)
    assert world.said == [
        "rank 0: waiting for rank 2, not arrived for 5 s",
        "rank 0: waiting for rank 2, not arrived for 10 s",
    ]


def test_who_never_arrives_is_named_at_the_limit():
    world = World({1: (99, ""), 2: (0, "torch 2"), 3: (99, "")})
    with pytest.raises(RankError, match="ranks 1, 3 never arrived: rank 0 waited 8 s"):
        world.arrive(8)
    assert 8 <= world.now < 8.2


def test_who_runs_something_else_is_named():
    with pytest.raises(RankError, match="rank 2 runs something else than rank 0: torch 1 instead of torch 2"):
        World({1: (0, "torch 2"), 2: (0, "torch 1")}).arrive(60)
