"""Words and tables for a terminal: times, sizes, digests, tables, panels; and the one JSON document of `--json`.

The small functions are pure (value -> text); `write` is the only edge. Colours and the width of the window are for
terminals: into a pipe goes plain text, wide enough that lines aren't folded. rich is loaded with this module, so only
verbs import it.
"""

from __future__ import annotations

import datetime
import io
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any
from urllib.parse import unquote

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from onejob.core.artifact import Json, short

PIPE_WIDTH = 200
MOST_CELL, MOST_LINE = 72, 1000
"""Characters of a value in a table, and on a line of its own."""
AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
STYLES: Mapping[str, str] = {
    "done": "green",
    "ready": "green",
    "cached": "green",
    "available": "green",
    "chosen": "green",
    "running": "cyan",
    "starting": "cyan",
    "claimed": "cyan",
    "run": "cyan",
    "ran": "cyan",
    "would run": "cyan",
    "failed": "red",
    "lost": "red",
    "rejected": "red",
    "damaged": "red",
    "source changed": "red",
    "source gone": "yellow",
    "missing": "red",
    "not here": "yellow",
    "cancelled": "yellow",
    "stopping": "yellow",
    "skipped": "yellow",
}
"""State, verdict or finding -> style; what isn't here is plain."""

# ---- words -------------------------------------------------------------------------------------------------------


def duration(seconds: float | None) -> str:
    """`0.42 s`, `12 s`, `3 min 5 s`, `2 h 10 min`, `3 d 4 h`; nothing for None."""
    if seconds is None:
        return ""
    if seconds < 9.95:
        return f"{seconds:.2f} s" if seconds < 0.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {unit} {rest} {small}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"


def size(count: float) -> str:
    """`0 B`, `980 B`, `12.3 KiB`, `1.4 GiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if count < 1023.95 or unit == "TiB":
            break
    return f"{count:.1f} {unit}"


def ago(time: float | None, now: float) -> str:
    """`8 s ago`, `5 min ago`, `3 d ago`; one unit is enough here."""
    if time is None:
        return ""
    seconds = max(0.0, now - time)
    length, unit = next(pair for pair in AGES if seconds >= pair[0] or pair[0] == 1)
    return f"{seconds // length:.0f} {unit} ago"


def moment(time: float) -> str:
    """A point in time, by the clock of this machine: `2024-03-01 12:00:05`."""
    return datetime.datetime.fromtimestamp(time).isoformat(" ", "seconds")


def number(value: Json) -> str:
    """A number with as many digits as a person reads; anything else as it is, in JSON's spelling."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10000 else f"{value:,.0f}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def digest(text: str) -> str:
    """The first digits: enough to name a thing by."""
    return short(text)


def pairs(values: Mapping[str, Json]) -> str:
    """`loss 0.41  auc 0.703`."""
    return "  ".join(f"{name} {number(value)}" for name, value in values.items())


def curl(url: str, path: str, options: str = "-s") -> str:
    """The command that asks an endpoint; `http+unix://%2Frun%2Fmodel.sock` is a Unix socket's URL."""
    scheme, _, rest = url.partition("://")
    if scheme == "http+unix":
        return f"curl {options} --unix-socket {shlex.quote(unquote(rest))} http://localhost{path}"
    return f"curl {options} {url}{path}"


def plural(count: int, noun: str) -> str:
    """`1 file`, `3 files`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def state(word: str) -> Text:
    """A state or verdict in its colour."""
    return Text(word, style=STYLES.get(word, ""))


def muted(text: str) -> Text:
    return Text(text, style="dim")


# ---- shapes ------------------------------------------------------------------------------------------------------


def table(columns: Sequence[str], rows: Iterable[Sequence[RenderableType]], *, right: Sequence[str] = ()) -> Table:
    """A plain table; columns in `right` are aligned right, and columns that are empty in every row are left out."""
    kept = [tuple(row) for row in rows]
    used = [i for i, _ in enumerate(columns) if not kept or any(str(row[i]) for row in kept)]
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for i in used:
        made.add_column(columns[i], justify="right" if columns[i] in right else "left", overflow="fold")
    for row in kept:
        made.add_row(*(row[i] for i in used))
    return made


def panel(values: Mapping[str, str | Text]) -> Table:
    """Names and values, one a line; what is empty is left out."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in values.items():
        if str(value):
            made.add_row(name, value)
    return made


