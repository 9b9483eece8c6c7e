"""The arithmetic of slots: nothing is given out twice, what fits is given, and the reason names what is missing."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onejob.errors import UsageError
from onejob.store.slots import EPSILON, Full, Granted, Held, choose, shares


def needs(cpus: float, gpus: float = 0.0) -> dict[str, float]:
    return {"cpus": cpus, "gpus": gpus}


def room(cpus: float, *gpus: int) -> dict[str, object]:
    return {"cpus": cpus, "gpus": list(gpus)}


def train(name: str, cpus: float = 0.0, gpus: float = 0.0, *ids: int) -> Held:
    return Held(name, "train of flights", cpus, gpus, ids)


def test_cpus_fit_until_they_are_all_held() -> None:
    assert choose(needs(1), room(2), [train("ab12", 1)]) == Granted()
    full = choose(needs(2), room(2), [train("ab12", 1)])
    assert full == Full("waiting for 2 CPUs: 1 of 2 free, held by execution ab12 (train of flights)")
    assert choose(needs(0), room(1), [train("ab12", 1)]) == Granted()
    assert choose(needs(0.1), room(1), [train(str(n), 0.1) for n in range(9)]) == Granted()
    assert isinstance(choose(needs(0.1), room(1), [train(str(n), 0.1) for n in range(10)]), Full)


def test_a_wish_for_more_cpus_than_there_are_runs_alone() -> None:
    assert choose(needs(8), room(2), []) == Granted()
    assert isinstance(choose(needs(8), room(2), [train("ab12", 0.5)]), Full)
    assert choose(needs(1), room(2), [train("big", 8)]) == Full(
        "waiting for 1 CPU: 0 of 2 free, held by execution big (train of flights)"
    )


def test_whole_gpus_take_whole_devices_and_fractions_share_one() -> None:
    assert choose(needs(1, 2), room(8, 0, 1, 2), [train("a", 0, 0.5, 1)]) == Granted((0, 2))
    assert choose(needs(1, 0.5), room(8, 0, 1), [train("a", 0, 0.5, 1)]) == Granted((1,))
    assert choose(needs(1, 0.6), room(8, 0, 1), [train("a", 0, 0.5, 1)]) == Granted((0,))
    assert choose(needs(1, 1.5), room(8, 0, 1), [train("a", 0, 0.5, 1)]) == Granted((0, 1))
    assert choose(needs(1, 1), room(8, 0), [train("a", 0, 1, 7)]) == Granted((0,)), "7 isn't ours any more"
    assert choose(needs(1, 1), room(8, 0, 1), [train("a", 0, 2, 0, 1)]) == Full(
        "waiting for 1 GPU: 0 of 2 free, held by execution a (train of flights)"
    )
    assert choose(needs(1, 0.5), room(8, 0), [train("a", 0, 0.75, 0)]) == Full(
        "waiting for 0.5 GPU: no device has 0.5 left, held by execution a (train of flights)"
    )


def test_more_gpus_than_there_are_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="asks for 2 GPUs, and there are 1"):
        choose(needs(1, 2), room(8, 0), [])
    with pytest.raises(UsageError, match=r"asks for 0\.5 GPU, and there are 0"):
        choose(needs(1, 0.5), room(8), [])


def test_many_holders_are_not_all_named() -> None:
    full = choose(needs(1), room(5), [train(str(n), 1) for n in range(5)])
    assert isinstance(full, Full)
    assert full.reason.count("execution") == 3
    assert full.reason.endswith("and 2 more")


WISHES = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 5.0]), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0])
    ),
    max_size=25,
)


@given(WISHES, st.integers(0, 3), st.data())
def test_slots_are_never_exceeded(wishes: list[tuple[float, float]], devices: int, data: st.DataObject) -> None:
    capacity = room(3.0, *range(devices))
    held: list[Held] = []
    for number, (cpus, gpus) in enumerate(wishes):
        if held and data.draw(st.booleans()):
            held.pop(data.draw(st.integers(0, len(held) - 1)))
        if math.ceil(gpus) > devices:
            with pytest.raises(UsageError):
                choose(needs(cpus, gpus), capacity, held)
            continue
        answer = choose(needs(cpus, gpus), capacity, held)
        if isinstance(answer, Granted):
            held.append(train(str(number), cpus, gpus, *answer.gpu_ids))
        else:
            assert held, "an empty machine takes any wish"
        used = sum(one.cpus for one in held)
        assert used <= 3.0 or sum(one.cpus > 0 for one in held) == 1
        load: Counter[int] = Counter()
        for one in held:
            assert sum(shares(one).values()) == pytest.approx(one.gpus)
            for device, share in shares(one).items():
                load[device] += share  # type: ignore[assignment]
        assert all(share <= 1.0 + 100 * EPSILON for share in load.values())
