"""Processes by pid and start time, read from this process's own entries in /proc."""

import os
import signal
import subprocess

import pytest

from onejob.machines import processes

STAT = (
    b"4242 (a) R (b c)) S 17 4242 4200 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 10000000 512 18446744073709551615 "
    b"1 1 0 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0\n"
)


def test_a_command_with_brackets_and_spaces() -> None:
    process = processes.parse_stat(STAT)
    assert (process.pid, process.state, process.parent, process.session) == (4242, "S", 17, 4200)
    assert process.start == 987654 / processes.TICKS
    assert process.rss == 512 * processes.PAGE


def test_ourselves() -> None:
    me = processes.read(os.getpid())
    assert me is not None
    assert (me.parent, me.session, me.ended) == (os.getppid(), os.getsid(0), False)
    assert processes.alive(me.pid, me.start)
    assert me.pid in [process.pid for process in processes.everything()]
    assert me.rss > 1 << 20


def test_a_start_that_travelled_through_text() -> None:
    start = processes.start_of(os.getpid())
    assert start is not None
    assert processes.alive(os.getpid(), float(f"{start:.2f}"))


def test_the_same_pid_with_another_start_is_another() -> None:
    start = processes.start_of(os.getpid())
    assert start is not None
    assert not processes.alive(os.getpid(), start - 1 / processes.TICKS)
    assert not processes.send(os.getpid(), start - 1 / processes.TICKS, signal.SIGKILL)


def test_nobody() -> None:
    assert processes.read(2**22 + 1) is None
    assert processes.start_of(2**22 + 1) is None
    assert not processes.send(2**22 + 1, 0.0, signal.SIGKILL)
    assert processes.environ(2**22 + 1) == []


@pytest.mark.parametrize("descriptors", [True, False], ids=["pidfd", "without-pidfd"])
def test_a_signal_reaches_exactly_the_process(monkeypatch: pytest.MonkeyPatch, descriptors: bool) -> None:
    """To a child, not to us: a signal to this process may land on a thread of some native library."""
    if not descriptors:
        monkeypatch.setattr(os, "pidfd_open", _not_here)
    with subprocess.Popen(["sleep", "60"]) as child:
        start = processes.start_of(child.pid)
        assert start is not None
        assert not processes.send(child.pid, start - 100, signal.SIGTERM), "another process had that pid before"
        assert child.poll() is None
        assert processes.send(child.pid, start, signal.SIGTERM)
        assert child.wait(10) == -signal.SIGTERM


def test_marked_by_the_environment_it_started_with() -> None:
    name, _, value = processes.environ(os.getpid())[0].decode().partition("=")
    assert os.getpid() in [process.pid for process in processes.marked(name, value)]
    assert processes.marked(name, value + "-not") == []
    assert os.getpid() not in [process.pid for process in processes.marked(name, value[:-1])]


def test_descendants() -> None:
    assert os.getpid() in [process.pid for process in processes.descendants(os.getppid())]
    assert os.getpid() not in [process.pid for process in processes.descendants(os.getpid())]


def test_memory_counts_shared_pages_once_only_where_it_matters() -> None:
    me = processes.read(os.getpid())
    assert me is not None
    assert processes.memory([me, me], limit=1 << 60) == 2 * me.rss
    exact = processes.memory([me], limit=0)
    assert 0 < exact <= me.rss * 1.1


def test_boot_names_kernel_and_namespace() -> None:
    assert processes.boot() == processes.boot() != ""
    assert "pid:[" in processes.boot()


def _not_here(pid: int) -> int:
    raise OSError(38, "Function not implemented")
