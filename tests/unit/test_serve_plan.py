"""Heads that are understood once, answers from templates, and values at the edges of their datatypes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from onejob.core.tensor import TensorSpec
from onejob.errors import BadRequestError, InferenceError, OnejobError
from onejob.serve.protocols import plan as plans
from onejob.serve.protocols import tensors
from onejob.serve.protocols.answer import Encoder
from onejob.serve.protocols.classification import classify
from onejob.serve.protocols.generate import encode_generate, parse_generate
from onejob.serve.protocols.interface import Interface, Wanted
from onejob.serve.protocols.plan import MAX_HEADS, Plans
from onejob.serve.protocols.repository import parse_load, parse_unload

KNOWN = Interface(
    "m",
    {"a": TensorSpec("a", "INT32", (-1, 2)), "b": TensorSpec("b", "FP32", (-1, -1))},
    {"y": TensorSpec("y", "FP32", (-1, 2)), "t": TensorSpec("t", "BYTES", (-1,)), "h": TensorSpec("h", "BF16", (-1,))},
    labels={"y": ["no", "yes"]},
)
A, B = np.array([[1, 2]], "<i4"), np.array([[0.5, 1.5, 2.5]], "<f4")


def head(identifier: str | None = None, *, size: int = 12, **more: Any) -> bytes:
    message: dict[str, Any] = {"id": identifier} if identifier is not None else {}
    message["inputs"] = [
        {"name": "b", "shape": [1, 3], "datatype": "FP32", "parameters": {"binary_data_size": size}},
        {"name": "a", "shape": [1, 2], "datatype": "INT32", "parameters": {"binary_data_size": 8}},
    ]
    return json.dumps(message | more, separators=(",", ":")).encode()


def body(identifier: str | None = None, **more: Any) -> tuple[bytes, int]:
    text = head(identifier, **more)
    return text + B.tobytes() + A.tobytes(), len(text)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The heads that had to be parsed."""
    seen: list[bytes] = []
    parse = plans.parse_head

    def counting(text: bytes, interface: Interface, binary: int) -> Any:
        seen.append(bytes(text))
        return parse(text, interface, binary)

    monkeypatch.setattr(plans, "parse_head", counting)
    return seen


def test_a_repeated_head_is_parsed_once_and_its_arrays_are_views(parsed: list[bytes]) -> None:
    reader = Plans(KNOWN)
    for _ in range(3):
        message, length = body()
        plan, identifier, arrays = reader.read(message, length)
        assert list(arrays) == ["a", "b"]  # the model's order, not the client's
        assert arrays["a"].tolist() == A.tolist()
        assert arrays["b"].tolist() == B.tolist()
        assert not arrays["b"].flags.owndata
        assert (identifier, plan.rows, plan.signature, plan.size) == ("", 1, ((2,), (3,)), 20)
    assert len(parsed) == 1


def test_heads_that_differ_in_their_id_alone_are_one(parsed: list[bytes]) -> None:
    reader = Plans(KNOWN)
    names = ["1", "", "a b", "request-0000000001"]
    assert [reader.read(*body(name))[1] for name in names] == names
    assert len(parsed) == 1
    odd = ['a"b', "é", "\\", "\n", "\x7f"]
    assert [reader.read(*body(name))[1] for name in [*odd, *odd]] == [*odd, *odd]


@pytest.mark.parametrize("text", ['{"id":"a","id":7,"inputs":[]}', '{"id":"a\tb","inputs":[]}', '{"id":"a'])
def test_an_id_that_is_cut_out_hides_no_mistake(text: str) -> None:
    reader = Plans(KNOWN)
    reader.read(*body("7"))
    with pytest.raises(BadRequestError):
        reader.read(text.encode(), len(text))


def test_a_known_head_is_still_held_to_its_bytes() -> None:
    reader = Plans(KNOWN)
    message, length = body()
    reader.read(message, length)
    with pytest.raises(BadRequestError, match="unexpected size for input 'a', expecting 1 additional bytes"):
        reader.read(message[:-1], length)
    with pytest.raises(BadRequestError, match="unexpected additional input data for model 'm'"):
        reader.read(message + b"1", length)


def test_only_so_many_heads_are_remembered_and_none_with_tensors_in_it(parsed: list[bytes]) -> None:
    reader = Plans(KNOWN)
    for number in range(3 * MAX_HEADS):
        reader.read(*body(parameters={"number": number}))
    assert 0 < len(reader._known) <= MAX_HEADS
    entry = [{"name": "a", "shape": [1, 2], "datatype": "INT32", "data": [1, 2]}]
    entry.append({"name": "b", "shape": [1, 1], "datatype": "FP32", "parameters": {"binary_data_size": 4}})
    text = json.dumps({"inputs": entry}).encode()
    known, count = len(reader._known), len(parsed)
    for _ in range(2):
        assert reader.read(text + b"\0\0\0\0", len(text))[2]["a"].tolist() == [[1, 2]]
    assert (len(reader._known), len(parsed)) == (known, count + 2)
    reader.read(*body(parameters={"long": "x" * plans.MAX_HEAD}))
    assert len(reader._known) == known


