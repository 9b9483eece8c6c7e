"""The search for the highest rate that keeps a goal, on servers that are formulas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onejob.errors import UsageError
from onejob.serve.bench.outcome import Outcome
from onejob.serve.bench.schedule import OPEN, Load
from onejob.serve.bench.search import Goals, Search, parse_goals


def climb(search: Search, limit: float) -> list[float]:
    tried = []
    while (rate := search.next_rate) is not None:
        tried.append(rate)
        search.learn(rate <= limit)
    return tried


@given(st.floats(1, 1e6), st.floats(1, 1e3))
def test_it_ends_within_a_twentieth_below_the_limit(limit: float, start: float) -> None:
    search = Search(start)
    climb(search, limit)
    assert search.held is not None
    assert search.failed is not None
    assert search.held <= limit < search.failed <= search.held * 1.05 * (1 + 1e-9)


def test_a_server_that_holds_nothing_has_an_end_too() -> None:
    search = Search(100)
    assert len(climb(search, 0.0)) <= 60
    assert search.held is None


def test_a_step_that_fails_once_is_tried_again_and_only_then_believed() -> None:
    search = Search(100)
    search.learn(False)
    assert (search.next_rate, search.failed) == (100, None)
    search.learn(True)
    assert (search.next_rate, search.held) == (200, 100)
    search.learn(False)
    search.learn(False)
    assert search.failed == 200


def test_a_limit_that_never_comes_ends_the_search_all_the_same() -> None:
    search = Search(1, most=10)
    assert len(climb(search, 1e12)) == 10
    assert search.held == 512


def step(latencies_ms: list[float], *, errors: int = 0, arrived: int | None = None) -> Outcome:
    made = Outcome(Load(OPEN, 10, 100.0), seconds=1.0)
    made.latency.record([round(value * 1e6) for value in latencies_ms])
    made.arrived = len(latencies_ms) if arrived is None else arrived
    if errors:
        made.errors["status 503"] = errors
    return made


def test_goals_say_what_broke_them() -> None:
    goals = parse_goals(["p99_ms=10, p50_ms=2", "errors=1%"])
    assert goals == Goals({"p99": 10.0, "p50": 2.0}, 0.01)
    assert str(goals) == "p99 <= 10 ms, p50 <= 2 ms, errors <= 0.01"
    assert goals.broken_by(step([1.0] * 100)) == ""
    assert goals.broken_by(step([1.0] * 98 + [11.0, 11.0])).startswith("p99 11")
    assert goals.broken_by(step([1.0] * 99 + [11.0])) == ""
    assert goals.broken_by(step([1.0] * 99, errors=1)) == ""
    assert goals.broken_by(step([1.0] * 97, errors=3)) == "errors 3.000%"
    assert goals.broken_by(step([1.0] * 1000, arrived=900)) == "900 of 1,000 answered in time"
    assert goals.broken_by(step([1.0] * 1000, arrived=965)) == "", "ten may be on their way"
    assert goals.broken_by(step([])) == "p99 unknown"


@pytest.mark.parametrize(
    "text", ["p99=10", "p99_ms=fast", "p99_ms=0", "p99_ms=-1", "speed_ms=3", "errors=1%", "p99_ms"]
)
def test_what_is_no_goal_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_goals([text])


def test_any_percentile_can_be_a_goal() -> None:
    assert parse_goals(["p99.9_ms=5", "max_ms=100", "mean_ms=1"]).latency_ms == {
        "p99.9": 5.0,
        "max": 100.0,
        "mean": 1.0,
    }
