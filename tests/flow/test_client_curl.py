"""curl asks an endpoint: every kind of body, text that is generated, server-sent events, compression, what is wrong."""

from __future__ import annotations

import gzip
import json
import struct
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from client_models import LABELS, served_repository
from served_models import Endpoint


@dataclass(frozen=True)
class Answer:
    """What curl has got."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Curl:
    """The program, with a folder for what it sends."""

    def __init__(self, port: int, folder: Path) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._folder = folder

    def __call__(self, path: str, *options: str, body: bytes | Any = None) -> Answer:
        command = ["curl", "-sS", "-i", "--max-time", "20", *options]
        if body is not None:
            (self._folder / "body").write_bytes(body if isinstance(body, bytes) else json.dumps(body).encode())
            command += ["--data-binary", f"@{self._folder / 'body'}"]
        done = subprocess.run([*command, self._url + path], capture_output=True, check=True)
        out = done.stdout
        while out.startswith(b"HTTP/1.1 100"):
            out = out.partition(b"\r\n\r\n")[2]
        head, _, rest = out.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        return Answer(int(first.split()[1]), headers, rest)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with served_repository(tmp_path_factory.mktemp("curl")) as made:
        yield made


@pytest.fixture
def curl(served: Endpoint, tmp_path: Path) -> Curl:
    return Curl(served.port, tmp_path)


def message(*rows: list[float], **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [len(rows), 4], "data": rows}], **more}


ROW = [1.0, 2.0, 3.0, 4.0]
INFER = "/v2/models/affine/versions/1/infer"


def test_json(curl: Curl) -> None:
    answer = curl(INFER, body=message(ROW, ROW, id="c-1"))
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [2, 4], "data": [3, 5, 7, 9] * 2}]
    assert answer.json["id"] == answer.headers["x-request-id"] == "c-1"


def test_binary_and_a_body_that_is_one_tensor(curl: Curl) -> None:
    head = message()
    head["inputs"][0] |= {"shape": [1, 4], "parameters": {"binary_data_size": 16}}
    del head["inputs"][0]["data"]
    head["parameters"] = {"binary_data_output": True}
    text = json.dumps(head).encode()
    octets = ("-H", "Content-Type: application/octet-stream")
    body = text + struct.pack("<4f", *ROW)
    answer = curl(INFER, *octets, "-H", f"Inference-Header-Content-Length: {len(text)}", body=body)
    assert answer.headers["content-type"] == "application/octet-stream"
    length = int(answer.headers["inference-header-content-length"])
    assert json.loads(answer.body[:length])["outputs"][0]["parameters"] == {"binary_data_size": 16}
    assert struct.unpack("<4f", answer.body[length:]) == (3, 5, 7, 9)
    bare = curl(INFER, *octets, "-H", "Inference-Header-Content-Length: 0", body=struct.pack("<4f", *ROW))
    assert bare.status == 200
    assert bare.body.endswith(struct.pack("<4f", 3, 5, 7, 9))


@pytest.mark.parametrize(
    "options",
    [
        ("--http1.0",),
        ("--http2",),
        ("-H", "Expect: 100-continue"),
        ("-H", "Transfer-Encoding: chunked"),
        ("-H", "Transfer-Encoding: chunked", "-H", "Expect: 100-continue"),
        ("-H", "Transfer-Encoding: chunked", "--http2"),
    ],
)
def test_ways_to_send_it(curl: Curl, options: tuple[str, ...]) -> None:
    assert curl(INFER, *options, body=message(ROW)).json["outputs"][0]["data"] == [3, 5, 7, 9]


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_both_ways(curl: Curl, coding: str, pack: Any) -> None:
    body = message(*[ROW] * 400)
    plain = curl(INFER, body=body)
    assert "content-encoding" not in plain.headers
    sent = pack(json.dumps(body).encode())
    answer = curl(INFER, "-H", f"Content-Encoding: {coding}", "-H", f"Accept-Encoding: {coding}", body=sent)
    assert answer.headers["content-encoding"] == coding
    assert json.loads(zlib.decompress(answer.body, 47))["outputs"] == plain.json["outputs"]
    assert len(answer.body) < len(plain.body) / 4
    read = curl(INFER, "--compressed", body=body)
    assert read.json["outputs"] == plain.json["outputs"], "curl unpacks it"


def test_classes(curl: Curl) -> None:
    wanted = [{"name": "y", "parameters": {"classification": 2}}]
    answer = curl("/v2/models/classes/infer", body=message(ROW, outputs=wanted))
    (told,) = answer.json["outputs"]
    assert told["datatype"] == "BYTES"
    assert told["data"] == [f"9.000000:3:{LABELS[3]}", f"7.000000:2:{LABELS[2]}"]


def test_text_is_generated(curl: Curl) -> None:
    answer = curl("/v2/models/text/generate", body={"text_input": "Zürich ", "repeat": 2, "id": "g-1"})
    assert answer.status == 200
    assert answer.json == {
        "id": "g-1",
        "length": 14,
        "model_name": "text",
        "model_version": "1",
        "text_output": "ZÜRICH ZÜRICH ",
    }
    nested = curl("/v2/models/text/versions/1/generate", body={"text_input": "a", "parameters": {"repeat": 3}})
    assert nested.json["text_output"] == "AAA"
    assert curl("/v2/models/pair/generate", body={"a": [1, 2], "b": [0.5, 0.5]}).json["sum"] == [1.5, 2.5]


def test_text_is_streamed_as_server_sent_events(curl: Curl) -> None:
    answer = curl("/v2/models/text/generate_stream", "-N", body={"text_input": "two\nlines", "repeat": 1})
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.body.startswith(b"data: {")
    assert answer.body.endswith(b"}\n\n")
    (event,) = answer.body.decode().split("\n\n")[:-1]
    assert json.loads(event.removeprefix("data: "))["text_output"] == "TWO\nLINES"


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("model", "body", "status", "words"),
    [
        ("text", {"text_input": "a"}, 400, "missing required input(s) ['repeat']"),
        ("text", {"text_input": 5, "repeat": 1}, 400, "non-string"),
        ("text", b"{", 400, "failed to parse the request JSON buffer"),
        ("text", {"text_input": "FAIL", "repeat": 1}, 500, "model.py:10: ValueError: this text fails"),
        ("nope", {"text_input": "a"}, 404, "Request for unknown model: 'nope' is not found"),
        ("affine", {"x": [1, 2, 3]}, 400, "can not convert input 'x' to tensor with proper shape"),
    ],
)
def test_what_cannot_be_generated(curl: Curl, verb: str, model: str, body: Any, status: int, words: str) -> None:
    answer = curl(f"/v2/models/{model}/{verb}", body=body)
    assert answer.status == status
    assert words in answer.body.decode()


def test_the_repository(curl: Curl) -> None:
    index = curl("/v2/repository/index", "-X", "POST").json
    assert [(one["name"], one["version"]) for one in index][:3] == [("affine", "1"), ("affine", "2"), ("classes", "1")]
    assert curl("/v2/repository/models/pair/unload", "-X", "POST").status == 200
    assert curl("/v2/models/pair/ready").status != 200
    names = {one["name"] for one in curl("/v2/repository/index", body={"ready": True}).json}
    assert "pair" not in names
    assert curl("/v2/repository/models/pair/load", "-X", "POST").status == 200
    assert curl("/v2/models/pair/ready").status == 200
    told = [one["name"] for one in curl("/v2/repository/index", "-X", "POST").json]
    assert told == sorted(told), "whatever was loaded last"


def test_heads_and_what_is_not_there(curl: Curl) -> None:
    head = curl("/v2/models/affine", "-I")
    assert (head.status, head.body) == (200, b"")
    assert curl("/v2/nothing").json == {"error": "Not Found: /v2/nothing"}
    refused = curl(INFER)
    assert (refused.status, refused.headers["allow"]) == (405, "post")
    assert b"nv_inference_request_success" in curl("/metrics").body
