"""The join of traffic and late labels: each odd thing has one meaning, is counted once, and nothing else changes."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onejob.core.traffic import SECOND
from onejob.errors import DamagedError
from onejob.monitor.capture import Traffic
from onejob.monitor.joined import DAY, NEVER_LABELLED, Counts, Joined, coverage, join, overall
from onejob.monitor.labels import Label, read_labels

HOUR = 3600 * SECOND


def traffic(*rows: tuple[str, int, int, str | None], engine: str = "d1", **inputs: list[Any]) -> Traffic:
    """Rows of (request, row, event time, key); they arrive in this order."""
    requests, numbers, times, keys = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [], [])
    count = len(rows)
    return Traffic(
        request=np.array(requests, object),
        row=np.array(numbers, np.int32),
        arrived=np.arange(count),
        time=np.array(times, np.int64),
        key=np.array(keys, object),
        engine=np.full(count, engine, object),
        inputs={name: np.array(values) for name, values in inputs.items()} or {"x": np.arange(count)},
        outputs={"p": np.linspace(0, 1, count)},
    )


def by_key(key: str, value: Any, order: int = 1, line: int = 1, time: int = 0) -> Label:
    return Label(order, line, value, time, time, key=key)


def by_request(request: str, row: int | None, value: Any, order: int = 1, line: int = 1, time: int = 0) -> Label:
    return Label(order, line, value, time, time, request=request, row=row)


def counts(joined: Joined) -> dict[str, int]:
    return {name: value for name, value in asdict(joined.counts).items() if value}


def test_labels_find_their_rows_by_key_and_by_request() -> None:
    rows = traffic(("r1", 0, 3, "a"), ("r1", 1, 2, None), ("r2", 0, 1, None))
    joined = join(rows, [by_key("a", 1, time=10), by_request("r1", 1, 0, time=20), by_request("r2", None, 1, time=30)])
    assert joined.traffic.time.tolist() == [1, 2, 3], "in the order of event time"
    assert joined.label.tolist() == [1, 0, 1]
    assert joined.label_time.tolist() == [30, 20, 10]
    assert joined.traffic.inputs["x"].tolist() == [2, 1, 0]
    assert joined.labelled.all()
    assert counts(joined) == {}


def test_rows_without_a_label_are_pending_and_then_never() -> None:
    rows = traffic(("r1", 0, 0, None), ("r2", 0, 5 * DAY, None), ("r3", 0, 9 * DAY, None))
    joined = join(rows, [by_request("r3", 0, 1)], horizon=7 * DAY)
    assert joined.label.tolist() == [None, None, 1]
    assert joined.label_time.tolist()[:2] == [NEVER_LABELLED] * 2
    assert counts(joined) == {"never": 1, "pending": 1}
    assert counts(join(rows, [], now=13 * DAY, horizon=7 * DAY)) == {"never": 2, "pending": 1}


def test_a_label_before_its_traffic_waits_then_fits_and_else_is_unknown() -> None:
    early = by_request("r2", 0, 1, time=DAY)
    first = join(traffic(("r1", 0, DAY, None)), [early])
    assert counts(first) == {"waiting": 1, "pending": 1}
    both = join(traffic(("r1", 0, DAY, None), ("r2", 0, DAY, None)), [early])
    assert counts(both) == {"pending": 1}
    late = join(traffic(("r1", 0, 40 * DAY, None)), [early], horizon=30 * DAY)
    assert counts(late) == {"unknown": 1, "pending": 1}


def test_what_is_sent_twice_counts_once_and_is_no_later() -> None:
    labels = [by_key("a", 1, 1, 1, 5), by_key("a", 1, 1, 2, 6), by_key("a", True, 2, 1, 9), by_key("a", 1.0, 3, 1, 10)]
    joined = join(traffic(("r", 0, 0, "a")), labels)
    assert (joined.label.tolist(), joined.label_time.tolist()) == ([1], [5])
    assert counts(joined) == {"duplicates": 3}
    assert joined.history == {}


def test_a_later_batch_corrects_and_its_history_is_kept_whatever_the_times_say() -> None:
    labels = [by_key("a", 1, 3, 1, 1), by_key("a", 0, 1, 1, 500), by_key("a", 0, 2, 1, 900)]
    joined = join(traffic(("r", 0, 0, "a")), labels)
    assert (joined.label.tolist(), joined.label_time.tolist()) == ([1], [1])
    assert [label.order for label in joined.history[0]] == [1]
    assert counts(joined) == {"corrections": 1, "duplicates": 1}


def test_conflicts_in_one_batch_are_counted_and_the_last_line_wins() -> None:
    labels = [by_request("r", 0, 0, 1, 9), by_request("r", 0, 1, 1, 2), by_key("a", 1, 1, 3)]
    joined = join(traffic(("r", 0, 0, "a")), labels)
    assert joined.label.tolist() == [0]
    assert counts(joined) == {"conflicts": 1}


def test_a_label_that_does_not_say_which_row_is_left_out() -> None:
    rows = traffic(("r", 0, 0, None), ("r", 1, 0, None), ("one", 0, 0, None))
    joined = join(rows, [by_request("r", None, 1), by_request("r", 7, 1), by_request("one", None, 0)])
    assert joined.label.tolist() == [None, None, 0]
    assert counts(joined) == {"ambiguous": 1, "waiting": 1, "pending": 2}


def test_a_retry_counts_once_and_another_question_of_the_same_key_does_not() -> None:
    rows = traffic(("r1", 0, 5, "a"), ("r2", 0, 5, "a"), ("r3", 0, 6, "a"))
    joined = join(rows, [by_key("a", 1)])
    assert joined.traffic.request.tolist() == ["r1", "r3"]
    assert joined.label.tolist() == [1, 1]
    assert counts(joined) == {"repeated": 1}
    same = traffic(("r", 0, 1, None), ("r", 0, 2, None), ("r", 0, 3, None), x=[7, 7, 8])
    joined = join(same, [by_request("r", 0, 1)])
    assert len(joined.traffic) == 2, "an id that a client uses for several questions is no retry"
    assert counts(joined) == {"repeated": 1, "ambiguous": 1, "pending": 2}


def test_two_engines_that_answered_the_same_are_two_rows() -> None:
    one, two = traffic(("r1", 0, 5, "a")), traffic(("r1", 0, 5, "a"), engine="d2")
    fields = ("request", "row", "arrived", "time", "key", "engine")
    both = Traffic(
        *(np.concatenate([getattr(one, name), getattr(two, name)]) for name in fields),
        inputs={"x": np.arange(2)},
        outputs={},
    )
    joined = join(both, [by_key("a", 1)])
    assert joined.traffic.engine.tolist() == ["d1", "d2"]
    assert joined.label.tolist() == [1, 1]


def test_nothing_joined_with_nothing() -> None:
    joined = join(traffic(), [])
    assert (len(joined.traffic), joined.counts, coverage(joined)) == (0, Counts(), [])
    assert overall(joined) == {"label_coverage": None}


def test_coverage_and_delay_by_block_of_event_time() -> None:
    rows = traffic(*((f"r{n}", 0, n * 6 * HOUR, f"k{n}") for n in range(8)))
    labels = [by_key(f"k{n}", 1, time=n * 6 * HOUR + (n + 1) * HOUR) for n in (0, 1, 2, 4)]
    joined = join(rows, labels)
    first, second = coverage(joined)
    assert (first.begins, first.rows, first.labelled, first.coverage) == (0.0, 4, 3, 0.75)
    assert (first.delay_median, first.delay_p90) == (2 * 3600.0, pytest.approx(2.8 * 3600))
    assert (second.begins, second.rows, second.labelled, second.delay_median) == (86400.0, 4, 1, 5 * 3600.0)
    shifted = coverage(joined, offset=-6 * HOUR)
    assert [(block.begins, block.rows) for block in shifted] == [(-21600.0, 3), (64800.0, 4), (151200.0, 1)]
    assert overall(joined) == {"label_coverage": 0.5, "label_delay_median": 9000.0, "label_delay_p90": 15840.0}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_a_bad_file_costs_nothing_else(seed: int) -> None:
    """10 % duplicates, unknown ids and conflicting values among good labels: the good ones are joined as they are."""
    source = random.Random(seed)
    count = 40
    rows = traffic(*((f"r{n}", 0, n, f"k{n}") for n in range(count)))
    good = [by_key(f"k{n}", source.randrange(2), 1, n, time=100 + n) for n in range(count) if source.random() < 0.8]
    chosen = source.sample(good, min(len(good), 4))
    duplicates = [replace(label, order=2, line=line) for line, label in enumerate(chosen)]
    conflicts = [replace(label, order=2, line=50 + line, value=1 - label.value) for line, label in enumerate(chosen)]
    unknown = [by_key(f"nobody{n}", 1, 2, 90 + n, time=100) for n in range(3)]
    everything = [*good, *duplicates, *conflicts, *unknown]
    source.shuffle(everything)
    joined = join(rows, everything)
    expected: dict[str, Any] = {label.key: label.value for label in good}  # type: ignore[misc]
    expected |= {label.key: label.value for label in conflicts}
    assert {k: v for k, v in zip(joined.traffic.key, joined.label, strict=True) if v is not None} == expected
    found = joined.counts
    assert (found.duplicates, found.conflicts, found.corrections) == (len(chosen), len(chosen), 0)
    assert (found.waiting, found.pending) == (3, count - len(good))
    assert join(rows, [*everything, *everything]).label.tolist() == joined.label.tolist(), "twice is once"


def test_a_batch_that_is_damaged_is_named_with_its_line(tmp_path: Any) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_bytes(b'{"order":1,"line":1,"label":1,"time":null,"arrived":5,"key":"a"}\n{"order":1}\n')
    with pytest.raises(DamagedError, match=r"labels\.jsonl: line 2"):
        read_labels([path])


def test_a_label_for_no_row_that_was_sent_twice_waits_once() -> None:
    joined = join(traffic(("r1", 0, 10, None)), [by_key("lost", 1, order=1), by_key("lost", 1, order=2)])
    assert joined.counts.waiting + joined.counts.unknown == 1
