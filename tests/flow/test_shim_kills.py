"""Whoever is killed, at any line: the task's story stays true, it never starts twice, and nothing is left."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onejob.core.ports import Task
from onejob.errors import RankError
from onejob.exec.local import LocalExecutor, adopt, revoke
from onejob.machines import processes
from onejob.testing.executor_contract import end_of, make_task, run
from onejob.testing.faults import armed
from onejob.testing.processes import living, no_orphans, python, wait_until

SLEEP = "open('ready', 'w').close(); import time; time.sleep(600)"

# a rank with every kind of child that is hard to be rid of; the last has lost the environment, and so the marker
FAMILY = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep = [sys.executable, "-c", "import time; open('/proc/self/comm', 'w').write('left'); time.sleep(600)"]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    plain = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={})
    open("children", "w").write(str(plain.pid))
    os.rename("children", "ready")
    time.sleep(600)
"""

SUPERVISOR = """
    import json, sys, time
    from pathlib import Path
    from onejob.core.ports import Task
    from onejob.exec.local import LocalExecutor
    work = Path(sys.argv[1])
    code = "open('starts', 'a').write('x'); open('ready', 'w').close(); import time; time.sleep(0.3)"
    handle = LocalExecutor().submit(Task(id="t", argv=(sys.executable, "-c", code), work=work, env={}))
    print(json.dumps(handle), flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def trace() -> Iterator[str]:
    with no_orphans() as value:
        yield value


@pytest.fixture
def executor() -> LocalExecutor:
    return LocalExecutor()


def test_a_killed_shim_takes_everything_along(executor: LocalExecutor, tmp_path: Path, trace: str) -> None:
    handle = executor.submit(make_task(tmp_path, FAMILY))
    wait_until((tmp_path / "ready").exists, "the rank's children")
    plain = int((tmp_path / "ready").read_text())
    start = processes.start_of(plain)
    assert start is not None
    assert len(living(trace)) == 4  # the shim, the rank, two children that carry the environment
    os.kill(handle["pid"], signal.SIGKILL)
    status = end_of(executor, handle)
    assert status.state == "gone"
    assert "shim was killed" in status.reason
    assert not processes.alive(plain, start)
    assert not living(trace)


def test_ranks_die_with_their_shim_though_nobody_looks(executor: LocalExecutor, tmp_path: Path, trace: str) -> None:
    handle = executor.submit(make_task(tmp_path, SLEEP, processes=2, arrive=None))
    wait_until((tmp_path / "ready").exists, "a rank")
    os.kill(handle["pid"], signal.SIGKILL)
    wait_until(lambda: not living(trace), "the ranks to die by themselves")


def test_a_task_that_ends_leaves_nothing(executor: LocalExecutor, tmp_path: Path) -> None:
    code = FAMILY.rpartition("time.sleep(600)")[0]
    handle = executor.submit(make_task(tmp_path, code))
    assert end_of(executor, handle).code == 0
    plain = int((tmp_path / "ready").read_text())
    assert processes.read(plain) is None
    assert "were left behind" in (tmp_path / "log").read_text()


def test_a_killed_rank_ends_its_gang(executor: LocalExecutor, tmp_path: Path) -> None:
    code = """
        import os, time
        open(f"part.{os.environ['RANK']}", "w").write(str(os.getpid()))
        os.rename(f"part.{os.environ['RANK']}", f"pid.{os.environ['RANK']}")
        time.sleep(600)
    """
    handle = executor.submit(make_task(tmp_path, code, processes=4, arrive=None, grace=0.5))
    wait_until(lambda: len(list(tmp_path.glob("pid.*"))) == 4, "four ranks")
    os.kill(int((tmp_path / "pid.3").read_text()), signal.SIGKILL)
    status = end_of(executor, handle)
    assert (status.state, status.code, status.rank, status.cause) == ("exited", 137, 3, "signal")
    assert status.reason == "rank 3 was killed by SIGKILL"


def test_a_task_outlives_its_supervisor(executor: LocalExecutor, tmp_path: Path) -> None:
    with subprocess.Popen([*python(SUPERVISOR), str(tmp_path)], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        handle = json.loads(supervisor.stdout.readline())
        supervisor.kill()
    assert adopt(tmp_path) == handle
    assert end_of(executor, handle).code == 0
    assert (tmp_path / "starts").read_text() == "x"


@pytest.mark.parametrize("point", ["local.before_shim", "local.after_shim"])
def test_a_supervisor_killed_while_it_submits(executor: LocalExecutor, tmp_path: Path, point: str) -> None:
    first = subprocess.run([*python(SUPERVISOR), str(tmp_path)], env={**os.environ, **armed(point)}, check=False)
    assert first.returncode == -signal.SIGKILL
    code = "open('starts', 'a').write('x'); open('ready', 'w').close(); import time; time.sleep(0.3)"
    assert run(executor, make_task(tmp_path, code)).code == 0
    assert (tmp_path / "starts").read_text() == "x"


def test_a_shim_killed_before_anybody_knows_it(executor: LocalExecutor, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="killed before it started"):
        executor.submit(make_task(tmp_path, SLEEP, env=armed("shim.before_started")))
    assert adopt(tmp_path) is None
    assert not (tmp_path / "ready").exists()


@pytest.mark.parametrize("point", ["shim.after_started", "shim.after_ranks", "shim.before_exit"])
def test_a_shim_killed_later_is_gone(executor: LocalExecutor, tmp_path: Path, point: str) -> None:
    code = "pass" if point == "shim.before_exit" else SLEEP
    handle = executor.submit(make_task(tmp_path, code, env=armed(point)))
    assert end_of(executor, handle).state == "gone"
    assert executor.poll([handle])[0].state == "gone"


def test_a_shim_killed_after_its_last_word(executor: LocalExecutor, tmp_path: Path) -> None:
    handle = executor.submit(make_task(tmp_path, "raise SystemExit(4)", env=armed("shim.after_exit")))
    assert end_of(executor, handle).code == 4


def test_a_reused_pid_is_nobody_of_ours(executor: LocalExecutor, tmp_path: Path) -> None:
    handle = executor.submit(make_task(tmp_path, SLEEP))
    os.kill(handle["pid"], signal.SIGKILL)
    end_of(executor, handle)
    with subprocess.Popen(python("import time; time.sleep(600)"), start_new_session=True) as stranger:
        reused = {**handle, "pid": stranger.pid}
        assert executor.poll([reused])[0].state == "gone"
        executor.cancel(reused)
        assert stranger.poll() is None
        stranger.kill()


def test_a_revoked_task_never_starts(tmp_path: Path, trace: str) -> None:
    assert revoke(tmp_path)
    order = {"id": "t", "argv": [*python(SLEEP)], "gpu_ids": [], "secrets": []}
    (tmp_path / "shim.json").write_text(json.dumps(order))
    late = subprocess.run([sys.executable, "-m", "onejob.exec.shim", str(tmp_path)], check=False)
    assert late.returncode == 0
    assert not (tmp_path / "log").exists()
    assert not living(trace)


def test_a_task_that_has_started_is_not_revoked(executor: LocalExecutor, tmp_path: Path) -> None:
    handle = executor.submit(make_task(tmp_path, "pass"))
    assert not revoke(tmp_path)
    assert end_of(executor, handle).code == 0


def test_many_supervisors_start_a_task_once(executor: LocalExecutor, tmp_path: Path) -> None:
    code = """
        import sys, time
        from pathlib import Path
        from onejob.core.ports import Task
        from onejob.exec.local import LocalExecutor
        base = Path(sys.argv[1])
        Path(base, f"ready.{sys.argv[2]}").touch()
        while not (base / "go").exists():
            pass
        task = Task(id="t", argv=(sys.executable, "-c", "open('starts', 'a').write('x')"), work=base / "work", env={})
        print(LocalExecutor().submit(task)["marker"])
    """
    command = [*python(code), str(tmp_path)]
    rivals = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True) for n in range(4)]
    wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 4, "four supervisors")
    (tmp_path / "go").touch()
    markers = {rival.communicate()[0] for rival in rivals}
    assert len(markers) == 1
    handle = adopt(tmp_path / "work")
    assert handle is not None
    assert end_of(executor, handle).code == 0
    assert (tmp_path / "work" / "starts").read_text() == "x"


def test_the_shim_holds_nothing_of_its_supervisor(executor: LocalExecutor, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    handle = executor.submit(make_task(tmp_path, SLEEP))
    os.close(writer)
    assert os.read(reader, 1) == b""  # the end of the pipe: nobody else holds it open
    os.close(reader)
    assert os.readlink(f"/proc/{handle['pid']}/cwd") == "/"
    assert os.getsid(handle["pid"]) == handle["pid"]
    executor.cancel(handle)
    end_of(executor, handle)


def test_children_are_reaped(executor: LocalExecutor, tmp_path: Path) -> None:
    handle = executor.submit(make_task(tmp_path, "pass"))
    wait_until(lambda: executor.poll([handle])[0].state == "exited" and not processes.read(handle["pid"]), "no zombie")


def test_memory_of_the_whole_task(executor: LocalExecutor, tmp_path: Path) -> None:
    # neither process is above the limit, both together are
    code = """
        import os, time
        held = b"x" * (80 << 20)
        if os.fork() == 0:
            held = b"y" * (80 << 20)
        time.sleep(600)
    """
    status = run(executor, make_task(tmp_path, code, memory=128 << 20, grace=0.2))
    assert (status.code, status.cause) == (137, "memory")
    assert "more than the 128 MiB it asked for" in status.reason


def test_a_rank_that_does_not_arrive_is_named(executor: LocalExecutor, tmp_path: Path) -> None:
    code = """
        import os, pathlib, time
        pathlib.Path("arrived").mkdir(exist_ok=True)
        if os.environ["RANK"] != "1":
            pathlib.Path("arrived", os.environ["RANK"]).touch()
        time.sleep(600)
    """
    task: Task = make_task(tmp_path, code, processes=3, arrive=2.0, grace=0.2)
    status = run(executor, task)
    assert (status.rank, status.cause) == (1, "arrive")
    assert status.reason == "rank 1 never arrived (within 2 s)"
    assert status.reason in (tmp_path / "log").read_text()


def test_what_ranks_leave_behind_may_save_its_state(executor: LocalExecutor, tmp_path: Path) -> None:
    code = """
        import os, signal, sys, time
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, lambda *_: (open("saved", "w").close(), os._exit(0)))
            open("ready", "w").close()
            time.sleep(600)
        while not os.path.exists("ready"):
            time.sleep(0.01)
    """
    assert run(executor, make_task(tmp_path, code)).code == 0
    assert (tmp_path / "saved").exists()
    assert "left behind" not in (tmp_path / "log").read_text()


def test_nobody_but_rank_0_holds_the_meeting_place(executor: LocalExecutor, tmp_path: Path) -> None:
    code = """
        import os, socket, time
        if os.environ["RANK"] == "0":
            os.close(int(os.environ["ONEJOB_STORE_FD"]))
            open("closed", "w").close()
        else:
            while not os.path.exists("closed"):
                time.sleep(0.01)
            try:
                socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            except ConnectionRefusedError:
                print("refused")
    """
    assert run(executor, make_task(tmp_path, code, processes=2, arrive=None)).code == 0
    assert (tmp_path / "log").read_text() == "[rank 1] refused\n"
