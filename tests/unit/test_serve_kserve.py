"""The v2 and v1 messages: what goes in comes out, and every lie is refused in words."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from onejob.core.tensor import DATATYPES, TensorSpec
from onejob.errors import BadRequestError
from onejob.serve.protocols import tensors
from onejob.serve.protocols.kserve import decode_infer, decode_predict, encode_infer, encode_predict

X = {"x": TensorSpec("x", "FP32", (-1, 2))}
Y = {"y": TensorSpec("y", "FP32", (-1, 2)), "z": TensorSpec("z", "BYTES", (-1,))}
TWO = {"a": TensorSpec("a", "INT32", (-1, 1)), "b": TensorSpec("b", "BYTES", (-1, 1))}


def decode(message: Any, binary: bytes = b"", *, specs: Any = X, raw: bool = False, length: Any = ...) -> Any:
    head = json.dumps(message).encode()
    header_length = (len(head) if binary else None) if length is ... else length
    return decode_infer(head + binary, header_length, "m", specs, Y, raw=raw)


def tensor(**more: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2], **more}


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [1.0, 2, 3, 4]])
def test_json_data_flat_or_nested(data: Any) -> None:
    request = decode({"id": "7", "inputs": [tensor(shape=[2, 2], data=data)]})
    assert request.id == "7"
    assert request.arrays["x"].dtype == np.float32
    assert request.arrays["x"].tolist() == [[1, 2], [3, 4]]
    assert request.outputs == (("y", False), ("z", False))


def test_binary_and_json_inputs_mixed() -> None:
    text = "hé".encode()
    binary = len(text).to_bytes(4, "little") + text
    request = decode(
        {
            "inputs": [
                {"name": "b", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(binary)}},
                {"name": "a", "datatype": "INT32", "shape": [1, 1], "data": [5]},
            ],
            "outputs": [{"name": "z", "parameters": {"binary_data": False}}, {"name": "y"}],
            "parameters": {"binary_data_output": True, "timeout": 5},
        },
        binary,
        specs=TWO,
    )
    assert request.arrays["b"].tolist() == [["hé"]]
    assert request.arrays["a"].tolist() == [[5]]
    assert request.outputs == (("z", False), ("y", True))
    assert request.timeout_us == 5


BAD = [
    ({}, b"", "attempt to access non-existing object member 'inputs'"),
    ({"inputs": {}}, b"", "Unable to parse 'inputs'"),
    ({"inputs": [1]}, b"", "no field is set"),
    ({"inputs": []}, b"", "expected 1 inputs but got 0"),
    ({"inputs": [tensor(name="w")]}, b"", "unexpected inference input 'w' for model 'm'"),
    ({"inputs": [tensor(name=3)]}, b"", "Unable to parse 'name'"),
    ({"inputs": [tensor(), tensor()]}, b"", "input 'x' already exists in request"),
    ({"inputs": [tensor(datatype="INT32")]}, b"", "data-type is 'INT32', but model 'm' expects 'FP32'"),
    ({"inputs": [tensor(datatype="FP7")]}, b"", "invalid datatype for input x: 'FP7'"),
    (
        {"inputs": [tensor(shape=[1, 3], data=[1, 2, 3])]},
        b"",
        r"unexpected shape for input 'x' for model 'm'. Expected \[-1,2\], got \[1,3\]",
    ),
    ({"inputs": [tensor(shape=[2])]}, b"", "unexpected shape"),
    ({"inputs": [tensor(shape=[-1, 2])]}, b"", "Unable to parse 'shape'"),
    ({"inputs": [tensor(shape=[True, 2])]}, b"", "Unable to parse 'shape'"),
    ({"inputs": [tensor(shape=[2, 2])]}, b"", "expected 4 elements"),
    ({"inputs": [tensor(data=["1", "2"])]}, b"", "'1' is not FP32"),
    ({"inputs": [tensor(data=[1, True])]}, b"", "True is not FP32"),
    ({"inputs": [tensor(data=[1, [2]])]}, b"", "mixes values and arrays"),
    ({"inputs": [tensor(data=[1, 1e300])]}, b"", "too large for FP32"),
    ({"inputs": [tensor(data={"a": 1})]}, b"", "must be an array"),
    ({"inputs": [{k: v for k, v in tensor().items() if k != "data"}]}, b"", "no field is set"),
    ({"inputs": [tensor()], "outputs": [{"name": "q"}]}, b"", "unexpected inference output 'q'"),
    ({"inputs": [tensor()], "outputs": [{"name": "y", "parameters": {"classification": 2}}]}, b"", "classification"),
    (
        {"inputs": [tensor()], "parameters": {"timeout": -1}},
        b"",
        "Unable to parse 'timeout': attempt to access JSON non-unsigned-integer as unsigned-integer: -1",
    ),
    ({"inputs": [tensor()], "id": 4}, b"", "Unable to parse 'id': attempt to access JSON non-string as string: 4"),
    ({"inputs": [tensor()]}, b"1234", "unexpected additional input data"),
    (
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}]},
        b"",
        "expecting 8 additional bytes for model 'm'. Inference-Header-Content-Length must be",
    ),
]


@pytest.mark.parametrize(("message", "binary", "words"), BAD)
def test_refused_in_words(message: Any, binary: bytes, words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        decode(message, binary)


@pytest.mark.parametrize(
    ("size", "binary", "words"),
    [
        (8, b"1234", "unexpected size for input 'x', expecting 4 additional bytes for model 'm'"),
        (4, b"1234", "input byte size mismatch for input 'x' for model 'm'. Expected 8, got 4"),
        (-1, b"1234", "Unable to parse 'binary_data_size': .* non-unsigned-integer as unsigned-integer: -1"),
        ("8", b"12345678", "Unable to parse 'binary_data_size'"),
    ],
)
def test_binary_that_is_cut_or_lies(size: Any, binary: bytes, words: str) -> None:
    entry = {k: v for k, v in tensor(parameters={"binary_data_size": size}).items() if k != "data"}
    with pytest.raises(BadRequestError, match=words):
        decode({"inputs": [entry]}, binary)


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 100_000, b"", b'{"a": NaN', b'{"a": NaN, "id": "\\ud800"}'])
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    with pytest.raises(BadRequestError, match="failed to parse the request JSON buffer"):
        decode_infer(body, None, "m", X, Y)


def test_header_length_beyond_the_body() -> None:
    with pytest.raises(BadRequestError, match=r"inference header size should be in range \(0, 14\), got: 999"):
        decode({"inputs": []}, length=999)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x05\x00\x00\x00ab", "expecting string of length 5 but only 2 bytes available"),
        (b"\x01\x00", "incomplete string length indicator for inference b, expecting 4 bytes but only 2"),
        (b"\x01\x00\x00\x00\xff", "not UTF-8"),
        (b"\x00\x00\x00\x00" * 2, "unexpected number of string elements 2 for inference b, expecting 1"),
        (b"", "expected 1 string elements for inference b, got 0"),
    ],
)
def test_text_bytes_that_lie(data: bytes, words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        tensors.from_bytes(memoryview(data), "BYTES", [1], "b")


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("UINT8", -1),
        ("INT8", 200),
        ("INT64", 2**63),
        ("INT32", 1.5),
        ("BOOL", 1),
        ("INT32", None),
        ("BYTES", 3),
        ("INT64", 2**70),
    ],
)
def test_values_that_a_datatype_cannot_hold(datatype: str, value: Any) -> None:
    with pytest.raises(BadRequestError):
        tensors.from_json([value], datatype, [1], "x")


def test_big_integers_are_exact() -> None:
    assert tensors.from_json([2**63 - 1, -(2**63)], "INT64", [2], "x").tolist() == [2**63 - 1, -(2**63)]
    assert tensors.from_json([2**64 - 1, 0], "UINT64", [2], "x").tolist() == [2**64 - 1, 0]


def test_nulls() -> None:
    assert np.isnan(tensors.from_json([None, 1], "FP64", [2], "x")[0])
    assert tensors.from_json([None, "a"], "BYTES", [2], "x", nulls=True).tolist() == [None, "a"]
    with pytest.raises(BadRequestError, match="text is wanted"):
        tensors.from_json([None], "BYTES", [1], "x")


def test_nan_and_infinity_become_null_in_json() -> None:
    array = np.array([[np.nan, np.inf]], np.float32)
    body, length = encode_infer({"y": array}, Y, [("y", False)], {})
    assert length is None
    assert json.loads(body)["outputs"][0]["data"] == [None, None]


NUMERIC = [name for name in DATATYPES if name not in ("BYTES", "BF16")]


@given(
    st.sampled_from(NUMERIC).flatmap(lambda t: st.tuples(st.just(t), arrays.arrays(DATATYPES[t], st.integers(0, 5))))
)
def test_numbers_survive_bytes(pair: tuple[str, np.ndarray[Any, Any]]) -> None:
    datatype, array = pair
    back = tensors.from_bytes(memoryview(tensors.to_bytes(array, datatype)), datatype, array.shape, "x")
    np.testing.assert_array_equal(back, array)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_text_survives_bytes_and_json(values: list[str]) -> None:
    array = np.empty(len(values), object)
    array[:] = values
    assert (
        tensors.from_bytes(memoryview(tensors.to_bytes(array, "BYTES")), "BYTES", [len(values)], "x").tolist() == values
    )
    assert tensors.from_json(tensors.to_json(array, "BYTES"), "BYTES", [len(values)], "x").tolist() == values


@given(
    arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.just(2)),
        elements=st.floats(allow_nan=False, allow_infinity=False, width=32),
    )
)
def test_an_answer_decodes_as_a_request(array: np.ndarray[Any, Any]) -> None:
    for binary in (True, False):
        body, length = encode_infer({"x": array}, X, [("x", binary)], {"id": "1"})
        message = json.loads(body[:length])
        message["inputs"] = message.pop("outputs")
        again = json.dumps(message).encode()
        request = decode_infer(again + (body[length:] if length else b""), len(again) if length else None, "m", X, Y)
        np.testing.assert_array_equal(request.arrays["x"], array)


@pytest.mark.parametrize("shape", [[2], [2, 1]])
@pytest.mark.parametrize("declared", [(-1,), (-1, 1)])
def test_a_raw_column_may_be_sent_either_way(shape: list[int], declared: tuple[int, ...]) -> None:
    specs = {"x": TensorSpec("x", "BYTES", declared)}
    entry = {"name": "x", "datatype": "BYTES", "shape": shape, "data": ["a", None]}
    assert decode({"inputs": [entry]}, specs=specs, raw=True).arrays["x"].reshape(-1).tolist() == ["a", None]


def test_plain_records() -> None:
    body = json.dumps({"instances": [{"a": 1, "b": "u", "more": 0}, {"a": None, "b": None}]}).encode()
    assert decode_predict(body, TWO, raw=True) == {"a": [1, None], "b": ["u", None]}
    with pytest.raises(BadRequestError, match="None is not INT32"):
        decode_predict(body, TWO, raw=False)
    with pytest.raises(BadRequestError, match=r"instances\[0\]: column 'b' is missing. Give null"):
        decode_predict(b'{"instances": [{"a": 1}]}', TWO, raw=True)
    for body in (b"{}", b'{"instances": []}', b'{"instances": [1]}'):
        with pytest.raises(BadRequestError):
            decode_predict(body, TWO, raw=True)


def test_plain_records_of_tensors() -> None:
    assert decode_predict(b'{"instances": [[1, 2], [3, 4]]}', X, raw=False)["x"].tolist() == [[1, 2], [3, 4]]
    for bad in (b'{"instances": [[1, 2], [3]]}', b'{"instances": [[1, 2, 3]]}', b'{"instances": [1]}'):
        with pytest.raises(BadRequestError, match=r"shape \[2\] is wanted"):
            decode_predict(bad, X, raw=False)


def test_predictions_are_plain_values() -> None:
    outputs = {"y": np.array([[0.5, np.nan], [1, 2]], np.float32), "z": np.array([["a"], ["b"]], object)}
    assert json.loads(encode_predict(outputs, Y)) == {
        "predictions": [{"y": [0.5, None], "z": "a"}, {"y": [1.0, 2.0], "z": "b"}]
    }
