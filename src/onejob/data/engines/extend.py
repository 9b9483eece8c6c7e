"""The dataset of a retraining: the rows of the first one, and the captured ones whose label has come.

An ordinary dataset. Rows whose event is at the cut or later are held out, all others are trained on, so that what the
gate compares on was never learnt from. Each captured row keeps its request in `onejob_request` and `onejob_row`, by
which `onejob trace` goes from a row to its request; the rows of the first dataset have nulls there. The job's
expectations are asked of them as of any other rows: a model must not learn from a join that broke in a client.
"""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from onejob.core.artifact import Json
from onejob.core.context import InputArtifact, StepContext, write_json
from onejob.core.faults import reach
from onejob.data.engines import expectations
from onejob.data.engines.profile import profile
from onejob.data.engines.shards import write_arrow, write_split
from onejob.data.spec import Columns, Expect
from onejob.data.steps.dropped import REASON
from onejob.data.steps.split import HELD_OUT
from onejob.errors import DamagedError, DataError

FORMAT = 1
DROPPED = "dropped/00.arrow"
CURE = (
    "Mend what is sent to the endpoint (`onejob trace` takes an onejob_request), or its labels; "
    "[monitor.retrain] hold_out and history say which rows are taken."
)
SECOND = 1_000_000
ROWS = "rows.arrow"
TIME, KEY, REQUEST, ROW = "onejob_time", "onejob_key", "onejob_request", "onejob_row"
"""Columns of labelled rows; the last two are kept."""
MOMENT = "onejob_moment"
"""The event's time in microseconds, while rows are chosen; null where the first dataset doesn't know it."""


def run(context: StepContext) -> None:
    """Reads the inputs `dataset` and `labelled`, leaves the output `dataset`."""
    options, base = context.options, context.inputs["dataset"]
    columns = Columns.model_validate(options["columns"])
    cut, since = _range(options)
    first = _first_rows(base, columns)
    captured = _captured(context.inputs["labelled"], columns, first.schema)
    context.progress(1, 3, "steps")
    first, captured = _chosen(first, since, cut), _chosen(captured, since, cut)
    _require_rows(first, captured, cut)
    captured, strays = _checked(context, first, captured, columns)
    rows = pl.concat([first, captured], how="vertical_relaxed")
    frame = rows.drop(MOMENT, HELD_OUT)
    splits = {"train": frame.filter(~rows[HELD_OUT]), "holdout": frame.filter(rows[HELD_OUT])}
    context.progress(2, 3, "steps")
    shutil.rmtree(context.out("dataset"))  # a second try in the same folder starts from nothing
    folder = context.out("dataset")
    written = {name: write_split(part, folder, name) for name, part in splits.items()}
    if strays:
        write_arrow(pl.concat(strays).drop(MOMENT, HELD_OUT), folder / DROPPED)
    write_json(folder / "profile.json", profile(splits))
    reach("data.written")
    told = {
        "base": base.digest,
        "labelled": context.inputs["labelled"].digest,
        "base_rows": first.height,
        "captured_rows": captured.height,
        "begins": _seconds(captured[MOMENT].min()),
        "ends": _seconds(captured[MOMENT].max()),
        "cut": options["cut"],
    }
    meta = {
        "format": FORMAT,
        "family": base.meta["family"],
        "columns": columns.model_dump(mode="json"),
        "schema": {name: str(dtype) for name, dtype in frame.schema.items()},
        "splits": written,
        "counts": {
            "source": {"base": first.height, "captured": captured.height + sum(each.height for each in strays)},
            "dropped": [_told(each) for each in strays],
        },
        "extended": told,
    }
    context.measure({"rows": frame.height, **told})
    context.emit("dataset", "dataset", meta)
    context.progress(3, 3, "steps")


