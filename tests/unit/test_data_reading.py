"""Files of every kind are read alike, and a file that is missing something says so by name, column, row and value."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from onejob.data.engines.reading import check_readable, read_table
from onejob.data.spec import Format
from onejob.errors import SourceError

CSV = "day,carrier,delay\n2013-01-01,UA,5\n2013-01-02,NA,NA\n2013-01-03,,-3\n"
ROWS = {"day": ["2013-01-01", "2013-01-02"], "carrier": ["UA", "B6"], "delay": [5, -3]}


def read(folder: Path, **how: Any) -> pl.DataFrame:
    return read_table("source", folder, Format(**how), folder.parent / "unpacked").frame.collect()


def failing(folder: Path, **how: Any) -> str:
    """What the error says, whether it shows at once or only when everything is read."""
    with pytest.raises(SourceError) as caught:
        check_readable(read_table("source", folder, Format(**how), folder.parent / "unpacked"))
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "in [1] 'x'"
    made.mkdir()
    return made


def _zip(path: Path, **members: str) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, text in members.items():
            packed.writestr(name.replace("__", "."), text)


WRITERS: dict[str, Callable[[pl.DataFrame, Path], Any]] = {
    "a.csv": lambda frame, path: frame.write_csv(path),
    "a.csv.gz": lambda frame, path: path.write_bytes(gzip.compress(frame.write_csv().encode())),
    "a.csv.zip": lambda frame, path: _zip(path, a__csv=frame.write_csv()),
    "a.parquet": lambda frame, path: frame.write_parquet(path),
    "a.arrow": lambda frame, path: frame.write_ipc(path),
    "a.ndjson": lambda frame, path: frame.write_ndjson(path),
    "a.jsonl.gz": lambda frame, path: path.write_bytes(gzip.compress(frame.write_ndjson().encode())),
}


@pytest.mark.parametrize("name", list(WRITERS))
def test_every_kind_gives_the_same_rows(folder: Path, name: str) -> None:
    WRITERS[name](pl.DataFrame(ROWS), folder / name)
    assert read(folder).to_dict(as_series=False) == ROWS


@pytest.mark.parametrize("name", list(WRITERS))
def test_a_file_that_is_cut_off_is_refused(folder: Path, name: str) -> None:
    frame = pl.DataFrame({key: values * 500 for key, values in ROWS.items()})
    WRITERS[name](frame, folder / name)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) - 4 - len(whole) // 3])
    said = failing(folder)
    assert said.startswith(f"{name}: ")
    assert "etch" in said


@pytest.mark.parametrize("name", list(WRITERS))
def test_an_empty_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"")
    assert failing(folder) == f"{name}: is empty. Fetch it again."


def test_a_file_without_rows_is_refused(folder: Path) -> None:
    (folder / "a.csv").write_text("day,carrier\n")
    assert failing(folder).startswith("a.csv: has no rows")


def test_no_file_is_refused(folder: Path) -> None:
    assert "there is no file" in failing(folder)


def test_a_file_that_went_away_is_named(folder: Path) -> None:
    (folder / "a.csv").symlink_to(folder / "nowhere.csv")
    assert failing(folder) == "a.csv: is gone since the job was planned. Put it back, and run the job again."


def test_symbolic_links_are_followed_and_names_kept(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "blob").write_text(CSV)
    (folder / "pack" / "data").mkdir(parents=True)
    (folder / "pack" / "data" / "a.csv").symlink_to(tmp_path / "blob")
    table = read_table("source", folder, Format(), tmp_path / "unpacked")
    assert [file.name for file in table.files] == ["pack/data/a.csv"]
    assert table.frame.collect().height == 3


def test_na_is_missing_only_where_the_job_says_so(folder: Path) -> None:
    (folder / "a.csv").write_text(CSV)
    assert read(folder)["delay"].to_list() == ["5", "NA", "-3"]
    plain = read(folder, nulls=["NA"])
    assert plain["delay"].to_list() == [5, None, -3]
    assert plain["carrier"].to_list() == ["UA", None, None]


def test_types_are_inferred_from_the_whole_file(folder: Path) -> None:
    rows = "".join(f"{n}\n" for n in range(5000))
    (folder / "a.csv").write_text(f"a\n{rows}0.5\n")
    assert read(folder)["a"].dtype == pl.Float64


def test_declared_types(folder: Path) -> None:
    (folder / "a.csv").write_text("i,f,b,d,t,x\n1,2,yes,2013-02-22,2013-02-22T10:00:00,007\n,,,,,\n")
    types = {"i": "float", "f": "int", "b": "bool", "d": "date", "t": "datetime", "x": "text"}
    frame = read(folder, types=types)
    assert frame.dtypes == [pl.Float64, pl.Int64, pl.Boolean, pl.Date, pl.Datetime("us"), pl.String]
    assert frame["x"].to_list() == ["007", None]
    assert frame.null_count().row(0) == (1,) * 6


@pytest.mark.parametrize(("to", "value"), [("int", "12a"), ("float", "1,5"), ("bool", "maybe"), ("date", "22.2.2013")])
def test_a_value_of_another_type_than_declared_is_named(folder: Path, to: str, value: str) -> None:
    good = {"int": "1", "float": "1.5", "bool": "true", "date": "2013-02-22"}[to]
    rows = pl.DataFrame({"n": [1, 2, 3, 4], "a": [good, None, value, value]})
    rows.write_csv(folder / "a.csv")
    said = failing(folder, types={"a": to})
    assert said.startswith(f"a.csv: column 'a', row 3: {value!r} is not of type {to}. Mend the value")


def test_a_column_of_a_typed_file_must_have_the_declared_type(folder: Path) -> None:
    pl.DataFrame({"a": [1.5]}).write_parquet(folder / "a.parquet")
    assert "a.parquet: column 'a' is of type Float64, not int" in failing(folder, types={"a": "int"})
    assert "has no column 'b', which format.types declares. It has: a." in failing(folder, types={"b": "int"})


def test_a_row_with_too_many_fields_is_named(folder: Path) -> None:
    (folder / "a.csv").write_text("a,b\n1,2\n3,4\n5,6,7\n")
    assert "a.csv: row 3 has 3 fields, the first line 2" in failing(folder)


def test_a_last_line_that_is_cut_off_is_named(folder: Path) -> None:
    (folder / "a.csv").write_text("a,b,c\n1,2,3\n4,5")
    assert "a.csv: ends in the middle of row 2: it has 2 of 3 fields" in failing(folder)
    (folder / "a.csv").write_text("a,b,c\n1,2,3\n4,5,6")
    assert read(folder).height == 2
    (folder / "a.csv").write_text('a,b\n1,"x\ny"')
    assert read(folder)["b"].to_list() == ["x\ny"]


def test_text_that_is_not_utf8_is_named(folder: Path) -> None:
    (folder / "a.csv").write_bytes(b"a,b\n1,x\n2,caf\xe9 au lait\n3,y\n")
    assert "is not UTF-8" in failing(folder)


def test_a_line_that_is_no_json_is_named(folder: Path) -> None:
    (folder / "a.ndjson").write_text('{"a": 1}\n{"a": 2}\n{"a": \n')
    assert "a.ndjson: row 3 is no JSON" in failing(folder)


def test_a_zip_with_several_tables_wants_a_name(folder: Path) -> None:
    _zip(folder / "a.zip", a__csv="x\n1\n", b__csv="x\n2\n", readme__txt="hello")
    assert "a.zip: holds 2 tables; its members: a.csv, b.csv, readme.txt. Name one" in failing(folder)
    assert "holds no member 'c.csv'" in failing(folder, member="c.csv")
    assert read(folder, member="b.csv")["x"].to_list() == [2]


def test_a_name_that_says_nothing_wants_a_kind(folder: Path) -> None:
    (folder / "rows.dat").write_text("a|b\n1|2\n")
    assert "rows.dat: its name doesn't say what it is" in failing(folder)
    assert read(folder, kind="csv", separator="|").to_dict(as_series=False) == {"a": [1], "b": [2]}
    assert read(folder, kind="csv", separator="|", header=False).columns == ["column_1", "column_2"]


def test_files_of_one_table_come_in_the_order_of_their_names(folder: Path) -> None:
    for name, text in {"2.csv": "b,a\n2,1\n", "1.csv": "a,b\n0,1.5\n"}.items():
        (folder / name).write_text(text)
    assert read(folder).to_dict(as_series=False) == {"a": [0, 1], "b": [1.5, 2.0]}


def test_files_of_one_table_have_the_same_columns(folder: Path) -> None:
    (folder / "1.csv").write_text("a,b\n0,1\n")
    (folder / "2.csv").write_text("a,c\n0,1\n")
    assert "2.csv: hasn't a column 'b', unlike 1.csv" in failing(folder)
    (folder / "2.csv").write_text("a,b\n0,x\n")
    assert "2.csv: column 'b' is of type String, but Int64 in 1.csv" in failing(folder)


def test_what_is_no_parquet_says_so(folder: Path) -> None:
    (folder / "a.parquet").write_text(json.dumps({"a": 1}))
    assert failing(folder).startswith("a.parquet: can't be read as parquet; it may be damaged or cut off")
