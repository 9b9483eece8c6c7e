"""Models under a real Triton: what it makes of the repository that is written, and what becomes of it when it dies."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_models import alive, endpoint, save_affine, save_texts, wait_for

from onejob.core.tensor import TensorSpec
from onejob.engines import Living, open_model
from onejob.engines.triton import server, wheel
from onejob.engines.triton.config import Batching
from onejob.engines.triton.engine import supported, through
from onejob.engines.triton.repository import write_model
from onejob.errors import ConflictError, DataError, InferenceError, UnavailableError, UsageError

FUNCTION = """
import os, sys, time
import numpy as np

INPUTS = {"x": ("FP32", [-1]), "do": ("BYTES", [-1])}
OUTPUTS = {"y": ("FP32", [-1]), "told": ("BYTES", [-1])}


def infer(x, do):
    match do[0]:
        case b"exit":
            os._exit(3)
        case b"fail":
            raise ValueError("no such thing")
        case b"hang":
            open("../../../hangs", "w").close()
            time.sleep(1000)
    return {"y": 2 * x, "told": do}
"""


@pytest.fixture(scope="session")
def program() -> Path:
    """A tritonserver; where checks must be complete (CI), it has to be there."""
    try:
        return server.find()
    except UnavailableError as error:
        if sys.version_info[:2] not in wheel.PYTHONS:
            pytest.skip(f"the wheel with Triton doesn't work with this Python: {error}")
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture
def opened(program: Path) -> Iterator[Callable[..., Any]]:
    """Opens models under Triton, and closes them."""
    models: list[Any] = []

    def open_one(folder: Path, meta: Any, **options: Any) -> Any:
        models.append(open_model(folder, through(meta, server=str(program), **options), threads=1))
        return models[-1]

    yield open_one
    for model in models:
        model.close()


def ask(model: Any, do: str = "", rows: int = 2) -> dict[str, np.ndarray[Any, Any]]:
    x = np.arange(rows, dtype=np.float32)
    found: dict[str, np.ndarray[Any, Any]] = model.infer({"x": x, "do": np.array([do] * rows, object)})
    return found


def shared() -> list[str]:
    return [path.name for path in server.SHARED.glob(f"{server.mine()}*")]


def folders() -> list[str]:
    return sorted(path.name for path in Path(tempfile.gettempdir()).glob(f"{server.mine()}*"))


def test_an_onnx_model_answers_as_it_does_without_triton(opened: Callable[..., Any], tmp_path: Path) -> None:
    folder = save_affine(tmp_path / "engine", width=3)
    alone, model = open_model(folder, {"engine": "onnxruntime"}), opened(folder, {"engine": "onnxruntime"})
    assert isinstance(model, Living)
    assert (model.inputs, model.outputs) == (alone.inputs, alone.outputs)
    assert not model.dead()
    for rows in (1, 5, 300):
        x = np.random.default_rng(rows).normal(size=(rows, 3)).astype(np.float32)
        assert model.infer({"x": x})["y"].tolist() == alone.infer({"x": x})["y"].tolist()
    assert model.infer({"x": x[::-2, ::-1]})["y"].tolist() == alone.infer({"x": x[::-2, ::-1]})["y"].tolist()
    for wrong, told in (
        ({"z": x}, "the inputs are x, not z"),
        ({"x": x.astype(np.float64)}, "is float64"),
        ({"x": x[:, :2]}, r"unexpected shape for input 'x'"),
    ):
        with pytest.raises(InferenceError, match=told):
            model.infer(wrong)
    repository = model._repository
    assert repository.is_dir()
    model.close()
    assert not repository.exists()
    assert shared() == []
    assert model.dead() == "the model is closed"


def test_text_and_tensors_without_another_dimension(opened: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FUNCTION)
    model = opened(tmp_path, {"engine": "function"})
    assert model.inputs[0] == TensorSpec("x", "FP32", (-1,))
    found = ask(model, "ü", rows=3)
    assert found["y"].tolist() == [0, 2, 4]
    assert found["told"].tolist() == ["ü".encode()] * 3
    with pytest.raises(InferenceError, match="ValueError: no such thing"):
        ask(model, "fail")
    texts = opened(save_texts(tmp_path / "texts"), {"engine": "onnxruntime"})
    found = texts.infer({"text": np.array([["ü"], [""]], object), "index": np.array([[0], [2]])})
    assert found["echo"].tolist() == [["ü".encode()], [b""]]
    assert found["looked_up"].tolist() == [[10], [30]]
    with pytest.raises(InferenceError, match="out of data bounds"):
        texts.infer({"text": np.array([["a"]], object), "index": np.array([[9]])})


def test_a_dead_python_model_is_noticed_and_replaced(opened: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FUNCTION)
    model = opened(tmp_path, {"engine": "function"})
    first = model._kept.get(0)
    stub = first.descriptors and first._stubs[0].pid
    with pytest.raises(InferenceError, match=r"is not healthy|lost the process of its Python model"):
        ask(model, "exit")
    assert not alive(stub)
    assert ask(model)["y"].tolist() == [0, 2], "the next one waits for another server"
    second = model._kept.get(0)
    assert second.process.pid != first.process.pid

    os.kill(second._stubs[0].pid, signal.SIGKILL)  # Triton itself would go on saying that it is ready
    wait_for(lambda: model.dead() != "")
    wait_for(lambda: not model.dead())
    assert not alive(second.process.pid)
    assert ask(model)["y"].tolist() == [0, 2]
    model.close()
    assert shared() == [], "what the killed ones have left is removed"


def test_a_server_that_is_killed_or_hangs_is_replaced(opened: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FUNCTION)
    model = opened(tmp_path, {"engine": "function"})
    first = model._kept.get(0)
    os.kill(first.process.pid, signal.SIGKILL)
    wait_for(lambda: model._kept._running not in (None, first))
    assert ask(model)["y"].tolist() == [0, 2]
    wait_for(lambda: not alive(first._stubs[0].pid))

    failed: list[str] = []
    hung = run_aside(lambda: ask(model, "hang"), failed)
    wait_for((model._repository / "hangs").exists)
    assert not model.dead()
    model.kill("no answer for 30 s")
    hung.join(20)
    assert "was killed by SIGKILL (no answer for 30 s) before it had answered" in failed[0]
    assert ask(model)["y"].tolist() == [0, 2]


def run_aside(work: Callable[[], Any], failed: list[str]) -> threading.Thread:
    def run() -> None:
        try:
            work()
        except InferenceError as error:
            failed.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


PARENT = """
import sys, time
from pathlib import Path
from onejob.engines import open_model
from onejob.engines.triton.engine import through

