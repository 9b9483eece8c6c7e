"""What a real Triton answered (tests/golden/http, recorded by tests/golden/record.py), against the codecs here.

Each recorded inference and generation is decoded, computed by the same function and encoded; the answers must be
equal, and errors must begin with Triton's words. What differs on purpose is in DIFFERENT, and told in
docs/serve-triton.md.
"""

from __future__ import annotations

import base64
import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onejob.core.tensor import DATATYPES, TensorSpec
from onejob.errors import OnejobError
from onejob.serve.protocols import generate, repository
from onejob.serve.protocols.answer import Encoder
from onejob.serve.protocols.interface import Interface
from onejob.serve.protocols.plan import Plans, header_length

GOLDEN = Path(__file__).parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))

from golden_models import COMPUTE, LABELS, MODELS, VERSIONS, words  # noqa: E402

PAGE = (GOLDEN.parents[1] / "docs" / "serve-triton.md").read_text()

ROWS: dict[str, tuple[str, ...]] = {
    "JSON that isn't JSON": (
        *("malformed_not_utf8", "malformed_nul", "malformed_deep", "malformed_duplicate_key"),
        *("binary_without_header:1", "binary_header:8"),
    ),
    "an empty body": ("malformed_empty",),
    "NaN and infinity in a JSON answer": ("malformed_nan", "non_finite_json_out"),
    "null where a float is wanted": ("wrong_floats:12", "wrong_values:5", "generate_wrong:14"),
    "numbers that the datatype can't hold": (
        *("malformed_big_float", "wrong_floats:8", "wrong_integers:7", "wrong_integers:8"),
        *("wrong_short_integers:1", "wrong_short_integers:2", "wrong_small_integers:1", "wrong_small_integers:3"),
        *("wrong_small_integers:5", "wrong_small_unsigned:1", "wrong_unsigned:1", "wrong_unsigned_16:1"),
    ),
    "FP16 and BF16 in JSON": (
        *("binary_in_json_out_bf16", "binary_in_json_out_fp16", "json_bf16", "json_fp16"),
        *("json_in_binary_out_bf16", "json_in_binary_out_fp16", "generate_numbers:7"),
    ),
    "`null` for `id`, `parameters` or `outputs`": ("id_of_other_types:1", "parameters:9", "outputs_of_other_types:5"),
    "`binary_data_output` beside named outputs": ("outputs_binary:1", "classification_binary:1"),
    "the order of outputs asked for by name": ("outputs_binary:3", "outputs_by_name:1"),
    "more rows than `max_batch_size`": ("batch_of_9",),
    "no rows": ("batch_of_0",),
    "sequence parameters": ("sequence", "sequence_elsewhere:0", "sequence_elsewhere:1", "sequence_elsewhere:2"),
    "values and lists mixed in `data`": ("nested_data_otherwise", "nested_and_flat_data"),
    "`Inference-Header-Content-Length` that is no number": tuple(
        f"binary_header:{number}" for number in (4, 5, 6, 7, 10)
    ),
    "BYTES whose lengths don't add up": ("binary_bytes_wrong:2", "binary_bytes_wrong:4", "binary_bytes_wrong:5"),
    "several mistakes in one request": (
        *("binary_two_sizes:1", "wrong_shape:2", "wrong_shape_pair:1", "wrong_one_of_two:2"),
    ),
    "what ends Triton 2.51 itself": (
        *("huge_shape_1_1099511627776", "huge_shape_1_4611686018427387904", "huge_shape_8_2305843009213693952"),
        *("huge_shape_4294967296_4294967296", "huge_shape_binary_1_4611686018427387904"),
        *("huge_shape_binary_1_9223372036854775808", "huge_shape_binary_4294967296_4294967296"),
        *("huge_shape_binary_8_2305843009213693952", "classification_bytes"),
    ),
    "`generate` of a model that gives several answers, or none": ("generate_decoupled:0", "generate_decoupled:2"),
    "a compressed `generate`": ("generate_binary:1",),
    "an `unload` whose body is malformed": ("repository_unload_dependents:2", "repository_unload_dependents:4"),
    "a file's content that is not base64": ("repository_load_parameters_wrong:6",),
}
"""Row of the table in docs/serve-triton.md -> cases (or exchanges, with their number) that are different."""
DIFFERENT = {name: row for row, names in ROWS.items() for name in names}


@dataclass(frozen=True)
class Exchange:
    """A recorded request and its answer."""

    name: str
    method: str
    path: list[str]
    headers: dict[str, str]
    body: bytes
    status: int
    answer_headers: dict[str, str]
    answer: bytes

    @property
    def model(self) -> str:
        return self.path[2]

    @property
    def version(self) -> str:
        known = VERSIONS.get(self.model, (1,))
        return self.path[4] if self.path[3:4] == ["versions"] else str(known[-1])


