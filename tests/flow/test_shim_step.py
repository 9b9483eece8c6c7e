"""A step run for real by the local executor: what its process is given, and how each of its ends is reported."""

import json
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onejob.core.context import read_lines
from onejob.core.ports import Status, Task
from onejob.exec.local import LocalExecutor
from onejob.testing.executor_contract import end_of
from onejob.testing.faults import armed
from onejob.testing.processes import no_orphans, python, wait_until

SECRET = "hunter2-hunter2"


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with no_orphans():
        yield


class Lab:
    """A project with one module, and a work folder for one step."""

    def __init__(self, folder: Path) -> None:
        self.project, self.work = folder / "my project", folder / "work"
        self.project.mkdir()
        self.work.mkdir()
        self.executor = LocalExecutor()

    def start(self, code: str, *, entry: str = "mine:entry", env: dict[str, str] | None = None, **more: Any) -> Any:
        (self.project / "mine.py").write_text(textwrap.dedent(code))
        options = {key: more.pop(key) for key in ("outputs", "sources", "options", "inputs", "threads") if key in more}
        task = {
            "id": "t",
            "name": "train",
            "entry": entry,
            "options": {},
            "setup": {},
            "seed": 7,
            "threads": 3,
            "project": str(self.project),
            "scratch": str(self.work / "scratch"),
            "inputs": {},
            "outputs": [],
            **options,
        }
        (self.work / "task.json").write_text(json.dumps(task))
        argv = (*python("")[:1], "-m", "onejob.exec.step", str(self.work))
        return self.executor.submit(Task("t", argv, self.work, env or {}, **more))

    def run(self, code: str, **more: Any) -> Status:
        return end_of(self.executor, self.start(code, **more))

    @property
    def error(self) -> dict[str, Any]:
        return json.loads((self.work / "error.json").read_bytes())

    @property
    def log(self) -> str:
        return (self.work / "log").read_text()


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_a_step_that_succeeds(lab: Lab) -> None:
    code = """
        import os
        import helper
        def entry(context):
            assert (context.name, context.seed, context.threads, context.rank, context.world) == ("train", 7, 3, 0, 1)
            assert context.inputs["dataset"].file("a").read_text() == "rows"
            assert {os.environ[n] for n in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS")} == {"3"}
            assert open("beside.txt").read() == "by a relative path"
            assert not context.stopping()
            (context.out("model") / "weights").write_text(str(context.options["lr"] * helper.FACTOR))
            context.emit("model", "checkpoint", {"format": 1})
            context.metric({"loss": 0.5})
            context.progress(1, 2, "steps")
    """
    (lab.project / "helper.py").write_text("FACTOR = 4")
    (lab.project / "beside.txt").write_text("by a relative path")
    (lab.work / "in").mkdir()
    (lab.work / "in" / "a").write_text("rows")
    inputs = {"dataset": {"digest": "d", "kind": "dataset", "meta": {}, "path": str(lab.work / "in")}}
    status = lab.run(code, options={"lr": 0.25}, inputs=inputs, outputs=["model"])
    assert status == Status("exited", code=0), lab.log
    assert (lab.work / "out" / "model" / "weights").read_text() == "1.0"
    assert json.loads((lab.work / "out" / "model.json").read_bytes()) == {"kind": "checkpoint", "meta": {"format": 1}}
    assert not (lab.work / "error.json").exists()


def test_an_exception_names_the_users_line(lab: Lab) -> None:
    code = """
        import json
        def entry(context):
            return parse("{")
        def parse(text):
            return json.loads(text)
    """
    assert lab.run(code).code == 5
    assert lab.error["error"] == "StepError"
    assert lab.error["place"] == "mine.py:6 in parse"
    assert lab.error["message"].startswith("JSONDecodeError: Expecting property name")
    assert (lab.error["retryable"], lab.error["rank"]) == (False, 0)
    assert "Traceback" in lab.log
    assert "json/decoder.py" in lab.log


def test_errors_of_the_tree_keep_their_class_and_code(lab: Lab) -> None:
    code = """
        from onejob.errors import ExpectationError
        def entry(context):
            raise ExpectationError("rows_min: 3 < 1000", place="job.toml [data] expect", cure="Look at the source.")
    """
    assert lab.run(code).code == 4
    assert lab.error["error"] == "ExpectationError"
    assert lab.error["place"] == "job.toml [data] expect"


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("def entry(context): import nowhere", "StepError", "ModuleNotFoundError: No module named 'nowhere'"),
        ("import nowhere", "UnavailableError", "nowhere"),
        ("def other(context): pass", "UnavailableError", "no 'entry'"),
        ("def entry(context):\n    return (", "StepError", "SyntaxError"),
        ("import sys\ndef entry(context): sys.exit('no more')", "StepError", "SystemExit: no more"),
        ("def entry(context): raise OSError(28, 'No space left', 'big')", "StorageFullError", "big"),
        ("def entry(context): raise ValueError", "StepError", "ValueError"),
    ],
)
def test_other_ends(lab: Lab, code: str, kind: str, words: str) -> None:
    assert lab.run(code).code not in (0, 75)
    assert lab.error["error"] == kind
    assert words in lab.error["message"]


def test_a_missing_output_is_named(lab: Lab) -> None:
    code = "def entry(context): context.emit('one', 'dataset', {})"
    assert lab.run(code, outputs=["one", "two", "three"]).code == 5
    assert "'two', 'three'" in lab.error["message"]
    assert "'one'" not in lab.error["message"]


