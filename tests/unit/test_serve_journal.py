"""The request log: bounded, rotated, not in the way when the disk is full; ended replicas' counts are kept once."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from onejob.core.counters import BUCKETS, Counters, quantile, read_snapshots
from onejob.serve.journal import RequestLog
from onejob.serve.retire import retire


def lines_of(folder: Path) -> list[int]:
    return [json.loads(line)["n"] for path in sorted(folder.glob("*.jsonl")) for line in path.read_bytes().splitlines()]


def test_lines_are_written_at_the_flush_and_the_files_rotate(tmp_path: Path) -> None:
    times = iter(range(1000, 2000))
    log = RequestLog(tmp_path, max_bytes=40, max_files=3, clock=lambda: next(times))
    for n in range(10):
        log.add({"n": n, "pad": "x" * 20})
        assert n not in lines_of(tmp_path)
        log.flush()
    log.close()
    assert lines_of(tmp_path) == [7, 8, 9]
    assert all(path.stat().st_size <= 40 for path in tmp_path.iterdir())
    assert log.dropped == 0


def test_a_full_buffer_drops_and_counts(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, max_lines=2)
    for n in range(5):
        log.add({"n": n})
    log.flush()
    log.close()
    assert lines_of(tmp_path) == [0, 1]
    assert log.dropped == 3


def test_a_full_disk_drops_and_counts_leaves_whole_lines_and_is_used_again_when_there_is_room(tmp_path: Path) -> None:
    full = False

    def write(file: int, data: bytes) -> int:
        if not full:
            return os.write(file, data)
        os.write(file, data[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    log = RequestLog(tmp_path, write=write)
    log.add({"n": 0})
    log.flush()
    full = True
    log.add({"n": 1})
    log.flush()
    assert log.dropped == 1
    assert "No space" in log.fault
    full = False
    log.add({"n": 2})
    log.flush()
    log.close()
    assert lines_of(tmp_path) == [0, 2]
    assert log.fault == ""


def test_a_folder_that_cannot_be_made_does_not_raise(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = RequestLog(tmp_path / "file" / "requests")
    log.add({"n": 0})
    log.flush()
    assert log.dropped == 1


def leave(folder: Path, pid: int, success: int, start: str = "1.0") -> None:
    counters = Counters({"success": success})
    counters.observe(1000)
    (folder / f"{pid}.json").write_text(json.dumps({"id": f"{pid}:{start}", "pending": 0, **counters.to_json()}))


def test_ended_replicas_are_folded_once_whenever_the_host_dies(tmp_path: Path) -> None:
    leave(tmp_path, 1, 10)
    leave(tmp_path, 2, 5)
    retire(tmp_path, {2})
    assert not (tmp_path / "1.json").exists()
    assert read_snapshots(tmp_path).total().get("success") == 15
    leave(tmp_path, 1, 10)  # as if the host had died between folding and deleting
    assert read_snapshots(tmp_path).total().get("success") == 15
    retire(tmp_path, {2})
    assert read_snapshots(tmp_path).total().get("success") == 15
    leave(tmp_path, 1, 3, start="2.0")  # another process with the same pid
    assert read_snapshots(tmp_path).total().get("success") == 18
    assert read_snapshots(tmp_path).total(without="2:1.0").get("success") == 13
    retire(tmp_path, ())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["retired.json"]
    total = read_snapshots(tmp_path).total()
    assert total.get("success") == 18
    assert sum(total.latency) == 3


def test_torn_and_foreign_files_are_no_snapshots(tmp_path: Path) -> None:
    (tmp_path / "3.json").write_text('{"id": "3:1"')
    (tmp_path / "4.json").write_text("[]")
    (tmp_path / "retired.json").write_text("")
    assert read_snapshots(tmp_path).total() == Counters()


def test_quantiles() -> None:
    counters = Counters()
    assert quantile(counters.latency, 0.5) is None
    for milliseconds in range(1, 101):
        counters.observe(milliseconds * 1_000_000)
    for q, expected in ((0.5, 50), (0.9, 90), (0.99, 99)):
        assert quantile(counters.latency, q) == pytest.approx(expected, rel=0.1)
    counters.observe(10**15)  # longer than the last bound
    assert len(counters.latency) == BUCKETS
    assert quantile(counters.latency, 1.0) == pytest.approx(112e3, rel=0.2)