def _range(options: Mapping[str, Json]) -> tuple[int, int | None]:
    """The cut, and the oldest event that is trained on, in microseconds."""
    history = None if options["history"] == "all" else float(options["history"])
    since = None if history is None else round((options["cut"] - history) * SECOND)
    return round(options["cut"] * SECOND), since


# ---- the first dataset -------------------------------------------------------------------------------------------


def _first_rows(base: InputArtifact, columns: Columns) -> pl.DataFrame:
    """All its rows, whichever split they were in: what was held out then is past by now."""
    missing = [name for name in columns.names if name not in base.meta["schema"]]
    if missing:
        raise DataError(
            f"the first dataset has no column {missing[0]!r}",
            place="[data] columns",
            cure="Run the job from its sources once with the columns that it has now: `onejob run`.",
        )
    shards = [shard for split in base.meta["splits"].values() for shard in split["shards"]]
    frame = pl.concat([_read(base.file(shard["path"]), columns.names) for shard in shards])
    moment = _moments(frame[columns.time]) if columns.time else None
    known = moment if moment is not None else pl.Series([None] * frame.height, dtype=pl.Int64)
    empty = [pl.lit(None, dtype=pl.String).alias(REQUEST), pl.lit(None, dtype=pl.Int32).alias(ROW)]
    return frame.with_columns(*empty, known.alias(MOMENT))


def _read(path: Path, names: list[str] | None = None) -> pl.DataFrame:
    try:
        return pl.read_ipc(path, columns=names)
    except (OSError, pl.exceptions.PolarsError) as error:
        cure = "`onejob verify` says what is damaged."
        raise DamagedError(f"it can't be read: {error}", place=str(path), cure=cure) from error


def _moments(column: pl.Series) -> pl.Series | None:
    """Microseconds since 1970 (without a zone: UTC); None for numbers, whose unit nobody knows, and for other text."""
    if column.dtype == pl.Date or isinstance(column.dtype, pl.Datetime):
        return column.cast(pl.Datetime("us", getattr(column.dtype, "time_zone", None))).to_physical().cast(pl.Int64)
    if column.dtype != pl.String:
        return None
    try:
        known = {text: _parsed(text) for text in column.drop_nulls().unique().to_list()}
    except ValueError:
        return None
    return pl.Series([known.get(text) for text in column.to_list()], dtype=pl.Int64)


def _parsed(text: str) -> int:
    read = datetime.datetime.fromisoformat(text)
    known = read if read.tzinfo else read.replace(tzinfo=datetime.UTC)
    return (known - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) // datetime.timedelta(microseconds=1)


# ---- captured rows -----------------------------------------------------------------------------------------------


def _captured(labelled: InputArtifact, columns: Columns, like: pl.Schema) -> pl.DataFrame:
    """The labelled ones, each column of the first dataset's type where its values allow it."""
    inputs = [*columns.categories, *columns.numbers]
    private = [name for name in inputs if name in labelled.meta["private"]]
    if private:
        raise DataError(
            f"the column {private[0]!r} is private: what was captured of it is not what the model was asked with, "
            "and can't be trained on",
            place="[monitor] capture.private",
            cure="Take the model's inputs out of the list, or leave out [monitor.retrain].",
        )
    frame = _read(labelled.file(ROWS))
    missing = [name for name in (columns.label, *inputs) if name not in frame.columns]
    if missing:
        raise DataError(
            f"the column {missing[0]!r} was never captured",
            place="[data] columns",
            cure=f"Captured: {', '.join(name for name in frame.columns if not name.startswith('onejob_'))}.",
        )
    frame = frame.filter(pl.col(columns.label).is_not_null())
    given = [_typed(frame[name], like[name]) for name in (columns.label, *inputs)]
    if columns.id:
        given.append(frame[KEY].cast(like[columns.id], strict=False).alias(columns.id))
    if columns.time:
        given.append(_times(frame[TIME], like[columns.time]).alias(columns.time))
    return pl.DataFrame([*given, frame[REQUEST], frame[ROW], frame[TIME].alias(MOMENT)]).select(like.names())