def _bytes(body: dict[str, str]) -> bytes:
    return body["text"].encode() if "text" in body else base64.b64decode(body["base64"])


def inflated(body: bytes, headers: dict[str, str]) -> bytes:
    encoding = headers.get("content-encoding")
    return {"gzip": gzip.decompress, "deflate": zlib.decompress}.get(encoding or "", bytes)(body)


def exchanges() -> Iterator[Exchange]:
    for file in sorted((GOLDEN / "http").glob("*.json")):
        case = json.loads(file.read_text())
        for number, exchange in enumerate(case["exchanges"]):
            request, answer = exchange["request"], exchange["answer"]
            yield Exchange(
                f"{case['case']}:{number}",
                request["method"],
                request["path"].strip("/").split("/"),
                {name.lower(): value for name, value in request["headers"].items()},
                _bytes(request["body"]),
                answer["status"],
                {name.lower(): value for name, value in answer["headers"].items()},
                inflated(_bytes(answer["body"]), {name.lower(): text for name, text in answer["headers"].items()}),
            )


ALL = list(exchanges())


OTHERS = {"unloadable", "broken", "queue", "slow"}
"""Models that fail or must be waited for."""
NOT_HERE = ("compressed_wrong", "infer_decoupled", "repository_")
"""What the codecs never see."""


def of(*verbs: str) -> list[Any]:
    """The exchanges of these verbs that come as far as the codecs, with models and versions that exist."""
    found = []
    for exchange in ALL:
        if exchange.method != "POST" or exchange.path[-1] not in verbs or exchange.model not in MODELS.keys() - OTHERS:
            continue
        if exchange.version not in map(str, VERSIONS.get(exchange.model, (1,))):
            continue
        if exchange.name.startswith(NOT_HERE):
            continue
        found.append(pytest.param(exchange, id=exchange.name))
    return found


def interface(model: str) -> Interface:
    shapes = MODELS[model].shapes
    inputs, outputs = list(shapes(MODELS[model].inputs)), list(shapes(MODELS[model].outputs))
    return Interface(
        model,
        {name: TensorSpec(name, datatype, shape) for name, datatype, shape, _ in inputs},
        {name: TensorSpec(name, datatype, shape) for name, datatype, shape, _ in outputs},
        optional=frozenset(name for name, _, _, optional in inputs if optional),
        octets=True,
        labels={"y": LABELS} if model == "scores" else {},
    )


def compute(model: str, version: str, arrays: dict[str, Any]) -> dict[str, Any]:
    outputs = COMPUTE["text" if model == "text_batched" else model](arrays, int(version))
    return {name: array.reshape(-1, 1) for name, array in outputs.items()} if model == "text_batched" else outputs


def replay_infer(exchange: Exchange) -> tuple[int, bytes, int | None]:
    """Status, body, and length of the JSON that a server with these codecs answers."""
    body = inflated(exchange.body, exchange.headers)
    told = exchange.headers.get("inference-header-content-length")
    known = interface(exchange.model)
    encoder = Encoder(known, exchange.version)
    try:
        length = header_length(None if told is None else told.strip().encode(), len(body))
        plan, identifier, arrays = Plans(known).read(body, length)
        encoder.check(plan.head.outputs)
        outputs = compute(exchange.model, exchange.version, arrays)
        return 200, *encoder.encode(outputs, plan.head.outputs, identifier)
    except OnejobError as error:
        return error.http_status, json.dumps({"error": str(error)}).encode(), None


def replay_generate(exchange: Exchange) -> tuple[int, bytes]:
    known, stream = interface(exchange.model), exchange.path[-1] == "generate_stream"
    try:
        plan = generate.parse_generate(exchange.body, known)
    except OnejobError as error:
        return error.http_status, generate.encode_error(str(error))
    arrays = plan.arrays(b"")
    status, answers = 200, []
    try:
        for outputs in words(arrays) if exchange.model == "words" else [compute(exchange.model, "1", arrays)]:
            answers.append(generate.encode_generate(outputs, known, exchange.version, plan.id))
    except ValueError as error:
        status = 400 if not answers else status
        answers.append(generate.encode_error(str(error)))
    if stream:
        return status, b"".join(map(generate.encode_event, answers))
    return (status, answers[0]) if len(answers) == 1 else (400, generate.encode_error(generate.ONE_ANSWER))


def parsed(body: bytes) -> Any:
    return json.loads(body.decode("utf-8", "replace"))


