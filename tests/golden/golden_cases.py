"""The requests whose answers were recorded from Triton: names, the server's options, and what was sent."""

from __future__ import annotations

import base64
import gzip
import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from golden_models import DATATYPES, NUMBERS

OPTIONS: Mapping[str, list[str]] = {
    "all": ["--model-control-mode=none", "--exit-on-error=false", "--strict-readiness=false"],
    "explicit": [
        "--model-control-mode=explicit",
        "--load-model=same_fp32",
        "--load-model=versions",
        "--exit-on-error=false",
    ],
    "crashes": ["--model-control-mode=explicit", "--load-model=same_fp32", "--load-model=same_bytes"],
}
"""The server's options for each set of cases. The last one has those that crash it, with little to start again."""
LENGTH = "Inference-Header-Content-Length"
BFLOAT = bytes.fromhex("803f 0040 4040 8040 a040 c040")
"""1 to 6 in BF16."""


@dataclass(frozen=True)
class Sent:
    """A request as it goes over the wire."""

    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    aside: bool = False
    """Whether the next one is sent without waiting for this one's answer."""


@dataclass(frozen=True)
class Case:
    name: str
    exchanges: tuple[Sent, ...]
    setup: str = "all"


def get(path: str) -> Sent:
    return Sent("GET", path)


def post(path: str, message: Any = None, *, aside: bool = False, **headers: str) -> Sent:
    """A POST of JSON (or of text or bytes as they are)."""
    body = message if isinstance(message, bytes) else message.encode() if isinstance(message, str) else None
    if body is None and message is not None:
        body = json.dumps(message, separators=(",", ":")).encode()
    return Sent("POST", path, body or b"", {key.replace("_", "-"): value for key, value in headers.items()}, aside)


def infer(model: str, message: Any, *, version: str = "", aside: bool = False, **headers: str) -> Sent:
    path = f"/v2/models/{model}/versions/{version}/infer" if version else f"/v2/models/{model}/infer"
    return post(path, message, aside=aside, **headers)


def binary(model: str, message: Any, *parts: bytes, length: int | str | None = None) -> Sent:
    """An inference whose head is followed by the tensors' bytes."""
    head = json.dumps(message, separators=(",", ":")).encode()
    told = len(head) if length is None else length
    return Sent("POST", f"/v2/models/{model}/infer", b"".join((head, *parts)), {LENGTH: str(told)})