def test_a_size_that_does_not_fit_the_shape() -> None:
    text = head(size=16)
    with pytest.raises(
        BadRequestError, match=r"^input byte size mismatch for input 'b' for model 'm'. Expected 12, got 16"
    ):
        Plans(KNOWN).read(text + bytes(24), len(text))


def test_an_empty_tensor_of_a_shape_that_nothing_can_hold() -> None:
    entry = {"name": "b", "shape": [0, 2**62], "datatype": "FP32", "data": []}
    with pytest.raises(BadRequestError, match="nothing can hold"):
        Plans(KNOWN).read(json.dumps({"inputs": [entry]}).encode(), None)


OUTPUTS = {
    "y": np.array([[0.25, 0.1]], np.float32),
    "t": np.array(["hé"], object),
    "h": np.array([1.5], np.float32),
}


@pytest.mark.parametrize("told", [None, {}, {"engine": "e"}])
@pytest.mark.parametrize("identifier", ["", 'a"b'])
def test_an_answer_is_the_same_json_each_time(told: dict[str, Any] | None, identifier: str) -> None:
    encoder = Encoder(KNOWN, "3", told)
    wanted = (Wanted("t", True), Wanted("y", False), Wanted("h", True), Wanted("y", True, 1))
    for request in ("r1", 'r"2'):
        message, length = encoder.encode(OUTPUTS, wanted, identifier, request)
        assert length is not None
        expected: dict[str, Any] = {"id": identifier} if identifier else {}
        expected |= {"model_name": "m", "model_version": "3"}
        if told is not None:
            expected["parameters"] = {**told, "request_id": request}
        expected["outputs"] = [
            {"name": "t", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 7}},
            {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [0.25, 0.1]},
            {"name": "h", "datatype": "BF16", "shape": [1], "parameters": {"binary_data_size": 2}},
            {"name": "y", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 17}},
        ]
        assert json.loads(message[:length]) == expected
        assert message[length:] == b"\3\0\0\0h\xc3\xa9" + b"\xc0\x3f" + b"\x0d\0\0\0" + b"0.250000:0:no"


def test_a_template_is_made_once_for_a_shape() -> None:
    encoder, wanted = Encoder(KNOWN, "1"), (Wanted("y", True),)
    for rows in (1, 2, 1):
        encoder.encode({"y": np.zeros((rows, 2), np.float32)}, wanted)
    assert len(encoder._templates) == 2


def test_outputs_are_turned_into_what_the_model_says_of_them() -> None:
    encoder = Encoder(KNOWN, "1")
    strided = np.arange(8, dtype=np.float64).reshape(2, 4)[:, ::2]
    message, length = encoder.encode({"y": strided}, (Wanted("y", True),))
    assert np.frombuffer(message[length:], "<f4").tolist() == [0, 2, 4, 6]
    message, length = encoder.encode({"y": strided}, (Wanted("y", False),))
    assert json.loads(message)["outputs"][0]["data"] == [0, 2, 4, 6]
    with pytest.raises(InferenceError, match="left no output 't'"):
        encoder.encode({"y": strided}, (Wanted("t", True),))
    with pytest.raises(BadRequestError, match="unsupported type 'BYTES'"):
        encoder.check((Wanted("y", True), Wanted("t", False, 2)))


@example([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 2.0**-140, 3.4e38])  # half way, tiny, and what becomes infinity
@given(st.lists(st.floats(width=32)))
def test_bf16_is_rounded_as_others_round_it(values: list[float]) -> None:
    array = np.array(values, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = array.astype(ml_dtypes.bfloat16)
    data = tensors.to_bytes(array, "BF16")
    again = tensors.from_bytes(memoryview(data), "BF16", [len(values)], "x")
    np.testing.assert_array_equal(again, expected.astype(np.float32))
    known = ~np.isnan(array)
    assert (np.frombuffer(data, "<u2")[known] == expected.view(np.uint16)[known]).all()
    assert np.isnan(again[~known]).all()


@pytest.mark.parametrize(
    ("values", "datatype"),
    [([1.0] * 99 + [True], "FP32"), ([0.5] * 99 + [False], "FP64"), ([7] * 99 + [True], "INT8"), ([True], "UINT64")],
)
def test_a_boolean_is_no_number_however_many_there_are(values: list[Any], datatype: str) -> None:
    with pytest.raises(BadRequestError, match=f"(True|False) is not {datatype}"):
        tensors.from_json(values, datatype, [len(values)], "x")


@pytest.mark.parametrize(
    ("value", "datatype"), [(65520, "FP16"), (3.4e38, "BF16"), (3.5e38, "FP32"), (2**1030, "FP64")]
)
def test_a_float_that_its_datatype_cannot_hold(value: float, datatype: str) -> None:
    with pytest.raises(BadRequestError, match="too large"):
        tensors.from_json([0.5, value], datatype, [2], "x")
    assert tensors.from_json([0.5, float("inf")], datatype, [2], "x").tolist() == [0.5, float("inf")]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32)))
