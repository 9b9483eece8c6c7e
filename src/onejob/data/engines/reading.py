"""Files become lazy tables: CSV, Parquet, Arrow, NDJSON, also inside .zip and .gz, with types that can be relied on.

A file that is empty, cut off, damaged, or whose column isn't of the declared type is a SourceError that names the file,
the column, the row and the value. Rows are counted from 1, without the header.
"""

from __future__ import annotations

import errno
import glob
import gzip
import shutil
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import polars as pl

from onejob.data.engines import blame
from onejob.data.sources import kind_of
from onejob.data.spec import Format
from onejob.data.steps.cast import TYPES, converted, first_bad
from onejob.errors import SourceError, StorageFullError

READ_ERRORS = (pl.exceptions.PolarsError, OSError, UnicodeDecodeError)
_SAME: Mapping[str, Callable[[pl.DataType], bool]] = {
    "int": lambda dtype: dtype.is_integer(),
    "float": lambda dtype: dtype.is_float(),
    "text": lambda dtype: dtype in (pl.String, pl.Categorical, pl.Enum),
    "bool": lambda dtype: dtype == pl.Boolean,
    "date": lambda dtype: dtype == pl.Date,
    "datetime": lambda dtype: dtype == pl.Datetime,
}
"""Declared type -> which types of a typed file are that."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a table: its logical name, where its bytes are (unpacked), and what it is."""

    name: str
    path: Path
    kind: str


@dataclass(frozen=True)
class Table:
    """A table that can be queried, and the files that it is made of."""

    name: str
    files: tuple[SourceFile, ...]
    format: Format
    frame: pl.LazyFrame


def read_table(name: str, folder: Path, how: Format, unpacked: Path) -> Table:
    """The files under an input's folder, in the order of their names, as one lazy table."""
    paths = sorted((path for path in folder.rglob("*") if not path.is_dir()), key=lambda p: p.relative_to(folder).parts)
    gone = [path.relative_to(folder).as_posix() for path in paths if not path.exists()]
    if gone:
        raise SourceError(
            "is gone since the job was planned", place=gone[0], cure="Put it back, and run the job again."
        )
    if not paths:
        raise SourceError("there is no file", place=f"table {name!r}")
    files = tuple(
        _unpack(path.relative_to(folder).as_posix(), path, how, unpacked / f"{name}-{index}")
        for index, path in enumerate(paths)
    )
    frames = [_scan(file, how) for file in files]
    _refuse_different(files, frames)
    names = frames[0].collect_schema().names()
    frame = pl.concat([each.select(names) for each in frames], how="vertical_relaxed") if len(frames) > 1 else frames[0]
    table = Table(name, files, how, frame)
    if _is_empty(table):
        raise SourceError("has no rows", place=files[0].name, cure="Is it the right file?")
    return table


def check_readable(table: Table) -> None:
    """Read a whole table for its errors alone; SourceError names the row."""
    for file in table.files:
        try:
            _scan(file, table.format).collect()
        except READ_ERRORS as error:
            raise blame.unreadable(file.name, file.path, file.kind, table.format, error) from error


def _is_empty(table: Table) -> bool:
    try:
        return table.frame.head(1).collect().height == 0
    except READ_ERRORS:
        check_readable(table)
        raise


# ---- packed files ------------------------------------------------------------------------------------------------


