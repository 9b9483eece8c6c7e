"""Outcomes that are added up, figures that are reported, and ratios of turns that were taken side by side."""

from __future__ import annotations

import math

import numpy as np
import pytest

from onejob.serve.bench.outcome import Outcome, Tick, percentiles, ratio
from onejob.serve.bench.report import measured, ratios, warnings_of
from onejob.serve.bench.schedule import CLOSED, OPEN, PACED, Load

CLOSED_16 = Load(CLOSED, 16)


def outcome(
    load: Load = CLOSED_16, *, ms: float = 1.0, count: int = 1000, seconds: float = 1.0, cpu: float | None = None
) -> Outcome:
    made = Outcome(load, seconds=seconds, arrived=count, server_cpu=cpu, server_arrived=count, server_processes=2)
    made.latency.record(np.full(count, round(ms * 1e6)))
    made.ticks = [Tick(0.5, 0.5, count // 2, 0, ms, ms)]
    return made


def test_turns_add_up() -> None:
    both = Outcome(CLOSED_16)
    one, other = outcome(cpu=0.1), outcome(ms=3.0, count=500, cpu=0.2)
    other.errors["timeout"] = 2
    other.samples["timeout"] = "no answer in 10 s"
    for turn in (one, other):
        both.add(turn)
    assert (both.seconds, both.arrived, both.requests, both.failed) == (2.0, 1500, 1502, 2)
    assert both.rate == 750
    assert both.cpu_us == pytest.approx(0.3 / 1500 * 1e6)
    assert both.samples == {"timeout": "no answer in 10 s"}
    assert [tick.seconds for tick in both.ticks] == [0.5, 1.0], "one after the other"
    assert percentiles(both.latency)["max"] == 3.0
    assert percentiles(both.latency)["mean"] == pytest.approx((1000 + 1500) / 1500)


def test_cost_is_unknown_where_the_server_cannot_be_seen() -> None:
    assert outcome().cpu_us is None
    assert measured("a", outcome()).server is None
    shown = measured("a", outcome(cpu=0.5)).server
    assert shown is not None
    assert (shown.cpu_us, shown.cores, shown.processes) == (500.0, 0.5, 2)
    short = measured("a", outcome(cpu=0.01)).server
    assert short is not None
    assert short.cpu_us is None, "one hundredth of a second may be none or two"


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (CLOSED_16, "not corrected"),
        (Load(PACED, 16, 1000.0), "by the expected interval of 16 ms"),
        (Load(OPEN, 16, 1000.0), "from when each request was due"),
    ],
)
def test_it_is_said_how_latencies_were_corrected(load: Load, words: str) -> None:
    shown = measured("a", outcome(load))
    assert words in shown.correction
    assert (shown.uncorrected_ms is None) == (load is CLOSED_16)
    assert (shown.due_per_s is None) == (load is CLOSED_16)


def test_a_ratio_is_taken_turn_by_turn_so_what_slows_both_is_not_in_it() -> None:
    pairs = [(2.0, 1.0), (20.0, 10.0), (0.2, 0.1)]
    found = ratio("p50_ms", "closed", "b", "a", pairs)
    assert found is not None
    assert (found.ratio, found.low, found.high) == (pytest.approx(2.0), pytest.approx(2.0), pytest.approx(2.0))


def test_its_interval_is_students() -> None:
    """Logs 0, 0.1, 0.2: mean 0.1, deviation 0.1, t of 2 degrees 4.303."""
    found = ratio("p50_ms", "closed", "b", "a", [(math.exp(value), 1.0) for value in (0.0, 0.1, 0.2)])
    assert found is not None
    assert found.low is not None
    half = 4.303 * 0.1 / 3**0.5
    assert (math.log(found.ratio), math.log(found.low)) == (pytest.approx(0.1), pytest.approx(0.1 - half))
    many = ratio("p50_ms", "closed", "b", "a", [(1.0 + number % 2, 1.0) for number in range(61)])
    assert many is not None
    assert many.rounds == 61


def test_what_is_missing_is_left_out() -> None:
    found = ratio("cpu_us", "closed", "b", "a", [(None, 1.0), (3.0, 1.0), (2.0, 0.0)])
    assert found is not None
    assert (found.ratio, found.low, found.rounds) == (pytest.approx(3.0), None, 1)
    assert ratio("cpu_us", "closed", "b", "a", [(None, None)]) is None


def test_targets_are_compared_with_the_first() -> None:
    a, b = [outcome(count=1000), outcome(count=900)], [outcome(ms=2.0, count=500), outcome(ms=2.0, count=450)]
    found = {(one.target, one.what): one.ratio for one in ratios(["a", "b"], CLOSED_16, [a, b])}
    assert found == {
        ("b", "requests_per_s"): pytest.approx(0.5),
        ("b", "p50_ms"): pytest.approx(2.0, rel=0.01),
        ("b", "p99_ms"): pytest.approx(2.0, rel=0.01),
    }
    load = Load(OPEN, 16, 1000.0)
    given = ratios(["a", "b"], load, [[outcome(load)], [outcome(load)]])
    assert "requests_per_s" not in {one.what for one in given}, "the rate is not theirs"


def test_what_should_not_be_believed_is_warned_of() -> None:
    assert warnings_of("a", outcome()) == []
    busy = outcome()
    busy.cpu = 0.95
    assert "--processes" in warnings_of("a", busy)[0]
    late = outcome(Load(OPEN, 16, 1000.0), ms=10.0)
    late.late.record([5_000_000] * 100)
    assert "late" in warnings_of("a", late)[0]
    closing = outcome()
    closing.reconnects = 1000
    assert "connecting again" in warnings_of("a", closing)[0]
    assert "too few" in warnings_of("a", outcome(count=99))[0]
    assert "no request got a good answer" in warnings_of("a", outcome(count=0))[0]
