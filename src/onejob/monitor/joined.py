"""Traffic joined with the labels that came late: each row with its label or without, and everything odd counted.

Pure. What counts once: a row that was asked for twice (the same key at the same event time, of the same engine; without
a key, the same request id with the same inputs), and a label that was sent twice. Of several labels for a row the last
one taken wins; those before it are kept as its history. A label that fits no row waits, since its request may not be
captured yet, and is counted as unknown after the horizon; a row without a label waits likewise: pending, then never.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onejob.core.artifact import Json
from onejob.core.traffic import SECOND
from onejob.monitor.capture import Array, Traffic
from onejob.monitor.labels import Label

DAY = 86_400 * SECOND
NEVER_LABELLED = np.iinfo(np.int64).min
"""The label time of a row without a label."""


@dataclass(frozen=True)
class Counts:
    """What was odd, and how much of it."""

    repeated: int = 0
    """Rows that were captured again: left out."""
    duplicates: int = 0
    """Labels that said again what was known."""
    corrections: int = 0
    """Labels of a later batch that said something else: they won."""
    conflicts: int = 0
    """Labels of one batch that contradict each other: the last line won."""
    ambiguous: int = 0
    """Labels for a request of several rows that don't say which (or for an id of several requests): left out."""
    waiting: int = 0
    """Labels that fit no row yet."""
    unknown: int = 0
    """Labels that fitted no row within the horizon."""
    pending: int = 0
    """Rows without a label yet."""
    never: int = 0
    """Rows that got no label within the horizon."""


@dataclass(frozen=True)
class Joined:
    """Rows in the order of their event time, with what is known of each."""

    traffic: Traffic
    label: Array
    """As it was sent; None where there is none."""
    label_time: Array
    """Microseconds; NEVER_LABELLED where there is none."""
    history: Mapping[int, tuple[Label, ...]]
    """Row -> the labels that others have replaced, the oldest first."""
    counts: Counts

    @property
    def labelled(self) -> Array:
        """A mask of the rows that have a label."""
        return np.not_equal(self.label_time, NEVER_LABELLED)


@dataclass(frozen=True, slots=True)
class Block:
    """How complete and how late the labels of a stretch of event time are; delays in seconds."""

    begins: float
    rows: int
    labelled: int
    coverage: float
    delay_median: float | None
    delay_p90: float | None


def join(traffic: Traffic, labels: Sequence[Label], *, now: int | None = None, horizon: int = 30 * DAY) -> Joined:
    """Join by request id and row, or by key.

    `now` and `horizon` are microseconds of event time; without `now`, the newest event's. A label by request id is more
    exact than one by key, but of two for a row the later one wins, whichever it names it by.
    """
    kept, repeated = _once(traffic)
    rows = traffic.take(kept)
    now = (int(rows.time.max()) if len(rows) else 0) if now is None else now
    by_request, by_key = _index(rows, any(label.key is None for label in labels))
    given: dict[int, list[Label]] = defaultdict(list)
    ambiguous, odd = 0, _Odd()
    lost: dict[tuple[str, str, int | None], Label] = {}
    for label in sorted(labels, key=lambda label: (label.order, label.line)):
        found = by_key.get(label.key, []) if label.key is not None else _asked(by_request, label)
        if label.key is None and len(found) > 1:
            ambiguous += 1
            continue
        if not found:
            lost[label.target] = label  # sent twice it is still one that fits no row
        if found or label.target in odd.last:
            odd.see(label)
        for row in found:
            given[row].append(label)
    unknown = sum(now - label.time > horizon for label in lost.values())
    value, when, history = _settled(len(rows), given)
    missing = when == NEVER_LABELLED
    late = int((missing & (now - rows.time > horizon)).sum())
    counts = Counts(
        repeated=repeated,
        duplicates=odd.duplicates,
        corrections=odd.corrections,
        conflicts=odd.conflicts,
        ambiguous=ambiguous,
        waiting=len(lost) - unknown,
        unknown=unknown,
        pending=int(missing.sum()) - late,
        never=late,
    )
    return Joined(rows, value, when, history, counts)