def sheet(values: Mapping[str, Json]) -> RenderableType:
    """Any JSON object as a person reads it: a line for each value, and tables for what comes several times."""
    single: dict[str, Json] = {}
    tables: dict[str, list[dict[str, Json]]] = {}
    for name, value in _flat(values):
        if _are_objects(value):
            tables[name] = [dict(_flat(row)) for row in value]
        elif isinstance(value, Mapping) and value:
            _spread(name, value, tables)
        else:
            single[name] = value
    parts: list[RenderableType] = (
        [panel({name: cell(value, most=MOST_LINE) for name, value in single.items()})] if single else []
    )
    for name, rows in tables.items():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        parts += [muted(name), table(columns, [[cell(row.get(key, "")) for key in columns] for row in rows])]
    return Group(*parts)


def _spread(name: str, things: Mapping[str, Mapping[str, Json]], tables: dict[str, list[dict[str, Json]]]) -> None:
    """Named objects of one shape as a table with a row each; lists of objects in them as tables of their own."""
    rows = tables.setdefault(name, [])
    for thing, values in things.items():
        row: dict[str, Json] = {"name": thing}
        for key, value in _flat(values):
            if _are_objects(value):
                tables.setdefault(f"{name}: {key}", []).extend({"name": thing, **dict(_flat(item))} for item in value)
            else:
                row[key] = value
        rows.append(row)


def cell(value: Json, *, most: int = MOST_CELL) -> str:
    """A value in a table: digests short, `-` for None, long values cut with a mark."""
    if value is None:
        return "-"
    text = number(value)
    if len(text) == 64 and set(text) <= set("0123456789abcdef"):
        return digest(text)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _flat(values: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Nested names joined by dots; objects that come several times are left whole."""
    for name, value in values.items():
        several = isinstance(value, Mapping) and len(value) > 1 and _are_objects(list(value.values()))
        if isinstance(value, Mapping) and value and not several:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _are_objects(value: Json) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Mapping) and item for item in value)


def commands(lines: Iterable[tuple[str, str]]) -> RenderableType:
    """(command, what it does) each: the command stands alone on its line, so that the line can be pasted as it is."""
    parts: list[RenderableType] = []
    for command, note in lines:
        parts += [muted(f"# {note}"), command]
    return Group(*parts)


def title(text: str) -> Text:
    """The heading of a part, with a line of air above."""
    return Text(f"\n{text}", style="bold")


# ---- the edge ----------------------------------------------------------------------------------------------------


def console(stream: IO[str]) -> Console:
    """A console that takes text as it is: no markup, no emoji, no guessing at what to colour."""
    return Console(file=stream, markup=False, emoji=False, highlight=False)


def plain(renderable: RenderableType, width: int = PIPE_WIDTH) -> str:
    """As text without colours, and without blanks at the ends of lines."""
    stream = io.StringIO()
    drawn = Console(
        file=stream, markup=False, emoji=False, highlight=False, width=width, color_system=None, legacy_windows=False
    )
    drawn.print(renderable, soft_wrap=True)  # sentences and commands stay in one line; tables keep to the width
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def write(renderable: RenderableType, stream: IO[str]) -> None:
    """Draw on a terminal; write plain text into anything else."""
    if stream.isatty():
        console(stream).print(renderable, soft_wrap=True)
    else:
        stream.write(plain(renderable))
    stream.flush()


def write_json(value: Any, stream: IO[str]) -> None:
    """One JSON document."""
    stream.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n")
    stream.flush()
