"""Late labels: the good rows are kept durably, the bad ones named; numbered in one order whatever the clock does."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from onejob.core.traffic import LABELS, OPEN, hidden, key_text, moment, secret_of
from onejob.errors import BadRequestError
from onejob.families.tabular.encode import Encoding
from onejob.families.tabular.encode import Label as LabelColumn
from onejob.monitor.labels import Label, read_labels
from onejob.monitor.labels import summary as summary_of
from onejob.serve import labels as labels_module
from onejob.serve.identify import Roles, identify
from onejob.serve.labels import Batch, LabelLog, Names, mend, parse, read
from onejob.serve.spool import rescue, sealed_in

ROLES = Roles("late", "departs", "flight")
BINARY = Encoding(LabelColumn("late", "binary"), (), ()).encode_label
CLASSES = Encoding(LabelColumn("kind", "multiclass", ("1", "02", "no")), (), ()).encode_label
AMOUNT = Encoding(LabelColumn("amount", "regression"), (), ()).encode_label


def taken(data: str, kind: str, check: Any = BINARY, names: Names | None = None) -> Batch:
    rows, text = parse(data.encode(), kind)
    return read(rows, names or Names.of(ROLES), check, text=text)


def told(batch: Batch) -> list[tuple[int, str]]:
    return [(refused.line, refused.reason) for refused in batch.refused]


def made(folder: Path, **more: Any) -> LabelLog:
    return LabelLog(folder, ROLES, BINARY, **more)


def kept(folder: Path) -> list[Label]:
    rescue(folder / LABELS, mend)
    return read_labels(sealed_in(folder / LABELS))


# ---- reading


def test_the_three_forms_say_the_same() -> None:
    message = '{"labels": [{"id": "a", "label": 1, "time": 5}, {"request_id": "r", "row": 2, "label": false}]}'
    lines = '{"flight": "a", "late": 1, "label_time": 5}\n\n{"request_id": "r", "row": 2, "label": false}\n'
    table = '\ufeffflight,request_id,row,late,label_time\r\n"a",,,1,5\r\nx,r,2,FALSE,\r\n'
    found = [
        [(label.key, label.request, label.row, label.value, label.time) for label in taken(data, kind).labels]
        for data, kind in ((message, "application/json"), (lines, "application/x-ndjson"), (table, "text/csv; a=b"))
    ]
    assert found[0] == found[1] == found[2] == [("a", None, None, 1, 5_000_000), (None, "r", 2, False, None)]


def test_each_bad_row_is_named_and_the_good_ones_stay() -> None:
    rows: list[Any] = [
        {"id": "a", "label": 1},
        {"id": "b", "label": "maybe"},
        {"label": 1},
        {"id": "c"},
        {"id": 1.5, "label": 1},
        {"id": "d", "label": 1, "time": "yesterday"},
        {"id": "e", "label": 1, "time": "2024-01-01T00:00:00"},
        {"request_id": "r", "row": -1, "label": 1},
        {"id": "f", "label": [1]},
        17,
        {"id": "", "label": 1},
        {"id": "g", "label": 0.5},
        {"id": 7, "label": True},
    ]
    batch = taken(json.dumps({"labels": rows}), "")
    assert [(label.line, label.key, label.value) for label in batch.labels] == [(1, "a", 1), (13, "7", True)]
    reasons = dict(told(batch))
    assert list(reasons) == list(range(2, 13))
    for line, words in {
        2: "is no label of this model: ",
        3: "has neither flight nor id nor key nor request_id",
        4: "has no late or label",
        5: "is no key: text or a whole number",
        6: "is not a time: ISO text such as",
        7: "has no time zone",
        8: "is no row of a request",
        9: "is no label: text, a number",
        10: "is no record",
        11: "has neither",
        12: "is no label of this model: ",
    }.items():
        assert words in reasons[line], line
    assert batch.refused[0].value == "maybe"
    assert "column 'late': 'maybe' is not 0/1" in batch.refused[0].reason


def test_broken_lines_are_named_and_the_others_read() -> None:
    lines = '{"id": "a", "label": 1}\n{"id": \n\xff\n[]\n{"id": "b", "label": 0}'
    batch = taken(lines, "application/x-ndjson")
    assert [label.line for label in batch.labels] == [1, 5]
    assert [line for line, _ in told(batch)] == [2, 3, 4]
    assert "is no line of JSON" in batch.refused[0].reason
    table = "id,label\na,1\nb\nc,1,extra\nd,0\n"
    batch = taken(table, "text/csv")
    assert [(label.line, label.key) for label in batch.labels] == [(2, "a"), (4, "c"), (5, "d")]
    assert told(batch) == [(3, "has no late or label")]


@pytest.mark.parametrize(
    ("check", "texts", "values"),
    [
        (BINARY, ["1", "0", "true", "1.0", "2", "no"], [1, 0, True, 1.0, None, None]),
        (CLASSES, ["1", "02", "no", "2", "yes"], ["1", "02", "no", None, None]),
        (AMOUNT, ["1.5", "-3", "1e3", "inf", "much"], [1.5, -3, 1000.0, None, None]),
        (None, ["1.5", "x", "true"], [1.5, "x", True]),
    ],
)
def test_text_is_read_as_the_family_wants_it(check: Any, texts: list[str], values: list[Any]) -> None:
    batch = taken("id,label\n" + "".join(f"k{n},{text}\n" for n, text in enumerate(texts)), "text/csv", check)
    found = {label.key: label.value for label in batch.labels}
    expected = {f"k{n}": value for n, value in enumerate(values) if value is not None}
    assert found == expected
    assert [type(found[key]) for key in expected] == [type(value) for value in expected.values()]
    assert len(batch.refused) == values.count(None)


def test_columns_by_other_names_leave_the_usual_ones_out() -> None:
    names = Names.of(ROLES, {"key": "k", "label": None})
    batch = taken('{"labels": [{"k": "a", "label": 1}, {"id": "b", "label": 1}]}', "", names=names)
    assert [label.key for label in batch.labels] == ["a"]
    assert Names.of(Roles(time="time")).time == ("label_time",), "the job's own time is the event's"


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        ("{", "", "failed to parse"),
        ("[]", "application/json", "'labels' must be an array"),
        ('{"labels": 3}', "", "'labels' must be an array"),
        ("a", "image/png", "can't be read from 'image/png'"),
    ],
)
def test_what_is_no_message_of_labels(data: str, kind: str, words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        parse(data.encode(), kind)


def test_a_table_that_is_not_text() -> None:
    rows, _ = parse(b"id,label\n\xff,1\n", "text/csv")
    with pytest.raises(BadRequestError, match="not UTF-8"):
        list(rows)


# ---- keeping


def test_taken_labels_are_durable_and_come_back_in_their_order(tmp_path: Path) -> None:
    log = made(tmp_path, clock=lambda: 100.0)
    assert log.take([(1, {"id": "a", "label": 1, "time": 7}), (2, {"id": "b", "label": "x"})]).refused[0].line == 2
    log.take([(5, {"request_id": "r", "row": 1, "label": 0})])
    (path,) = (tmp_path / LABELS / OPEN).iterdir()
    assert len(path.read_bytes().splitlines()) == 2, "before anything is sealed"
    log.seal()
    first, second = kept(tmp_path)
    assert (first.key, first.value, first.time, first.line) == ("a", 1, 7_000_000, 1)
    assert (second.request, second.row, second.time, second.arrived) == ("r", 1, 100_000_000, 100_000_000)
    assert first.order < second.order
    assert log.counts() == {"labels": 2, "labels_refused": 1}
    (sealed,) = sealed_in(tmp_path / LABELS)
    assert summary_of(sealed) == {"format": 1, "rows": 2, "begins": 7.0, "ends": 100.0}


def test_strict_keeps_all_or_none(tmp_path: Path) -> None:
    log = made(tmp_path)
    batch = log.take([(1, {"id": "a", "label": 1}), (2, {"id": "b"})], strict=True)
    assert (len(batch.labels), len(batch.refused)) == (0, 1)
    assert log.take([(1, {"id": "a", "label": 1})], strict=True).labels
    log.seal()
    assert len(kept(tmp_path)) == 1


def test_the_order_of_batches_survives_a_clock_that_jumps_back_and_another_writer(tmp_path: Path) -> None:
    now = [1e9]
    for value, jump in ((0, 1e9), (1, 1e6), (0, 2e9), (1, 5.0)):
        now[0] = jump
        log = made(tmp_path, clock=lambda: now[0])
        log.take([(1, {"id": "a", "label": value})])
        log.seal()
    found = kept(tmp_path)
    assert [label.value for label in found] == [0, 1, 0, 1]
    assert len({label.order for label in found}) == 4


def test_a_killed_writers_half_line_is_cut(tmp_path: Path) -> None:
    log = made(tmp_path)
    log.take([(1, {"id": "a", "label": 1})])
    (path,) = (tmp_path / LABELS / OPEN).iterdir()
    whole = path.read_bytes()
    (path.parent / "0000000000002-2-1.jsonl").write_bytes(whole + whole[:20])
    (path.parent / "0000000000003-3-1.jsonl").write_bytes(whole[:20])
    assert len(rescue(tmp_path / LABELS, mend)) == 1, "the first is still written to, the third holds nothing whole"
    log.seal()
    assert [label.key for label in kept(tmp_path)] == ["a", "a"]


def test_a_full_disk_keeps_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = made(tmp_path)
    log.take([(1, {"id": "a", "label": 1})])

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            log.take([(1, {"id": "b", "label": 1})])
    assert log.counts()["labels"] == 1
    log.take([(1, {"id": "c", "label": 1})])
    log.seal()
    assert [label.key for label in kept(tmp_path)] == ["a", "c"]


def test_private_keys_are_hashed_or_refused(tmp_path: Path) -> None:
    log = made(tmp_path, private={"flight": "hash"})
    log.take([(1, {"id": "secret", "label": 1})])
    log.seal()
    assert kept(tmp_path)[0].key == hidden("secret", secret_of(tmp_path))
    dropped = made(tmp_path / "other", private={"flight": "drop"})
    batch = dropped.take([(1, {"id": "secret", "label": 1}), (2, {"request_id": "r", "label": 1})])
    assert [label.request for label in batch.labels] == ["r"]
    assert "name the request" in batch.refused[0].reason
    assert "secret" not in (tmp_path / "other" / LABELS / OPEN).iterdir().__next__().read_text()


def test_files_are_sealed_by_age_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels_module, "TICK_SECONDS", 0.001)
    log = made(tmp_path, age=60)
    log.take([(1, {"id": "a", "label": 1})])
    log.start()
    log.stop()
    assert len(sealed_in(tmp_path / LABELS)) == 1


# ---- times and keys


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (1.5, 1_500_000),
        ("1970-01-01T00:00:01Z", 1_000_000),
        ("1970-01-01T01:00:00.25+01:00", 250_000),
        ("2013-03-10 02:30:00-05:00", 1_362_900_600_000_000),
        (-1, -1_000_000),
    ],
)
def test_moments(value: Any, expected: int) -> None:
    assert moment(value) == expected


@pytest.mark.parametrize("value", ["", "noon", "2013-01-01", "2013-01-01T10:00", True, None, [], float("nan"), 1.7e12])
def test_what_is_no_moment(value: Any) -> None:
    with pytest.raises(ValueError, match=r"is not a time|has no time zone|milliseconds"):
        moment(value)


def test_keys() -> None:
    assert (key_text("a b"), key_text(7)) == ("a b", "7")
    for value in ("", "x" * 257, 1.0, True, None, ["a"]):
        with pytest.raises(ValueError, match="is no key"):
            key_text(value)


def test_what_a_request_carries_is_read_or_refused_by_row_and_value() -> None:
    told = identify({"departs": [5, None], "flight": ["a", None], "x": [1, 2]}, ROLES, 2, 9)
    assert (told.times_of(2), list(told.keys_of(2))) == ([5_000_000, 9], ["a", None])
    nothing = identify({"x": [1, 2]}, ROLES, 2, 9)
    assert (nothing.times_of(2), list(nothing.keys_of(2))) == ([9, 9], [None, None])
    for columns, words in (
        ({"departs": [5, "noon"]}, r"column 'departs', row 1: 'noon' is not a time"),
        ({"flight": [["a"], "b"]}, r"column 'flight', row 0: \['a'\] is no key"),
        ({"flight": ["a"]}, "flight has 1, not 2"),
    ):
        with pytest.raises(BadRequestError, match=words):
            identify(columns, ROLES, 2, 9)