model = open_model(Path(sys.argv[1]), through({"engine": "function"}, server=sys.argv[2]))
running = model._kept.get(0)
print(running.process.pid, running._stubs[0].pid, running._shared, model._repository, flush=True)
time.sleep(1000)
"""


def test_all_of_it_dies_with_its_parent_and_the_next_one_tidies_up(
    program: Path, opened: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(FUNCTION)
    command = [sys.executable, "-c", PARENT, str(tmp_path), str(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, stub, prefix, repository = parent.stdout.readline().split()
        assert alive(int(pid))
        parent.send_signal(signal.SIGSTOP)  # it sees nothing of what comes
        os.kill(int(stub), signal.SIGKILL)  # or it would tidy up itself
        parent.kill()
    wait_for(lambda: not alive(int(pid)))
    wait_for(lambda: not alive(int(stub)))
    assert list(server.SHARED.glob(f"{prefix}*")), "a killed server leaves it"
    assert Path(repository).exists()
    assert ask(opened(tmp_path, {"engine": "function"}))["y"].tolist() == [0, 2]
    assert not list(server.SHARED.glob(f"{prefix}*"))
    assert not Path(repository).exists()


def test_what_cannot_be_loaded_is_told_in_tritons_words(
    program: Path, opened: Callable[..., Any], tmp_path: Path
) -> None:
    folder = save_affine(tmp_path / "engine")
    with pytest.raises(UnavailableError, match=r"has no backend 'onnxruntime'.*It has: python\. With backend 'python'"):
        opened(folder, {"engine": "onnxruntime"}, backend="native")
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text("import nowhere\n")
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "python"\nmax_batch_size: 4\n')
    with pytest.raises(
        InferenceError, match=r"^Triton: Internal: ModuleNotFoundError: No module named 'nowhere'\. The log"
    ):
        opened(tmp_path / "m", {})
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "python"\nmax_batch: 4\n')
    with pytest.raises(InferenceError, match=r"^Triton: it can't read the model\. The log has more"):
        opened(tmp_path / "m", {})


TRITONS_OWN = """
import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        x = [pb.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb.InferenceResponse([pb.Tensor("y", one + 1)]) for one in x]
"""
OWN_CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "x" data_type: TYPE_INT32 dims: [ 2 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ 2 ] }
"""


