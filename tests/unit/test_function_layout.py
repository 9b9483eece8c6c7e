"""Named arrays as bytes: where each lies, and text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onejob.engines.function.layout import ALIGN, Plans, pack, places, plan, read, unpack
from onejob.engines.kept import LONGEST_PAUSE, ended, pause

ELEMENTS = st.none() | st.binary(max_size=9) | st.text(st.characters(exclude_categories=[]), max_size=9)


@given(st.lists(ELEMENTS, max_size=12))
def test_text_comes_back_as_it_was(values: list[Any]) -> None:
    array = np.empty(len(values), object)
    array[:] = values
    found = unpack(memoryview(pack(array)), array.shape)
    assert found.tolist() == values
    assert list(map(type, found.tolist())) == list(map(type, values))


def test_text_comes_as_bytes_where_that_is_wanted() -> None:
    array = np.array(["ü", b"\xff", None, ""], object)
    assert unpack(memoryview(pack(array)), (4,), octets=True).tolist() == ["ü".encode(), b"\xff", None, b""]


def test_text_keeps_its_shape_and_numbers_are_no_text() -> None:
    array = np.array([["a", "bc"], ["", None]], object)
    assert unpack(memoryview(pack(array)), (2, 2)).tolist() == array.tolist()
    with pytest.raises(TypeError, match="1 is not text"):
        pack(np.array([1], object))


def test_arrays_lie_one_after_the_other_each_aligned() -> None:
    arrays = {
        "small": np.zeros((3,), np.uint8),
        "text": np.array(["a"], object),
        "none": np.zeros((0, 4), np.float32),
        "wide": np.zeros((2, 2), np.float64),
        "swapped": np.zeros((2,), ">i4"),
    }
    made = plan(arrays)
    starts, total = made.places([100])
    assert all(start % ALIGN == 0 for start in starts)
    sizes = [3, 100, 0, 32, 8]
    for here, size, after in zip(starts, sizes, [*starts[1:], total], strict=True):
        assert here + size <= after
    assert total == starts[-1] + 8
    again = read(made.head)
    assert again == made, "the other end reads the same"
    assert [part.shape for part in again.parts] == [array.shape for array in arrays.values()]
    assert again.parts[4].dtype == np.dtype("<i4")


def test_a_plan_is_made_once_for_its_shapes() -> None:
    plans = Plans()
    one = plans.of({"x": np.zeros((2, 3), np.float32)})
    assert plans.of({"x": np.ones((2, 3), np.float32)}) is one
    assert plans.of({"x": np.ones((3, 3), np.float32)}) is not one
    assert plans.of({"y": np.ones((2, 3), np.float32)}).head != one.head
    assert plans.of({"x": np.ones((2, 3), np.int32)}).head != one.head
    assert plans.read(one.head) is plans.read(bytes(bytearray(one.head)))
    assert one.fixed == places(one.parts, ())


def test_plans_forget_rather_than_grow() -> None:
    plans = Plans(most=4)
    for rows in range(20):
        plans.of({"x": np.zeros((rows, 1), np.float32)})
    assert len(plans._known) <= 4


def test_pauses_grow_to_a_limit_and_are_none_after_success() -> None:
    assert pause(0) == 0
    assert [pause(n) for n in (1, 2, 3)] == pytest.approx([0.2, 0.4, 0.8])
    assert pause(1000) == LONGEST_PAUSE


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0"),
        (3, "exit code 3"),
        (-9, "was killed by SIGKILL"),
        (-99, "was killed by signal 99"),
    ],
)
def test_return_codes_in_words(code: int, words: str) -> None:
    assert words in ended(code)
