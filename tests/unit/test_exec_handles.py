"""What a handle alone says about a task: ended, gone, on another machine, revoked."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from onejob.core.ports import Status, Task
from onejob.errors import RankError, UnavailableError
from onejob.exec import folder, local
from onejob.exec.local import LocalExecutor, adopt, revoke, status
from onejob.machines import processes


def started(work: Path, **other: Any) -> dict[str, Any]:
    """A handle of this very process: it lives."""
    value = {
        "pid": os.getpid(),
        "start": processes.start_of(os.getpid()),
        "host": socket.gethostname(),
        "boot": processes.boot(),
        "marker": "t:0",
        "time": 0.0,
        **other,
    }
    folder.claim_start(work, value)
    return {"dir": str(work), **value}


def exit_json(work: Path) -> None:
    ended = {"code": 3, "cause": "exit", "reason": "rank 1 exited with code 3", "rank": 1, "time": 5.0}
    (work / "exit.json").write_text(json.dumps(ended))


def test_it_runs(tmp_path: Path) -> None:
    assert status(started(tmp_path)) == Status("running")


def test_the_last_word_counts_even_if_the_shim_still_lives(tmp_path: Path) -> None:
    handle = started(tmp_path)
    exit_json(tmp_path)
    assert status(handle) == Status("exited", code=3, reason="rank 1 exited with code 3", rank=1, cause="exit")


def test_another_process_with_its_pid_is_not_it(tmp_path: Path) -> None:
    assert status(started(tmp_path, start=1.0)).state == "gone"


def test_after_a_restart_of_the_machine(tmp_path: Path) -> None:
    assert status(started(tmp_path, boot="an earlier one")).state == "gone"


def test_on_another_machine_while_it_is_heard_of(tmp_path: Path) -> None:
    handle = started(tmp_path, boot="another one", host="elsewhere")
    assert status(handle) == Status("running")
    with pytest.raises(UnavailableError, match="elsewhere"):
        LocalExecutor().cancel(handle)


def test_on_another_machine_and_not_heard_of(tmp_path: Path) -> None:
    handle = started(tmp_path, boot="another one", host="elsewhere")
    os.utime(tmp_path / "started.json", (1, 1))
    assert status(handle).state == "gone"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["started.json"]


def test_a_shim_that_does_not_start_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, local.START_LIMIT + 1.0])
    monkeypatch.setattr(local, "_spawn_shim", lambda task: os.getpid())
    monkeypatch.setattr(os, "waitpid", lambda pid, options: (0, 0))
    executor = LocalExecutor(clock=lambda: next(times), sleep=lambda seconds: None)
    with pytest.raises(RankError, match="did not start within 60 s") as caught:
        executor.submit(Task("t", ("x",), tmp_path, {}))
    assert caught.value.retryable
    assert folder.read(tmp_path, folder.STARTED)["revoked"]


def test_adopting(tmp_path: Path) -> None:
    assert adopt(tmp_path) is None
    handle = started(tmp_path)
    assert adopt(tmp_path) == handle


def test_revoking_is_for_good(tmp_path: Path) -> None:
    assert revoke(tmp_path)
    assert revoke(tmp_path)
    assert adopt(tmp_path) is None
    assert not folder.claim_start(tmp_path, {"pid": 1})


def test_what_has_started_can_not_be_revoked(tmp_path: Path) -> None:
    handle = started(tmp_path)
    assert not LocalExecutor().revoke(tmp_path)
    assert adopt(tmp_path) == handle


def test_a_folder_that_is_not_there_yet_can_be_revoked(tmp_path: Path) -> None:
    assert revoke(tmp_path / "later")
    assert not folder.claim_start(tmp_path / "later", {"pid": 1})


def test_a_shim_that_broke_says_why(tmp_path: Path) -> None:
    handle = started(tmp_path, start=1.0)
    (tmp_path / "shim.err").write_text("Traceback\nOSError: prctl\n")
    assert status(handle) == Status("gone", reason="OSError: prctl")


def test_the_first_claim_wins_whole(tmp_path: Path) -> None:
    assert folder.claim_start(tmp_path, {"pid": 1})
    assert not folder.claim_start(tmp_path, {"pid": 2})
    assert folder.read(tmp_path, folder.STARTED) == {"pid": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["started.json"]


def test_the_order_holds_no_environment(tmp_path: Path) -> None:
    task = Task("t", ("x",), tmp_path, {"TOKEN": "hunter2-hunter2"}, secrets=("TOKEN",))
    assert "hunter2" not in json.dumps(local._order(task))
