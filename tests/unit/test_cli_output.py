"""Words and tables: what a person reads."""

from __future__ import annotations

import io
import json
import math

import pytest

from onejob.cli import output
from onejob.core.state import StepState
from onejob.loop.views import EndpointView, RunView, StepView, to_json


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0, "0.00 s"),
        (0.4234, "0.42 s"),
        (0.996, "1.0 s"),
        (9.96, "10 s"),
        (59.6, "1 min"),
        (65, "1 min 5 s"),
        (3600, "1 h"),
        (3599.7, "1 h"),
        (7800, "2 h 10 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert output.duration(seconds) == text


def test_how_an_endpoint_is_asked() -> None:
    assert output.curl("http://127.0.0.1:80", "/v2") == "curl -s http://127.0.0.1:80/v2"
    there = "curl -s --unix-socket '/run/my model.sock' http://localhost/v2"
    assert output.curl("http+unix://%2Frun%2Fmy%20model.sock", "/v2") == there


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (3 * 1024**5, "3072.0 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert output.size(count) == text


def test_ago_is_rough_and_never_in_the_future() -> None:
    assert [output.ago(t, 100000) for t in (None, 99990, 99000, 90000, 0)] == [
        "",
        "10 s ago",
        "16 min ago",
        "2 h ago",
        "1 d ago",
    ]
    assert output.ago(200000, 100000) == "0 s ago"


def test_numbers() -> None:
    values = [True, None, 12345, 0.70312345, 123456.7, 1e-7, "text", [1, 2], {"a": 1}]
    assert [output.number(v) for v in values] == [
        "true", "null", "12,345", "0.7031", "123,457", "1e-07", "text", "[1, 2]", '{"a": 1}',
    ]  # fmt: skip


def test_a_table_leaves_out_empty_columns_and_takes_text_as_it_is() -> None:
    text = output.plain(
        output.table(["step", "note", "n"], [("train", "", "1"), ("[bold]data", "", "20")], right=["n"])
    )
    assert text.splitlines() == ["step          n", "───────────────", "train         1", "[bold]data   20"]


def test_a_long_value_is_never_lost_in_a_pipe() -> None:
    long = "x" * 300
    assert output.plain(output.table(["a", "b"], [(long, "1")])).replace("\n", "").count("x") == 300


def test_a_sheet_flattens_objects_and_makes_tables_of_lists() -> None:
    digest = "ab" * 32
    view = {
        "score": {"auc": 0.70312, "log_loss": 0.4},
        "rows": 12345,
        "engine": digest,
        "candidates": [{"name": "fp32", "ms": 0.41}, {"name": "int8", "ms": 0.2, "rejected": "lost too much"}],
    }
    text = output.plain(output.sheet(view))
    assert "score.auc       0.7031" in text
    assert "rows            12,345" in text
    assert f"engine          {digest[:12]}\n" in text
    assert [line.split() for line in text.splitlines() if line.startswith(("name", "fp32", "int8"))] == [
        ["name", "ms", "rejected"],
        ["fp32", "0.41"],
        ["int8", "0.2", "lost", "too", "much"],
    ]


def test_json_is_one_document_of_plain_values() -> None:
    step = StepView("train", StepState.DONE, metric={"loss": math.nan, "auc": 0.7})
    view = RunView("flights", 1, "done", (step,), EndpointView("flights", "ready"))
    stream = io.StringIO()
    output.write_json(to_json(view), stream)
    data = json.loads(stream.getvalue())
    assert data["steps"][0]["state"] == "done"
    assert data["steps"][0]["metric"] == {"loss": None, "auc": 0.7}
    assert data["endpoint"]["name"] == "flights"


def test_colours_are_for_terminals() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    piped, terminal = io.StringIO(), Terminal()
    output.write(output.state("failed"), piped)
    output.write(output.state("failed"), terminal)
    assert piped.getvalue() == "failed\n"
    assert "failed" in terminal.getvalue()


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, plain = Terminal(), Terminal()
    output.write(output.state("failed"), coloured)
    monkeypatch.setenv("NO_COLOR", "1")
    output.write(output.state("failed"), plain)
    assert "\x1b[31m" in coloured.getvalue()
    assert "\x1b[31m" not in plain.getvalue()
