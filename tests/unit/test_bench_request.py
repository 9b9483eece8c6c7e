"""What is sent: URLs, heads, and bodies that the protocol's own decoder takes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from onejob.core.tensor import DATATYPES, TensorSpec
from onejob.errors import UsageError
from onejob.serve.bench.body import inputs_of, make_body
from onejob.serve.bench.target import Address, parse_header, render, split_url
from onejob.serve.protocols.kserve import decode_infer

KNOWN = [name for name in DATATYPES if name != "BF16"]


def test_urls() -> None:
    assert split_url("http://h:81/v2/models/m?x=1") == (Address("h", 81), "/v2/models/m?x=1")
    assert split_url("http://h") == (Address("h", 80), "")
    assert split_url("https://h/") == (Address("h", 443, tls=True), "/")
    assert split_url("http://[::1]:8000/x") == (Address("::1", 8000), "/x")
    assert split_url("http+unix://%2Frun%2Fa.sock/v2") == (Address("localhost", socket="/run/a.sock"), "/v2")


@pytest.mark.parametrize(
    "text", ["ftp://h/", "http://", "http://h:port/", "http://h/a b", "http+unix://run/x", "http://h/ü"]
)
def test_what_cannot_be_asked_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        split_url(text)
    assert refused.value.place == text


def test_the_host_header_names_the_port_unless_it_is_the_usual_one() -> None:
    assert Address("h", 80).authority == "h"
    assert Address("h", 443, tls=True).authority == "h"
    assert Address("h", 443).authority == "h:443"
    assert Address("::1", 8000).authority == "[::1]:8000"
    assert Address("localhost", socket="/s").authority == "localhost"


def test_a_request_is_whole_and_the_persons_headers_win() -> None:
    made = render("POST", "/x", [("Content-Type", "a/b"), ("host", "other"), ("content-type", "c/d")], b"body", "h:1")
    assert made == b"POST /x HTTP/1.1\r\nhost: other\r\nContent-Length: 4\r\ncontent-type: c/d\r\n\r\nbody"
    assert render("GET", "", [], b"", "h") == b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
    assert b"Content-Length: 0" in render("POST", "/x", [], b"", "h")


@pytest.mark.parametrize("text", ["no colon", ": empty", "a b: c", "x: a\r\nEvil: 1", "ü: x", "x: ☃"])
def test_what_is_no_header_is_refused(text: str) -> None:
    assert parse_header("X-A : b: c ") == ("X-A", "b: c")
    with pytest.raises(UsageError, match="no header"):
        parse_header(text)


@pytest.mark.parametrize("form", ["binary", "json"])
def test_bodies_of_every_datatype_are_taken_by_the_protocol(form: str) -> None:
    specs = [TensorSpec(name.lower(), name, (-1, 3)) for name in KNOWN]
    body, length = make_body(specs, batch=5, form=form, shapes={}, seed=1)
    by_name = {spec.name: spec for spec in specs}
    request = decode_infer(body, length, "m", by_name, {"y": TensorSpec("y", "FP32", (-1,))})
    assert {array.shape for array in request.arrays.values()} == {(5, 3)}
    assert request.outputs == (("y", form == "binary"),)
    assert len(set(request.arrays["fp32"].reshape(-1).tolist())) > 5, "random, not all the same"
    assert set(np.unique(request.arrays["int64"])) <= set(range(10))
    assert all(isinstance(text, str) for text in request.arrays["bytes"].reshape(-1))


def test_bfloat16_is_the_upper_half_of_a_float() -> None:
    spec = [TensorSpec("x", "BF16", (-1, 4))]
    body, length = make_body(spec, batch=2, form="binary", shapes={}, seed=1)
    assert length is not None
    bits = np.frombuffer(body[length:], "<u2").astype(np.uint32) << 16
    as_json, _ = make_body(spec, batch=2, form="json", shapes={}, seed=1)
    np.testing.assert_array_equal(bits.view(np.float32), np.array(json.loads(as_json)["inputs"][0]["data"], np.float32))


def test_open_sizes_are_the_batch_and_what_is_asked_for() -> None:
    specs = [TensorSpec("tokens", "INT64", (-1, -1)), TensorSpec("image", "FP32", (-1, 3, -1, -1))]
    body, _ = make_body(specs, batch=2, form="json", shapes={"image": (3, 8, 9)}, seed=0)
    assert [one["shape"] for one in json.loads(body)["inputs"]] == [[2, 1], [2, 3, 8, 9]]
    fixed = [TensorSpec("x", "FP32", (4, 2))]
    assert json.loads(make_body(fixed, batch=9, form="json", shapes={}, seed=0)[0])["inputs"][0]["shape"] == [4, 2]
    with pytest.raises(UsageError, match="no input 'picture'"):
        make_body(specs, batch=1, form="json", shapes={"picture": (1,)}, seed=0)
    with pytest.raises(UsageError, match="shape"):
        make_body(specs, batch=1, form="json", shapes={"image": (4, 8, 8)}, seed=0)


def test_the_same_seed_makes_the_same_body_and_another_another() -> None:
    spec = [TensorSpec("x", "FP32", (-1, 4))]
    one, same, other = (make_body(spec, batch=1, form="binary", shapes={}, seed=seed)[0] for seed in (1, 1, 2))
    assert one == same != other
    assert len(one) == len(other)


def test_metadata_without_inputs_asks_for_a_body() -> None:
    with pytest.raises(UsageError) as refused:
        inputs_of({"name": "m", "inputs": []})
    assert "--data" in refused.value.cure
    with pytest.raises(UsageError, match="unknown datatype 'FP8'"):
        make_body([TensorSpec("x", "FP8", (-1,))], batch=1, form="binary", shapes={}, seed=0)