def test_a_model_of_tritons_own_is_served_as_it_is(opened: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "adder" / "1").mkdir(parents=True)
    (tmp_path / "adder" / "1" / "model.py").write_text(TRITONS_OWN)
    (tmp_path / "adder" / "config.pbtxt").write_text(OWN_CONFIG)
    model = opened(tmp_path / "adder", {})
    assert model.inputs == (TensorSpec("x", "INT32", (-1, 2)),)
    assert model.infer({"x": np.array([[1, 2]], np.int32)})["y"].tolist() == [[2, 3]]


def test_an_endpoint_under_triton_tells_the_truth_and_comes_back(program: Path, tmp_path: Path) -> None:
    meta = through({"engine": "onnxruntime"}, server=str(program))
    with endpoint(tmp_path / "endpoint") as made:
        made.want(save_affine(tmp_path / "engine"), meta=meta)
        made.start().ready()
        assert infer(made.port, [[1, 2, 3, 4]]) == [3, 5, 7, 9]
        replica = made.pids[0]
        (triton,) = children(replica)
        os.kill(children(triton)[0], signal.SIGKILL)
        wait_for(lambda: not ready(made.port))
        wait_for(lambda: ready(made.port))
        assert infer(made.port, [[1, 2, 3, 4]]) == [3, 5, 7, 9]
        assert made.pids == [replica]
        made.stop()
        wait_for(lambda: not alive(triton))


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(text) for task in tasks for text in (task / "children").read_text().split()]


# ---- the repository that is written, under a Triton that somebody else runs


COUNTER = """
INPUTS = {"x": ("FP32", [-1, -1])}
OUTPUTS = {"y": ("FP32", [-1])}


def infer(x):
    return [len(x)] * len(x)
"""


@contextlib.contextmanager
def running(program: Path, repository: Path) -> Iterator[int]:
    """A Triton that serves a whole repository; its port."""
    with server.reserve() as reserved:
        port = reserved.getsockname()[1]
        options = [f"--model-repository={repository}", f"--http-port={port}"]
        options += [option for option in server.QUIET if option != "--model-control-mode=explicit"]
        with subprocess.Popen([str(program), *options]) as process:
            try:
                wait_for(lambda: ready(port))
                yield port
            finally:
                process.terminate()
                process.wait(30)


def ready(port: int) -> bool:
    try:
        send(port, "GET", "/v2/health/ready")
    except OSError:
        return False
    return True


def send(port: int, method: str, path: str, body: Any = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, json.dumps(body).encode() if body else None)
        answer = connection.getresponse()
        data = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise ConnectionError(data.decode())
    return json.loads(data) if data else None


def infer(port: int, rows: list[list[float]], model: str = "affine") -> list[float]:
    shape = [len(rows), len(rows[0])]
    tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": [value for row in rows for value in row]}
    found: list[float] = send(port, "POST", f"/v2/models/{model}/infer", {"inputs": [tensor]})["outputs"][0]["data"]
    return found


