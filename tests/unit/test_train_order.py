"""The order of the rows: a bijection, the same batches for any number of ranks, resumed at any row."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from onejob.train.order import State, permute, share, steps_per_epoch, take

seeds = st.integers(0, 2**63 - 1)


@given(st.integers(1, 3000), seeds, st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_every_epoch_visits_every_row_once(rows: int, seed: int, epoch: int):
    assert sorted(permute(np.arange(rows), rows, seed, epoch).tolist()) == list(range(rows))


def test_epochs_and_seeds_shuffle_anew_and_well():
    rows = 20_000
    orders = [permute(np.arange(rows), rows, seed, epoch) for seed, epoch in ((1, 0), (1, 1), (2, 0), (0, 1), (0, 0))]
    for number, order in enumerate(orders):
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.04  # neighbours are strangers
        assert abs(np.corrcoef(order, np.arange(rows))[0, 1]) < 0.04
        for other in orders[:number]:
            assert (order == other).mean() < 0.001


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 7), seeds)
@settings(max_examples=60, deadline=None)
def test_the_ranks_shares_are_the_global_batch(rows: int, batch: int, world: int, seed: int):
    state = State("d", seed, 0, 0)
    seen: list[int] = []
    for _ in range(steps_per_epoch(rows, batch)):
        taken, state = take(state, rows, batch)
        parts = [share(taken, rank, world) for rank in range(world)]
        assert np.concatenate(parts).tolist() == taken.tolist()
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        seen += taken.tolist()
    assert sorted(seen) == list(range(rows))
    assert state == State("d", seed, 1, 0)


@given(st.integers(2, 300), st.integers(1, 40), st.integers(1, 40), seeds, st.data())
@settings(max_examples=60, deadline=None)
def test_reading_goes_on_at_any_row(rows: int, batch: int, other_batch: int, seed: int, data: st.DataObject):
    start = data.draw(st.integers(0, rows - 1))
    whole = permute(np.arange(rows), rows, seed, 3).tolist()
    state, seen = State.from_json(State("d", seed, 3, start).to_json()), []
    while state.epoch == 3:
        taken, state = take(state, rows, batch if len(seen) % 2 else other_batch)
        seen += taken.tolist()
    assert seen == whole[start:]


def test_no_memory_grows_with_the_rows():
    rows = 10**15
    found = permute(np.array([0, 1, rows - 1]), rows, 1, 1)
    assert ((found >= 0) & (found < rows)).all()
    assert len(set(found.tolist())) == 3
