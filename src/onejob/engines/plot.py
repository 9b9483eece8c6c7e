"""Draws the year that a demo has played, with matplotlib: an SVG for pages and a PNG for everything else.

It lies here because nothing above may import a heavy package; what it is handed is plain data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

COLOURS: Mapping[str, str] = {
    "static": "#999999",
    "loop": "#0072b2",
    "always": "#d55e00",
    "constant": "#bbbbbb",
}
"""Told apart by the colour-blind too (Okabe and Ito)."""
NAMES: Mapping[str, str] = {
    "static": "never retrained",
    "loop": "the loop",
    "always": "every challenger deployed",
    "constant": "late share of the last weeks",
}
STYLES: Mapping[str, str] = {"loop": "-", "always": "--", "static": "-", "constant": ":"}


def draw_months(
    target: Path,
    months: Sequence[str],
    curves: Mapping[str, Mapping[str, Sequence[float]]],
    shares: Sequence[float],
    promoted: Sequence[bool],
) -> list[Path]:
    """Write `target`.svg and `target`.png, and give their paths.

    `curves` maps a metric ("auc", "log_loss") to policy -> one value a month; `shares` are the late shares; `promoted`
    says after which months a challenger took over.
    """
    with matplotlib.rc_context({"svg.hashsalt": "onejob", "font.size": 9, "axes.spines.top": False}):
        figure = Figure(figsize=(8.5, 7), layout="constrained")
        axes = figure.subplots(3, 1, sharex=True, height_ratios=[3, 3, 1.2])
        for axis, (metric, policies) in zip(axes, curves.items(), strict=False):
            _draw_metric(axis, metric, policies, promoted)
        axes[-1].bar(range(len(months)), [100 * share for share in shares], color="#cccccc", width=0.6)
        axes[-1].set_ylabel("late, %")
        axes[-1].set_xticks(range(len(months)), months)
        axes[1].legend(loc="upper right", frameon=False)  # the panel that has every policy
        paths = [target.with_suffix(".svg"), target.with_suffix(".png")]
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=130)
    return paths


def _draw_metric(axis: Any, metric: str, policies: Mapping[str, Sequence[float]], promoted: Sequence[bool]) -> None:
    for policy, values in policies.items():
        style = {"color": COLOURS[policy], "linestyle": STYLES[policy], "label": NAMES[policy]}
        axis.plot(range(len(values)), values, marker="o", markersize=3, **style)
    for month, took_over in enumerate(promoted):
        if took_over:  # at the end of the month
            axis.axvline(month + 0.5, color=COLOURS["loop"], linewidth=0.6, alpha=0.5)
    axis.set_ylabel({"auc": "ROC AUC (higher is better)", "log_loss": "log loss (lower is better)"}[metric])
