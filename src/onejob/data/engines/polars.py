"""The data stage on Polars: sources become a dataset, in one process, with equal bytes however often it runs.

Everything is computed in memory: a split, a sort and the profile need all rows anyway, and the rows' order is certain.
"""

from __future__ import annotations

import errno
import itertools
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from onejob.core.artifact import Json
from onejob.core.context import StepContext, write_json
from onejob.core.faults import reach
from onejob.data.engines import expectations
from onejob.data.engines.profile import profile
from onejob.data.engines.query import StepRows, execute
from onejob.data.engines.reading import Table, check_readable, read_table
from onejob.data.engines.roles import in_roles
from onejob.data.engines.shards import write_arrow, write_split
from onejob.data.spec import Options
from onejob.data.steps.split import HELD_OUT
from onejob.errors import DataError, StorageFullError

FORMAT = 1


@dataclass(frozen=True)
class Collected:
    """The rows after the last step, and how they came about."""

    rows: pl.DataFrame
    source_rows: Mapping[str, int]
    steps: tuple[StepRows, ...]


def run(context: StepContext) -> None:
    """Sources to dataset: reads the inputs `source` and `table.<name>`, leaves the output `dataset`."""
    options = Options.model_validate(context.options)
    unpacked = context.work / "unpacked"
    total = len(options.steps) + 3
    times = [time.perf_counter()]
    try:
        tables = _read(context, options, unpacked)
        times.append(time.perf_counter())
        reach("data.read")
        context.progress(1, total, "steps")
        collected = _compute(context, options, tables, total)
        times.append(time.perf_counter())
        reach("data.computed")
        context.progress(total - 1, total, "steps")
        _write(context, options, collected)
        times.append(time.perf_counter())
        context.progress(total, total, "steps")
        context.measure(_measured(collected, times))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise StorageFullError(
            "no space left for the dataset", place=str(context.work), cure="Free some space, and run the job again."
        ) from error
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)


# ---- read and compute --------------------------------------------------------------------------------------------


def _read(context: StepContext, options: Options, unpacked: Path) -> dict[str, Table]:
    """The main table under the name `source`, and the others under theirs."""
    tables = {"source": read_table("source", context.inputs["source"].path, options.format, unpacked)}
    for name, how in options.formats.items():
        tables[name] = read_table(name, context.inputs[f"table.{name}"].path, how, unpacked)
    return tables


def _compute(context: StepContext, options: Options, tables: Mapping[str, Table], total: int) -> Collected:
    frames = {name: table.frame for name, table in tables.items()}
    source = frames.pop("source")
    given = {"seed": context.seed, "time": options.columns.time}

    def progress(done: int) -> None:
        context.progress(1 + done, total, "steps")

    try:
        rows, steps = execute(source, options.steps, frames, given, progress)
        counts = pl.collect_all([table.frame.select(pl.len()) for table in tables.values()])
    except DataError:
        # a step may fail because a file is damaged further down than anything was read so far: then that is the error
        for table in tables.values():
            check_readable(table)
        raise
    if HELD_OUT not in rows.columns:
        rows = rows.with_columns(pl.lit(False).alias(HELD_OUT))
    return Collected(rows, {name: int(count.item()) for name, count in zip(tables, counts, strict=True)}, tuple(steps))


# ---- check and write ---------------------------------------------------------------------------------------------


def _write(context: StepContext, options: Options, collected: Collected) -> None:
    _check(context, options, collected)
    frame = in_roles(collected.rows, options.columns)
    held_out = collected.rows[HELD_OUT]
    splits = {"train": frame.filter(~held_out), "holdout": frame.filter(held_out)}
    if not splits["train"].height:
        raise DataError(
            f"no row is left to train on (held out: {splits['holdout'].height})",
            place="[data] steps",
            cure=f"Rows after each step: {_trail(collected)}.",
        )
    # a second try in the same folder starts from nothing
    shutil.rmtree(context.out("dataset"))
    folder = context.out("dataset")
    written = {name: write_split(part, folder, name) for name, part in splits.items()}
    dropped = _write_dropped(folder, collected)
    write_json(folder / "profile.json", profile(splits))
    reach("data.written")
    meta = {
        "format": FORMAT,
        "family": options.family,
        "columns": options.columns.model_dump(mode="json"),
        "schema": {name: str(dtype) for name, dtype in frame.schema.items()},
        "splits": written,
        "counts": {"source": dict(collected.source_rows), "dropped": dropped},
    }
    context.emit("dataset", "dataset", meta)


def _check(context: StepContext, options: Options, collected: Collected) -> None:
    """Raise ExpectationError where the rows aren't what the job expects, and leave the rows at fault beside the log."""
    kept = [each for step in collected.steps for each in step.dropped if each.rows is not None]
    dropped = sum(each.count for each in kept)
    broken = expectations.check(collected.rows, options.expect, options.columns, dropped)
    if not broken:
        return
    rows, where = expectations.offending(broken), context.work / "offending.arrow"
    if rows is not None:
        write_arrow(rows, where)
    marks = [name for name in (options.columns.id, options.columns.time) if name]
    raise expectations.error(broken, marks, str(where))


def _write_dropped(folder: Path, collected: Collected) -> list[dict[str, Json]]:
    """`dropped/NN.arrow` for step number NN, counted from 0; gives what was dropped, by step and reason."""
    counts: list[dict[str, Json]] = []
    for step in collected.steps:
        number, name = step.number, step.name
        path = f"dropped/{number:02d}.arrow"
        kept = [each.rows for each in step.dropped if each.rows is not None and each.count]
        if kept:
            write_arrow(pl.concat(kept, how="diagonal_relaxed"), folder / path)
        for each in step.dropped:
            if each.count:
                file = path if each.rows is not None else None
                counts.append({"number": number, "step": name, "reason": each.reason, "rows": each.count, "file": file})
    return counts


def _measured(collected: Collected, times: Sequence[float]) -> dict[str, Json]:
    """Belongs to the execution: rows in and out of each step, and where the time went."""
    read, compute, write = (round(end - start, 4) for start, end in itertools.pairwise(times))
    return {
        "rows": collected.rows.height,
        "seconds": {"read": read, "compute": compute, "write": write},
        "steps": [
            {
                "step": step.name,
                "rows_in": step.rows_in,
                "rows_out": step.rows_out,
                "seconds": round(step.seconds, 4),
            }
            for step in collected.steps
        ],
    }


def _trail(collected: Collected) -> str:
    rows = [f"source {collected.source_rows['source']}"]
    return ", ".join([*rows, *(f"{step.name} {step.rows_out}" for step in collected.steps)])
