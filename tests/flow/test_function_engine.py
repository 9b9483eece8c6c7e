"""A user's function in its own process: what it answers, and every way in which it can die."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_models import alive, endpoint, wait_for

from onejob.engines import Living, open_model
from onejob.engines.function.channel import ARRAYS, FAILED, INLINE, Channel
from onejob.errors import BadRequestError, InferenceError, ModelCodeError
from onejob.serve.model import open_served

MODEL = """
import ctypes, os, sys, threading, time
import numpy as np
from onejob.errors import BadRequestError

kept = []


class Model:
    inputs = {"x": ("FP32", [-1, 2]), "do": ("BYTES", [-1])}
    outputs = {"y": ("FP32", [-1, 2]), "told": ("BYTES", [-1])}

    def __init__(self, folder, threads):
        print("loaded with", threads, os.environ["OMP_NUM_THREADS"])
        assert open("beside.txt").read() == "beside"

    def infer(self, x, do):
        match do[0].decode(errors="replace"):
            case "exit":
                sys.exit(3)
            case "kill":
                os.kill(os.getpid(), 9)
            case "crash":
                ctypes.string_at(0)
            case "leave a grandchild":
                if os.fork() == 0:
                    time.sleep(60)
                os._exit(7)
            case "hang":
                open("hangs.txt", "w").close()
                time.sleep(1000)
            case "fail":
                y = x @ np.ones((3, 3))
            case "network":
                raise ConnectionRefusedError("the database is away")
            case "refuse":
                raise BadRequestError("x is out of range", place="x")
            case "keep":
                kept.append(x)
            case "kept":
                return {"y": x, "told": np.array([",".join(f"{one.sum():.0f}" for one in kept)] * len(x))}
            case "where":
                return {"y": x, "told": np.full(len(x), str(os.getpid()), object)}
            case "descriptors":
                return {"y": x, "told": [" ".join(os.readlink(f"/proc/self/fd/{n}") for n in range(3, 64)
                                                  if os.path.exists(f"/proc/self/fd/{n}"))] * len(x)}
        return {"y": 2 * x, "told": do}

    def close(self):
        open("closed.txt", "w").write("closed")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "beside.txt").write_text("beside")
    return tmp_path


@pytest.fixture
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What this process and its children write to stderr goes there, as a replica's does to its log."""
    path = tmp_path_factory.mktemp("log") / "log"
    saved, file = os.dup(2), os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 2)
    yield path
    os.dup2(saved, 2)
    os.close(saved)
    os.close(file)


@pytest.fixture
def model(folder: Path, log: Path) -> Iterator[Any]:
    made = open_model(folder, {"engine": "function"}, threads=2)
    yield made
    made.close()


def ask(model: Any, do: str | bytes | None = "", x: Any = None) -> dict[str, np.ndarray[Any, Any]]:
    x = np.ones((1, 2), np.float32) if x is None else x
    texts = np.empty(len(x), object)
    texts[:] = [do] * len(x)
    found: dict[str, np.ndarray[Any, Any]] = model.infer({"x": x, "do": texts})
    return found


def line_of(do: str) -> int:
    """Where in the file that is done."""
    return MODEL.splitlines().index(f'            case "{do}":') + 2


def pid_of(model: Any) -> int:
    return int(ask(model, "where")["told"][0])


def test_it_answers_batches_and_text(model: Any, log: Path) -> None:
    assert isinstance(model, Living)
    assert not model.dead()
    assert [spec.name for spec in model.inputs] == ["x", "do"]
    for rows in (1, 3, 100):
        x = np.arange(2 * rows, dtype=np.float32).reshape(-1, 2)
        found = ask(model, "ü", x)
        assert (found["y"] == 2 * x).all()
        assert found["told"].tolist() == ["ü".encode()] * rows, "text is bytes to it"
    assert ask(model, b"\xff\0")["told"].tolist() == [b"\xff\0"]
    assert ask(model, x=np.ones((4, 4), np.float32)[::2, ::-2])["y"].tolist() == [[2, 2]] * 2
    ask(model, x=np.ones((2, 2), ">f4").astype("<f4"))
    assert "loaded with 2 2" in log.read_text(), "what is printed goes to the log"


