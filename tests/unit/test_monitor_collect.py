"""The series of an endpoint: right through restarts, crashes, two collectors and years of running."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onejob.core.counters import Counters
from onejob.monitor import collect
from onejob.monitor.collect import collect_once, interval, series_of, summarize, summary_of
from onejob.monitor.spec import Spec


def counters(success: int, rejected: int = 0, ms: float = 1.0) -> Counters:
    made = Counters({"success": success, "failure.REJECTED": rejected, "rows": success * 2, "executions": success})
    for _ in range(success + rejected):
        made.observe(int(ms * 1e6))
    return made


def leave(folder: Path, pid: int, made: Counters) -> None:
    (folder / "metrics").mkdir(exist_ok=True)
    (folder / "metrics" / f"{pid}.json").write_text(json.dumps({"id": f"{pid}:1", **made.to_json()}))


def test_interval_is_the_difference() -> None:
    line = interval(counters(10), counters(30, 5), 10.0)
    assert {name: line[name] for name in ("requests", "rows", "errors", "rate", "executions")} == {
        "requests": 25,
        "rows": 40,
        "errors": 5,
        "rate": 2.5,
        "executions": 20,
    }
    assert line["p50_ms"] == pytest.approx(1.0, rel=0.2)


def test_counts_that_fell_are_taken_as_new() -> None:
    assert interval(counters(10), counters(3), 1.0)["requests"] == 3


def test_an_interval_without_requests_has_no_percentiles() -> None:
    line = interval(counters(3), counters(3), 5.0)
    assert (line["requests"], line["rate"], line["p99_ms"]) == (0, 0.0, None)


def test_summarize_merges_histograms_not_percentiles() -> None:
    quick, slow = counters(99, ms=1), counters(1, ms=100)
    lines = [
        {"time": 10.0, **interval(Counters(), quick, 10.0)},
        {"time": 20.0, **interval(quick, quick + slow, 10.0)},
    ]
    whole = summarize(lines)
    assert whole["requests"] == 100
    assert whole["rate"] == 5.0
    assert whole["p50_ms"] == pytest.approx(1.0, rel=0.2)
    assert whole["p99_ms"] < 2
    assert summarize(lines, since=10.0)["requests"] == 1
    assert summarize([])["rate"] is None


def test_collect_adds_what_happened_since_the_last_line(tmp_path: Path) -> None:
    leave(tmp_path, 1, counters(5))
    assert collect_once(tmp_path, 100.0) is not None
    leave(tmp_path, 1, counters(9))
    leave(tmp_path, 2, counters(1, 1))
    assert collect_once(tmp_path, 101.0) is None  # another collector was here a second ago
    line = collect_once(tmp_path, 105.0)
    assert line is not None
    assert (line["requests"], line["errors"], line["rate"], line["replicas"]) == (6, 1, 1.2, 2)
    assert [entry["requests"] for entry in series_of(tmp_path)] == [5, 6]
    assert [entry["requests"] for entry in series_of(tmp_path, since=100.0)] == [6]
    assert summary_of(tmp_path)["requests"] == 11


def test_an_idle_endpoint_gets_a_line_only_so_often(tmp_path: Path) -> None:
    leave(tmp_path, 1, counters(5))
    written = [collect_once(tmp_path, 100.0 + 5 * n) is not None for n in range(20)]
    assert sum(written) == 3  # the requests, that there are none, and a minute later again


def test_half_a_line_of_a_killed_collector_is_cut_off(tmp_path: Path) -> None:
    leave(tmp_path, 1, counters(5))
    collect_once(tmp_path, 100.0)
    with (tmp_path / "series.jsonl").open("ab") as file:
        file.write(b'{"time":105,"requ')
    leave(tmp_path, 1, counters(8))
    collect_once(tmp_path, 110.0)
    lines: list[Any] = [json.loads(line) for line in (tmp_path / "series.jsonl").read_text().splitlines()]
    assert [line["requests"] for line in lines] == [5, 3]


@pytest.mark.parametrize("point", ["monitor.before_append", "monitor.before_trim"])
def test_a_collector_that_dies_anywhere_loses_and_repeats_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    class Death(BaseException):
        pass

    def die(reached: str) -> None:
        if reached == point:
            raise Death

    leave(tmp_path, 1, counters(5))
    collect_once(tmp_path, 1000.0)
    leave(tmp_path, 1, counters(8))
    monkeypatch.setattr(collect, "reach", die)
    with pytest.raises(Death):
        collect_once(tmp_path, 2000.0, keep=500.0)
    monkeypatch.undo()
    leave(tmp_path, 1, counters(9))
    collect_once(tmp_path, 2010.0, keep=500.0)
    assert sum(line["requests"] for line in series_of(tmp_path, since=1000.0)) == 4
    assert series_of(tmp_path)[0]["time"] > 1000.0, "the old line is cut off by the next one"


def test_a_clock_that_jumps_back_loses_no_request(tmp_path: Path) -> None:
    leave(tmp_path, 1, counters(5))
    collect_once(tmp_path, 1000.0)
    leave(tmp_path, 1, counters(7))
    line = collect_once(tmp_path, 400.0)
    assert line is not None
    assert (line["requests"], line["rate"]) == (2, None)


def test_the_series_is_bounded_by_age_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(1, 30):
        leave(tmp_path, 1, counters(n))
        collect_once(tmp_path, 1000.0 * n, keep=5000.0)
    assert [entry["time"] for entry in series_of(tmp_path)] == [24000.0 + 1000.0 * n for n in range(6)]
    monkeypatch.setattr(collect, "MAX_BYTES", 4000)
    for n in range(30, 60):
        leave(tmp_path, 1, counters(n))
        collect_once(tmp_path, 1000.0 * n, keep=1e9)
        assert (tmp_path / "series.jsonl").stat().st_size < 6000
    assert series_of(tmp_path)[-1]["time"] == 59000.0
    assert series_of(tmp_path)[-1]["requests"] == 1


def test_spec() -> None:
    spec = Spec.model_validate({"interval": "1m", "keep": "2d"})
    assert (spec.interval, spec.keep) == (60.0, 2 * 86400.0)
    assert (Spec().interval, Spec().keep) == (5.0, 7 * 86400.0)
