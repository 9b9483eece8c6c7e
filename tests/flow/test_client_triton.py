"""NVIDIA's client, unmodified, blocking and asyncio: every call over HTTP, every datatype, every way to send it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from client_models import DATATYPES, LABELS, SAME, served_repository
from served_models import Endpoint, save_affine
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

X = np.arange(8, dtype=np.float32).reshape(2, 4)


class Client:
    """The blocking client, or the asyncio one as if it were it."""

    def __init__(self, url: str, kind: str) -> None:
        self._loop = asyncio.new_event_loop() if kind == "asyncio" else None
        self._client = triton.InferenceServerClient(url) if self._loop is None else self._run(self._make(url))

    async def _make(self, url: str) -> Any:
        return triton_aio.InferenceServerClient(url)

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work) if self._loop is not None else work

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *args, **options: self._run(method(*args, **options))

    def shut(self) -> None:
        self._run(self._client.close())
        if self._loop is not None:
            self._loop.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with served_repository(tmp_path_factory.mktemp("triton"), replicas=2) as made:
        yield made


@pytest.fixture(params=["blocking", "asyncio"])
def client(served: Endpoint, request: pytest.FixtureRequest) -> Iterator[Any]:
    made = Client(f"127.0.0.1:{served.port}", request.param)
    yield made
    made.shut()


def tensor(values: Any, *, binary: bool = True, name: str = "x", datatype: str = "FP32") -> Any:
    made = triton.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values, binary_data=binary)
    return made


def output(name: str, *, binary: bool = True, classes: int = 0) -> Any:
    return triton.InferRequestedOutput(name, binary_data=binary, class_count=classes)


def values_of(datatype: str) -> Any:
    """Two rows of three: the ends of what the datatype can hold among them."""
    if datatype == "BYTES":
        return np.array([[b"", "Zürich".encode(), b'"\\\n\x00'], [b"a" * 300, b"b", b"c"]], dtype=object)
    if datatype == "BOOL":
        return np.array([[True, False, True], [False, False, True]])
    if datatype == "BF16":
        return np.array([[0, 1.5, -2], [3.140625, 1e30, -1e-30]], dtype=ml_dtypes.bfloat16)
    dtype = np.dtype(triton_to_np_dtype(datatype))
    limits = np.iinfo(dtype) if dtype.kind in "iu" else np.finfo(dtype)
    return np.array([[limits.min, limits.max, 0], [1, 2, 3]], dtype=dtype)


# ---- what the server says of itself


def test_health_and_descriptions(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("affine")
    assert client.is_model_ready("affine", "1")
    assert not client.is_model_ready("affine", "3")
    assert not client.is_model_ready("nope")
    told = client.get_server_metadata()
    assert told["name"] == "onejob"
    assert {"binary_tensor_data", "classification", "model_repository", "statistics"} <= set(told["extensions"])
    metadata = client.get_model_metadata("pair")
    assert metadata["inputs"][0] == {"name": "a", "datatype": "INT32", "shape": [-1, 2]}
    assert [one["name"] for one in metadata["outputs"]] == ["sum", "difference", "text"]
    assert client.get_model_metadata("affine", "1")["versions"] == ["1", "2"]
    config = client.get_model_config("affine", "2")
    assert (config["name"], config["max_batch_size"], config["input"][0]["dims"]) == ("affine", 8, [4])
    assert {one["name"] for one in client.get_model_repository_index()} == {
        "affine", "classes", "pair", "same", "slow", "text"
    }  # fmt: skip


def test_statistics_count_what_was_asked(client: Any) -> None:
    def counts() -> dict[str, int]:
        stats = client.get_inference_statistics("affine")["model_stats"]
        return {one["version"]: int(one["inference_count"]) for one in stats}

    before = counts()
    for version in ("1", "2", ""):
        client.infer("affine", [tensor(X)], model_version=version)
    after = counts()
    assert {version: after[version] - before[version] for version in after} == {"1": 2, "2": 4}
    (one,) = client.get_inference_statistics("affine", "1")["model_stats"]
    assert one["inference_stats"]["success"]["count"] > 0
    names = {one["name"] for one in client.get_inference_statistics()["model_stats"]}
    assert {"affine", "same", "text"} <= names


def test_what_is_not_there_is_said_in_words(client: Any) -> None:
    for ask in (
        client.get_trace_settings,
        client.get_log_settings,
        client.get_system_shared_memory_status,
        client.get_cuda_shared_memory_status,
        partial(client.update_log_settings, {"log_info": True}),
        partial(client.update_trace_settings, "affine", {"trace_level": ["OFF"]}),
        partial(client.register_system_shared_memory, "region", "/key", 64),
        partial(client.unregister_system_shared_memory, "region"),
    ):
        with pytest.raises(InferenceServerException) as caught:
            ask()
        assert caught.value.status() == "404"
    shared = triton.InferInput("x", [2, 4], "FP32")
    shared.set_shared_memory("region", 32)
    with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'region'"):
        client.infer("affine", [shared])
    with pytest.raises(InferenceServerException, match="has no sequence batcher"):
        client.infer("affine", [tensor(X)], sequence_id=5, sequence_start=True)
    with pytest.raises(InferenceServerException, match="unknown model: 'affine' version 3 is not found"):
        client.infer("affine", [tensor(X)], model_version="3")


# ---- inference


@pytest.mark.parametrize("packed", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("binary_in", [True, False])
def test_every_datatype_there_and_back(client: Any, binary_in: bool, binary_out: bool, packed: str | None) -> None:
    """All fourteen in one request; the client itself sends FP16 and BF16 as bytes only, and bytes that aren't text."""
    sent = {datatype: values_of(datatype) for datatype in DATATYPES}
    inputs = [
        tensor(values, binary=binary_in or datatype in ("FP16", "BF16"), name=datatype, datatype=datatype)
        for datatype, values in sent.items()
    ]
    outputs = [output(f"{datatype}_too", binary=binary_out or datatype in ("FP16", "BF16")) for datatype in sent]
    answer = client.infer(
        "same",
        inputs,
        outputs=outputs,
        request_compression_algorithm=packed,
        response_compression_algorithm=packed,
    )
    for datatype, values in sent.items():
        got = answer.as_numpy(f"{datatype}_too")
        assert answer.get_output(f"{datatype}_too")["datatype"] == datatype
        if datatype == "BYTES":
            got = np.array([[one.encode() if isinstance(one, str) else one for one in row] for row in got], object)
        np.testing.assert_array_equal(got, values, err_msg=datatype)
        assert got.dtype == values.dtype


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_a_large_answer_comes_compressed(client: Any, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.ones((500, 4), np.float32)
    answer = client.infer("affine", [tensor(rows)], response_compression_algorithm=algorithm)
    np.testing.assert_array_equal(answer.as_numpy("y"), rows * 3 + 1)
    seen: list[str | None] = []
    opened = triton.InferResult.__init__

    def look(self: Any, response: Any, verbose: bool) -> None:
        seen.append(response.get("Content-Encoding"))
        opened(self, response, verbose)

    monkeypatch.setattr(triton.InferResult, "__init__", look)
    client.infer("affine", [tensor(rows)], response_compression_algorithm=algorithm)
    client.infer("affine", [tensor(rows)], headers={"Accept-Encoding": "identity"})  # aiohttp asks for gzip by itself
    assert seen == [algorithm, None]


def test_outputs_by_name_and_in_the_order_asked(client: Any) -> None:
    inputs = [
        tensor(np.array([[1, 2]], np.int32), name="a", datatype="INT32"),
        tensor(np.array([[0.5, 1]], np.float32), name="b"),
    ]
    whole = client.infer("pair", inputs)
    assert [one["name"] for one in whole.get_response()["outputs"]] == ["sum", "difference", "text"]
    mixed = client.infer("pair", inputs, outputs=[output("text", binary=False), output("sum")])
    assert [one["name"] for one in mixed.get_response()["outputs"]] == ["text", "sum"]
    assert mixed.as_numpy("text").tolist() == [["1.5", "3"]]
    assert mixed.as_numpy("sum").tolist() == [[1.5, 3.0]]
    assert mixed.as_numpy("difference") is None
    with pytest.raises(InferenceServerException, match="unexpected inference output 'product' for model 'pair'"):
        client.infer("pair", inputs, outputs=[output("product")])
    with pytest.raises(InferenceServerException, match="expected 2 inputs but got 1 inputs for model 'pair'"):
        client.infer("pair", inputs[:1])


@pytest.mark.parametrize("binary", [True, False])
def test_classes_with_their_labels(client: Any, binary: bool) -> None:
    answer = client.infer("classes", [tensor(X)], outputs=[output("y", binary=binary, classes=2)])
    assert answer.get_output("y")["datatype"] == "BYTES"
    got = [[one.decode() if isinstance(one, bytes) else one for one in row] for row in answer.as_numpy("y")]
    assert got == [
        [f"7.000000:3:{LABELS[3]}", f"5.000000:2:{LABELS[2]}"],
        [f"15.000000:3:{LABELS[3]}", f"13.000000:2:{LABELS[2]}"],
    ]
    plain = client.infer("affine", [tensor(X[:1])], outputs=[output("y", binary=binary, classes=1)])
    assert str(plain.as_numpy("y").reshape(-1)[0]).strip("b'") == "10.000000:3"


def test_ids_parameters_headers_and_queries(client: Any) -> None:
    answer = client.infer(
        "affine",
        [tensor(X)],
        request_id="r-1",
        priority=1,
        timeout=20_000_000,
        parameters={"mine": "1", "number": 3, "flag": True},
        headers={"X-Mine": "1"},
        query_params={"a": "b c"},
    ).get_response()
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("r-1", "affine", "2")
    assert answer["parameters"]["request_id"] == "r-1"


def test_a_request_whose_time_is_over_is_told_so(client: Any) -> None:
    slow = tensor(np.array([[1.0]], np.float32), name="seconds")
    with pytest.raises(InferenceServerException, match="no answer after") as caught:
        client.infer("slow", [slow], timeout=100_000)
    assert caught.value.status() == "504"


def test_requests_under_way_at_once(served: Endpoint) -> None:
    """`async_infer` of the blocking client, on as many connections as it is given."""
    client = triton.InferenceServerClient(f"127.0.0.1:{served.port}", concurrency=8)
    under_way = [client.async_infer("affine", [tensor(X + number)], model_version="1") for number in range(64)]
    for number, one in enumerate(under_way):
        np.testing.assert_array_equal(one.get_result(timeout=20).as_numpy("y"), (X + number) * 2 + 1)
    client.close()


def test_many_at_once_by_asyncio(served: Endpoint) -> None:
    async def ask() -> list[Any]:
        async with triton_aio.InferenceServerClient(f"127.0.0.1:{served.port}", conn_limit=32) as client:
            asked = [client.infer("affine", [tensor(X + number)], model_version="1") for number in range(200)]
            return await asyncio.gather(*asked)

    for number, answer in enumerate(asyncio.run(ask())):
        np.testing.assert_array_equal(answer.as_numpy("y"), (X + number) * 2 + 1)


def test_bodies_made_and_read_without_a_connection(served: Endpoint) -> None:
    """The static methods, for those who bring a transport of their own."""
    body, length = triton.InferenceServerClient.generate_request_body([tensor(X)], outputs=[output("y")])
    connection = triton.InferenceServerClient(f"127.0.0.1:{served.port}")
    headers = {"Inference-Header-Content-Length": length} if length else {}
    response = connection._post("v2/models/affine/versions/1/infer", body, headers, None)
    data = response.read()
    size = response.get("Inference-Header-Content-Length")
    answer = triton.InferenceServerClient.parse_response_body(data, header_length=int(size))
    np.testing.assert_array_equal(answer.as_numpy("y"), X * 2 + 1)
    connection.close()


# ---- the repository


def test_a_model_is_loaded_with_its_files_and_unloaded(client: Any, tmp_path: Path) -> None:
    data = (save_affine(tmp_path / "new", scale=9) / "model.onnx").read_bytes()
    config = json.dumps({"max_batch_size": 4, "backend": "onnxruntime"})
    client.load_model("sent", config=config, files={"file:7/model.onnx": data})
    assert client.is_model_ready("sent", "7")
    assert client.get_model_config("sent")["max_batch_size"] == 4
    np.testing.assert_array_equal(client.infer("sent", [tensor(X)]).as_numpy("y"), X * 9 + 1)
    client.unload_model("sent", unload_dependents=True)
    assert not client.is_model_ready("sent")
    states = {one["name"]: one["state"] for one in client.get_model_repository_index()}
    assert (states["sent"], states["affine"]) == ("UNAVAILABLE", "READY")
    with pytest.raises(InferenceServerException, match="unknown model: 'sent'"):
        client.infer("sent", [tensor(X)])
    with pytest.raises(InferenceServerException, match="failed to load 'nowhere'"):
        client.load_model("nowhere")
    with pytest.raises(InferenceServerException, match="failed to unload 'nowhere'"):
        client.unload_model("nowhere")


def test_a_model_is_loaded_anew_while_it_is_asked(served: Endpoint) -> None:
    failed: list[Exception] = []
    over = threading.Event()

    def keep_asking() -> None:
        with contextlib.closing(triton.InferenceServerClient(f"127.0.0.1:{served.port}")) as mine:
            given = {name: tensor(values_of(name), name=name, datatype=name) for name in DATATYPES}
            while not over.is_set():
                try:
                    mine.infer("same", list(given.values()))
                except Exception as error:  # what the test counts
                    failed.append(error)

    asking = [threading.Thread(target=keep_asking) for _ in range(2)]
    for thread in asking:
        thread.start()
    try:
        with contextlib.closing(triton.InferenceServerClient(f"127.0.0.1:{served.port}")) as client:
            for _ in range(3):
                client.load_model("same")
            client.load_model("same", config="{}", files={"file:1/model.py": SAME.format(datatypes=DATATYPES).encode()})
    finally:
        over.set()
        for thread in asking:
            thread.join(30)
    assert failed == []
