"""The step that joins captured traffic with the labels that came late: one row for each row that was asked for.

Leaves `rows.arrow`, in the order of event time: `onejob_time` (microseconds, UTC), `onejob_key`, `onejob_request`,
`onejob_row`, `onejob_digest` (of the engine that answered), `onejob_label_time`, the label under its own name, each
input under its own, each output as `onejob_output_<name>`. A row without a label has null there: how many have none is
evidence too. The same segments give the same bytes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import numpy as np
import polars as pl

from onejob.core.artifact import Json
from onejob.core.context import InputArtifact, StepContext
from onejob.core.traffic import SECOND
from onejob.errors import DataError
from onejob.monitor.capture import Traffic, read_traffic
from onejob.monitor.joined import Joined, join, overall
from onejob.monitor.labels import read_labels

Array = np.ndarray[Any, Any]

FORMAT = 1
SEGMENT, BATCH = "segment.arrows", "labels.jsonl"
"""The file of a `traffic` artifact, and of a `labels` artifact."""
ROWS = "rows.arrow"
TIME, KEY, REQUEST, ROW = "onejob_time", "onejob_key", "onejob_request", "onejob_row"
DIGEST, LABEL_TIME, OUTPUT = "onejob_digest", "onejob_label_time", "onejob_output_"


def run(context: StepContext) -> None:
    """Segments to labelled rows: reads the inputs `traffic.<n>` and `labels.<n>`, leaves the output `labelled`."""
    options = context.options
    segments, batches = (_of_kind(context.inputs, kind) for kind in ("traffic", "labels"))
    since, until, now, horizon = (round(options[name] * SECOND) for name in ("from", "until", "now", "horizon"))
    with _without_collection():
        traffic = read_traffic([each.file(SEGMENT) for each in segments])
        traffic = traffic.take((traffic.time >= since) & (traffic.time < until))
        _require_rows(traffic, options)
        context.progress(1, 3, "steps")
        joined = join(traffic, read_labels([each.file(BATCH) for each in batches]), now=now, horizon=horizon)
    context.progress(2, 3, "steps")
    columns = _roles(segments, joined.traffic)
    frame = _frame(joined, columns["label"])
    out = context.out("labelled")
    frame.write_ipc(
        out / ROWS,
        compression="uncompressed",
        compat_level=pl.CompatLevel.oldest(),
        record_batch_size=max(1, frame.height),
    )
    context.progress(3, 3, "steps")
    meta = {
        "format": FORMAT,
        "columns": columns,
        "private": _merged(segments, "private"),
        "schema": {name: str(dtype) for name, dtype in frame.schema.items()},
        "counts": asdict(joined.counts),
        **{name: options[name] for name in ("from", "until", "now", "horizon")},
        "rows": frame.height,
        "labelled": int(joined.labelled.sum()),
        **overall(joined),
    }
    context.measure({"rows": frame.height, "counts": asdict(joined.counts)})
    context.emit("labelled", "labelled", meta)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Millions of small objects without a cycle among them: looking for cycles would take a quarter of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _require_rows(traffic: Traffic, options: Mapping[str, Json]) -> None:
    if not len(traffic):
        since, until = (datetime.fromtimestamp(options[name], UTC).isoformat() for name in ("from", "until"))
        raise DataError(
            f"no row was captured from {since} until {until}", cure="`onejob show ENDPOINT` tells what was captured."
        )


def _of_kind(inputs: Mapping[str, InputArtifact], kind: str) -> list[InputArtifact]:
    """In the order in which they were sealed, which the number in the name tells."""
    return [inputs[name] for name in sorted(inputs) if name.partition(".")[0] == kind]


def _merged(segments: Sequence[InputArtifact], key: str) -> dict[str, Json]:
    """What all segments say under a key, together."""
    return {name: value for each in segments for name, value in (each.meta.get(key) or {}).items()}


def _roles(segments: Sequence[InputArtifact], traffic: Traffic) -> dict[str, Json]:
    """The columns' roles, as a dataset tells them: text is a category, all else a number."""
    told = {name: value for each in segments for name, value in (each.meta["columns"] or {}).items() if value}
    if "label" not in told:
        raise DataError(
            "the traffic doesn't say which column is the label",
            cure="Name it in [data] columns.label, and serve again.",
        )
    texts = {name for name, values in traffic.inputs.items() if values.dtype == object}
    return {
        "label": told["label"],
        "time": told.get("time"),
        "id": told.get("id"),
        "categories": [name for name in traffic.inputs if name in texts],
        "numbers": [name for name in traffic.inputs if name not in texts],
    }


def _frame(joined: Joined, label: str) -> pl.DataFrame:
    rows = joined.traffic
    columns = [
        pl.Series(TIME, rows.time, dtype=pl.Int64),
        pl.Series(KEY, rows.key.tolist(), dtype=pl.String),
        pl.Series(REQUEST, rows.request.tolist(), dtype=pl.String),
        pl.Series(ROW, rows.row, dtype=pl.Int32),
        pl.Series(DIGEST, rows.engine.tolist(), dtype=pl.String),
        _where(LABEL_TIME, joined.label_time, joined.labelled),
        _label(label, joined.label.tolist()),
        *(_series(name, values) for name, values in rows.inputs.items()),
        *(_series(f"{OUTPUT}{name}", values) for name, values in rows.outputs.items()),
    ]
    return pl.DataFrame(columns)


def _where(name: str, values: Array, present: Array) -> pl.Series:
    column = pl.Series(name, np.where(present, values, 0), dtype=pl.Int64)
    return pl.select(pl.when(pl.Series(present)).then(column).otherwise(None).alias(name)).to_series()


def _label(name: str, values: list[Json]) -> pl.Series:
    """Labels as one type: as they were sent if they agree, whole numbers rather than others, text if any is text."""
    kinds = {type(value) for value in values} - {type(None)}
    if kinds == {bool}:
        return pl.Series(name, values, dtype=pl.Boolean)
    if kinds <= {bool, int}:
        return pl.Series(name, [None if value is None else int(value) for value in values], dtype=pl.Int64)
    if kinds <= {bool, int, float}:
        numbers = [None if value is None else float(value) for value in values]
        whole = all(value is None or value.is_integer() for value in numbers)
        # 1 and 1.0 are the same label, however a client spells it
        return pl.Series(name, numbers, dtype=pl.Float64).cast(pl.Int64 if whole else pl.Float64)
    return pl.Series(name, [None if value is None else _text(value) for value in values], dtype=pl.String)


def _text(value: Json) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _series(name: str, values: Array) -> pl.Series:
    """A column as it was captured; what is not known is null, never NaN."""
    if values.dtype == object:
        plain = values.tolist()
        if isinstance(next((value for value in plain if value is not None), None), np.ndarray):
            return pl.Series(name, [value if value is None else value.tolist() for value in plain])
        return pl.Series(name, plain, dtype=pl.String)
    column = pl.Series(name, values)
    return column.fill_nan(None) if column.dtype.is_float() else column