def test_nothing_is_left_in_the_folder_and_close_is_told(folder: Path) -> None:
    model = open_model(folder, {"engine": "function"})
    pid = pid_of(model)
    model.close()
    assert not alive(pid), "its memory is free"
    assert (folder / "closed.txt").exists()
    (folder / "closed.txt").unlink()
    assert sorted(path.name for path in folder.iterdir()) == ["beside.txt", "model.py"]
    with pytest.raises(InferenceError, match="the model is closed"):
        ask(model)
    assert model.dead() == "the model is closed"
    model.close()


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ({"x": np.ones((1, 2), np.float32)}, "the inputs are x, do, not x"),
        ({"x": np.ones((1, 2)), "do": np.array(["a"], object)}, r"input 'x' is float64 \[1, 2\], not FP32 \[-1, 2\]"),
        ({"x": np.ones((1, 3), np.float32), "do": np.array(["a"], object)}, r"float32 \[1, 3\], not FP32 \[-1, 2\]"),
        ({"x": np.ones((1, 2), np.float32), "do": np.array([3], object)}, "can't be asked: 3 is not text"),
    ],
)
def test_inputs_that_do_not_fit_never_reach_it(model: Any, inputs: Any, told: str) -> None:
    with pytest.raises(InferenceError, match=told):
        model.infer(inputs)
    assert ask(model)["y"].tolist() == [[2, 2]]


@pytest.mark.parametrize(
    ("do", "told"),
    [
        ("fail", r"ValueError: matmul: Input operand 1 has a mismatch"),
        ("network", r"ConnectionRefusedError: the database is away$"),
    ],
)
def test_an_exception_says_what_and_where(model: Any, log: Path, do: str, told: str) -> None:
    pid = pid_of(model)
    for _ in range(2):
        with pytest.raises(InferenceError, match=rf"^model\.py:{line_of(do)}: {told}"):
            ask(model, do)
    assert pid_of(model) == pid, "it goes on"
    assert log.read_text().count("Traceback") == 1, "the whole traceback is in the log, once"


def test_it_can_refuse_a_request_as_the_clients_fault(model: Any) -> None:
    with pytest.raises(BadRequestError, match=r"^x: x is out of range$"):
        ask(model, "refuse")


@pytest.mark.parametrize(
    ("do", "told"),
    [
        ("exit", "its process ended with exit code 3 before it had answered"),
        ("kill", "its process was killed by SIGKILL before it had answered"),
        ("crash", "its process was killed by SIGSEGV before it had answered"),
        ("leave a grandchild", "its process ended with exit code 7 before it had answered"),
    ],
)
def test_a_death_costs_the_call_that_it_had(
    model: Any, log: Path, do: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    pid = pid_of(model)
    with pytest.raises(InferenceError, match=rf"model\.py: {told}"):
        ask(model, do)
    assert ask(model)["y"].tolist() == [[2, 2]], "the next one waits for another process"
    assert pid_of(model) != pid
    assert not model.dead()
    assert told.removesuffix(" before it had answered") in caplog.text
    if do == "crash":
        assert f'model.py", line {line_of(do)} in infer' in log.read_text(), (
            "a native crash leaves its place in the log"
        )


def test_it_is_known_to_be_gone_without_being_asked_and_comes_back(model: Any, folder: Path) -> None:
    pid = pid_of(model)
    (folder / "beside.txt").unlink()  # so that it can't come back before anybody has looked
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: model.dead() != "")
    wait_for(lambda: "FileNotFoundError" in model.dead())
    (folder / "beside.txt").write_text("beside")
    wait_for(lambda: not model.dead())
    assert pid_of(model) != pid


