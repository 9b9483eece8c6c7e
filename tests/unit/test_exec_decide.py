"""The shim's decisions, as tables: who failed first, what is overdue, and the last word."""

import pytest

from onejob.exec.decide import Order, Verdict, at_the_end, exit_code, failed, next_pause, overdue, ranks, too_big

ORDER = Order(id="t", argv=("x",), processes=3, timeout=30.0, arrive=10.0, memory=2 << 30)
EXIT_1, EXIT_5, KILLED, TERMINATED, CRASHED = 1 << 8, 5 << 8, 9, 15, 11 | 0x80  # wait statuses


@pytest.mark.parametrize(("status", "code"), [(0, 0), (EXIT_1, 1), (KILLED, 137), (TERMINATED, 143), (CRASHED, 139)])
def test_exit_codes_are_the_shells(status: int, code: int) -> None:
    assert exit_code(status) == code


@pytest.mark.parametrize(
    ("ended", "verdict"),
    [
        ({}, None),
        ({0: 0, 1: 0}, None),
        ({0: 0, 2: EXIT_5}, Verdict(5, "exit", "rank 2 exited with code 5", 2)),
        ({0: EXIT_1, 1: KILLED}, Verdict(137, "signal", "rank 1 was killed by SIGKILL", 1)),
        ({0: EXIT_1, 2: CRASHED}, Verdict(139, "signal", "rank 2 was killed by SIGSEGV", 2)),
        ({1: EXIT_5, 0: EXIT_1}, Verdict(1, "exit", "rank 0 exited with code 1", 0)),
        ({0: 63}, Verdict(191, "signal", "rank 0 was killed by signal 63", 0)),
    ],
)
def test_who_failed(ended: dict[int, int], verdict: Verdict | None) -> None:
    assert failed(ended, world=3) == verdict


def test_a_lone_process_is_no_rank() -> None:
    assert failed({0: EXIT_5}, world=1) == Verdict(5, "exit", "the process exited with code 5", 0)


@pytest.mark.parametrize(
    ("elapsed", "missing", "cause", "reason"),
    [
        (9.9, [1], None, None),
        (10.0, [], None, None),
        (10.0, [1], "arrive", "rank 1 never arrived (within 10 s)"),
        (11.0, [2, 1], "arrive", "ranks 1, 2 never arrived (within 10 s)"),
        (30.0, [1], "timeout", "ran past its limit of 30 s"),
    ],
)
def test_what_is_overdue(elapsed: float, missing: list[int], cause: str | None, reason: str | None) -> None:
    verdict = overdue(ORDER, elapsed, missing)
    assert (verdict.cause, verdict.reason) == (cause, reason) if cause else verdict is None
    if cause == "arrive":
        assert verdict is not None
        assert verdict.rank == min(missing)


def test_without_limits_nothing_is_overdue() -> None:
    assert overdue(Order(id="t", argv=("x",)), 1e9, [0]) is None
    assert too_big(Order(id="t", argv=("x",)), 1 << 60) is None


def test_memory() -> None:
    assert too_big(ORDER, 2 << 30) is None
    assert too_big(ORDER, (2 << 30) + (300 << 20)) == Verdict(
        137, "memory", "used 2.29 GiB of memory, more than the 2.00 GiB it asked for"
    )


STOPPED = Verdict(143, "stopped", "was asked to stop (SIGTERM)")


@pytest.mark.parametrize(
    ("verdict", "codes", "last"),
    [
        (None, {0: 0, 1: 0}, Verdict(0)),
        (STOPPED, {0: 0, 1: 0}, Verdict(0)),
        (STOPPED, {0: 75, 1: 143}, Verdict(75, "stopped", STOPPED.reason)),
        (Verdict(124, "timeout", "late"), {0: 0}, Verdict(124, "timeout", "late")),
        (Verdict(5, "exit", "rank 1", 1), {0: 143, 1: 5}, Verdict(5, "exit", "rank 1", 1)),
    ],
)
def test_the_last_word(verdict: Verdict | None, codes: dict[int, int], last: Verdict) -> None:
    assert at_the_end(verdict, codes) == last


def test_pauses_end_when_something_falls_due() -> None:
    assert next_pause(10.0, [None, 12.0, 10.25], longest=0.5) == 0.25
    assert next_pause(10.0, [], longest=0.5) == 0.5
    assert next_pause(10.0, [3.0], longest=0.5) == 0.0


def test_names_of_ranks() -> None:
    assert (ranks([3]), ranks({2, 0})) == ("rank 3", "ranks 0, 2")
