"""The built-in steps: `(frame, **options) -> frame`, or the frame and what was dropped, each with the reason.

A step is lazy: it adds to the query and computes nothing of the main table. Steps that name `tables`, `seed` or `time`
among their parameters are given them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from onejob.core.artifact import Json
from onejob.data.steps.cast import cast
from onejob.data.steps.drop_duplicates import drop_duplicates
from onejob.data.steps.drop_nulls import drop_nulls
from onejob.data.steps.filter import filter_rows
from onejob.data.steps.join import join
from onejob.data.steps.rename import rename
from onejob.data.steps.sample import sample
from onejob.data.steps.select import select
from onejob.data.steps.sort import sort
from onejob.data.steps.split import split
from onejob.data.steps.with_columns import with_columns

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "drop_duplicates": drop_duplicates,
    "drop_nulls": drop_nulls,
    "filter": filter_rows,
    "select": select,
    "rename": rename,
    "cast": cast,
    "join": join,
    "with_columns": with_columns,
    "sample": sample,
    "sort": sort,
    "split": split,
}
"""Name in the job file -> function; `data.options.STEPS` has the models of their options under the same names."""

_SAME_ROWS = frozenset({"select", "rename", "with_columns", "sort"})


def same_rows(name: str, options: Mapping[str, Json]) -> bool:
    """Whether a built-in step leaves every row, so that the query may simply go on."""
    return name in _SAME_ROWS or (name == "join" and options["how"] == "left")


def keeps_dropped(name: str, options: Mapping[str, Json]) -> bool:
    """Whether a built-in step may drop rows that are to be kept with the reason.

    The others, at the start of a job, are pushed down into the reading of the files: columns and rows that nobody wants
    are never in memory.
    """
    return not (same_rows(name, options) or name == "sample" or (name == "filter" and not options["keep"]))