def hanging(model: Any, folder: Path) -> tuple[threading.Thread, list[str]]:
    """A call that hangs, and where its error will be."""
    failed: list[str] = []

    def hang() -> None:
        try:
            ask(model, "hang")
        except InferenceError as error:
            failed.append(str(error))

    thread = threading.Thread(target=hang)
    thread.start()
    wait_for((folder / "hangs.txt").exists)
    return thread, failed


def test_one_that_hangs_can_be_ended_and_is_replaced(model: Any, folder: Path) -> None:
    thread, failed = hanging(model, folder)
    assert not model.dead(), "a process that hangs is there; the batcher knows for how long"
    model.kill("no answer for 30 s")
    thread.join(20)
    assert "was killed by SIGKILL (no answer for 30 s) before it had answered" in failed[0]
    assert ask(model)["y"].tolist() == [[2, 2]]


def test_closing_doesnt_wait_for_one_that_hangs(folder: Path) -> None:
    model = open_model(folder, {"engine": "function"})
    pid = pid_of(model)
    thread, failed = hanging(model, folder)
    model.close()
    assert not alive(pid)
    thread.join(20)
    assert "the model was closed before it had answered" in failed[0]


def test_closing_ends_one_that_is_being_started(folder: Path, log: Path) -> None:
    before = set(children(os.getpid()))
    model = open_model(folder, {"engine": "function"})
    (folder / "model.py").write_text("import time\nopen('starts.txt', 'w').close()\ntime.sleep(1000)\n")
    with pytest.raises(InferenceError):
        ask(model, "exit")
    wait_for((folder / "starts.txt").exists)
    assert "exit code 3" in model.dead()
    model.close()
    assert set(children(os.getpid())) <= before


