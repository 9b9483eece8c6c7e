"""The tabular encoding: the same arrays in training and in serving, and mistakes that are named."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onejob.errors import BadRequestError, DataError
from onejob.families.tabular import encode
from onejob.families.tabular.options import Options

ROLES: dict[str, Any] = {"label": "late", "categories": ["carrier", "origin"], "numbers": ["distance", "wind"]}


def text(*values: str | None) -> np.ndarray[Any, Any]:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def columns() -> dict[str, Any]:
    return {
        "late": np.array([True, False, True, False]),
        "carrier": text("UA", "AA", "UA", None),
        "origin": text("JFK", "JFK", "LGA", "EWR"),
        "distance": np.array([100.0, 200.0, 300.0, 400.0]),
        "wind": np.array([1.0, np.nan, 3.0, np.nan]),
    }


def fit(changes: dict[str, Any] | None = None, roles: dict[str, Any] = ROLES, **options: Any) -> encode.Encoding:
    return encode.fit({**columns(), **(changes or {})}, roles, Options(**{"min_count": 1, **options}).model_dump())


def test_codes_are_sorted_by_name_and_zero_is_missing_or_unknown():
    found = fit().encode({**columns(), "origin": text("LGA", "EWR", "XXX", "JFK")})
    assert found["categories"].dtype == np.int64
    assert found["categories"].tolist() == [[2, 3], [1, 1], [2, 0], [0, 2]]


def test_a_value_rarer_than_the_minimum_count_is_unknown():
    assert fit(min_count=2).categories == (encode.Category("carrier", ("UA",)), encode.Category("origin", ("JFK",)))


def test_numbers_are_scaled_and_columns_with_nulls_have_an_indicator():
    found = fit().encode(columns())["numbers"]
    std = math.sqrt(12500.0)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[:, 0], np.array([-150, -50, 50, 150]) / std, rtol=1e-6)
    np.testing.assert_allclose(found[:, 1], [-1, 0, 1, 0])
    assert found[:, 2].tolist() == [0, 1, 0, 1]


def test_a_null_where_training_had_none_is_the_mean_without_an_indicator():
    found = fit().encode({**columns(), "distance": [None, 200, 300, 400]})["numbers"]
    assert found.shape == (4, 3)
    assert found[0, 0] == 0.0


def test_constant_and_empty_columns_encode_to_zero():
    encoding = fit({"distance": np.full(4, 7.0), "wind": np.full(4, np.nan)})
    found = encoding.encode({**columns(), "distance": np.full(4, 7.0), "wind": np.full(4, np.nan)})["numbers"]
    assert found.tolist() == [[0, 0, 1]] * 4
    again = encode.load(json.loads(json.dumps(encoding.to_json())))
    live = again.encode({**columns(), "distance": np.full(4, 900.0), "wind": np.full(4, 5.0)})["numbers"]
    assert live[:, :2].tolist() == [[0, 0]] * 4, (
        "nothing was learnt of these columns, so no value of theirs says anything"
    )


def test_what_comes_as_json_encodes_to_the_same_bytes_as_what_was_trained_on():
    encoding = fit()
    trained = encoding.encode(columns())
    asked = {
        name: [None if value != value else value for value in column.tolist()] for name, column in columns().items()
    }
    tensors = {name: column.reshape(-1, 1) for name, column in columns().items()}
    for given_columns in (json.loads(json.dumps(asked)), tensors):
        served = encoding.encode(given_columns)
        assert {name: array.tobytes() for name, array in served.items()} == {
            name: array.tobytes() for name, array in trained.items()
        }


def test_whole_numbers_booleans_and_bytes_stand_for_the_text_that_the_dataset_has():
    encoding = fit({"carrier": text("1545", "true", "é", None)})
    expected = encoding.encode({**columns(), "carrier": text("1545", "true", "é", None)})["categories"]
    found = encoding.encode({**columns(), "carrier": [1545, True, "é".encode(), None]})["categories"]
    assert found.tolist() == expected.tolist()


def test_one_row_encodes_as_it_does_among_others():
    encoding = fit()
    together = encoding.encode(columns())
    for row in range(4):
        alone = encoding.encode({name: column[row : row + 1] for name, column in columns().items()})
        assert all((alone[name][0] == together[name][row]).all() for name in together)


def test_an_extreme_number_stays_finite():
    found = fit().encode({**columns(), "distance": [1e308, -1e308, 2**70, 0]})["numbers"]
    assert np.isfinite(found).all()
    assert found[0, 0] == encode.EXTREME


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"distance": [1, "12", 3, 4]}, ["'distance'", "row 1", "'12'"]),
        ({"distance": [1, 2, [3], 4]}, ["'distance'", "row 2", "[3]"]),
        ({"distance": [1, 2, 3, math.inf]}, ["'distance'", "row 3", "inf"]),
        ({"distance": [10**400, 2, 3, 4]}, ["'distance'", "row 0", "too large"]),
        ({"distance": np.array(["1", "2", "3", "4"])}, ["'distance'", "row 0", "'1'"]),
        ({"carrier": ["UA", {"a": 1}, "AA", "UA"]}, ["'carrier'", "row 1", "{'a': 1}"]),
        ({"carrier": ["UA", "AA", b"\xff", "UA"]}, ["'carrier'", "row 2", "UTF-8"]),
        ({"carrier": "UA"}, ["'carrier'", "'UA'", "list"]),
        ({"wind": [1, 2, 3]}, ["'wind'", "3 rows", "4"]),
        ({"wind": np.zeros((4, 2))}, ["'wind'", "[4, 2]"]),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], named: list[str]):
    with pytest.raises(BadRequestError) as caught:
        fit().encode({**columns(), **changes})
    assert all(word in str(caught.value) for word in named), str(caught.value)


def test_a_missing_column_is_named():
    with pytest.raises(BadRequestError, match=r"column 'wind' is missing.*Sent: carrier"):
        fit().encode({name: column for name, column in columns().items() if name != "wind"})


def test_no_rows_encode_to_empty_arrays():
    found = fit().encode({name: [] for name in columns()})
    assert found["categories"].shape == (0, 2)
    assert found["numbers"].shape == (0, 3)


def test_json_gives_the_encoding_back():
    encoding = fit({"late": text("on time", "late", "late", "lost")})
    assert encode.load(json.loads(json.dumps(encoding.to_json()))) == encoding


@given(st.permutations(range(4)))
@settings(max_examples=20)
def test_the_encoding_does_not_depend_on_the_order_of_the_rows(order: list[int]):
    assert fit({name: column[order] for name, column in columns().items()}) == fit()


@pytest.mark.parametrize(
    ("label", "task"),
    [
        (np.array([True, False, True, False]), "binary"),
        (np.array([0, 1, 1, 0]), "binary"),
        (np.array([0.0, 1.0, 1.0, 0.0]), "binary"),
        (text("a", "b", "a", "c"), "multiclass"),
        (np.array([3, 1, 2, 3]), "multiclass"),
        (np.array([0.5, 1.0, 2.0, 3.0]), "regression"),
    ],
)
def test_the_task_is_inferred_from_the_label(label: Any, task: str):
    assert fit({"late": label}).task == task


def test_an_option_sets_the_task():
    assert fit({"late": np.array([3, 1, 2, 3])}, task="regression").task == "regression"


def test_many_whole_numbers_are_not_guessed_at():
    many = {name: np.resize(column, 500) for name, column in columns().items()}
    with pytest.raises(DataError, match="task"):
        encode.fit({**many, "late": np.arange(500)}, ROLES, Options().model_dump())


def test_classes_that_are_numbers_are_sorted_as_numbers():
    assert fit({"late": np.array([10, 2, 2, 3])}).label.classes == ("2", "3", "10")


def test_labels_are_encoded():
    assert fit().encode_label(np.array([True, False])).tolist() == [1.0, 0.0]
    assert fit({"late": text("b", "a", "c", "a")}).encode_label(text("c", "a")).tolist() == [2, 0]
    assert fit({"late": np.array([0.5, 1, 2, 3])}).encode_label(np.array([7.0])).tolist() == [7.0]


@pytest.mark.parametrize(
    ("trained", "asked", "named"),
    [
        (np.array([True, False, True, False]), [1, 2], ["'late'", "row 1", "2", "binary"]),
        (np.array([True, False, True, False]), ["yes"], ["'late'", "row 0", "'yes'"]),
        (text("a", "b", "a", "b"), text("a", "z"), ["'late'", "row 1", "'z'"]),
        (text("a", "b", "a", "b"), text("a", None), ["'late'", "row 1", "no label"]),
        (np.array([0.5, 1, 2, 3]), np.array([np.nan]), ["'late'", "row 0", "no label"]),
    ],
)
def test_bad_labels_are_named(trained: Any, asked: Any, named: list[str]):
    with pytest.raises(DataError) as caught:
        fit({"late": trained}).encode_label(asked)
    assert all(word in str(caught.value) for word in named), str(caught.value)


def test_a_dataset_that_can_not_be_learnt_from_is_refused():
    with pytest.raises(DataError, match="no column 'gone'"):
        fit(roles={**ROLES, "numbers": ["gone"]})
    with pytest.raises(DataError, match="neither"):
        fit(roles={**ROLES, "numbers": [], "categories": []})
    with pytest.raises(DataError, match="no rows"):
        encode.fit({name: column[:0] for name, column in columns().items()}, ROLES, Options().model_dump())


def test_signatures_name_what_goes_in_and_out():
    encoding = fit()
    assert [(s.name, s.datatype, s.shape) for s in encoding.inputs] == [
        ("carrier", "BYTES", (-1, 1)),
        ("origin", "BYTES", (-1, 1)),
        ("distance", "FP64", (-1, 1)),
        ("wind", "FP64", (-1, 1)),
    ]
    assert [(s.name, s.datatype, s.shape) for s in encoding.features] == [
        ("categories", "INT64", (-1, 2)),
        ("numbers", "FP32", (-1, 3)),
    ]
    assert [spec.name for spec in fit(roles={**ROLES, "categories": []}).features] == ["numbers"]
    assert [spec.name for spec in fit(roles={**ROLES, "numbers": []}).features] == ["categories"]


@pytest.mark.parametrize(
    ("label", "outputs", "served"),
    [
        (
            np.array([True, False, True, False]),
            {"logit": [[0.0], [1000.0], [-1000.0]]},
            {"probability": [[0.5], [1], [0]]},
        ),
        (
            text("a", "b", "a", "b"),
            {"logits": [[0.0, 0.0], [0.0, 1000.0]]},
            {"probabilities": [[0.5, 0.5], [0, 1]], "label": [["a"], ["b"]]},
        ),
        (np.array([0.5, 1, 2, 3]), {"value": [[1.5]]}, {"value": [[1.5]]}),
    ],
)
def test_outputs_become_what_the_client_gets(label: Any, outputs: Any, served: Any):
    encoding = fit({"late": label})
    arrays = {name: np.array(values, np.float32) for name, values in outputs.items()}
    assert set(arrays) == {spec.name for spec in encoding.outputs}
    found = encoding.decode(arrays)
    assert {name: array.tolist() for name, array in found.items()} == served
    kinds = {"FP32": np.float32, "BYTES": object}
    assert [(name, array.dtype) for name, array in found.items()] == [
        (spec.name, kinds[spec.datatype]) for spec in encoding.served
    ]
