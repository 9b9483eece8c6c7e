"""Carries out the steps of a job: lazily where a step only adds to the query, and at once where rows must be kept.

Polars doesn't share work between results that are asked for together, so a step that gives both the rows that stay and
those that it drops has its input computed first; else everything before it would be computed once for each result.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from onejob.core.artifact import Json
from onejob.core.plugin import load
from onejob.data.options import StepCall, did_you_mean
from onejob.data.steps import FUNCTIONS, keeps_dropped, same_rows
from onejob.data.steps.dropped import REASON, Dropped
from onejob.errors import DataError, OnejobError, StepError, UnavailableError

REST = "not selected"
"""The reason of rows that a user's function left out without one: counted, since a silent loss is the worst one."""


@dataclass(frozen=True)
class DroppedRows:
    """Rows that a step dropped for one reason: how many, and the rows themselves where they are kept."""

    reason: str
    count: int
    rows: pl.DataFrame | None


@dataclass(frozen=True)
class StepRows:
    """What one step did to the rows; `seconds` include the computing of lazy steps before it."""

    number: int
    """The step's place in `steps`, from 0."""
    name: str
    rows_in: int
    rows_out: int
    dropped: tuple[DroppedRows, ...]
    seconds: float


@dataclass(frozen=True)
class _Query:
    """A lazy query, and the steps in it that aren't computed yet: their places, and the query up to each."""

    frame: pl.LazyFrame
    pending: tuple[tuple[str, pl.LazyFrame], ...] = ()

    def then(self, place: str, frame: pl.LazyFrame) -> _Query:
        return _Query(frame, (*self.pending, (place, frame)))

    def collect(self, *others: pl.LazyFrame) -> list[pl.DataFrame]:
        """Compute it, and what a step gave beside it; an error gets the place of the first step whose query fails."""
        try:
            return pl.collect_all([self.frame, *others], engine="in-memory")
        except Exception as error:
            place = "[data] source"
            for place, frame in self.pending:
                try:
                    frame.collect(engine="in-memory")
                except Exception as found:
                    raise _as_error(found, place) from found
            raise _as_error(error, place) from error


def execute(
    source: pl.LazyFrame,
    calls: Sequence[StepCall],
    tables: Mapping[str, pl.LazyFrame],
    given: Mapping[str, Json],
    progress: Callable[[int], None],
) -> tuple[pl.DataFrame, list[StepRows]]:
    """The rows after the last step, and what each step did.

    `given` holds the values that built-in steps ask for by the names of their parameters: `seed`, `time`.
    """
    query = _Query(source)
    rows = int(_Query(source.select(pl.len())).collect()[0].item())
    done: list[StepRows] = []
    for number, call in enumerate(calls):
        started = time.perf_counter()
        place = f"[data] steps[{number}] {call.name}"
        if call.module is not None or keeps_dropped(call.name, call.options):
            query = _Query(query.collect()[0].lazy())
        stays, dropped = _called(call, query.frame, tables, given, place)
        query = query.then(place, stays)
        left = rows
        counted: tuple[DroppedRows, ...] = ()
        if call.module is not None or not same_rows(call.name, call.options):
            kept, *frames = query.collect(*(each.rows for each in dropped if each.rows is not None))
            query, left = _Query(kept.lazy()), kept.height
            counted = _counted(dropped, frames, rows - left)
        done.append(StepRows(number, call.name, rows, left, counted, time.perf_counter() - started))
        rows = left
        progress(number + 1)
    return query.collect()[0], done


def _counted(dropped: Sequence[Dropped], frames: Sequence[pl.DataFrame], missing: int) -> tuple[DroppedRows, ...]:
    """How many rows each reason dropped; those that no frame holds go to the reason without rows, or to `REST`."""
    known = iter(frames)
    counted, rest = [], REST
    for each in dropped:
        if each.rows is None:
            rest = each.reason
        else:
            frame = next(known)
            counted.append(
                DroppedRows(each.reason, frame.height, frame.with_columns(pl.lit(each.reason).alias(REASON)))
            )
            missing -= frame.height
    return (*counted, *([DroppedRows(rest, missing, None)] if missing > 0 else []))


def _called(
    call: StepCall, frame: pl.LazyFrame, tables: Mapping[str, pl.LazyFrame], given: Mapping[str, Json], place: str
) -> tuple[pl.LazyFrame, Sequence[Dropped]]:
    try:
        function = FUNCTIONS[call.name] if call.module is None else load(call.name)
    except UnavailableError as error:
        raise UnavailableError(
            error.message, place=place, cure="A step's module lies beside the job file, or is installed."
        ) from error
    extra: dict[str, Any] = dict(tables) if call.module else {"tables": tables, **given}
    options = _arguments(function, call, extra, place)
    try:
        result = function(frame, **options)
        stays, dropped = _parts(result, place)
        stays.collect_schema()  # a column that isn't there fails here, at its own step
    except Exception as error:
        raise _as_error(error, place) from error
    return stays, dropped


def _arguments(function: Any, call: StepCall, extra: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The step's options, and of the extras those that the function has a parameter for."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    names = [each.name for each in parameters]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    unknown = [name for name in call.options if name not in names and not takes_any]
    if unknown:
        raise DataError(
            f"the function takes no option {unknown[0]!r}.{did_you_mean(unknown[0], names)}",
            place=place,
            cure=f"It takes: {', '.join(names) or 'none'}.",
        )
    arguments = {**{name: extra[name] for name in names if name in extra}, **call.options}
    missing = [
        each.name
        for each in parameters
        if each.default is each.empty
        and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        and each.name not in arguments
    ]
    if missing:
        raise DataError(
            f"the function needs {missing[0]!r}, which is neither an option of the step nor a table",
            place=place,
            cure=f"Give it as an option, or add it to [data] tables (now: {', '.join(extra) or 'none'}).",
        )
    return arguments


def _parts(result: Any, place: str) -> tuple[pl.LazyFrame, Sequence[Dropped]]:
    """What a step gave back, in one form: a user's function may give a frame, or a frame and {reason: dropped rows}."""
    stays, dropped = result if isinstance(result, tuple) and len(result) == 2 else (result, ())
    if isinstance(dropped, Mapping):
        dropped = [Dropped(str(reason), rows.lazy()) for reason, rows in dropped.items()]
    if isinstance(stays, pl.LazyFrame | pl.DataFrame):
        return stays.lazy(), dropped
    raise StepError(
        f"the function gave back {type(result).__name__}",
        place=place,
        cure="It gives a LazyFrame, or (LazyFrame, {reason: LazyFrame of the dropped rows}).",
    )


def _as_error(error: Exception, place: str) -> OnejobError:
    """Any error of a step, with its place: what the data are not, or what broke in a user's function."""
    if isinstance(error, OnejobError):
        return error if error.place else type(error)(error.message, place=place, cure=error.cure)
    words = str(error).strip().splitlines()
    text = words[0] if words else type(error).__name__
    if isinstance(error, pl.exceptions.ColumnNotFoundError):
        return DataError(f"there is no column {text}", place=place)
    if isinstance(error, pl.exceptions.PolarsError):
        return DataError(text, place=place, cure="Do the columns have the types that the step expects?")
    return StepError(f"{type(error).__name__}: {text}", place=place, cure="The log has the lines that led there.")
