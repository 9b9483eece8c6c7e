"""The contract of `Executor`, as a suite of tests that every executor passes.

    class TestMine(ExecutorContract):
        @pytest.fixture
        def connect(self):
            return lambda: MyExecutor(...)     # each call: the executor as another process would make it

The tests start real processes, and none may be left behind.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onejob.core.artifact import Json
from onejob.core.ports import Executor, Status, Task
from onejob.errors import ConflictError, OnejobError
from onejob.testing.processes import no_orphans, python, wait_until

Connect = Callable[[], Executor]


class ExecutorContract:
    """Subclass it, and give the fixture `connect`."""

    @pytest.fixture(autouse=True)
    def _nothing_left(self) -> Iterator[None]:
        with no_orphans():
            yield

    @pytest.fixture
    def connect(self) -> Connect:
        raise NotImplementedError("give a fixture that makes the executor")

    @pytest.fixture
    def executor(self, connect: Connect) -> Executor:
        return connect()

    def test_ends_with_zero(self, executor: Executor, tmp_path: Path) -> None:
        assert run(executor, make_task(tmp_path, "print('hello')")) == Status("exited", code=0)
        assert log_of(tmp_path) == "hello\n"

    def test_keeps_the_exit_code(self, executor: Executor, tmp_path: Path) -> None:
        status = run(executor, make_task(tmp_path, "raise SystemExit(7)"))
        assert (status.state, status.code, status.rank, status.cause) == ("exited", 7, 0, "exit")
        assert "7" in status.reason

    def test_names_the_signal(self, executor: Executor, tmp_path: Path) -> None:
        status = run(executor, make_task(tmp_path, "import os; os.kill(os.getpid(), 11)"))
        assert (status.code, status.cause) == (128 + 11, "signal")
        assert "SIGSEGV" in status.reason

    def test_a_command_that_is_not_there(self, executor: Executor, tmp_path: Path) -> None:
        task = Task(id="t", argv=("/nonexistent/program",), work=tmp_path, env={})
        status = run(executor, task)
        assert (status.state, status.code, status.cause) == ("exited", 127, "start")
        assert "/nonexistent/program" in status.reason

    def test_folder_with_spaces_and_quotes(self, executor: Executor, tmp_path: Path) -> None:
        work = tmp_path / 'it\'s a "folder" $HOME; \\ ü'
        work.mkdir()
        assert run(executor, make_task(work, "print(open('note', 'w').write('x'))")).code == 0
        assert (work / "note").read_text() == "x"

    def test_environment(self, executor: Executor, tmp_path: Path) -> None:
        code = "import os, json; print(json.dumps(dict(os.environ)))"
        run(executor, make_task(tmp_path, code, env={"COLOUR": "blue sky"}, gpu_ids=(2, 5)))
        environ = json.loads(log_of(tmp_path))
        expected = {
            "COLOUR": "blue sky",
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "CUDA_VISIBLE_DEVICES": "2,5",
        }
        assert expected.items() <= environ.items()

    def test_secrets_stay_off_the_disk(self, executor: Executor, tmp_path: Path) -> None:
        value = 'pass"word-9f8e7d'
        code = (
            "import os, sys; [print(os.environ['TOKEN'], end='', file=f, flush=True) for f in (sys.stdout, sys.stderr)]"
        )
        run(executor, make_task(tmp_path, code, env={"TOKEN": value}, secrets=("TOKEN",)))
        assert log_of(tmp_path) == "***TOKEN******TOKEN***"
        everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        assert value.encode() not in everything
        assert json.dumps(value)[1:-1].encode() not in everything

    def test_submitting_twice_starts_once(self, connect: Connect, tmp_path: Path) -> None:
        task = make_task(tmp_path, "open('starts', 'a').write('x')")
        first = connect().submit(task)
        second = connect().submit(task)
        assert first == second
        other = connect()
        end_of(other, first)
        assert connect().submit(task) == first
        assert (tmp_path / "starts").read_text() == "x"

    def test_a_folder_belongs_to_one_task(self, executor: Executor, tmp_path: Path) -> None:
        run(executor, make_task(tmp_path, "pass"))
        with pytest.raises(ConflictError, match="belongs to task 't'"):
            executor.submit(make_task(tmp_path, "pass", id="other"))

    def test_a_handle_is_json_and_enough(self, connect: Connect, tmp_path: Path) -> None:
        handle = connect().submit(make_task(tmp_path, "import time; time.sleep(600)"))
        again = json.loads(json.dumps(handle))
        other = connect()
        assert other.poll([again])[0].state in ("starting", "running")
        other.cancel(again)
        assert end_of(connect(), again).state == "exited"

    def test_polls_many_in_order(self, executor: Executor, tmp_path: Path) -> None:
        handles = []
        for code in (3, 0, 5):
            work = tmp_path / str(code)
            work.mkdir()
            handles.append(executor.submit(make_task(work, f"raise SystemExit({code})", id=f"t{code}")))
        wait_until(lambda: all(s.state == "exited" for s in executor.poll(handles)), "three tasks to end")
        assert [status.code for status in executor.poll(handles)] == [3, 0, 5]
        assert executor.poll([]) == []

    def test_cancel_lets_it_save(self, executor: Executor, tmp_path: Path) -> None:
        code = """
            import signal, sys, time
            def save(number, frame):
                open("saved", "w").write("state")
                sys.exit(75)
            signal.signal(signal.SIGTERM, save)
            open("ready", "w").close()
            time.sleep(600)
        """
        handle = executor.submit(make_task(tmp_path, code, grace=60.0))
        wait_until((tmp_path / "ready").exists, "the task to be ready")
        executor.cancel(handle)
        status = end_of(executor, handle)
        assert (status.code, status.cause) == (75, "stopped")
        assert (tmp_path / "saved").read_text() == "state"

    def test_cancel_ends_what_does_not_listen(self, executor: Executor, tmp_path: Path) -> None:
        code = """
            import os, signal, time
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if os.fork() == 0:
                os.setsid()
                os.fork()
            open(f"ready.{os.getpid()}", "w").close()
            time.sleep(600)
        """
        handle = executor.submit(make_task(tmp_path, code, grace=0.2))
        wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 3, "three processes to be ready")
        executor.cancel(handle)
        status = end_of(executor, handle)
        assert (status.code, status.cause) == (128 + signal.SIGKILL, "stopped")

    def test_cancel_of_what_has_ended_changes_nothing(self, executor: Executor, tmp_path: Path) -> None:
        handle = executor.submit(make_task(tmp_path, "pass"))
        end_of(executor, handle)
        executor.cancel(handle)
        assert executor.poll([handle]) == [Status("exited", code=0)]

    def test_time_limit(self, executor: Executor, tmp_path: Path) -> None:
        status = run(executor, make_task(tmp_path, "import time; time.sleep(600)", timeout=0.3, grace=0.2))
        assert (status.state, status.cause) == ("exited", "timeout")
        assert "ran past its limit of 0.3 s" in status.reason
        assert status.code != 0

    def test_a_gang_meets_and_ends(self, executor: Executor, tmp_path: Path) -> None:
        code = """
            import os, pathlib, socket
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            pathlib.Path("arrived").mkdir(exist_ok=True)
            pathlib.Path("arrived", str(rank)).touch()
            if rank == 0:
                listener = socket.socket(fileno=int(os.environ["ONEJOB_STORE_FD"]))
                for _ in range(world - 1):
                    listener.accept()[0].send(b"!")
            else:
                place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                assert socket.create_connection(place).recv(1) == b"!"
            print(f"{rank} of {world} met")
        """
        assert run(executor, make_task(tmp_path, code, processes=3)) == Status("exited", code=0)
        assert sorted(log_of(tmp_path).splitlines()) == [f"[rank {n}] {n} of 3 met" for n in range(3)]

    def test_a_gang_dies_together(self, executor: Executor, tmp_path: Path) -> None:
        code = """
            import os, pathlib, time
            rank = os.environ["RANK"]
            pathlib.Path(f"here.{rank}").touch()
            while len(list(pathlib.Path(".").glob("here.*"))) < 4:
                time.sleep(0.01)
            if rank == "2":
                raise SystemExit(9)
            time.sleep(600)
        """
        status = run(executor, make_task(tmp_path, code, processes=4, arrive=None, grace=0.5))
        assert (status.code, status.rank, status.cause) == (9, 2, "exit")
        assert "rank 2 exited with code 9" in status.reason

    def test_capacity(self, executor: Executor) -> None:
        capacity = executor.capacity()
        assert capacity["cpus"] > 0
        assert capacity["memory"] > 0
        assert list(capacity["gpus"]) == sorted(set(capacity["gpus"]))

    def test_errors_are_of_the_tree(self, executor: Executor, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("not a folder")
        with pytest.raises(OnejobError):
            executor.submit(make_task(tmp_path / "file", "pass"))


def make_task(work: Path, code: str, id: str = "t", **more: Json) -> Task:
    """A task that runs Python code in its work folder."""
    return Task(id=id, argv=python(code), work=work, env=more.pop("env", {}), **more)


def run(executor: Executor, task: Task) -> Status:
    """Submit, and wait for the end."""
    return end_of(executor, executor.submit(task))


def end_of(executor: Executor, handle: Json) -> Status:
    """Wait until a task has ended, or is gone."""

    def ended() -> Status | None:
        status = executor.poll([handle])[0]
        return status if status.state in ("exited", "gone") else None

    return wait_until(ended, "the task to end")


def log_of(work: Path) -> str:
    return (work / "log").read_text()
