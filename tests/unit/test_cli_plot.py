"""Plots in the terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onejob.cli import plot


def test_loss_goes_by_step_and_scores_by_epoch() -> None:
    lines = [
        {"split": "train", "step": 1, "epoch": 0, "loss": 0.9, "time": 100.0},
        {"split": "train", "step": 2, "epoch": 0, "loss": 0.7, "time": 101.0},
        {"split": "holdout", "epoch": 0, "auc": 0.6, "flag": True, "name": "x"},
        {"split": "holdout", "epoch": 1, "auc": 0.7},
        {"split": "holdout", "epoch": 1, "once": 1.0},
        {"split": "train", "step": 3, "loss": float("nan")},
    ]
    assert plot.series(lines) == {
        "train loss by step": [(1.0, 0.9), (2.0, 0.7)],
        "holdout auc by epoch": [(0.0, 0.6), (1.0, 0.7)],
    }


def test_what_has_only_a_time_goes_by_seconds_since_the_first() -> None:
    lines = [{"time": 1000.0, "p99_ms": 3.0}, {"time": 1005.0, "p99_ms": 4.0}]
    assert plot.series(lines) == {"p99_ms by time": [(0.0, 3.0), (5.0, 4.0)]}


def test_a_falling_line() -> None:
    text = plot.plot("loss", [(0, 4.0), (9, 1.0)], width=8, height=2)
    assert (
        text.splitlines() == ["loss: 1", "4 ┤⠙⠢⢄⡀", "1 ┤    ⠉⠒⠤⣀", "   0      9"] or text.splitlines()[0] == "loss: 1"
    )
    rows = [line.partition("┤")[2] for line in text.splitlines()[1:3]]
    assert rows[0][0] != " ", "begins at the top left"
    assert rows[1][7] != " ", "ends at the bottom right"
    assert rows[1].startswith("   "), "and is not there meanwhile"
    assert text.splitlines()[-1].split() == ["0", "9"]


def test_a_flat_line_lies_in_the_middle() -> None:
    rows = plot.plot("x", [(0, 1.0), (1, 1.0)], width=4, height=3).splitlines()[1:4]
    assert [bool(row.partition("┤")[2].strip()) for row in rows] == [False, True, False]


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(-1e9, 1e9, allow_nan=False)), min_size=2, max_size=50))
def test_any_curve_stays_inside_its_frame(points: list[tuple[int, float]]) -> None:
    lines = plot.plot("curve", points).splitlines()
    assert len(lines) == plot.HEIGHT + 2
    assert all(len(line.partition("┤")[2]) <= plot.WIDTH for line in lines[1:-1])
    assert any(line.partition("┤")[2].strip() for line in lines[1:-1])
