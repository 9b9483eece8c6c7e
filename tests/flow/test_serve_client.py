"""An endpoint asked as its users ask it: NVIDIA's own client unmodified, raw sockets, curl, and plain records."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from onnx import TensorProto, helper, numpy_helper
from served_models import DIGEST, Endpoint, endpoint, save, save_affine, save_texts, wait_for
from tritonclient.utils import InferenceServerException

from onejob.core.artifact import canonical
from onejob.families.tabular import encode
from onejob.monitor.collect import collect_once, summary_of
from onejob.monitor.requests import find_request


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("served")
    with endpoint(folder / "affine") as made:
        made.want(save_affine(folder / "engine"))
        yield made.start().ready()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("texts")
    with endpoint(folder / "texts") as made:
        made.want(save_texts(folder / "engine"), name="texts")
        yield made.start().ready()


@pytest.fixture
def client(served: Endpoint) -> Iterator[Any]:
    made = triton.InferenceServerClient(f"127.0.0.1:{served.port}")
    yield made
    made.close()


def tensor(values: np.ndarray[Any, Any], *, binary: bool = True, name: str = "x", datatype: str = "FP32") -> Any:
    made = triton.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values, binary_data=binary)
    return made


X = np.arange(8, dtype=np.float32).reshape(2, 4)


def test_nvidias_client_health_and_descriptions(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("affine")
    assert client.is_model_ready("affine", "1")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["name"] == "onejob"
    metadata = client.get_model_metadata("affine")
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    config = client.get_model_config("affine")
    assert config["max_batch_size"] == 8
    assert (config["input"][0]["dims"], config["input"][0]["data_type"]) == ([4], "TYPE_FP32")
    assert client.get_model_repository_index()[0]["state"] == "READY"


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
@pytest.mark.parametrize("packed", [None, "gzip", "deflate"])
def test_nvidias_client_infers(client: Any, binary_in: bool, binary_out: bool | None, packed: str | None) -> None:
    outputs = None if binary_out is None else [triton.InferRequestedOutput("y", binary_data=binary_out)]
    result = client.infer(
        "affine",
        [tensor(X, binary=binary_in)],
        request_id="r-1",
        outputs=outputs,
        request_compression_algorithm=packed,
        response_compression_algorithm=packed,
    )
    np.testing.assert_array_equal(result.as_numpy("y"), X * 2 + 1)
    answer = result.get_response()
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("r-1", "affine", "1")
    assert answer["parameters"]["engine"] == DIGEST


def test_nvidias_client_statistics_count_up(client: Any) -> None:
    def count() -> int:
        return int(client.get_inference_statistics("affine")["model_stats"][0]["inference_count"])

    before = count()
    client.infer("affine", [tensor(X)])
    assert count() == before + 2


@pytest.mark.parametrize(
    ("model", "values", "words"),
    [
        ("nope", X, "Request for unknown model: 'nope' is not found"),
        ("affine", X[:, :3], "unexpected shape for input 'x'"),
        ("affine", np.zeros((0, 4), np.float32), "one row or more"),
    ],
)
def test_nvidias_client_sees_errors_in_its_own_words(client: Any, model: str, values: Any, words: str) -> None:
    with pytest.raises(InferenceServerException, match=words):
        client.infer(model, [tensor(values)])


@pytest.mark.parametrize("binary", [True, False])
def test_nvidias_client_sends_and_gets_text(texts: Endpoint, binary: bool) -> None:
    client = triton.InferenceServerClient(f"127.0.0.1:{texts.port}")
    words = np.array([["Zürich"], [""], ["a\x00b"]], dtype=object)
    index = np.array([[2], [0], [1]], np.int64)
    inputs = [
        tensor(words, binary=binary, name="text", datatype="BYTES"),
        tensor(index, name="index", datatype="INT64"),
    ]
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("looked_up", "echo")]
    result = client.infer("texts", inputs, outputs=outputs)
    echoed = [value.decode() if isinstance(value, bytes) else value for value in result.as_numpy("echo").reshape(-1)]
    assert echoed == ["Zürich", "", "a\x00b"]
    assert result.as_numpy("looked_up").tolist() == [[30.0], [10.0], [20.0]]
    client.close()


def test_the_engines_own_refusal_fails_alone(texts: Endpoint) -> None:
    """Requests in one batch: the one that the engine can't compute fails, its neighbours don't."""

    def request(index: int) -> bytes:
        inputs = [
            {"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["t"]},
            {"name": "index", "datatype": "INT64", "shape": [1, 1], "data": [index]},
        ]
        body = json.dumps({"inputs": inputs}).encode()
        return b"POST /v2/models/texts/infer HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    with texts.connect() as sock:
        sock.sendall(request(0) + request(9) + request(2))
        answers = read_answers(sock, 3)
    assert [status for status, _ in answers] == [200, 500, 200]
    assert json.loads(answers[2][1])["outputs"][1]["data"] == [30.0]


def read_answers(sock: socket.socket, count: int) -> list[tuple[int, bytes]]:
    """The next answers of a raw connection."""
    reader = sock.makefile("rb")
    answers = []
    for _ in range(count):
        status = int(reader.readline().split()[1])
        length = 0
        while (line := reader.readline().strip()) != b"":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        answers.append((status, reader.read(length)))
    reader.close()
    return answers


def infer(values: list[Any], head: str = "") -> bytes:
    entry = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": values}
    body = json.dumps({"inputs": [entry]}).encode()
    return f"POST /v2/models/affine/infer HTTP/1.1\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body


def test_raw_pipelining_keeps_the_order(served: Endpoint) -> None:
    with served.connect() as sock:
        sock.sendall(b"".join(infer([n] * 4) for n in range(50)) + b"GET /v2/health/ready HTTP/1.1\r\n\r\n")
        answers = read_answers(sock, 51)
    assert [status for status, _ in answers] == [200] * 51
    assert [json.loads(body)["outputs"][0]["data"][0] for _, body in answers[:50]] == [2 * n + 1 for n in range(50)]


def test_raw_chunked_and_dripping(served: Endpoint) -> None:
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}).encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:20], body[20:]))
    request = b"POST /v2/models/affine/infer HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    with served.connect() as sock:
        for start in range(0, len(request), 13):
            sock.sendall(request[start : start + 13])
        assert read_answers(sock, 1)[0][0] == 200


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"not http at all\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nA: " + b"x" * 100_000 + b"\r\n\r\n", 431),
        (b"POST /v2/models/affine/infer HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"DELETE /v2 HTTP/1.1\r\n\r\n", 405),
        (infer([1, 2, 3]), 400),
        (infer(["1", 2, 3, 4]), 400),
        (infer([1, 2, 3, 4], "Inference-Header-Content-Length: 5\r\n"), 400),
        (infer([1, 2, 3, 4], "Content-Encoding: gzip\r\n"), 400),
    ],
)
def test_raw_lies_are_refused_and_the_endpoint_lives_on(served: Endpoint, request_bytes: bytes, status: int) -> None:
    with served.connect() as sock:
        sock.sendall(request_bytes)
        got, body = read_answers(sock, 1)[0]
        assert got == status
        assert json.loads(body)["error"]
    with served.connect() as sock:
        sock.sendall(infer([1, 2, 3, 4]))
        assert read_answers(sock, 1)[0][0] == 200


def test_a_client_that_hangs_up_in_the_middle_harms_nobody(served: Endpoint) -> None:
    for cut in (10, 70, 150):
        with served.connect() as sock:
            sock.sendall(infer([1, 2, 3, 4])[:cut])
    with served.connect() as sock:
        sock.sendall(infer([1, 2, 3, 4]) * 3)
    with served.connect() as sock:
        sock.sendall(infer([1, 2, 3, 4]))
        assert read_answers(sock, 1)[0][0] == 200


@pytest.mark.parametrize("flags", [[], ["--http1.0"], ["-H", "Expect: 100-continue"], ["--http2"]])
def test_curl(served: Endpoint, flags: list[str]) -> None:
    body = json.dumps({"instances": [[1, 2, 3, 4], [0, 0, 0, 0]]})
    url = f"http://127.0.0.1:{served.port}/v1/models/affine:predict"
    done = subprocess.run(["curl", "-sS", "--max-time", "20", *flags, "-d", body, url], capture_output=True, check=True)
    assert json.loads(done.stdout) == {"predictions": [{"y": [3, 5, 7, 9]}, {"y": [1, 1, 1, 1]}]}


def test_an_answered_request_is_found_by_its_id_and_counted(served: Endpoint) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    before = summary_of(served.folder)["requests"]
    body = infer([1, 2, 3, 4]).partition(b"\r\n\r\n")[2]
    connection.request("POST", "/v2/models/affine/infer", body)
    answer = connection.getresponse()
    request = answer.headers["x-request-id"]
    assert answer.headers["x-onejob-engine"] == DIGEST
    assert json.loads(answer.read())["parameters"]["request_id"] == request
    connection.close()
    wait_for(lambda: find_request(served.folder, request) is not None)
    record = find_request(served.folder, request)
    assert record is not None
    assert (record["digest"], record["execution"], record["rows"], record["status"]) == (DIGEST, "e1", 1, 200)
    wait_for(lambda: summary_of(served.folder)["requests"] > before)
    line = collect_once(served.folder, time.time())
    assert line is not None
    assert line["p99_ms"] > 0


FAMILY = '''
"""A family of one text column, which is served as its length."""
import numpy as np
from onejob.core.tensor import TensorSpec
from onejob.errors import BadRequestError


class Encoding:
    inputs = (TensorSpec("word", "BYTES", (-1,)),)
    features = outputs = ()
    served = (TensorSpec("length", "FP32", (-1,)), TensorSpec("verdict", "BYTES", (-1,)))

    def __init__(self, scale):
        self.scale = scale

    def encode(self, columns):
        for row, word in enumerate(columns["word"]):
            if word == "bad":
                raise BadRequestError(f"column 'word', row {row}: 'bad' is not a word")
        lengths = [[len(word or "")] * 4 for word in columns["word"]]
        return {"x": np.array(lengths, np.float32).reshape(-1, 4)}

    def decode(self, outputs):
        length = (outputs["y"][:, 0] - 1) / self.scale
        verdict = np.array(["long" if value > 3 else "short" for value in length], dtype=object)
        return {"length": length, "verdict": verdict}


def load(data):
    return Encoding(data["scale"])
'''


def test_a_users_own_family_takes_raw_columns_and_plain_records(tmp_path: Path) -> None:
    package = tmp_path / "project" / "my_words"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "encode.py").write_text(FAMILY)
    engine = save_affine(tmp_path / "engine")
    (engine / "encoding.json").write_text('{"scale": 2.0}')
    with endpoint(tmp_path / "it's an endpoint") as made:
        meta = {"engine": "onnxruntime", "family": "my_words"}
        made.want(engine, name="words", meta=meta, project=str(tmp_path / "project"))
        made.start().ready()
        client = triton.InferenceServerClient(f"127.0.0.1:{made.port}")
        words = np.array([["tree"], ["a"]], dtype=object)
        result = client.infer("words", [tensor(words, name="word", datatype="BYTES")])
        assert result.as_numpy("length").tolist() == [4.0, 1.0]
        assert result.as_numpy("verdict").tolist() == [b"long", b"short"]
        client.close()
        connection = http.client.HTTPConnection("127.0.0.1", made.port, timeout=20)
        for records, status, expected in (
            (
                [{"word": "tree"}, {"word": None}],
                200,
                [{"length": 4, "verdict": "long"}, {"length": 0, "verdict": "short"}],
            ),
            ([{"word": "ok"}, {"word": "bad"}], 400, "column 'word', row 1"),
            ([{"wrd": "ok"}], 400, "column 'word' is missing"),
        ):
            connection.request("POST", "/v1/models/words:predict", json.dumps({"instances": records}))
            answer = connection.getresponse()
            got = json.loads(answer.read())
            assert answer.status == status
            assert got.get("predictions") == expected if status == 200 else expected in got["error"]
        connection.close()


def test_the_tabular_family_is_served_with_the_encoding_that_trained_it(tmp_path: Path) -> None:
    columns = {"carrier": np.array(["UA", "AA", None], object), "distance": np.array([100.0, 300.0, np.nan])}
    roles = {"label": "late", "categories": ["carrier"], "numbers": ["distance"], "time": None}
    fitted = encode.fit({**columns, "late": np.array([0.0, 1.0, 0.0])}, roles, {"task": "binary", "min_count": 1})
    width = next(spec.shape[1] for spec in fitted.features if spec.name == "numbers")
    save_logits(tmp_path / "engine", width)
    (tmp_path / "engine" / "encoding.json").write_bytes(canonical(fitted.to_json()))
    expected = fitted.encode(columns)["numbers"].sum(axis=1)
    with endpoint(tmp_path / "ep") as made:
        made.want(tmp_path / "engine", name="late", meta={"engine": "onnxruntime", "family": "onejob.families.tabular"})
        made.start().ready()
        connection = http.client.HTTPConnection("127.0.0.1", made.port, timeout=20)
        records = [
            {"carrier": "UA", "distance": 100},
            {"carrier": "AA", "distance": 300},
            {"carrier": None, "distance": None},
        ]
        connection.request("POST", "/v1/models/late:predict", json.dumps({"instances": records}))
        predictions = json.loads(connection.getresponse().read())["predictions"]
        got = [row["probability"] if isinstance(row, dict) else row for row in predictions]
        np.testing.assert_allclose(got, 1 / (1 + np.exp(-expected)), rtol=1e-5)
        connection.close()


def save_logits(folder: Path, width: int) -> None:
    """A graph with the tabular family's features: the sum of the numbers, nothing of the categories, as the logit."""
    folder.mkdir()
    inputs = [
        helper.make_tensor_value_info("categories", TensorProto.INT64, ["n", 1]),
        helper.make_tensor_value_info("numbers", TensorProto.FLOAT, ["n", width]),
    ]
    output = helper.make_tensor_value_info("logit", TensorProto.FLOAT, ["n", 1])
    constants = [
        numpy_helper.from_array(np.array([1]), "axis"),
        numpy_helper.from_array(np.array(0.0, np.float32), "zero"),
    ]
    nodes = [
        helper.make_node("ReduceSum", ["numbers", "axis"], ["sum"], keepdims=1),
        helper.make_node("Cast", ["categories"], ["codes"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["codes", "zero"], ["nothing"]),
        helper.make_node("Add", ["sum", "nothing"], ["logit"]),
    ]
    save(helper.make_graph(nodes, "logits", inputs, [output], constants), folder)