def coverage(joined: Joined, *, block: int = DAY, offset: int = 0) -> list[Block]:
    """Label coverage and delay for each block of event time; `offset` shifts the blocks' begin (a zone's midnight)."""
    number = (joined.traffic.time - offset) // block
    found = []
    for one in np.unique(number):
        inside = number == one
        known = inside & joined.labelled
        delays = (joined.label_time[known] - joined.traffic.time[known]) / SECOND
        median, most = np.quantile(delays, [0.5, 0.9]).tolist() if len(delays) else (None, None)
        rows, labelled = int(inside.sum()), int(known.sum())
        begins = (int(one) * block + offset) / SECOND
        found.append(Block(begins, rows, labelled, labelled / rows, median, most))
    return found


def overall(joined: Joined) -> dict[str, Json]:
    """Coverage and delay over all rows, in the words of `onejob show`; delays in seconds."""
    known = joined.labelled
    told: dict[str, Json] = {"label_coverage": round(float(known.mean()), 4) if len(known) else None}
    if known.any():
        delays = (joined.label_time[known] - joined.traffic.time[known]) / SECOND
        told["label_delay_median"], told["label_delay_p90"] = np.round(np.quantile(delays, [0.5, 0.9]), 3).tolist()
    return told


def _once(traffic: Traffic) -> tuple[Array, int]:
    """Indices of the rows that count, by event time, and how many were captured again; the first to arrive counts."""
    seen: set[tuple[Any, ...]] = set()
    kept = []
    order = np.argsort(traffic.arrived, kind="stable")
    heads = (traffic.request, traffic.row, traffic.key, traffic.time, traffic.engine)
    for index, request, row, key, time, engine in zip(
        order.tolist(), *(head[order].tolist() for head in heads), strict=True
    ):
        mark = (request, row, _inputs(traffic, index)) if key is None else (key, time, engine)
        if mark not in seen:
            seen.add(mark)
            kept.append(index)
    indices = np.array(kept, np.int64)
    by_time = np.argsort(traffic.time[indices], kind="stable")
    return indices[by_time], len(traffic) - len(kept)


def _inputs(traffic: Traffic, index: int) -> str:
    return repr([values[index] for values in traffic.inputs.values()])


def _index(rows: Traffic, requests: bool) -> tuple[dict[tuple[str, int | None], list[int]], dict[str, list[int]]]:
    """(request, row in it) and (request, None) -> rows here, if labels name requests; key -> rows here."""
    by_request: dict[tuple[str, int | None], list[int]] = defaultdict(list)
    by_key: dict[str, list[int]] = defaultdict(list)
    for index, key in enumerate(rows.key.tolist()):
        if key is not None:
            by_key[key].append(index)
    if requests:
        for index, (request, number) in enumerate(zip(rows.request.tolist(), rows.row.tolist(), strict=True)):
            by_request[request, number].append(index)
            by_request[request, None].append(index)
    return by_request, by_key


def _asked(by_request: Mapping[tuple[str, int | None], list[int]], label: Label) -> list[int]:
    return by_request.get((label.request or "", label.row), [])


class _Odd:
    """Counts labels that repeat, correct or contradict those before them, each once, whatever it fits."""

    def __init__(self) -> None:
        self.last: dict[tuple[str, str, int | None], Label] = {}
        self.duplicates = self.corrections = self.conflicts = 0

    def see(self, label: Label) -> None:
        before = self.last.get(label.target)
        self.last[label.target] = label
        if before is None:
            return
        if same(before.value, label.value):
            self.duplicates += 1
        elif before.order == label.order:
            self.conflicts += 1
        else:
            self.corrections += 1


def same(one: Json, other: Json) -> bool:
    """Whether two labels say the same; 1, 1.0 and true do."""
    return bool(one == other)


def _settled(rows: int, given: Mapping[int, list[Label]]) -> tuple[Array, Array, dict[int, tuple[Label, ...]]]:
    """Label and its time for each row, and what was replaced; a repetition doesn't make a label any later."""
    value, when = np.full(rows, None, object), np.full(rows, NEVER_LABELLED, np.int64)
    history: dict[int, tuple[Label, ...]] = {}
    for row, labels in given.items():
        distinct = [labels[0]]
        for label in labels[1:]:
            if not same(label.value, distinct[-1].value):
                distinct.append(label)
        value[row], when[row] = distinct[-1].value, distinct[-1].time
        if len(distinct) > 1:
            history[row] = tuple(distinct[:-1])
    return value, when, history