def _typed(column: pl.Series, dtype: Any) -> pl.Series:
    """A captured column as the first dataset has it; a number that doesn't fit makes the column one of fractions."""
    try:
        cast = column.cast(dtype)
    except pl.exceptions.PolarsError:
        cast = None
    if cast is not None and (dtype == pl.String or _same(cast, column)):
        return cast
    if dtype.is_integer() and column.dtype.is_numeric():
        return column.cast(pl.Float64)
    raise DataError(
        f"the captured column {column.name!r} is of type {column.dtype}, and that of the first dataset of type {dtype}",
        place="[data] columns",
        cure="Send labels and inputs of the type that the dataset has.",
    )


def _same(cast: pl.Series, column: pl.Series) -> bool:
    """Whether no value has changed."""
    return bool((cast.cast(pl.Float64) == column.cast(pl.Float64)).fill_null(True).all())


def _times(moments: pl.Series, dtype: Any) -> pl.Series:
    """Event times in the type of the first dataset's column; null where that is a number, whose unit nobody knows."""
    times = moments.cast(pl.Datetime("us", "UTC"))
    if dtype == pl.Date:
        return times.cast(pl.Date)
    if isinstance(dtype, pl.Datetime):
        zoned = times.dt.convert_time_zone(dtype.time_zone) if dtype.time_zone else times.dt.replace_time_zone(None)
        return zoned.cast(dtype)
    if dtype == pl.String:
        return times.dt.strftime("%Y-%m-%dT%H:%M:%S%.6fZ")
    return pl.Series([None] * len(moments), dtype=dtype)


# ---- both --------------------------------------------------------------------------------------------------------


def _chosen(frame: pl.DataFrame, since: int | None, cut: int) -> pl.DataFrame:
    """Rows that are not too old (one whose time isn't known counts as old), and whether they are held out."""
    recent = frame if since is None else frame.filter(pl.col(MOMENT) >= since)
    return recent.with_columns((pl.col(MOMENT) >= cut).fill_null(False).alias(HELD_OUT))


def _checked(
    context: StepContext, first: pl.DataFrame, captured: pl.DataFrame, columns: Columns
) -> tuple[pl.DataFrame, list[pl.DataFrame]]:
    """The captured rows that are as the job expects, and the strays; ExpectationError if it is more than strays."""
    expect = Expect.model_validate(context.options["expect"])
    captured, strays, broken = expectations.check_captured(captured, expect, columns)
    broken += expectations.check_extended(pl.concat([first, captured], how="vertical_relaxed"), expect, columns)
    if broken:
        rows, where = expectations.offending(broken), context.work / "offending.arrow"
        if rows is not None:
            write_arrow(rows, where)
        marks = [name for name in (columns.id, columns.time) if name]
        raise expectations.error(broken, [*marks, REQUEST], str(where), CURE)
    return captured, strays


def _told(strays: pl.DataFrame) -> dict[str, Json]:
    """As other datasets tell of the rows that a step dropped."""
    return {"number": 0, "step": "expect", "reason": strays[REASON][0], "rows": strays.height, "file": DROPPED}


def _require_rows(first: pl.DataFrame, captured: pl.DataFrame, cut: int) -> None:
    when = datetime.datetime.fromtimestamp(cut / SECOND, datetime.UTC).isoformat()
    held_out = pl.concat([first[HELD_OUT], captured[HELD_OUT]])
    if held_out.all():
        raise DataError(
            "no row is left to train on", place="[monitor.retrain] history", cure="Make it longer, or 'all'."
        )
    if not held_out.any():
        raise DataError(
            f"of the {captured.height} captured rows with a label none is from {when} or later: none can be held out",
            place="[monitor.retrain] hold_out",
            cure="Hold out a longer time than labels take to come.",
        )


def _seconds(moment: Any) -> float | None:
    return None if moment is None else moment / SECOND