def test_a_call_that_finds_its_process_gone_asks_the_next_one(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    old, get = model._kept.get(0), model._kept.get
    os.kill(old.process.pid, signal.SIGKILL)
    wait_for(lambda: model._kept._running not in (None, old))
    given = iter([old])
    monkeypatch.setattr(model._kept, "get", lambda wait: next(given, None) or get(wait))
    assert ask(model)["y"].tolist() == [[2, 2]]
    assert next(given, None) is None


def test_an_array_that_somebody_keeps_never_changes(model: Any) -> None:
    rows = INLINE // 4  # more than goes in a message
    answers = []
    for number in range(6):
        x = np.full((rows, 2), number, np.float32)
        answers.append((number, ask(model, "keep" if number < 3 else "", x)["y"]))
    for number, answer in answers:
        assert (answer == 2 * number).all(), "on this side"
    assert ask(model, "kept")["told"].tolist() == [f"0,{2 * rows},{4 * rows}"], "and in the function"


ECHO = """
INPUTS = OUTPUTS = {"x": ("FP32", [-1])}


def infer(x):
    return x
"""


def test_memory_and_descriptors_do_not_grow(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(ECHO)
    others = set(children(os.getpid()))
    model: Any = open_model(tmp_path, {"engine": "function"})
    try:
        for _ in range(3):
            model.infer({"x": np.ones(INLINE, np.float32)})
        (pid,) = set(children(os.getpid())) - others
        child = Path(f"/proc/{pid}/fd")
        before = [len(os.listdir(fds)) for fds in ("/proc/self/fd", child)]
        for size in (1, 3, 1, 9, 27, 2, 81, 1):
            for _ in range(5):
                assert len(model.infer({"x": np.ones(size * INLINE, np.float32)})["x"]) == size * INLINE
        after = [len(os.listdir(fds)) for fds in ("/proc/self/fd", child)]
    finally:
        model.close()
    assert all(now - then <= 4 for then, now in zip(before, after, strict=True)), (before, after)


def test_deaths_and_closing_leak_no_descriptors(folder: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    model = open_model(folder, {"engine": "function"})
    for _ in range(3):
        with pytest.raises(InferenceError):
            ask(model, "exit")
        ask(model)
    model.close()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_the_child_inherits_nothing_of_the_server(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        os.set_inheritable(listener.fileno(), True)
        model = open_model(folder, {"engine": "function"})
        try:
            told = str(ask(model, "descriptors")["told"][0]).split()
        finally:
            model.close()
    assert len([name for name in told if name.startswith("socket:")]) == 1, "its channel, and no listener"


def test_threads_take_turns(model: Any) -> None:
    wrong: list[Any] = []

    def many(number: int) -> None:
        for count in range(50):
            x = np.full((2, 2), 100 * number + count, np.float32)
            if not (ask(model, str(number), x)["y"] == 2 * x).all():
                wrong.append((number, count))

    threads = [threading.Thread(target=many, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


PARENT = """
import sys
import numpy as np
from pathlib import Path
from onejob.engines import open_model

model = open_model(Path(sys.argv[1]), {"engine": "function"})
found = model.infer({"x": np.ones((1, 2), np.float32), "do": np.array([b"where"], object)})
print(found["told"][0], flush=True)
model.infer({"x": np.ones((1, 2), np.float32), "do": np.array([b"hang"], object)})
"""


def test_the_child_dies_with_its_parent(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_for((folder / "hangs.txt").exists)  # it doesn't listen, and can't hear that the parent is gone
        assert alive(pid)
        parent.kill()
    wait_for(lambda: not alive(pid))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = (", r"^model\.py:1: File .* SyntaxError: '\(' was never closed"),
        ("import nowhere", r"^model\.py:1: ModuleNotFoundError: No module named 'nowhere'$"),
        ("raise SystemExit(4)", r"^model\.py:1: SystemExit: 4$"),
        ("import os\nos._exit(5)", r"^model\.py: its process ended with exit code 5 while it was loaded$"),
        ("import ctypes\nctypes.string_at(0)", r"^model\.py: its process was killed by SIGSEGV while it was loaded$"),
        ("def infer(x):\n    return x", r"^model\.py: INPUTS is not there"),
    ],
)
def test_a_file_that_cannot_be_loaded(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(text)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(InferenceError, match=told):
        open_model(tmp_path, {"engine": "function"})
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_another_file_and_modules_beside_it_and_of_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "of_the_project.py").write_text("ONE = 1\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "beside.py").write_text("TWO = 2\n")
    (tmp_path / "mine" / "sum.py").write_text(
        textwrap.dedent("""
            from beside import TWO
            from of_the_project import ONE
            INPUTS = {"x": ("INT64", [-1])}
            OUTPUTS = {"y": ("INT64", [-1])}
            def infer(x):
                return x + ONE + TWO
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    model = open_model(tmp_path / "mine", {"engine": "function", "options": {"file": "sum.py"}})
    try:
        assert model.infer({"x": np.array([1, 2])})["y"].tolist() == [4, 5]
    finally:
        model.close()


def test_one_that_cannot_come_back_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    model = open_model(folder, {"engine": "function"})
    try:
        (folder / "beside.txt").unlink()
        with pytest.raises(InferenceError, match="exit code 3"):
            ask(model, "exit")
        wait_for(lambda: "FileNotFoundError" in model.dead())
        (folder / "beside.txt").write_text("beside")
        assert ask(model)["y"].tolist() == [[2, 2]], "it is tried again and again"
        assert not model.dead()
        (folder / "model.py").write_text(MODEL.replace('"y": ("FP32", [-1, 2])', '"y": ("FP32", [-1, -1])'))
        with pytest.raises(InferenceError, match="exit code 3"):
            ask(model, "exit")
        with pytest.raises(InferenceError, match="others than when it was opened"):
            ask(model)
    finally:
        model.close()


# ---- the channel alone


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = map(Channel, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    yield one, other
    one.close()
    other.close()


@pytest.mark.parametrize("size", [0, 1, INLINE // 8, INLINE // 8 + 1, INLINE])
def test_arrays_cross_whatever_their_size(ends: tuple[Channel, Channel], size: int) -> None:
    one, other = ends
    sent = {
        "wide": np.arange(size, dtype=np.float64),
        "text": np.array([str(number) for number in range(size)], object),
        "flags": np.arange(size) % 2 == 0,
    }
    for call in range(3):
        one.send(call, sent)
        kind, number, found = other.receive()
        assert (kind, number) == (ARRAYS, call)
        assert list(found) == list(sent)
        for name, array in sent.items():
            assert found[name].dtype == array.dtype
            assert found[name].tolist() == array.tolist()
        found["wide"][:] = 0  # the function's to write into
        del found
        other.say(FAILED, call, {"why": "ü" * 3000})
        assert one.receive() == (FAILED, call, {"why": "ü" * 3000})


def test_a_text_alone_gives_its_memory_back(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    for call in range(10):
        one.send(call, {"text": np.array(["x" * 2 * INLINE], object)})
        other.receive()
        other.send(call, {})
        one.receive()
    assert len(one._memory._mine) <= 2


def test_words_that_are_too_long_are_refused_and_the_end_is_told(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    with pytest.raises(ValueError, match="too long"):
        one.say(FAILED, 1, "x" * 200_000)
    one.shutdown()
    with pytest.raises(EOFError):
        other.receive()


# ---- behind an endpoint

SERVED = """
import os

INPUTS = {"x": ("FP32", [-1, 4])}
OUTPUTS = {"y": ("FP32", [-1, 4])}


def infer(x):
    if (x == -1).any():
        os._exit(9)
    return 2 * x
"""


def post(made: Any, x: float) -> tuple[int, Any]:
    body = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [x] * 4}]}).encode()
    with made.connect() as sock:
        head = "POST /v2/models/affine/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    top, _, rest = answer.partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(rest)


def test_a_function_is_served_and_its_death_costs_one_request(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "model.py").write_text(SERVED)
    with endpoint(tmp_path / "endpoint") as made:
        made.want(tmp_path / "engine", meta={"engine": "function"})
        made.start().ready()
        assert post(made, 3)[1]["outputs"][0]["data"] == [6] * 4
        status, told = post(made, -1)
        assert status == 500
        assert "its process ended with exit code 9" in told["error"]
        with ThreadPoolExecutor(4) as pool:  # in a batch with others or not, it fails alone
            answers = list(pool.map(lambda x: post(made, x), [4, -1, 5, 6]))
        assert [status for status, _ in answers] == [200, 500, 200, 200]
        assert answers[3][1]["outputs"][0]["data"] == [12] * 4
        replica = made.pids[0]
        assert alive(replica), "the replica is the same"
        child = children(replica)
        assert len(child) == 1
        made.stop()
        wait_for(lambda: not alive(child[0]))


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(text) for task in tasks for text in (task / "children").read_text().split()]


PICKY = """
import json

INPUTS = {"text": ("BYTES", [-1])}
OUTPUTS = {"length": ("INT64", [-1])}


def infer(text):
    return [len(json.loads(one)["word"]) for one in text]
"""


def test_a_model_that_can_not_take_anything_says_what_it_takes(tmp_path: Path) -> None:
    """Before anybody asks, and while nobody does, it is asked by itself."""
    (tmp_path / "model.py").write_text(PICKY)
    with (
        contextlib.closing(open_served(tmp_path, {"engine": "function"}, threads=1)) as made,
        pytest.raises(ModelCodeError, match=r"model\.py:9: .*JSONDecodeError.* EXAMPLE in its file says"),
    ):
        made.warm_up(2)
    (tmp_path / "model.py").write_text(PICKY + '\nEXAMPLE = {\'text\': [\'{"word": "a"}\', \'{"word": "bcd"}\']}\n')
    with contextlib.closing(open_served(tmp_path, {"engine": "function"}, threads=1)) as made:
        assert made.warm_up(5)
        assert made.infer(made.example(5))["length"].tolist() == [1, 3, 1, 3, 1]
    with endpoint(tmp_path / "ep") as served:
        served.want(tmp_path, name="picky", meta={"engine": "function"})
        served.start().ready()
