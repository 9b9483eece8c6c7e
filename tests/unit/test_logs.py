"""A log that grows, or is shortened, while it is read: every line once."""

from __future__ import annotations

from pathlib import Path

from onejob.exec.log import Log
from onejob.loop.commands.logs import LogReader


def test_a_growing_log_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader = LogReader(path)
    assert list(reader.lines()) == [], "it isn't there yet"
    path.write_bytes(b"one\ntw")
    assert list(reader.lines()) == ["one"]
    with path.open("ab") as file:
        file.write(b"o\nthree")
    assert list(reader.lines()) == ["two"]
    assert list(reader.lines(last=True)) == ["three"], "the last line may have no end"
    assert list(reader.lines(last=True)) == []


def test_a_log_that_is_shortened_is_gone_on_with_where_one_was(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", limit=40_000)
    reader = LogReader(tmp_path / "log")
    read: list[str] = []
    for number in range(9000):
        log.write(f"line {number:04d}\n".encode())
        if number % 50 == 0:
            read += reader.lines()
    read += reader.lines(last=True)
    log.close()
    assert log.left_out > 0
    assert [line for line in read if line.startswith("line")] == [f"line {number:04d}" for number in range(9000)]
