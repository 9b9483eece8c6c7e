"""The log keeps head and tail within its bounds, and tells the ranks of a gang apart."""

import re
from pathlib import Path

from onejob.exec.log import LONGEST_LINE, Log, RankOutput
from onejob.exec.redact import Redactor

NOBODY = Redactor({})


def lines(first: int, last: int) -> bytes:
    return b"".join(b"line %06d\n" % n for n in range(first, last))


def test_a_short_log_is_kept_whole(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", limit=4000)
    log.write(lines(0, 300))
    log.close()
    assert (tmp_path / "log").read_bytes() == lines(0, 300)


def test_a_long_log_keeps_head_and_tail(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", limit=4000)
    for n in range(0, 10_000, 7):
        log.write(lines(n, min(n + 7, 10_000)))
        assert (tmp_path / "log").stat().st_size <= 4100
    log.close()
    text = (tmp_path / "log").read_bytes()
    assert text.startswith(lines(0, 80))
    assert text.endswith(lines(9_950, 10_000))
    notice = re.findall(rb"\[onejob\] \xe2\x80\xa6 ([\d,]+) bytes of the log were left out here \xe2\x80\xa6\n", text)
    assert len(notice) == 1
    kept = len(re.sub(rb"\[onejob\].*\n", b"", text))
    assert int(notice[0].replace(b",", b"")) == 12 * 10_000 - kept


def test_one_endless_line_is_bounded_too(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", limit=4000)
    for _ in range(100):
        log.write(b"x" * 500)
    log.close()
    assert (tmp_path / "log").stat().st_size <= 4500


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"before\n")
    log = Log(tmp_path / "log")
    log.note("hello")
    log.close()
    assert (tmp_path / "log").read_bytes() == b"before\n[onejob] hello\n"


def test_a_note_begins_a_line(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.write(b"50%")
    log.note("stopping")
    log.close()
    assert (tmp_path / "log").read_bytes() == b"50%\n[onejob] stopping\n"


def test_ranks_are_told_apart_line_by_line(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    one, two = (RankOutput(log, NOBODY, b"[rank %d] " % n) for n in (0, 1))
    one.feed(b"a\nb")
    two.feed(b"x\n")
    one.feed(b"c\nd")
    two.feed(b"y")
    one.end()
    two.end()
    log.close()
    expected = b"[rank 0] a\n[rank 1] x\n[rank 0] bc\n[rank 0] d\n[rank 1] y\n"
    assert (tmp_path / "log").read_bytes() == expected


def test_a_line_without_end_is_broken(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    output = RankOutput(log, NOBODY, b"[rank 0] ")
    output.feed(b"x" * (LONGEST_LINE + 1))
    assert len((tmp_path / "log").read_bytes()) == len(b"[rank 0] ") + LONGEST_LINE + 2
    log.close()


def test_a_single_rank_shows_at_once(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    RankOutput(log, NOBODY).feed(b"50%\r")
    assert (tmp_path / "log").read_bytes() == b"50%\r"
    log.close()


def test_a_full_disk_costs_lines_and_not_the_task(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("/dev/full")
    log = Log(tmp_path / "log")
    log.write(b"lost\n")
    log.note("lost too")
    log.close()