def test_the_quick_way_and_the_careful_way_read_the_same(values: list[float]) -> None:
    quick = tensors.from_json(values, "FP32", [len(values)], "x")
    careful = tensors.from_json([*values, None], "FP32", [len(values) + 1], "x")[:-1]
    np.testing.assert_array_equal(quick, careful)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=16)), st.sampled_from(["FP16", "FP32", "FP64"]))
def test_floats_survive_json(values: list[float], datatype: str) -> None:
    array = np.array(values, tensors.DTYPES[datatype])
    again = tensors.from_json(json.loads(tensors.encode_json(array, datatype)), datatype, [len(values)], "x")
    np.testing.assert_array_equal(again, array)


def test_text_as_bytes() -> None:
    data = b"\2\0\0\0\xff\0" + b"\0\0\0\0"
    array = tensors.from_bytes(memoryview(data), "BYTES", [2], "x", octets=True)
    assert array.tolist() == [b"\xff\0", b""]
    assert tensors.to_bytes(array, "BYTES") == data
    assert tensors.from_json(["é"], "BYTES", [1], "x", octets=True).tolist() == ["é".encode()]


@given(st.lists(st.lists(st.integers(-3, 3), min_size=4, max_size=4), min_size=1, max_size=3), st.integers(1, 5))
def test_classes_are_the_highest_first_of_equals_first(rows: list[list[int]], classes: int) -> None:
    found = classify(np.array(rows, np.int32), classes, "INT32", ["a", "b"])
    for row, texts in zip(rows, found.tolist(), strict=True):
        best = sorted(range(4), key=lambda index: (-row[index], index))[:classes]
        assert texts == [f"{row[i]}:{i}" + (f":{'ab'[i]}" if i < 2 else "") for i in best]


def test_files_of_a_load_stay_in_their_folder() -> None:
    def load(path: str) -> Any:
        return parse_load(json.dumps({"parameters": {"config": "{}", f"file:{path}": "aGk="}}).encode(), "m")

    assert load("1/model.onnx").files == {"1/model.onnx": b"hi"}
    for path in ("../x", "1/../../x", "/etc/x", "", "1/", "a\\b", "a\0b", ".."):
        with pytest.raises(BadRequestError, match="must stay within the model's folder"):
            load(path)
    assert parse_load(b"", "m").config is None
    assert parse_unload(b'{"parameters": {"unload_dependents": true}}')


def test_a_generation_of_several_rows() -> None:
    known = Interface("m", {**KNOWN.inputs, "b": TensorSpec("b", "FP32", (-1, 1))}, KNOWN.outputs)
    plan = parse_generate(b'{"b": [1, 2], "id": "7", "a": [1, 2, 3, 4]}', known)
    assert (plan.id, plan.rows) == ("7", 2)
    assert {name: array.tolist() for name, array in plan.arrays(b"").items()} == {
        "a": [[1, 2], [3, 4]],
        "b": [[1], [2]],
    }
    with pytest.raises(BadRequestError, match=r"^\[request id: 7\] input 'a' batch size does not match other inputs"):
        parse_generate(b'{"b": [1], "id": "7", "a": [1, 2, 3, 4]}', known)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["FP32", "a", "b"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["name", "shape", "datatype", "data", "inputs", "parameters", "id", "a"]), inner
        )
    ),
    max_leaves=20,
)


@given(JSON, JSON, JSON, st.binary(max_size=24), st.booleans())
def test_whatever_is_sent_is_refused_in_words_or_read(
    one: Any, two: Any, three: Any, tail: bytes, framed: bool
) -> None:
    entries = [{"name": "a", "shape": one, "datatype": "INT32", "data": two}, three]
    for message in (one, {"inputs": entries}, {"inputs": entries[:1], "outputs": three, "parameters": two}):
        text = json.dumps(message).encode()
        for read in (
            lambda text=text: Plans(KNOWN).read(text + tail if framed else text, len(text) if framed else None),
            lambda text=text: parse_generate(text, KNOWN),
            lambda text=text: parse_load(text, "m"),
        ):
            error = refusal(read)
            assert error is None or (error.http_status in (400, 404) and str(error))


def refusal(read: Callable[[], object]) -> OnejobError | None:
    try:
        read()
    except OnejobError as error:
        return error
    return None


def test_an_answer_of_one_value_is_that_value() -> None:
    assert json.loads(encode_generate({"t": OUTPUTS["t"], "y": OUTPUTS["y"]}, KNOWN, "1")) == {
        "model_name": "m",
        "model_version": "1",
        "t": "hé",
        "y": [0.25, 0.1],
    }
