"""A run as it goes on: lines of a log, and the live view."""

from __future__ import annotations

from dataclasses import replace

from onejob.cli import output, progress
from onejob.loop.views import EndpointView, RunView, StepView

START = RunView(
    "flights", 12, "running", (StepView("data", "running"), StepView("train", "waiting", reason="data runs first"))
)


def test_a_log_has_one_line_for_each_change() -> None:
    lines: list[str] = []
    on_view = progress.logging(lines.append)
    on_view(START)
    on_view(START)
    trained = (
        StepView("data", "done", cached=True, reason="every component is the same"),
        StepView("train", "running"),
    )
    on_view(replace(START, steps=trained))
    ended = (trained[0], StepView("train", "failed", seconds=2.13, reason="rank 1 died"))
    on_view(replace(START, steps=ended, state="failed"))
    assert [line.strip() for line in lines] == [
        "run 12  data: running",
        "run 12  data: cached (every component is the same)",
        "run 12  train: running",
        "run 12  train: failed (rank 1 died)",
        "run 12  failed",
    ]


def test_a_log_keeps_runs_apart() -> None:
    lines: list[str] = []
    on_view = progress.logging(lines.append)
    on_view(START)
    on_view(replace(START, run=13))
    on_view(START)
    assert [line.strip() for line in lines] == ["run 12  data: running", "run 13  data: running"]


def test_an_endpoint_that_comes_up_is_told_once() -> None:
    ready = replace(START, endpoint=EndpointView("flights", "ready", "http://127.0.0.1:8080"))
    assert progress.changes(START, ready) == ["run 12  endpoint flights: ready http://127.0.0.1:8080"]
    assert progress.changes(ready, ready) == []


def test_the_live_view_shows_how_far_and_how_long() -> None:
    step = StepView(
        "train",
        "running",
        done=120,
        total=400,
        unit="steps",
        seconds=3.1,
        eta=7.2,
        metric={"split": "train", "loss": 0.4123},
    )
    text = output.plain(
        progress.draw(replace(START, steps=(step, StepView("optimize", "waiting", reason="train runs first")))), 160
    )
    assert "flights  run 12" in text
    assert "120/400 steps" in text
    assert "3.1 s, 7.2 s left" in text
    assert "loss 0.4123" in text
    assert "━" in text
    assert "train runs first" in text


def test_in_a_narrow_window_the_note_gives_way() -> None:
    steps = (
        StepView("optimize.onnxruntime-int8", "done", seconds=1, reason="first time " * 20),
        StepView("train", "running", done=1, total=9, unit="steps", seconds=61, eta=62, metric={"loss": 0.4123}),
    )
    lines = output.plain(progress.draw(replace(START, steps=steps)), 100).splitlines()
    assert len(lines) == 3, "a line each"
    assert lines[1].startswith("optimize.onnxruntime-int8  done")
    assert lines[1].endswith("…")
    assert "1/9 steps  1 min 1 s, 1 min 2 s left" in lines[2]


def test_a_step_that_is_over_has_no_bar() -> None:
    step = StepView("train", "done", done=400, total=400, unit="steps", seconds=9, reason="first time")
    text = output.plain(progress.draw(replace(START, steps=(step,))), 160)
    assert "━" not in text
    assert "400/400" not in text
    assert "first time" in text


def test_a_cached_step_took_no_time() -> None:
    assert progress.times(StepView("data", "done", cached=True, seconds=4.0)) == ""
    assert progress.verdict(StepView("data", "done", cached=True)) == "cached"