def same(theirs: Any, ours: Any, datatype: str = "FP64") -> bool:
    """Whether two answers say the same, numbers being what their datatype makes of them."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        kind = theirs.get("datatype", datatype)
        return theirs.keys() == ours.keys() and all(same(theirs[key], ours[key], kind) for key in theirs)
    if isinstance(theirs, list) and isinstance(ours, list):
        return len(theirs) == len(ours) and all(same(*pair, datatype) for pair in zip(theirs, ours, strict=True))
    if isinstance(theirs, float) and isinstance(ours, float):
        dtype = DATATYPES.get(datatype, "float64")
        return bool(np.array(theirs, dtype) == np.array(ours, dtype))
    return type(theirs) is type(ours) and bool(theirs == ours)


def words_of(body: bytes) -> str:
    """An error without the request's id, and without advice that is about Triton's own configuration."""
    text = str(parsed(body)["error"]).removeprefix("[request id: <id_unknown>] ")
    if text.startswith("failed to parse the request JSON buffer"):
        return "failed to parse the request JSON buffer"  # each parser has its own words for why
    return text.partition(" NOTE: ")[0].partition(" Please make sure")[0].rstrip(" .")


def differs(exchange: Exchange, status: int, body: bytes, length: int | None) -> str:
    """What is not as Triton answered; nothing, if all is. A client's mistake is a 400 here where Triton says 500."""
    if exchange.status in (400, 500) and status == 400:
        theirs, ours = words_of(exchange.answer), words_of(body)
        return "" if ours.startswith(theirs) else f"{theirs!r} != {ours!r}"
    if exchange.status != status:
        return f"status {exchange.status} != {status}: {exchange.answer!r} != {body!r}"
    if status != 200:
        return "" if words_of(body).startswith(words_of(exchange.answer)) else f"{exchange.answer!r} != {body!r}"
    told = exchange.answer_headers.get("inference-header-content-length")
    if (None if told is None else int(told)) != length:
        return f"length {told} != {length}: {exchange.answer!r} != {body!r}"
    if length is not None:
        return "" if body == exchange.answer else f"{exchange.answer!r} != {body!r}"
    equal = same(parsed(exchange.answer), parsed(body))
    return "" if equal else f"{exchange.answer!r} != {body!r}"


def judge(exchange: Exchange, difference: str) -> None:
    row = DIFFERENT.get(exchange.name) or DIFFERENT.get(exchange.name.partition(":")[0])
    if row is None:
        assert not difference
        return
    assert difference, f"it is as in Triton: take it out of DIFFERENT ({row})"
    assert f"| {row} |" in PAGE


@pytest.mark.parametrize("exchange", of("infer"))
def test_infer_as_triton_does(exchange: Exchange) -> None:
    judge(exchange, differs(exchange, *replay_infer(exchange)))


@pytest.mark.parametrize("exchange", of("generate", "generate_stream"))
def test_generate_as_triton_does(exchange: Exchange) -> None:
    status, body = replay_generate(exchange)
    if "event-stream" in exchange.answer_headers.get("content-type", ""):
        assert (status, body) == (exchange.status, exchange.answer)
    else:
        judge(exchange, differs(exchange, status, body, None))


@pytest.mark.parametrize(
    "exchange",
    [
        pytest.param(exchange, id=exchange.name)
        for exchange in ALL
        if exchange.path[1:2] == ["repository"] and exchange.name.startswith("repository_")
    ],
)
def test_repository_messages_as_triton_reads_them(exchange: Exchange) -> None:
    model = exchange.path[-2]
    try:
        if exchange.path[-1] == "load":
            repository.parse_load(exchange.body, model)
        elif exchange.path[-1] == "unload":
            repository.parse_unload(exchange.body)
        else:
            repository.parse_index(exchange.body)
    except OnejobError as error:
        theirs, ours = exchange.answer, json.dumps({"error": str(error)}).encode()
        equal = exchange.status in (400, 500) and words_of(ours).startswith(words_of(theirs))
        judge(exchange, "" if equal else f"{theirs!r} != {ours!r}")
    else:  # what is well said may still fail: that isn't the message's fault
        assert exchange.status == 200 or b"load" in exchange.answer


def test_every_difference_was_recorded() -> None:
    names = {exchange.name for exchange in ALL} | {exchange.name.partition(":")[0] for exchange in ALL}
    assert DIFFERENT.keys() <= names


def test_every_answer_was_recorded_from_the_same_triton() -> None:
    files = list((GOLDEN / "http").glob("*.json"))
    assert {json.loads(file.read_text())["triton"] for file in files} == {"2.51.0"}
    assert len(files) > 250
