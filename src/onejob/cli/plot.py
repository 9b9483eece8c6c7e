"""Line plots in the terminal: metrics over steps or epochs, drawn with braille dots.

A cell holds 2 x 4 dots, so a plot of 48 x 8 cells has 96 x 32 points. Pure: numbers in, text out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from onejob.cli.output import number
from onejob.core.artifact import Json

WIDTH = 48
HEIGHT = 8
POSITIONS = ("step", "epoch", "time")
"""What may be on the x axis, the finest one first; scores on held-out rows go by epoch. Times count from the first."""
NOT_VALUES = frozenset({"step", "epoch", "time", "split", "rank", "seconds", "lr", "rows_per_s"})
"""Places and speeds: kept in the metrics, but no curve that one wants to see."""

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille cell, by row and column."""
BLANK = 0x2800

Points = Sequence[tuple[float, float]]


def series(lines: Sequence[Mapping[str, Json]]) -> dict[str, list[tuple[float, float]]]:
    """Lines of metrics as curves: "train loss by step" -> [(x, y)]; one point is no curve, and is left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    first = next((float(line["time"]) for line in lines if _finite(line.get("time"))), 0.0)
    for position, line in enumerate(lines):
        order = POSITIONS if line.get("split", "train") == "train" else ("epoch", *POSITIONS)
        axis = next((name for name in order if _finite(line.get(name))), "line")
        x = float(line.get(axis, position)) - (first if axis == "time" else 0.0)
        for name, value in line.items():
            if name not in NOT_VALUES and _finite(value):
                title = f"{line.get('split', '')} {name} by {axis}".strip()
                found.setdefault(title, []).append((x, float(value)))
    return {title: points for title, points in found.items() if len(points) > 1}


def plot(title: str, points: Points, *, width: int = WIDTH, height: int = HEIGHT) -> str:
    """A curve with its scale: title and last value, the range of y on the left, the range of x below."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    labels = [number(max(ys)), *[""] * (height - 2), number(min(ys))]
    margin = max(len(label) for label in labels)
    rows = _draw(points, width, height)
    left, right = number(_whole(min(xs))), number(_whole(max(xs)))
    foot = f"{' ' * margin}  {left}{' ' * max(1, width - len(left) - len(right))}{right}"
    body = [f"{label:>{margin}} ┤{row}".rstrip() for label, row in zip(labels, rows, strict=True)]
    return "\n".join([f"{title}: {number(ys[-1])}", *body, foot])


def _draw(points: Points, width: int, height: int) -> list[str]:
    """Rows of braille cells, joined by straight lines from point to point."""
    cells = [[0] * width for _ in range(height)]
    dots = [_dot(point, points, width * 2 - 1, height * 4 - 1) for point in sorted(points)]
    for (x0, y0), (x1, y1) in zip(dots, dots[1:] or dots, strict=False):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(steps + 1):
            x, y = round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps)
            cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]
    return ["".join(chr(BLANK + cell) if cell else " " for cell in row) for row in cells]


def _dot(point: tuple[float, float], points: Points, right: int, bottom: int) -> tuple[int, int]:
    """A point's place on the canvas; y grows downwards there, and a flat curve lies in the middle."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    across = (point[0] - min(xs)) / (max(xs) - min(xs)) if max(xs) > min(xs) else 0.5
    up = (point[1] - min(ys)) / (max(ys) - min(ys)) if max(ys) > min(ys) else 0.5
    return round(across * right), round((1 - up) * bottom)


def _finite(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: float) -> float | int:
    return int(value) if value == int(value) else value
