"""Collect an endpoint's counters into a series: requests, rows, errors, rate and percentiles for each interval.

Each line of `series.jsonl` also holds the counters as they stood, so the next collection needs nothing but the last
line, a crash loses nothing, and doing it twice at once adds one line. Replicas may come, go and die: ended ones'
counts are kept by the host (core/counters.py), and counts that fell anyhow (the folder was made anew) are taken as
new.

    {"time", "seconds", "requests", "rows", "errors", "rate", "p50_ms", "p90_ms", "p99_ms", "executions", "replicas",
     "latency": {bucket: n}, "total": {"values", "latency"}}
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from onejob.core.artifact import Json, canonical
from onejob.core.context import append_line, read_lines
from onejob.core.counters import BUCKETS, Counters, quantile, read_snapshots
from onejob.core.faults import reach

SERIES = "series.jsonl"
LOCK = "series.lock"
METRICS = "metrics"
MAX_BYTES = 32 << 20
IDLE_SECONDS = 60.0
"""An endpoint that nobody asks gets a line only so often."""
TAIL_BYTES = 1 << 16


def interval(before: Counters, after: Counters, seconds: float) -> dict[str, Json]:
    """What happened between two readings of the counters."""
    grown = after.since(before)
    requests, errors = grown.get("success") + grown.failures, grown.failures
    sparse = {str(index): amount for index, amount in enumerate(grown.latency) if amount}
    return {
        "seconds": round(seconds, 3),
        "requests": requests,
        "rows": grown.get("rows"),
        "errors": errors,
        "executions": grown.get("executions"),
        "rate": round(requests / seconds, 3) if seconds > 0 else None,
        **percentiles(grown.latency),
        "latency": sparse,
    }


def percentiles(latency: Sequence[int]) -> dict[str, Json]:
    """p50, p90 and p99 in milliseconds; None without requests."""
    return {f"p{percent}_ms": _rounded(quantile(latency, percent / 100)) for percent in (50, 90, 99)}


def summarize(lines: Iterable[Mapping[str, Json]], *, since: float = 0.0) -> dict[str, Json]:
    """All intervals that ended after `since` as one: the sums, and percentiles of the merged histograms."""
    latency = [0] * BUCKETS
    sums = {"requests": 0, "rows": 0, "errors": 0, "executions": 0}
    seconds, first, last = 0.0, None, None
    for line in lines:
        if line.get("time", 0.0) <= since:
            continue
        first, last = first or line["time"] - line["seconds"], line["time"]
        seconds += line["seconds"]
        for name in sums:
            sums[name] += line.get(name, 0)
        for bucket, amount in line.get("latency", {}).items():
            latency[int(bucket)] += amount
    return {
        **sums,
        "seconds": round(seconds, 3),
        "rate": round(sums["requests"] / seconds, 3) if seconds > 0 else None,
        "error_rate": sums["errors"] / sums["requests"] if sums["requests"] else None,
        **percentiles(latency),
        "from": first,
        "until": last,
    }


def collect_once(folder: Path, now: float, *, every: float = 5.0, keep: float = 7 * 86400.0) -> dict[str, Json] | None:
    """Append to an endpoint's series what happened since its last line; None if too early, or another is at it."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return None
        return _collect(folder, now, every, keep)
    finally:
        os.close(lock)


def series_of(folder: Path, *, since: float = 0.0) -> list[dict[str, Json]]:
    """The collected lines of an endpoint, oldest first, without the running totals."""
    lines = [line for line in read_lines(folder / SERIES) if line.get("time", 0.0) > since]
    return [{name: value for name, value in line.items() if name != "total"} for line in lines]


def summary_of(folder: Path) -> dict[str, Json]:
    """An endpoint's totals since it was made: requests, rows, errors, percentiles; no series needed."""
    found = read_snapshots(folder / METRICS)
    line = interval(Counters(), found.total(), 0.0)
    told = ("requests", "errors", "rows", "executions", "p50_ms", "p90_ms", "p99_ms")
    return {**{name: line[name] for name in told}, "replicas": len(found.live)}


def counted(folder: Path) -> dict[str, int]:
    """Every counter of an endpoint since it was made, by name (core/counters.py lists them)."""
    return dict(read_snapshots(folder / METRICS).total().values)


def _collect(folder: Path, now: float, every: float, keep: float) -> dict[str, Json] | None:
    path = folder / SERIES
    last = _last_line(path)
    elapsed = now - last["time"] if last else 0.0
    if last and 0 <= elapsed < every / 2:
        return None
    found = read_snapshots(folder / METRICS)
    total = found.total()
    before = Counters.from_json(last["total"]) if last else Counters()
    line = interval(before, total, max(elapsed, 0.0))
    if last and not line["requests"] and not last["requests"] and 0 <= elapsed < IDLE_SECONDS:
        return None
    line = {"time": now, **line, "replicas": len(found.live), "total": replace(total, parts={}).to_json()}
    _mend(path)
    reach("monitor.before_append")
    append_line(path, line)
    _trim(path, now - keep)
    return line


def _last_line(path: Path) -> dict[str, Json] | None:
    """The newest whole line, read from the end."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return None
    for text in reversed(lines):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "total" in line:
            return line
    return None


def _mend(path: Path) -> None:
    """Cut off half a line that a killed writer left, so that the next one stands alone."""
    try:
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            tail = file.read()
            if tail and not tail.endswith(b"\n"):
                file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)
    except FileNotFoundError:
        return


def _trim(path: Path, oldest: float) -> None:
    """Bound the series: when it has grown too large, or half of it is too old, write what stays aside and rename."""
    size = path.stat().st_size
    if size <= MAX_BYTES and not _begins_long_before(path, oldest):
        return
    lines = [line for line in read_lines(path) if line.get("time", 0.0) >= oldest]
    kept = [canonical(line) + b"\n" for line in lines] or [b""]
    while sum(map(len, kept)) > MAX_BYTES // 2 and len(kept) > 1:
        kept = kept[len(kept) // 4 + 1 :]
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    reach("monitor.before_trim")
    aside.replace(path)


def _begins_long_before(path: Path, oldest: float) -> bool:
    """Whether the first line is older than what is kept by a tenth of an hour: not every line is worth a rewrite."""
    with path.open("rb") as file:
        try:
            first = json.loads(file.readline())
        except ValueError:
            return True
    return bool(first.get("time", 0.0) < oldest - 360.0)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