def _unpack(name: str, path: Path, how: Format, target: Path) -> SourceFile:
    """The file itself, or what is inside it, written to `target`."""
    try:
        if path.stat().st_size == 0:
            raise SourceError("is empty", place=name, cure="Fetch it again.")
        if name.lower().endswith(".zip"):
            return _unzip(name, path, how, target)
        kind = _kind(name, how)
        if not name.lower().endswith(".gz"):
            return SourceFile(name, path, kind)
        with gzip.open(path) as packed:
            return SourceFile(name, _copy(cast(IO[bytes], packed), target), kind)
    except (zipfile.BadZipFile, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise SourceError(f"is damaged or cut off ({error})", place=name, cure="Fetch it again.") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise StorageFullError(
                "no space left to unpack it", place=name, cure="Free some space, or unpack it elsewhere."
            ) from error
        raise SourceError(f"can't be read: {error.strerror}", place=name) from error


def _unzip(name: str, path: Path, how: Format, target: Path) -> SourceFile:
    with zipfile.ZipFile(path) as packed:
        members = [info.filename for info in packed.infolist() if not info.is_dir()]
        if how.member is not None:
            chosen = [member for member in members if member == how.member]
        else:
            chosen = [member for member in members if kind_of(member)] if len(members) > 1 else members
        if len(chosen) != 1:
            wanted = f"no member {how.member!r}" if how.member else f"{len(chosen)} tables"
            raise SourceError(
                f"holds {wanted}; its members: {', '.join(members) or 'none'}", place=name, cure="Name one in 'member'."
            )
        with packed.open(chosen[0]) as member:
            kind = _kind(chosen[0], how, name)
            return SourceFile(name, _copy(member, target), kind)


def _copy(packed: IO[bytes], target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
    return target


def _kind(name: str, how: Format, outer: str = "") -> str:
    kind = (None if how.kind == "auto" else how.kind) or kind_of(name) or kind_of(outer)
    if kind is None:
        raise SourceError("its name doesn't say what it is", place=name, cure="Set format.kind, such as 'csv'.")
    return kind


# ---- one file ----------------------------------------------------------------------------------------------------


def _scan(file: SourceFile, how: Format) -> pl.LazyFrame:
    try:
        if file.path.stat().st_size == 0:
            raise SourceError("is empty", place=file.name, cure="Fetch it again.")
        frame = _SCANS[file.kind](file, how)
        schema = frame.collect_schema()
    except READ_ERRORS as error:
        raise blame.unreadable(file.name, file.path, file.kind, how, error) from error
    missing = [column for column in how.types if column not in schema]
    if missing:
        raise SourceError(
            f"has no column {missing[0]!r}, which format.types declares",
            place=file.name,
            cure=f"It has: {', '.join(schema.names())}.",
        )
    return _typed(file, frame, schema, how.types)


def _scan_csv(file: SourceFile, how: Format) -> pl.LazyFrame:
    blame.refuse_cut_line(file.name, file.path, how)

    def scan(**types: Any) -> pl.LazyFrame:
        nulls = list(how.nulls) or None
        return pl.scan_csv(
            file.path, has_header=how.header, separator=how.separator, null_values=nulls, glob=False, **types
        )

    inferred = scan(infer_schema_length=None).collect_schema()
    names = inferred.names() if how.header else [f"column_{index + 1}" for index in range(len(inferred))]
    # declared columns come as text, so that a value of another type can be shown as it stands in the file
    schema = {
        name: pl.String() if name in how.types else dtype for name, dtype in zip(names, inferred.dtypes(), strict=True)
    }
    return scan(schema=schema)


def _scan_parquet(file: SourceFile, how: Format) -> pl.LazyFrame:
    return pl.scan_parquet(file.path, glob=False)


def _scan_arrow(file: SourceFile, how: Format) -> pl.LazyFrame:
    return pl.scan_ipc(file.path, glob=False)


def _scan_ndjson(file: SourceFile, how: Format) -> pl.LazyFrame:
    # this reader always expands patterns, so a folder called "runs [old]" must be escaped
    return pl.scan_ndjson(glob.escape(str(file.path)), infer_schema_length=None)


_SCANS = {"csv": _scan_csv, "parquet": _scan_parquet, "arrow": _scan_arrow, "ndjson": _scan_ndjson}


def _typed(file: SourceFile, frame: pl.LazyFrame, schema: pl.Schema, types: Mapping[str, str]) -> pl.LazyFrame:
    """Declared columns in their types; the first value of another type is named."""
    for column, to in types.items():
        dtype = schema[column]
        if _SAME[to](dtype):
            continue
        if file.kind != "csv" and not (dtype == pl.String or (to == "float" and dtype.is_integer())):
            raise SourceError(
                f"column {column!r} is of type {dtype}, not {to}",
                place=file.name,
                cure="Mend format.types or the file.",
            )
        try:
            found = first_bad(frame, column, converted(column, dtype, to))
        except READ_ERRORS as error:
            raise blame.unreadable(file.name, file.path, file.kind, None, error) from error
        if found:
            raise SourceError(
                f"column {column!r}, row {found[0]}: {found[1]!r} is not of type {to}",
                place=file.name,
                cure="Mend the value, add it to format.nulls if it means 'missing', or mend format.types.",
            )
    return frame.with_columns(
        converted(column, schema[column], to) for column, to in types.items() if not _SAME[to](schema[column])
    )


def _refuse_different(files: Sequence[SourceFile], frames: Sequence[pl.LazyFrame]) -> None:
    """All files of a table have the same columns, of types that go together."""
    first = frames[0].collect_schema()
    for file, frame in zip(files[1:], frames[1:], strict=True):
        schema = frame.collect_schema()
        different = sorted(set(first.names()) ^ set(schema.names()))
        if different:
            has = "has" if different[0] in schema else "hasn't"
            raise SourceError(
                f"{has} a column {different[0]!r}, unlike {files[0].name}",
                place=file.name,
                cure="The files of one table have the same columns.",
            )
        for column, dtype in schema.items():
            both = (dtype, first[column])
            if dtype != first[column] and not all(each.is_numeric() for each in both):
                raise SourceError(
                    f"column {column!r} is of type {dtype}, but {first[column]} in {files[0].name}",
                    place=file.name,
                    cure=f"Declare the column in format.types; types: {', '.join(TYPES)}.",
                )
