"""The candidates of an optimize step as a person reads them: figures, and why each was taken or not.

What is drawn is the record that the step measured; what it doesn't hold (a candidate that failed has no figures) is
`-`.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from onejob.cli import output
from onejob.core.artifact import Json

ONE_ROW = 1
"""The batch size whose time is the latency."""


def is_choice(measured: Mapping[str, Json]) -> bool:
    """Whether this was measured by a step that chose among candidates."""
    return isinstance(measured.get("candidates"), Mapping) and "chosen" in measured


def render(measured: Mapping[str, Json]) -> RenderableType:
    """What was chosen and why, the budget, the figures, and a line for each candidate: the reason."""
    metric, budget = str(measured.get("metric", "metric")), measured.get("budget") or {}
    parts: list[RenderableType] = []
    if measured.get("why"):
        parts.append(str(measured["why"]))
    if budget.get("drop") is not None:
        rows_read = output.plural(int(measured.get("rows") or 0), "held-out row")
        itself = f"the checkpoint itself: {metric} {output.number(measured.get('reference'))} on {rows_read}"
        parts.append(f"{itself}; may be lost: {output.number(budget['drop'])}")
    found: Mapping[str, Mapping[str, Json]] = measured["candidates"]
    rows = [_row(name, figures, name == measured["chosen"]) for name, figures in found.items()]
    columns = ["candidate", "verdict", metric, "lost", "one row", "rows/s", "size"]
    parts += ["", output.table(columns, rows, right=columns[2:]), ""]
    parts += [f"{name}: {figures['reason']}" for name, figures in found.items() if figures.get("reason")]
    return Group(*parts)


def verdict(figures: Mapping[str, Json], chosen: bool) -> str:
    """`chosen`; `accepted`: within the budget, but another was the better one to take; `rejected`."""
    if chosen:
        return "chosen"
    return "accepted" if figures.get("accepted") else "rejected"


def _row(name: str, figures: Mapping[str, Json], chosen: bool) -> tuple[str | Text, ...]:
    times = {bool(line.get("batch") == ONE_ROW): line for line in figures.get("latency") or () if line}
    one, full = times.get(True, {}), times.get(False, {})
    return (
        name,
        output.state(verdict(figures, chosen)),
        output.cell(figures.get("metric")),
        f"{figures['drop']:.4f}" if figures.get("drop") is not None else "-",
        f"{one['p50_ms']:.3g} ms" if one.get("p50_ms") is not None else "-",
        f"{full['rows_per_second']:,.0f}" if full.get("rows_per_second") is not None else "-",
        output.size(figures["size"]) if figures.get("size") else "-",
    )