def test_stopped_on_request(lab: Lab) -> None:
    code = """
        import time
        from onejob.core.context import Stopped
        def entry(context):
            (context.work / "ready").touch()
            while not context.stopping():
                time.sleep(0.01)
            (context.work / "saved").touch()
            raise Stopped
    """
    handle = lab.start(code, grace=60.0)
    wait_until((lab.work / "ready").exists, "the step to be ready")
    lab.executor.cancel(handle)
    status = end_of(lab.executor, handle)
    assert (status.code, status.cause) == (75, "stopped")
    assert (lab.work / "saved").exists()
    assert not (lab.work / "error.json").exists()


@pytest.mark.parametrize("change", ["path.write_text('other')", "path.unlink()", "os.utime(path, (1, 1))"])
@pytest.mark.parametrize("then", ["", "; raise ValueError('odd row')"])
def test_a_source_that_changes_meanwhile(lab: Lab, tmp_path: Path, change: str, then: str) -> None:
    source = tmp_path / "source.csv"
    source.write_text("a,b")
    code = f"import os, pathlib\npath = pathlib.Path({str(source)!r})\ndef entry(context): {change}{then}"
    about = source.stat()
    assert lab.run(code, sources={str(source): [about.st_size, about.st_mtime_ns]}).code == 4
    assert (lab.error["error"], lab.error["place"]) == ("SourceError", str(source))
    assert "while it was read" in lab.error["message"]


def test_secrets_are_written_nowhere(lab: Lab) -> None:
    code = """
        import os
        def entry(context):
            secret = os.environ["TOKEN"]
            print("the token is", secret)
            context.metric({"note": secret, secret: 1})
            context.measure({"url": f"https://{secret}@host"})
            context.warn(f"beware of {secret}")
            raise RuntimeError(f"can't log in with {secret}")
    """
    lab.run(code, env={"TOKEN": SECRET}, secrets=("TOKEN",))
    assert lab.error["message"] == "RuntimeError: can't log in with ***TOKEN***"
    assert read_lines(lab.work / "metrics.jsonl") == [{"***TOKEN***": 1, "note": "***TOKEN***"}]
    assert "the token is ***TOKEN***" in lab.log
    files = [path for path in lab.work.rglob("*") if path.is_file()]
    assert {"log", "metrics.jsonl", "measured.json", "warnings.jsonl", "error.json"} <= {path.name for path in files}
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("code", "where"),
    [
        ("(context.out('m') / 'w.bin').write_bytes(bytes(2**20 - 5) + os.environ['TOKEN'].encode())", "'m/w.bin'"),
        ("(context.out('m') / os.environ['TOKEN']).touch()", "name of an output file"),
        ("context.emit('m', 'checkpoint', {'by': os.environ['TOKEN']})", "metadata of output 'm'"),
    ],
)
def test_an_output_that_holds_a_secret_is_refused(lab: Lab, code: str, where: str) -> None:
    entry = f"import os\ndef entry(context):\n    context.emit('m', 'checkpoint', {{}})\n    {code}"
    assert lab.run(entry, env={"TOKEN": SECRET}, secrets=("TOKEN",), outputs=["m"]).code == 5
    assert where in lab.error["message"]
    assert "'TOKEN'" in lab.error["message"]
    assert SECRET not in json.dumps(lab.error)


def test_the_first_rank_that_fails_says_why(lab: Lab) -> None:
    code = """
        import time
        def entry(context):
            while len(list((context.work / "arrived").iterdir())) < 3:
                time.sleep(0.01)
            if context.rank == 2:
                raise ValueError("the real reason")
            while not (context.work / "error.json").exists():
                time.sleep(0.01)
            raise ConnectionError("a peer is gone")
    """
    status = lab.run(code, processes=3)
    assert status.code == 5
    assert lab.error["message"] == "ValueError: the real reason"
    assert lab.error["rank"] == 2
    assert "[rank 2] ValueError: the real reason" in lab.log


def test_a_rank_that_hangs_before_its_entry_is_named(lab: Lab) -> None:
    code = """
        import os, time
        if os.environ["RANK"] == "1":
            time.sleep(600)
        def entry(context):
            time.sleep(600)
    """
    status = lab.run(code, processes=2, arrive=4.0, grace=0.2)
    assert (status.rank, status.cause) == (1, "arrive")


def test_a_crash_in_native_code_shows_where(lab: Lab) -> None:
    status = lab.run("import ctypes\ndef entry(context): ctypes.string_at(0)")
    assert (status.code, status.cause) == (139, "signal")
    assert "Segmentation fault" in lab.log
    assert "mine.py" in lab.log


@pytest.mark.parametrize("point", ["step.before_entry", "step.after_entry", "step.before_exit"])
def test_a_step_killed_at_any_point_is_not_done(lab: Lab, point: str) -> None:
    code = "def entry(context): (context.work / 'called').touch()"
    status = lab.run(code, env=armed(point))
    assert (status.code, status.cause, status.rank) == (137, "signal", 0)
    assert (lab.work / "called").exists() == (point != "step.before_entry")


def test_folders_of_the_step_are_no_packages(lab: Lab) -> None:
    os.makedirs(lab.work / "out")
    assert lab.run("def entry(context): import out").code == 5
    assert "No module named 'out'" in lab.error["message"]