def test_a_written_repository_is_served_by_triton(program: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    batching = Batching(most=16, delay_us=20_000)
    paths = server.packages(sys.path)
    first = save_affine(tmp_path / "first", scale=2.0)
    second = save_affine(tmp_path / "second", scale=3.0)
    meta = {"engine": "onnxruntime"}
    for number, folder in ((1, first), (2, second)):
        told = write_model(folder, meta, repository, "affine", version=number, native=(), batching=batching, path=paths)
    assert told.backend == "python"
    (tmp_path / "counter").mkdir()
    (tmp_path / "counter" / "model.py").write_text(COUNTER)
    write_model(
        tmp_path / "counter", {"engine": "function"}, repository, "counter", native=(), batching=batching, path=paths
    )
    with pytest.raises(ConflictError, match="this version is there already"):
        write_model(second, meta, repository, "affine", version=2, native=())
    assert sorted(path.name for path in (repository / "affine").iterdir()) == ["1", "2", "config.pbtxt"]
    assert sorted(path.name for path in (repository / "affine" / "2").iterdir()) == ["model", "model.py", "onejob.json"]
    with running(program, repository) as port:
        config = send(port, "GET", "/v2/models/affine/config")
        assert config["max_batch_size"] == 16
        assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 20_000
        assert [one["name"] for one in config["input"]] == ["x"]
        assert send(port, "GET", "/v2/models/affine")["versions"] == ["2"], "the newest, as is Triton's policy"
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda number: infer(port, [[number] * 4]), range(8)))
        assert answers == [[3.0 * number + 1] * 4 for number in range(8)]

        def stats() -> Any:
            return send(port, "GET", "/v2/models/affine/stats")["model_stats"][0]

        wait_for(lambda: stats()["inference_count"] == 8)  # Triton counts once it has answered
        assert stats()["execution_count"] < 8, "it joins what comes together"
        with ThreadPoolExecutor(8) as pool:
            counts = list(pool.map(lambda number: infer(port, [[number] * 4], "counter")[0], range(8)))
        assert max(counts) > 1, "and so does the engine"
        assert infer(port, [[1] * 3], "counter") == [1], "other shapes are another batch"


def test_what_is_written_for_tritons_own_backends(tmp_path: Path) -> None:
    folder, repository = save_affine(tmp_path / "engine"), tmp_path / "models"
    told = write_model(folder, {"engine": "onnxruntime"}, repository, "affine", link=True)
    assert (told.backend, told.platform) == ("onnxruntime", "onnxruntime_onnx")
    assert [path.name for path in (repository / "affine" / "1").iterdir()] == ["model.onnx"]
    assert (repository / "affine" / "1" / "model.onnx").is_symlink()
    told = write_model(folder, {"engine": "openvino"}, repository, "other", threads=3)
    assert (told.backend, told.file, told.parameters["INFERENCE_NUM_THREADS"]) == ("openvino", "model.onnx", "3")
    assert not (repository / "other" / "1" / "model.onnx").is_symlink()


@pytest.mark.parametrize("name", ["", "a/b", ".hidden"])
def test_names_that_are_no_folders_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no name for a model"):
        write_model(save_affine(tmp_path / "engine"), {}, tmp_path / "models", name)


def test_a_repository_inside_of_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="lies in the model's own folder"):
        write_model(save_affine(tmp_path), {}, tmp_path / "models", "affine")


def test_what_is_no_model_and_options_that_nobody_knows(program: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    before = folders()
    with pytest.raises(DataError, match=r"no model in it.*model\.onnx"):
        open_model(tmp_path / "empty", {"engine": "triton", "triton": {"server": str(program)}})
    with pytest.raises(UsageError, match="unknown option 'engines'"):
        open_model(tmp_path, through({"engine": "onnxruntime"}, engines=2))
    with pytest.raises(UsageError, match="unknown backend 'tensorrt'"):
        open_model(tmp_path, through({"engine": "onnxruntime"}, backend="tensorrt"))
    assert folders() == before


def test_without_a_server_there_is_a_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(tmp_path / "python"))
        told = supported()
        assert not told.available
        assert "onejob.engines.triton.wheel" in told.cure
        with pytest.raises(UnavailableError, match=r"no tritonserver on PATH.*onejob\.engines\.triton\.wheel"):
            open_model(save_affine(tmp_path / "engine"), through({"engine": "onnxruntime"}))
    (tmp_path / "tritonserver").write_text("#!/bin/sh\n")
    (tmp_path / "tritonserver").chmod(0o755)
    assert supported().available
    with pytest.raises(InferenceError, match="its process ended with exit code 0 while it was started"):
        open_model(save_affine(tmp_path / "engine"), through({"engine": "onnxruntime"}))
