"""`onejob label`: bring the truth about what an endpoint has answered."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Group, RenderableType

from onejob.cli import output
from onejob.cli.options import Call, verb
from onejob.loop import commands
from onejob.loop.commands.label import LabelView


@verb(
    "label",
    examples=[
        ("onejob label flights arrived.csv", "columns by the job's names: its id, its label, label_time"),
        ("onejob label flights truth.parquet --key flight --label was_late", "columns by other names"),
        ("onejob label flights truth.csv --strict", "all rows or none"),
    ],
)
@click.argument("endpoint")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--key", metavar="COLUMN", help="The column of the key; by default the job's `columns.id`, id or key.")
@click.option("--request", metavar="COLUMN", help="The column of the request's id; by default request_id.")
@click.option("--row", metavar="COLUMN", help="The column of the row in the request, from 0; by default row.")
@click.option("--label", metavar="COLUMN", help="The column of the label; by default the job's label, or label.")
@click.option("--time", metavar="COLUMN", help="When the label became known; by default label_time or time, else now.")
@click.option("--strict", is_flag=True, help="Keep no label if one row is refused.")
def command(
    call: Call,
    endpoint: str,
    file: Path,
    key: str | None,
    request: str | None,
    row: str | None,
    label: str | None,
    time: str | None,
    strict: bool,
) -> int | None:
    """Give an endpoint the labels of a CSV, NDJSON, JSON or Parquet file, whether it runs or not.

    Each row names what it is for, by the key that the request carried or by the request's id. Bad rows are named, the
    good ones kept. A later label for the same row corrects the earlier one.
    """
    columns = {"key": key, "request": request, "row": row, "label": label, "time": time}
    with call.session() as session:
        view = commands.label(session, endpoint, file, columns=columns, strict=strict)
    call.show(view, render)
    return 4 if view.refused and not view.accepted else None


def render(view: LabelView) -> RenderableType:
    """The counts, and each refused row that is told with its reason."""
    head = f"{output.plural(view.accepted, 'label')} for {view.endpoint}, {output.plural(view.refused, 'row')} refused"
    rows = [(str(row["line"]), str(row["value"]), str(row["reason"])) for row in view.rows]
    return Group(head, output.table(["line", "value", "it"], rows, right=["line"])) if rows else head
