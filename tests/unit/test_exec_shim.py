"""The shim's supervision of a gang, with a gang that is none and a clock that the test turns."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from onejob.exec.decide import Order, Verdict
from onejob.exec.log import Log
from onejob.exec.shim import Supervision
from onejob.machines import processes


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeGang:
    """Ranks that end when the script says so: {seconds after the start: {rank: wait status}}."""

    def __init__(self, clock: Clock, world: int, script: dict[float, dict[int, int]], obeys: bool = True) -> None:
        self.clock, self.script, self.obeys = clock, dict(script), obeys
        self.pids = {100 + rank: rank for rank in range(world)}
        self.statuses: dict[int, int] = {}
        self.calls: list[tuple[float, str]] = []
        self.used = 0

    def start(self) -> None:
        self.began = self.clock()

    def wait(self, timeout: float) -> dict[int, int]:
        self.clock.now += max(timeout, 0.001)
        due = [at for at in self.script if self.began + at <= self.clock()]
        return self._end({rank: status for at in due for rank, status in self.script.pop(at).items()})

    def terminate(self) -> None:
        self.calls.append((self.clock() - self.began, "terminate"))
        if self.obeys:
            self._end(dict.fromkeys(self.pids.values(), 15))

    def kill(self) -> None:
        self.calls.append((self.clock() - self.began, "kill"))
        self._end(dict.fromkeys(self.pids.values(), 9))

    def clear(self, deadline: float, clock: Callable[[], float]) -> int:
        return 0

    def close(self) -> None: ...

    def memory(self) -> int:
        return self.used

    def _end(self, ended: dict[int, int]) -> dict[int, int]:
        self.statuses |= ended
        self.pids = {pid: rank for pid, rank in self.pids.items() if rank not in ended}
        return ended


class Stage:
    def __init__(self, work: Path) -> None:
        self.work, self.clock = work, Clock()
        self.reasons: list[str] = []
        (work / "started.json").write_text("{}")

    def run(self, script: dict[float, dict[int, int]], obeys: bool = True, used: int = 0, **order: object) -> Verdict:
        ordered = Order(id="t", argv=("x",), **order)  # type: ignore[arg-type]
        self.gang = FakeGang(self.clock, ordered.processes, script, obeys)
        self.gang.used = used
        log = Log(self.work / "log")
        stop = lambda: self.reasons[0] if self.reasons else ""  # noqa: E731
        verdict = Supervision(ordered, self.work, self.gang, log, stop, self.clock).run()  # type: ignore[arg-type]
        log.close()
        return verdict

    @property
    def log(self) -> list[str]:
        return (self.work / "log").read_text().splitlines()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_all_ranks_end_well(stage: Stage) -> None:
    assert stage.run({1.0: {0: 0}, 5.0: {1: 0}}, processes=2) == Verdict(0)
    assert stage.gang.calls == []


def test_the_first_failure_ends_the_others(stage: Stage) -> None:
    assert stage.run({3.0: {1: 7 << 8}}, processes=3) == Verdict(7, "exit", "rank 1 exited with code 7", 1)
    assert [name for _, name in stage.gang.calls] == ["terminate"]


def test_grace_and_then_the_end(stage: Stage) -> None:
    stage.run({}, obeys=False, timeout=20.0, grace=4.0)
    (asked, first), (killed, second) = stage.gang.calls
    assert (first, second) == ("terminate", "kill")
    assert 20.0 <= asked < 20.1
    assert 4.0 <= killed - asked < 4.2


def test_waiting_is_reported_every_ten_seconds(stage: Stage) -> None:
    (stage.work / "arrived").mkdir()
    (stage.work / "arrived" / "0").touch()
    verdict = stage.run({}, processes=3, arrive=35.0)
    assert verdict == Verdict(124, "arrive", "ranks 1, 2 never arrived (within 35 s)", 1)
    waiting = [line for line in stage.log if "waiting" in line]
    assert waiting == [f"[onejob] waiting for ranks 1, 2 (not arrived for {n} s)" for n in (10, 20, 30)]
    assert stage.log[-1] == f"[onejob] {verdict.reason}"


def test_who_has_arrived_is_not_waited_for(stage: Stage) -> None:
    (stage.work / "arrived").mkdir()
    for rank in (0, 1):
        (stage.work / "arrived" / str(rank)).touch()
    assert stage.run({500.0: {0: 0, 1: 0}}, processes=2, arrive=35.0) == Verdict(0)
    assert not (stage.work / "log").read_text()


def test_who_has_ended_is_not_waited_for(stage: Stage) -> None:
    assert stage.run({1.0: {0: 0, 1: 0, 2: 0}}, processes=3, arrive=0.5).cause == "arrive"
    assert stage.run({0.4: {0: 0, 1: 0, 2: 0}}, processes=3, arrive=0.5) == Verdict(0)


def test_a_lone_process_need_not_arrive(stage: Stage) -> None:
    assert stage.run({500.0: {0: 0}}, arrive=35.0) == Verdict(0)


def test_a_kill_for_want_of_memory_is_told(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([5, 5, 5, 6])
    monkeypatch.setattr(processes, "killed_for_memory", lambda: next(counts))
    assert stage.run({1.0: {0: 9}}).reason == "the process was killed by SIGKILL"
    assert stage.run({1.0: {0: 9}}).reason == "the process was killed by SIGKILL while the machine was out of memory"


def test_asked_to_stop(stage: Stage) -> None:
    stage.reasons = ["was asked to stop (SIGTERM)"]
    assert stage.run({}, processes=2) == Verdict(143, "stopped", "was asked to stop (SIGTERM)")


def test_a_work_folder_that_was_removed(stage: Stage) -> None:
    (stage.work / "started.json").unlink()
    verdict = stage.run({})
    assert (verdict.cause, verdict.reason) == ("stopped", "its work folder was removed")


def test_observers_elsewhere_see_it_live(stage: Stage) -> None:
    os.utime(stage.work / "started.json", (1, 1))
    stage.run({7.0: {0: 0}})
    assert (stage.work / "started.json").stat().st_mtime > 1


def test_memory_is_watched(stage: Stage) -> None:
    assert stage.run({500.0: {0: 0}}, used=1001, memory=1000).cause == "memory"
    assert stage.run({500.0: {0: 0}}, used=1000, memory=1000) == Verdict(0)
