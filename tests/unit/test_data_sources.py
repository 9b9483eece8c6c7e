"""Sources: what a name means, and what an error says when it means nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from onejob.data.sources import kind_of, resolve
from onejob.errors import SourceError, UnavailableError


def found(text: str, project: Path) -> list[str]:
    return [name for name, _ in resolve(text, str(project), place="[data] source").files]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with data, that breaks when it is imported."""
    folder = tmp_path / "site" / "olddata"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    for name in ("data/flights.csv.zip", "data/weather.csv", "data/airlines.parquet", "data/notes.txt"):
        (folder / name).write_bytes(b"x")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return folder


def test_a_path_starts_at_the_project(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.csv").write_text("x")
    assert found("raw/a.csv", tmp_path) == ["raw/a.csv"]
    assert found(str(tmp_path / "raw" / "a.csv"), tmp_path) == ["raw/a.csv"]


def test_outside_the_project_only_the_name_counts(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for name in ("b.csv", "a.csv"):
        (tmp_path / name).write_text("x")
    assert found("../a.csv", project) == ["a.csv"]
    assert found("../*.csv", project) == ["a.csv", "b.csv"]


def test_a_glob_gives_its_files_sorted(tmp_path: Path) -> None:
    for name in ("2.csv", "10.csv", "1.csv", "note.txt"):
        (tmp_path / name).write_text("x")
    assert found("*.csv", tmp_path) == ["1.csv", "10.csv", "2.csv"]
    with pytest.raises(SourceError, match=r"no file matches '\*\.parquet'"):
        found("*.parquet", tmp_path)


def test_a_folder_gives_the_files_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "raw" / "deep").mkdir(parents=True)
    for name in ("raw/b.csv.gz", "raw/deep/a.parquet", "raw/readme.md"):
        (tmp_path / name).write_text("x")
    assert found("raw", tmp_path) == ["raw/b.csv.gz", "raw/deep/a.parquet"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"holds no file of a kind that can be read"):
        found("empty", tmp_path)


def test_a_project_with_brackets_spaces_and_quotes_is_no_pattern(tmp_path: Path) -> None:
    project = tmp_path / "old [1] 'it\"s"
    project.mkdir()
    (project / "a [2].csv").write_text("x")
    assert found("a [2].csv", project) == ["a [2].csv"]
    assert found("*.csv", project) == ["a [2].csv"]


def test_a_data_set_of_a_package_is_found_without_importing_it(package: Path, tmp_path: Path) -> None:
    for name in ("olddata/flights", "olddata/data/flights", "olddata/flights.csv", "olddata/data/flights.csv.zip"):
        assert found(name, tmp_path) == ["olddata/data/flights.csv.zip"]
    assert found("olddata/airlines", tmp_path) == ["olddata/data/airlines.parquet"]
    assert "olddata" not in sys.modules


def test_an_ambiguous_data_set_lists_what_it_may_be(package: Path, tmp_path: Path) -> None:
    (package / "flights.parquet").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"may be any of: olddata/data/flights.csv.zip, olddata/flights.parquet"):
        found("olddata/flights", tmp_path)
    assert found("olddata/flights.parquet", tmp_path) == ["olddata/flights.parquet"]


def test_a_missing_data_set_names_the_nearest(package: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"holds no data set called 'wether'. It holds: weather\."):
        found("olddata/wether", tmp_path)


def test_a_missing_package_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"`pip install nosuchdata20`"):
        found("nosuchdata20/flights", tmp_path)


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "flights.csv").write_text("x")
    with pytest.raises(SourceError, match=r"\[data\] source: no such file: 'flight.csv'.*holds: flights.csv\."):
        found("flight.csv", tmp_path)
    with pytest.raises(SourceError, match=r"There is no folder .*raw\."):
        found("raw/flights.csv", tmp_path)


def test_a_url_is_refused_with_a_cure(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"s3:// sources can't be read. Copy the files"):
        found("s3://bucket/rows.parquet", tmp_path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.csv", "csv"), ("a.CSV.gz", "csv"), ("a.csv.zip", "csv"), ("a.jsonl", "ndjson"), ("a.txt", None), ("a", None)],
)
def test_the_name_says_what_a_file_is(name: str, kind: str | None) -> None:
    assert kind_of(name) == kind