def tensor(datatype: str, shape: list[Any], data: Any = None, *, name: str = "x", **parameters: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
    if data is not None:
        entry["data"] = data
    return entry | ({"parameters": parameters} if parameters else {})


def ask(*inputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**more, "inputs": list(inputs)}


def want(*names: str, **parameters: Any) -> list[dict[str, Any]]:
    return [{"name": name, **({"parameters": parameters} if parameters else {})} for name in names]


def text_bytes(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def values(datatype: str) -> list[Any]:
    """Six values, the datatype's limits among them."""
    if datatype == "BOOL":
        return [True, False, False, True, True, False]
    if datatype == "BYTES":
        return ["", "a", "hé", 'quote " and \\', "line\nbreak", "Ω"]
    if datatype in ("FP16", "BF16"):
        return [0.0, 1.0, -2.5, 65504.0, 0.5, 3.0]
    if datatype.startswith("FP"):
        return [0.0, 1.0, -2.5, 1e-20, 123456.789, 3.0]
    limits = np.iinfo(datatype.lower())
    return [int(limits.min), int(limits.max), 0, 1, 2, 3]


def raw(datatype: str) -> bytes:
    """The same six values as bytes."""
    if datatype == "BF16":
        return BFLOAT
    if datatype == "BYTES":
        return text_bytes(*(value.encode() for value in values(datatype)))
    dtype = {"BOOL": "bool"}.get(datatype, datatype.lower().replace("fp", "float"))
    return np.array(values(datatype), dtype=dtype).tobytes()


def _datatypes() -> Iterator[Case]:
    for datatype in DATATYPES:
        low = datatype.lower()
        model = f"same_{low}"
        yield Case(f"json_{low}", (infer(model, ask(tensor(datatype, [2, 3], values(datatype)))),))
        data = raw(datatype)
        described = tensor(datatype, [2, 3], binary_data_size=len(data))
        wanted = {"outputs": want("y", binary_data=True)}
        yield Case(f"binary_{low}", (binary(model, ask(described, **wanted), data),))
        yield Case(f"binary_in_json_out_{low}", (binary(model, ask(described), data),))
        yield Case(
            f"json_in_binary_out_{low}", (infer(model, ask(tensor(datatype, [2, 3], values(datatype)), **wanted)),)
        )
        yield Case(f"metadata_{low}", (get(f"/v2/models/{model}"), get(f"/v2/models/{model}/config")))


def _x(*data: Any, shape: list[int] | None = None) -> dict[str, Any]:
    return tensor("FP32", shape or [1, len(data)], list(data))


PAIR = (tensor("INT32", [1, 2], [1, 2], name="a"), tensor("FP32", [1, 2], [0.5, 4], name="b"))
A4 = struct.pack("<2i", 1, 2)
B4 = struct.pack("<2f", 0.5, 4)


def _messages() -> Iterator[Case]:
    """What a request may say beside its tensors."""
    one = _x(1, 2, 3)
    yield Case("id", (infer("same_fp32", ask(one, id="seven")), infer("same_fp32", ask(one, id=""))))
    yield Case("id_of_other_types", tuple(infer("same_fp32", ask(one, id=id)) for id in (7, None, True, ["a"], {})))
    yield Case(
        "id_in_errors",
        (
            infer("same_fp32", ask(tensor("FP32", [3], [1, 2, 3]), id="seven")),
            infer("same_fp32", ask(tensor("FP32", [1, 2], [1, 2, 3]), id="seven")),
            infer("same_fp32", ask(id="seven")),
        ),
    )
    yield Case("id_of_odd_text", (infer("same_fp32", ask(one, id='a "b" \\ é\n')),))
    yield Case(
        "id_binary", (binary("same_fp32", ask(tensor("FP32", [1, 1], binary_data_size=4), id="x"), b"\0\0\x80?"),)
    )
    yield Case("nested_data", (infer("same_fp32", ask(tensor("FP32", [2, 2], [[1, 2], [3, 4]]))),))
    yield Case("nested_data_otherwise", (infer("same_fp32", ask(tensor("FP32", [2, 2], [[1], [2, 3], [[4]]]))),))
    yield Case("nested_and_flat_data", (infer("same_fp32", ask(tensor("FP32", [2, 2], [1, [2, 3], 4]))),))
    yield Case("empty_nested_data", (infer("same_fp32", ask(tensor("FP32", [1, 1], [[], [1]]))),))
    yield Case("scalar_data", (infer("same_fp32", ask(tensor("FP32", [1, 1], 5))),))
    yield Case("batch_of_8", (infer("same_fp32", ask(tensor("FP32", [8, 1], list(range(8))))),))
    yield Case("batch_of_9", (infer("same_fp32", ask(tensor("FP32", [9, 1], list(range(9))))),))
    yield Case("batch_of_0", (infer("same_fp32", ask(tensor("FP32", [0, 1], []))),))
    yield Case("rows_of_0", (infer("same_fp32", ask(tensor("FP32", [2, 0], []))),))
    yield Case(
        "mixed",
        (
            binary("pair", ask(tensor("INT32", [1, 2], binary_data_size=8, name="a"), PAIR[1]), A4),
            binary("pair", ask(PAIR[0], tensor("FP32", [1, 2], binary_data_size=8, name="b")), B4),
            binary(
                "pair",
                ask(*(tensor(t, [1, 2], binary_data_size=8, name=n) for t, n in (("FP32", "b"), ("INT32", "a")))),
                B4,
                A4,
            ),
        ),
    )
    yield Case("outputs_all", (infer("pair", ask(*PAIR)), infer("pair", ask(*PAIR, outputs=[]))))
    yield Case(
        "outputs_by_name",
        (
            infer("pair", ask(*PAIR, outputs=want("difference"))),
            infer("pair", ask(*PAIR, outputs=want("text", "sum"))),
            infer("pair", ask(*PAIR, outputs=want("sum", "sum"))),
        ),
    )
    yield Case(
        "outputs_binary",
        (
            infer("pair", ask(*PAIR, parameters={"binary_data_output": True})),
            infer("pair", ask(*PAIR, parameters={"binary_data_output": True}, outputs=want("sum", "text"))),
            infer("pair", ask(*PAIR, parameters={"binary_data_output": True}, outputs=want("sum", binary_data=False))),
            infer("pair", ask(*PAIR, outputs=[*want("text", binary_data=True), *want("sum")])),
            infer("pair", ask(*PAIR, parameters={"binary_data_output": False}, outputs=want("sum", binary_data=True))),
            infer("pair", ask(*PAIR, parameters={"binary_data_output": True}, outputs=[])),
        ),
    )
    yield Case("outputs_unknown", (infer("pair", ask(*PAIR, outputs=want("nope"))),))
    yield Case(
        "outputs_of_other_types",
        tuple(infer("pair", ask(*PAIR, outputs=value)) for value in ({}, "sum", ["sum"], [{}], [{"name": 3}], None, 1)),
    )
    yield Case(
        "outputs_parameters_wrong",
        tuple(
            infer("pair", ask(*PAIR, outputs=[{"name": "sum", "parameters": value}]))
            for value in (
                [],
                {"binary_data": 1},
                {"binary_data": "yes"},
                {"nonsense": 1},
                None,
                {"classification": "2"},
                {"classification": -1},
                {"classification": 0},
                {"classification": 1.5},
            )
        ),
    )
    yield Case(
        "binary_data_output_of_other_types",
        tuple(infer("pair", ask(*PAIR, parameters={"binary_data_output": value})) for value in (1, "true", None)),
    )
    yield Case(
        "parameters",
        (
            infer("same_fp32", ask(one, parameters={"anything": "text", "number": 5, "yes": True})),
            infer("same_fp32", ask(one, parameters={"fraction": 0.5})),
            infer("same_fp32", ask(one, parameters={"list": [1]})),
            infer("same_fp32", ask(one, parameters={"object": {"a": 1}})),
            infer("same_fp32", ask(one, parameters={"null": None})),
            infer("same_fp32", ask(one, parameters={"triton_enable_empty_final_response": True})),
            infer("same_fp32", ask(one, parameters={"triton_other": 1})),
            infer("same_fp32", ask(one, parameters=[])),
            infer("same_fp32", ask(one, parameters="text")),
            infer("same_fp32", ask(one, parameters=None)),
        ),
    )
    yield Case("parameter_headers_ignored", (infer("same_fp32", ask(one), triton_grpc_x="1"),))
    yield Case(
        "input_parameters_wrong",
        tuple(infer("same_fp32", ask({**one, "parameters": value})) for value in ([], {"nonsense": 1}, None, "text")),
    )
    yield Case("extra_keys", (infer("same_fp32", {**ask({**one, "more": 1}), "more": {"deep": [1]}}),))


def _classification() -> Iterator[Case]:
    scores = tensor("FP32", [2, 5], [0.1, 0.5, 0.25, 3, -1, 5, 4, 3, 2, 1])
    for k in (1, 3, 5, 9):
        yield Case(f"classification_{k}", (infer("scores", ask(scores, outputs=want("y", classification=k))),))
    yield Case(
        "classification_binary",
        (
            infer("scores", ask(scores, outputs=want("y", classification=2, binary_data=True))),
            infer("scores", ask(scores, outputs=want("y", classification=2), parameters={"binary_data_output": True})),
        ),
    )
    yield Case(
        "classification_ties",
        (infer("scores", ask(tensor("FP32", [1, 5], [1, 1, 2, 2, 1]), outputs=want("y", classification=5))),),
    )
    yield Case(
        "classification_of_one",
        (infer("scores", ask(tensor("FP32", [1, 5], [1, 1, 2, 2, 1]), outputs=want("y", classification=True))),),
    )
    big = struct.pack("<5f", float("nan"), float("inf"), float("-inf"), 1e-30, 123456.789)
    yield Case(
        "classification_odd_values",
        (binary("scores", ask(tensor("FP32", [1, 5], binary_data_size=20), outputs=want("y", classification=5)), big),),
    )
    for datatype in (*NUMBERS, "BF16", "BOOL"):
        data = raw(datatype)
        message = ask(tensor(datatype, [2, 3], binary_data_size=len(data)), outputs=want("y", classification=2))
        yield Case(f"classification_{datatype.lower()}", (binary(f"same_{datatype.lower()}", message, data),))
    yield Case(
        "classification_unbatched",
        (infer("fixed", ask(tensor("FP32", [2, 2], [1, 4, 3, 2]), outputs=want("y", classification=2))),),
    )
    yield Case(
        "classification_column",
        (infer("column", ask(tensor("INT64", [2, 1], [1, 4]), outputs=want("y", classification=1))),),
    )


def _wrong_json() -> Iterator[Case]:
    path = "/v2/models/same_fp32/infer"
    one = '"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}'
    bodies = {
        "empty": "",
        "blank": "  ",
        "cut": '{"inputs": [',
        "comma": '{"inputs": [],}',
        "comment": '{"inputs": [] /* none */}',
        "more": '{"inputs": []} more',
        "null": "null",
        "list": "[]",
        "text": '"text"',
        "number": "5",
        "not_utf8": b'{"id": "\xff", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}',
        "bom": b'\xef\xbb\xbf{"inputs": []}',
        "nul": b'{"inputs": []}\0',
        "nan": '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [NaN, Infinity]}]}',
        "huge_number": '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1e400]}]}',
        "big_float": '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1e39]}]}',
        "duplicate_key": '{"id": "a", "id": "b", ' + one,
        "escapes": '{"inputs": [{"name": "\\u0078", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}',
        "lone_surrogate": '{"id": "\\ud800", ' + one,
        "leading_zero": '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [01]}]}',
        "plus": '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [+1]}]}',
        "point": '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [.5]}]}',
        "control_character": '{"id": "a\tb", ' + one,
    }
    for name, body in bodies.items():
        yield Case(f"malformed_{name}", (post(path, body),))
    yield Case("malformed_deep", (post(path, '{"inputs": ' + "[" * 2000 + "]" * 2000 + "}"),))


def _wrong_inputs() -> Iterator[Case]:
    good = _x(1, 2, 3)

    def one(name: str, *messages: Any, model: str = "same_fp32") -> Case:
        return Case(f"wrong_{name}", tuple(infer(model, message) for message in messages))

    def without(key: str) -> dict[str, Any]:
        return ask({name: value for name, value in good.items() if name != key})

    yield one("no_inputs", {}, {"inputs": []}, {"inputs": {}}, {"inputs": "x"}, {"inputs": None}, {"inputs": 5})
    yield one("input_types", {"inputs": [1]}, {"inputs": ["x"]}, {"inputs": [None]}, {"inputs": [[]]}, {"inputs": [{}]})
    yield one("missing_keys", *(without(key) for key in ("name", "datatype", "shape", "data")))
    yield one(
        "name",
        ask({**good, "name": "nope"}),
        ask({**good, "name": 3}),
        ask({**good, "name": ""}),
        ask({**good, "name": None}),
    )
    yield one("input_twice", ask(good, good))
    yield one("one_of_two", ask(PAIR[0]), ask(PAIR[1]), ask(*PAIR, good), ask(PAIR[0], good), model="pair")
    yield one(
        "datatype",
        *(ask({**good, "datatype": value}) for value in ("INT32", "FP64", "fp32", "FP7", "", "TYPE_FP32", 3, None)),
    )
    shapes = (
        [3],
        [1],
        [],
        [1, 2],
        [1, 4],
        [3, 1],
        [1, 3, 1],
        [1, -1],
        [-1, 3],
        [1, "3"],
        [1, 3.0],
        [1, 1.5],
        [True, 3],
        [[1, 3]],
        "x",
        3,
        None,
        [1, None],
    )
    yield one("shape", *(ask({**good, "shape": value}) for value in shapes))
    yield one(
        "shape_fixed",
        *(ask(tensor("FP32", shape, [1, 2, 3, 4, 5, 6])) for shape in ([2, 3], [3, 2], [6], [1, 2, 2], [2, 2], [4])),
        model="fixed",
    )
    yield one(
        "shape_pair",
        ask(tensor("INT32", [1, 3], [1, 2, 3], name="a"), PAIR[1]),
        ask(tensor("INT32", [2, 2], [1, 2, 3, 4], name="a"), PAIR[1]),
        model="pair",
    )
    yield one(
        "shape_column",
        *(ask(tensor("INT64", shape, [1, 4])) for shape in ([2, 1], [2], [1, 2], [2, 1, 1])),
        model="column",
    )
    yield one(
        "values",
        *(
            ask({**good, "data": value})
            for value in (
                [1, 2],
                [1, 2, 3, 4],
                [],
                ["1", "2", "3"],
                [True, False, True],
                [None, 1, 2],
                [{}, 1, 2],
                "123",
                {"a": 1},
                None,
                True,
            )
        ),
    )
    yield one(
        "integers",
        *(
            ask(tensor("INT32", [1, 1], [value]))
            for value in (1.0, 1.5, True, "1", None, 2**31 - 1, -(2**31), 2**31, -(2**31) - 1, 2**63, 2**64, 1e3)
        ),
        model="same_int32",
    )
    yield one(
        "small_integers",
        *(ask(tensor("INT8", [1, 1], [value])) for value in (127, 128, -128, -129, 1.0, 300)),
        model="same_int8",
    )
    yield one(
        "small_unsigned",
        *(ask(tensor("UINT8", [1, 1], [value])) for value in (255, 256, -1, 1.0, True)),
        model="same_uint8",
    )
    yield one(
        "unsigned_16", *(ask(tensor("UINT16", [1, 1], [value])) for value in (65535, 65536, -1)), model="same_uint16"
    )
    yield one(
        "short_integers",
        *(ask(tensor("INT16", [1, 1], [value])) for value in (32767, 32768, -32769)),
        model="same_int16",
    )
    yield one(
        "unsigned", *(ask(tensor("UINT32", [1, 1], [value])) for value in (2**32 - 1, 2**32, -1)), model="same_uint32"
    )
    yield one(
        "long_integers",
        *(
            ask(tensor("INT64", [1, 1], [value]))
            for value in (2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**53 + 1, 1.0, True)
        ),
        model="same_int64",
    )
    yield one(
        "long_unsigned",
        *(ask(tensor("UINT64", [1, 1], [value])) for value in (2**64 - 1, 2**64, -1, 1.0)),
        model="same_uint64",
    )
    yield one(
        "floats",
        *(
            ask(tensor("FP32", [1, 1], [value]))
            for value in (
                1,
                -0.0,
                0.1,
                16777217,
                2**63,
                2**64,
                2**70,
                3.4028235e38,
                3.5e38,
                1e-45,
                1e-60,
                "NaN",
                None,
                True,
            )
        ),
    )
    yield one(
        "doubles",
        *(
            ask(tensor("FP64", [1, 1], [value]))
            for value in (
                1,
                0.1,
                1 / 3,
                1e308,
                5e-324,
                2**53 + 1,
                2**63,
                2**70,
                -0.0,
                1e16,
                1e21,
                1.5e300,
                123456789.0,
                1e-7,
                True,
                "1",
            )
        ),
        model="same_fp64",
    )
    yield one(
        "booleans", *(ask(tensor("BOOL", [1, 1], [value])) for value in (0, 1, 2, "true", None, 1.0)), model="same_bool"
    )
    yield one(
        "texts",
        *(ask(tensor("BYTES", [1, 1], [value])) for value in (1, 1.5, True, None, ["a"], {"a": 1}, "a\0b", "\x7f\x01")),
        model="same_bytes",
    )
    yield Case(
        "non_finite_json_out",
        tuple(
            binary(
                f"same_{name}",
                ask(tensor(name.upper(), [1, 3], binary_data_size=3 * size)),
                struct.pack(f"<3{code}", *map(float, ("nan", "inf", "-inf"))),
            )
            for name, size, code in (("fp32", 4, "f"), ("fp64", 8, "d"))
        ),
    )
    spread = [
        0.1,
        1 / 3,
        1e-7,
        123456789.0,
        1e10,
        1e20,
        1e21,
        1e22,
        3.4e38,
        1.17549435e-38,
        1e-45,
        16777216.0,
        0.5,
        100.0,
        1e15,
        1e16,
        1e17,
        2.5e-5,
    ]
    for name, code in (("fp32", "f"), ("fp64", "d")):
        data = struct.pack(f"<{len(spread)}{code}", *spread)
        yield Case(
            f"numbers_json_out_{name}",
            (binary(f"same_{name}", ask(tensor(name.upper(), [1, len(spread)], binary_data_size=len(data))), data),),
        )


def _crashes() -> Iterator[Case]:
    for shape in ([1, 2**40], [1, 2**62], [1, 2**63], [1, 2**64], [2**32, 2**32], [8, 2**61]):
        name = "_".join(map(str, shape))
        yield Case(f"huge_shape_{name}", (infer("same_fp32", ask(tensor("FP32", shape, [1, 2, 3]))),), "crashes")
        described = tensor("FP32", shape, binary_data_size=12)
        yield Case(f"huge_shape_binary_{name}", (binary("same_fp32", ask(described), b"123456789012"),), "crashes")
    data = raw("BYTES")
    message = ask(tensor("BYTES", [2, 3], binary_data_size=len(data)), outputs=want("y", classification=2))
    yield Case("classification_bytes", (binary("same_bytes", message, data),), "crashes")


def _wrong_binary() -> Iterator[Case]:
    twelve = struct.pack("<3f", 1, 2, 3)

    def x(size: Any, shape: list[int] | None = None, datatype: str = "FP32", **more: Any) -> dict[str, Any]:
        return ask({**tensor(datatype, shape or [1, 3], binary_data_size=size), **more})

    yield Case(
        "binary_sizes",
        (
            binary("same_fp32", x(12), twelve[:8]),
            binary("same_fp32", x(12), twelve, b"more"),
            binary("same_fp32", x(8), twelve[:8]),
            binary("same_fp32", x(16), twelve, b"1234"),
            binary("same_fp32", x(8), twelve),
            binary("same_fp32", x(0), b""),
            binary("same_fp32", x(0), twelve),
            binary("same_fp32", x(0, [1, 0]), b""),
        ),
    )
    yield Case(
        "binary_size_of_other_types",
        tuple(
            binary("same_fp32", x(size), twelve)
            for size in (-1, "12", 12.0, None, True, 2**31, 2**63, 2**64 - 1, 2**64, [12])
        ),
    )
    yield Case(
        "binary_without_header",
        (
            infer("same_fp32", x(12)),
            infer("same_fp32", json.dumps(x(12), separators=(",", ":")).encode() + twelve),
        ),
    )
    yield Case("binary_and_data", (binary("same_fp32", x(12, data=[4, 5, 6]), twelve),))
    yield Case(
        "binary_header",
        tuple(
            binary("same_fp32", x(12), twelve, length=length)
            for length in (0, -1, 10, 99999, "abc", "", "12abc", "1e2", " 100", "99999999999999999999", "0x50")
        ),
    )

    def raw_binary(model: str, data: bytes) -> Sent:
        return Sent("POST", f"/v2/models/{model}/infer", data, {LENGTH: "0"})

    yield Case(
        "binary_raw",
        (
            raw_binary("same_fp32", twelve),
            raw_binary("scores", struct.pack("<5f", 1, 2, 3, 4, 5)),
            raw_binary("scores", twelve),
            raw_binary("scores", struct.pack("<10f", *range(10))),
            raw_binary("same_fp32", twelve[:10]),
            raw_binary("same_bool", b"\1\0\1"),
            raw_binary("same_bf16", BFLOAT),
            raw_binary("same_bytes", b"one text, as it is"),
            raw_binary("same_bytes", b""),
            raw_binary("pair", A4 + B4),
            raw_binary("fixed", struct.pack("<4f", 1, 2, 3, 4)),
            raw_binary("column", struct.pack("<q", 5)),
            raw_binary("column", struct.pack("<2q", 5, 6)),
            raw_binary("shaped_grid", struct.pack("<4f", 1, 2, 3, 4)),
            raw_binary("shaped_two", struct.pack("<4f", 1, 2, 3, 4)),
            raw_binary("text", b"hello"),
            raw_binary("text_batched", b"hello"),
            raw_binary("text_batched", b""),
            raw_binary("shaped_three", b""),
            raw_binary("nope", b"hello"),
        ),
    )
    yield Case(
        "binary_header_all",
        (
            Sent(
                "POST",
                "/v2/models/same_fp32/infer",
                (body := json.dumps(ask(_x(1, 2))).encode()),
                {LENGTH: str(len(body))},
            ),
            Sent("POST", "/v2/models/same_fp32/infer", body + b"1234", {LENGTH: str(len(body))}),
            Sent("POST", "/v2/models/same_fp32/infer", body, {LENGTH.lower(): str(len(body))}),
        ),
    )
    yield Case(
        "binary_two_sizes",
        (
            binary(
                "pair",
                ask(
                    tensor("INT32", [1, 2], binary_data_size=8, name="a"),
                    tensor("FP32", [1, 2], binary_data_size=8, name="b"),
                ),
                A4,
            ),
            binary(
                "pair",
                ask(
                    tensor("INT32", [1, 2], binary_data_size=12, name="a"),
                    tensor("FP32", [1, 2], binary_data_size=4, name="b"),
                ),
                A4,
                B4,
            ),
        ),
    )
    yield Case(
        "binary_bytes_wrong",
        tuple(
            binary("same_bytes", x(len(data), [1, 2], "BYTES"), data)
            for data in (
                text_bytes(b"a"),
                text_bytes(b"a", b"b", b"c"),
                text_bytes(b"a", b"b")[:-1],
                text_bytes(b"a", b"b") + b"\1",
                struct.pack("<I", 5) + b"ab",
                struct.pack("<I", 2**32 - 1) + b"ab",
                b"\1\0",
                b"",
            )
        ),
    )
    yield Case(
        "binary_bytes_not_text",
        (
            binary(
                "same_bytes",
                ask(tensor("BYTES", [1, 2], binary_data_size=12), outputs=want("y", binary_data=True)),
                text_bytes(b"\xff\0", b"\x80\n"),
            ),
            binary("same_bytes", x(12, [1, 2], "BYTES"), text_bytes(b"\xff\0", b"\x80\n")),
        ),
    )
    yield Case("binary_bool_of_2", (binary("same_bool", x(3, datatype="BOOL"), b"\2\0\1"),))
    yield Case(
        "shared_memory",
        (
            infer("same_fp32", ask(tensor("FP32", [1, 3], shared_memory_region="r", shared_memory_byte_size=12))),
            infer(
                "same_fp32", ask(_x(1, 2, 3), outputs=want("y", shared_memory_region="r", shared_memory_byte_size=12))
            ),
            get("/v2/systemsharedmemory/status"),
            get("/v2/systemsharedmemory/region/r/status"),
            post("/v2/systemsharedmemory/region/r/register", {"key": "/none", "offset": 0, "byte_size": 12}),
            post("/v2/systemsharedmemory/region/r/unregister"),
            post("/v2/systemsharedmemory/unregister"),
        ),
    )


def _limits() -> Iterator[Case]:
    """Priority, time-out, the queue, sequences, failing models."""
    one = _x(1)
    yield Case(
        "priority",
        tuple(
            infer("priorities", ask(one, parameters={"priority": value}))
            for value in (1, 3, 0, 4, -1, "1", 1.5, True, None, 2**64)
        ),
    )
    yield Case(
        "priority_elsewhere",
        tuple(infer("same_fp32", ask(one, parameters={"priority": value})) for value in (1, 0, -1, "1")),
    )
    yield Case(
        "timeout",
        tuple(
            infer("same_fp32", ask(one, parameters={"timeout": value}))
            for value in (1000000, 1, 0, -1, "5", 1.5, True, None, 2**64)
        ),
    )
    yield Case(
        "timeout_in_queue",
        (
            infer("slow", ask(_x(1.0)), aside=True),
            infer("slow", ask(_x(0), parameters={"timeout": 1000}), aside=True),
            infer("slow", ask(_x(0), parameters={"timeout": 1000}, id="seven"), aside=True),
        ),
    )
    yield Case(
        "queue_full",
        (
            infer("queue", ask(_x(1.5)), aside=True),
            infer("queue", ask(_x(0.2)), aside=True),
            infer("queue", ask(_x(0.2)), aside=True),
            infer("queue", ask(_x(0))),
        ),
    )
    yield Case(
        "sequence",
        (
            infer("sequences", ask(one)),
            infer("sequences", ask(one, parameters={"sequence_id": 5, "sequence_start": True})),
            infer("sequences", ask(one, parameters={"sequence_id": 5, "sequence_end": True})),
            infer("sequences", ask(one, parameters={"sequence_id": 6})),
            infer(
                "sequences", ask(one, parameters={"sequence_id": "text", "sequence_start": True, "sequence_end": True})
            ),
        ),
    )
    yield Case(
        "sequence_elsewhere",
        (
            infer("same_fp32", ask(one, parameters={"sequence_id": 5})),
            infer("same_fp32", ask(one, parameters={"sequence_id": 5, "sequence_start": True, "sequence_end": False})),
            infer("same_fp32", ask(one, parameters={"sequence_id": "text", "sequence_start": True})),
            infer("same_fp32", ask(one, parameters={"sequence_id": 1.5})),
            infer("same_fp32", ask(one, parameters={"sequence_start": 1})),
            infer("same_fp32", ask(one, parameters={"sequence_end": "yes"})),
        ),
    )
    yield Case("broken", (infer("broken", ask(one)), get("/v2/models/broken/ready")))
    yield Case("broken_statistics", (get("/v2/models/broken/stats"),))


def _descriptions() -> Iterator[Case]:
    yield Case("server", (get("/v2"), get("/v2/"), get("/v2/health/live"), get("/v2/health/ready")))
    yield Case(
        "server_not_ready_for_all",
        (get("/v2/models/unloadable/ready"), get("/v2/models/unloadable"), infer("unloadable", ask(_x(1)))),
    )
    for model in ("pair", "fixed", "column", "versions", "text", "words", "priorities", "sequences", "scores"):
        yield Case(
            f"description_{model}",
            (get(f"/v2/models/{model}"), get(f"/v2/models/{model}/config"), get(f"/v2/models/{model}/ready")),
        )
    yield Case(
        "versions",
        (
            infer("versions", ask(_x(1))),
            infer("versions", ask(_x(1)), version="1"),
            infer("versions", ask(_x(1)), version="3"),
            infer("versions", ask(_x(1)), version="2"),
            infer("versions", ask(_x(1)), version="-1"),
            infer("versions", ask(_x(1)), version="01"),
            infer("versions", ask(_x(1)), version="x"),
            infer("versions", ask(_x(1)), version="99999999999999999999"),
            get("/v2/models/versions/versions/1"),
            get("/v2/models/versions/versions/1/ready"),
            get("/v2/models/versions/versions/1/config"),
            get("/v2/models/versions/versions/2"),
            get("/v2/models/versions/versions/2/ready"),
            get("/v2/models/versions/versions/2/config"),
            get("/v2/models/versions/versions/2/stats"),
            get("/v2/models/versions/versions/x/ready"),
            get("/v2/models/versions/versions"),
        ),
    )
    yield Case(
        "unknown_model",
        (
            infer("nope", ask(_x(1))),
            infer("nope", "{"),
            infer("nope", ask(_x(1)), version="1"),
            get("/v2/models/nope"),
            get("/v2/models/nope/ready"),
            get("/v2/models/nope/config"),
            get("/v2/models/nope/stats"),
            get("/v2/models/nope/versions/1/ready"),
            post("/v2/models/nope/generate", {"text_input": "a"}),
        ),
    )
    yield Case(
        "paths",
        (
            get("/"),
            get("/v1"),
            get("/v3"),
            get("/v2/nope"),
            get("/v2/models"),
            get("/v2/models/"),
            get("/v2/models//ready"),
            get("/v2/models/same_fp32/"),
            get("/v2/models/same_fp32/nope"),
            get("/v2/models/same_fp32/ready/"),
            get("/v2/models/same_fp32/ready?a=b"),
            get("/v2/models/same%5Ffp32/ready"),
            get("/v2/health"),
            get("/v2/health/nope"),
            get("//v2/health/live"),
            get("/metrics"),
        ),
    )
    yield Case(
        "methods",
        (
            get("/v2/models/same_fp32/infer"),
            Sent("PUT", "/v2/models/same_fp32/infer", b"{}"),
            Sent("DELETE", "/v2/models/same_fp32"),
            post("/v2/health/live", ""),
            post("/v2", ""),
            post("/v2/models/same_fp32", ""),
            post("/v2/models/same_fp32/ready", ""),
            post("/v2/models/same_fp32/config", ""),
            post("/v2/models/same_fp32/stats", ""),
            get("/v2/repository/index"),
            get("/v2/repository/models/same_fp32/load"),
            Sent("HEAD", "/v2/health/live"),
            Sent("OPTIONS", "/v2/health/live"),
            get("/v2/models/text/generate"),
        ),
    )
    yield Case(
        "statistics",
        (
            infer("loaded", ask(tensor("FP32", [1, 1], [1]))),
            infer("loaded", ask(tensor("FP32", [3, 1], [1, 2, 3]))),
            infer("loaded", ask(tensor("FP32", [3, 1], [1, 2]))),
            get("/v2/models/loaded/stats"),
            get("/v2/models/loaded/versions/1/stats"),
            get("/v2/models/loaded/versions/x/stats"),
        ),
    )
    yield Case("statistics_of_all", (get("/v2/models/stats"),))
    yield Case(
        "settings",
        (
            get("/v2/logging"),
            get("/v2/trace/setting"),
            get("/v2/models/same_fp32/trace/setting"),
            post("/v2/logging", {"log_verbose_level": 0}),
            post("/v2/logging", {"nonsense": 1}),
            post("/v2/trace/setting", {"trace_rate": "100"}),
            get("/v2/cudasharedmemory/status"),
        ),
    )
    yield Case(
        "index_of_all",
        (
            post("/v2/repository/index", ""),
            post("/v2/repository/index", {"ready": True}),
            post("/v2/repository/index", {"ready": False}),
        ),
    )
    yield Case(
        "load_refused",
        (
            post("/v2/repository/models/same_fp32/load", ""),
            post("/v2/repository/models/same_fp32/unload", ""),
            post("/v2/repository/models/nope/load", ""),
        ),
    )


CONFIG = (
    '{"backend":"python","max_batch_size":%d,"input":[{"name":"x","data_type":"TYPE_FP32","dims":[1]}],'
    '"output":[{"name":"y","data_type":"TYPE_FP32","dims":[1]}]}'
)
SOURCE = b"""import numpy as np
import triton_python_backend_utils as pb
class TritonPythonModel:
    def execute(self, requests):
        return [self.one(pb.get_input_tensor_by_name(request, "x").as_numpy()) for request in requests]
    def one(self, x):
        return pb.InferenceResponse([pb.Tensor("y", x * np.float32(10))])
"""


def _repository() -> Iterator[Case]:
    def explicit(name: str, *exchanges: Sent) -> Case:
        return Case(f"repository_{name}", exchanges, "explicit")

    def load(model: str, message: Any = "") -> Sent:
        return post(f"/v2/repository/models/{model}/load", message)

    def unload(model: str, message: Any = "") -> Sent:
        return post(f"/v2/repository/models/{model}/unload", message)

    one = ask(_x(1))
    index = post("/v2/repository/index", "")
    source = base64.b64encode(SOURCE).decode()
    yield explicit(
        "index",
        index,
        post("/v2/repository/index", {"ready": True}),
        post("/v2/repository/index", "{"),
        post("/v2/repository/nope/index", ""),
        post("/v2/repository/index", {"ready": "yes"}),
    )
    yield explicit(
        "load",
        infer("loaded", one),
        load("loaded"),
        infer("loaded", one),
        get("/v2/models/loaded/ready"),
        load("loaded"),
        index,
    )
    yield explicit(
        "unload",
        unload("loaded"),
        infer("loaded", one),
        get("/v2/models/loaded/ready"),
        get("/v2/models/loaded"),
        get("/v2/models/loaded/stats"),
        unload("loaded"),
        index,
    )
    yield explicit("load_empty_object", load("loaded", {}), unload("loaded", {}))
    yield explicit("load_unknown", load("nope"), unload("nope"))
    yield explicit(
        "load_failing",
        load("unloadable"),
        get("/v2/models/unloadable/ready"),
        get("/v2/models/unloadable"),
        infer("unloadable", one),
        index,
        get("/v2/health/ready"),
        unload("unloadable"),
    )
    yield explicit(
        "load_config",
        load("loaded", {"parameters": {"config": CONFIG % 3}}),
        get("/v2/models/loaded/config"),
        infer("loaded", one),
        load("loaded"),
        get("/v2/models/loaded/config"),
    )
    yield explicit(
        "load_config_wrong",
        *(
            load("loaded", {"parameters": {"config": value}})
            for value in ("{", "", "text", 5, {"backend": "python"}, '{"nonsense": 1}', '{"backend": "none"}')
        ),
    )
    yield explicit(
        "load_parameters_wrong",
        load("loaded", {"parameters": {"nonsense": "a"}}),
        load("loaded", {"parameters": []}),
        load("loaded", "{"),
        load("loaded", "[]"),
        load("loaded", {"parameters": {"file:1/model.py": source}}),
        load("loaded", {"parameters": {"config": CONFIG % 3, "file:1/model.py": 5}}),
        load("loaded", {"parameters": {"config": CONFIG % 3, "file:1/model.py": "%%%"}}),
    )
    yield explicit(
        "load_file",
        load("loaded", {"parameters": {"config": CONFIG % 3, "file:1/model.py": source}}),
        infer("loaded", one),
        index,
        load("loaded"),
        infer("loaded", one),
    )
    yield explicit(
        "load_file_new_model",
        load("sent", {"parameters": {"config": CONFIG % 2, "file:7/model.py": source}}),
        infer("sent", one),
        get("/v2/models/sent"),
        index,
        unload("sent"),
        index,
    )
    yield explicit(
        "load_file_outside",
        load("sent", {"parameters": {"config": CONFIG % 2, "file:../model.py": source}}),
        load("sent", {"parameters": {"config": CONFIG % 2, "file:1/../../x": source}}),
    )
    yield explicit(
        "unload_dependents",
        load("loaded"),
        unload("loaded", {"parameters": {"unload_dependents": True}}),
        unload("loaded", {"parameters": {"unload_dependents": "yes"}}),
        unload("loaded", {"parameters": {"nonsense": 1}}),
        unload("loaded", "{"),
    )
    yield explicit(
        "versions", infer("versions", one), unload("versions"), infer("versions", one), index, load("versions"), index
    )
    yield explicit("ready", get("/v2/health/ready"), get("/v2/models/loaded/ready"), get("/v2/models/same_fp32/ready"))


def _encodings() -> Iterator[Case]:
    body = json.dumps(ask(_x(1, 2, 3))).encode()
    path = "/v2/models/same_fp32/infer"
    head = json.dumps(ask(tensor("FP32", [1, 3], binary_data_size=12))).encode()
    whole = head + struct.pack("<3f", 1, 2, 3)
    zipped = {"gzip": gzip.compress(whole, mtime=0), "deflate": zlib.compress(whole)}
    yield Case("gzip", (Sent("POST", path, gzip.compress(body, mtime=0), {"Content-Encoding": "gzip"}),))
    yield Case("deflate", (Sent("POST", path, zlib.compress(body), {"Content-Encoding": "deflate"}),))
    yield Case(
        "compressed_binary",
        tuple(
            Sent("POST", path, data, {"Content-Encoding": name, LENGTH: str(len(head))})
            for name, data in zipped.items()
        ),
    )
    yield Case(
        "compressed_wrong",
        (
            Sent("POST", path, body, {"Content-Encoding": "gzip"}),
            Sent("POST", path, body, {"Content-Encoding": "br"}),
            Sent("POST", path, gzip.compress(body, mtime=0)[:-12], {"Content-Encoding": "gzip"}),
            Sent("POST", path, gzip.compress(body, mtime=0), {"Content-Encoding": "deflate"}),
            Sent("POST", path, zlib.compress(body), {"Content-Encoding": "gzip"}),
            Sent("POST", path, body, {"Content-Encoding": "identity"}),
            Sent("POST", path, gzip.compress(body, mtime=0), {"Content-Encoding": "GZIP"}),
            Sent("POST", path, gzip.compress(body, mtime=0), {"Content-Encoding": "gzip, gzip"}),
        ),
    )
    yield Case(
        "compressed_answer",
        tuple(
            Sent("POST", path, body, {"Accept-Encoding": value})
            for value in (
                "gzip",
                "deflate",
                "gzip, deflate",
                "deflate, gzip",
                "br",
                "*",
                "identity",
                "gzip;q=0.5, deflate;q=0.8",
            )
        ),
    )
    yield Case(
        "compressed_answer_binary",
        tuple(
            Sent(
                "POST",
                path,
                json.dumps(ask(_x(1, 2, 3), parameters={"binary_data_output": True})).encode(),
                {"Accept-Encoding": value},
            )
            for value in ("gzip", "deflate")
        ),
    )
    yield Case(
        "content_type",
        (
            Sent("POST", path, body, {"Content-Type": "text/plain"}),
            Sent("POST", path, body, {"Content-Type": "application/json; charset=utf-16"}),
            Sent("POST", path, body, {"Content-Type": "application/octet-stream"}),
        ),
    )


def _generate() -> Iterator[Case]:
    def generate(model: str, message: Any, *, stream: bool = False, version: str = "", **headers: str) -> Sent:
        middle = f"/versions/{version}" if version else ""
        return post(f"/v2/models/{model}{middle}/generate{'_stream' if stream else ''}", message, **headers)

    yield Case(
        "generate",
        (
            generate("text", {"text_input": "hello"}),
            generate("text", {"text_input": "hello", "temperature": 0.5, "stop": ["a", "b"]}),
            generate("text", {"text_input": "hello", "temperature": 1, "stop": "a"}),
            generate("text", {"text_input": ["hello"]}),
            generate("text", {"text_input": "hello", "parameters": {"temperature": 0.25}}),
            generate("text", {"text_input": "hello", "copies": 2}),
            generate("text", {"text_input": 'hé "quoted" \\ \n'}),
            generate("text", {"text_input": "hello"}, version="1"),
            generate("text", {"text_input": "hello", "id": "seven"}),
            generate("text", {"id": "seven", "text_input": "hello"}),
        ),
    )
    yield Case(
        "generate_more_fields",
        (
            generate("text", {"text_input": "hello", "other": 5}),
            generate("text", {"text_input": "hello", "other": "text"}),
            generate("text", {"text_input": "hello", "other": [1]}),
            generate("text", {"text_input": "hello", "other": {"a": 1}}),
            generate("text", {"text_input": "hello", "other": None}),
            generate("text", {"text_input": "hello", "other": 1.5}),
            generate("text", {"text_input": "hello", "other": True}),
            generate("text", {"text_input": "hello", "parameters": {"other": 5}}),
            generate("text", {"text_input": "hello", "parameters": 5}),
            generate("text", {"text_input": "hello", "priority": 1, "timeout": 1000000}),
            generate("text", {"text_input": "hello", "parameters": {"priority": 1, "timeout": 1000000}}),
        ),
    )
    yield Case(
        "generate_wrong",
        (
            generate("text", {}),
            generate("text", ""),
            generate("text", "{"),
            generate("text", "[]"),
            generate("text", {"text_input": 5}),
            generate("text", {"text_input": None}),
            generate("text", {"text_input": {"a": 1}}),
            generate("text", {"text_input": []}),
            generate("text", {"text_input": ["a", "b"]}),
            generate("text", {"text_input": [["a"]]}),
            generate("text", {"text_input": "a", "copies": "2"}),
            generate("text", {"text_input": "a", "copies": 1.5}),
            generate("text", {"text_input": "a", "copies": [1, 2]}),
            generate("text", {"text_input": "a", "temperature": "hot"}),
            generate("text", {"text_input": "a", "temperature": None}),
            generate("text", {"text_input": "a"}, version="2"),
            generate("text", {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}),
        ),
    )
    yield Case(
        "generate_batched",
        (generate("text_batched", {"text_input": "hello"}), generate("text_batched", {"text_input": ["a", "b"]})),
    )
    yield Case(
        "generate_numbers",
        (
            generate("same_fp32", {"x": 1.5}),
            generate("same_fp32", {"x": [1.5, 2]}),
            generate("same_fp32", {"x": [[1.5, 2], [3, 4]]}),
            generate("same_int32", {"x": 7}),
            generate("same_bool", {"x": True}),
            generate("same_bytes", {"x": "text"}),
            generate("same_bytes", {"x": ["text", "more"]}),
            generate("same_fp16", {"x": 1.5}),
            generate("pair", {"a": [1, 2], "b": [0.5, 4]}),
            generate("broken", {"x": 1}),
            generate("fixed", {"x": [1, 2, 3, 4]}),
            generate("column", {"x": 5}),
        ),
    )
    one, two, four, six = 1.5, [1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]
    for name in ("one", "three", "grid", "two", "box", "free"):
        yield Case(
            f"generate_shape_{name}",
            tuple(generate(f"shaped_{name}", {"x": value}) for value in (one, two, [1, 2, 3], four, six, [*six, *six])),
        )
    yield Case(
        "generate_numbers_stream",
        (
            generate("same_fp32", {"x": 1.5}, stream=True),
            generate("broken", {"x": 1}, stream=True),
            generate("pair", {"a": [1, 2], "b": [0.5, 4]}, stream=True),
        ),
    )
    yield Case(
        "generate_stream",
        (
            generate("words", {"text_input": "one two three"}, stream=True),
            generate("words", {"text_input": "one"}, stream=True),
            generate("words", {"text_input": ""}, stream=True),
            generate("words", {"text_input": "one", "id": "seven"}, stream=True),
            generate("words", {"text_input": 'hé "quoted"'}, stream=True),
            generate("text", {"text_input": "hello"}, stream=True),
            generate("words", {"text_input": "one two"}, stream=True, version="1"),
        ),
    )
    yield Case(
        "generate_stream_wrong",
        (
            generate("words", {"text_input": "one FAIL three"}, stream=True),
            generate("words", {"text_input": "FAIL"}, stream=True),
            generate("words", {}, stream=True),
            generate("words", "{", stream=True),
            generate("words", {"text_input": 5}, stream=True),
            generate("nope", {"text_input": "one"}, stream=True),
            generate("words", {"text_input": "one"}, stream=True, version="2"),
        ),
    )
    yield Case(
        "generate_decoupled",
        (
            generate("words", {"text_input": "one two"}),
            generate("words", {"text_input": "one"}),
            generate("words", {"text_input": ""}),
            generate("words", {"text_input": "FAIL"}),
        ),
    )
    yield Case(
        "generate_timeout",
        (
            infer("slow", ask(_x(1.0)), aside=True),
            generate("slow", {"x": 0, "timeout": 1000}),
        ),
    )
    yield Case("infer_decoupled", (infer("words", ask(tensor("BYTES", [1], ["one two"], name="text_input"))),))
    yield Case(
        "generate_binary",
        (
            Sent("POST", "/v2/models/text/generate", b'{"text_input":"a"}', {LENGTH: "18"}),
            Sent(
                "POST",
                "/v2/models/text/generate",
                gzip.compress(b'{"text_input":"a"}', mtime=0),
                {"Content-Encoding": "gzip"},
            ),
            Sent("POST", "/v2/models/text/generate", b'{"text_input":"a"}', {"Accept-Encoding": "gzip"}),
        ),
    )


CASES: tuple[Case, ...] = (
    *_datatypes(),
    *_messages(),
    *_classification(),
    *_wrong_json(),
    *_wrong_inputs(),
    *_wrong_binary(),
    *_limits(),
    *_descriptions(),
    *_repository(),
    *_encodings(),
    *_generate(),
    *_crashes(),
)
