"""Capture: what is asked and answered comes back; private values don't; a bad disk costs rows, and nothing else."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from onejob.core.tensor import TensorSpec
from onejob.core.traffic import CAPTURE, OPEN, SEALED, SEGMENT_SUFFIX, hidden, secret_of
from onejob.errors import DamagedError, UnavailableError
from onejob.monitor.capture import Traffic, read_traffic, summary
from onejob.serve import capture as capture_module
from onejob.serve.capture import Capture, Record, Rules, Signature, sampled
from onejob.serve.identify import Roles, Told
from onejob.serve.segment import mend
from onejob.serve.spool import Spool, rescue, sealed_in

CARRIER, DISTANCE = TensorSpec("carrier", "BYTES", (-1, 1)), TensorSpec("distance", "FP64", (-1, 1))
OUTPUT = TensorSpec("probability", "FP32", (-1, 1))
ROLES = Roles("late", "departs", "flight")
SIGNATURE = Signature({"carrier": CARRIER, "distance": DISTANCE}, {"probability": OUTPUT}, True, ROLES)
META = {"endpoint": "flights", "engine": "d1"}


def record(request: str = "r1", rows: int = 2, **more: Any) -> Record:
    columns = {"carrier": ["UA", None, "é"][:rows], "distance": [1.5, None, 3][:rows]}
    outputs = {"probability": np.array([[0.25], [0.5], [0.75]], np.float32)[:rows]}
    values: dict[str, Any] = {"size": 100, "told": Told(1_000_000), "columns": columns, "outputs": outputs}
    return Record((request,), (rows,), **{**values, **more})


def made(folder: Path, *, signature: Signature = SIGNATURE, spool: Spool | None = None, **rules: Any) -> Capture:
    free = rules.pop("free", lambda place: 1 << 40)
    return Capture(folder, META, signature, Rules.of(rules), spool=spool, free=free)


def rows_of(folder: Path) -> Traffic:
    return read_traffic(sealed_in(folder / CAPTURE))


def test_what_was_asked_and_answered_comes_back(tmp_path: Path) -> None:
    capture = made(tmp_path)
    capture.add(record("r1", told=Told(5_000_000, times=[1_000_000, None], keys=["k1", None])))
    arrays = {"carrier": np.array([["AA"], [None]], object), "distance": np.array([[7.0], [np.nan]])}
    capture.add(record("r2", columns=arrays))
    capture.add(record("r3", rows=1, columns={"carrier": [12], "distance": [True]}))
    capture.flush()
    capture.seal()
    found = rows_of(tmp_path)
    assert found.request.tolist() == ["r1", "r1", "r2", "r2", "r3"]
    assert found.row.tolist() == [0, 1, 0, 1, 0]
    assert found.arrived.tolist() == [5_000_000, 5_000_000, 1_000_000, 1_000_000, 1_000_000]
    assert found.time.tolist() == [1_000_000, 5_000_000, 1_000_000, 1_000_000, 1_000_000]
    assert found.key.tolist() == ["k1", None, None, None, None]
    assert set(found.engine) == {"d1"}
    assert found.inputs["carrier"].tolist() == ["UA", None, "AA", None, "12"]
    np.testing.assert_array_equal(found.inputs["distance"], [1.5, np.nan, 7.0, np.nan, 1.0])
    np.testing.assert_array_equal(found.outputs["probability"], np.float32([0.25, 0.5, 0.25, 0.5, 0.25]))
    assert capture.counts() == {"capture_rows": 5}


def test_any_arrow_reader_reads_it_and_null_is_null(tmp_path: Path) -> None:
    capture = made(tmp_path)
    capture.add(record(rows=3))
    capture.flush()
    capture.seal()
    (path,) = sealed_in(tmp_path / CAPTURE)
    frame = pl.read_ipc_stream(path)
    assert frame["input.carrier"].to_list() == ["UA", None, "é"]
    assert frame["input.distance"].to_list() == [1.5, None, 3.0]
    assert frame.schema["time"] == pl.Datetime("us", "UTC")
    assert summary(path) == {
        "format": 1,
        "endpoint": "flights",
        "engines": {"d1": 3},
        "begins": 1.0,
        "ends": 1.0,
        "rows": 3,
        "newest": [[1.0, 3]],
        "columns": {"label": "late", "time": "departs", "id": "flight"},
        "private": {},
        "rate": 1.0,
        "schema": {
            "request": "string",
            "row": "int32",
            "arrived": "timestamp",
            "time": "timestamp",
            "key": "string",
            "input.carrier": "string",
            "input.distance": "double",
            "output.probability": "float",
        },
    }


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", [True, False, True]),
        ("INT8", [-1, 0, 1]),
        ("UINT64", [0, 1, 2**64 - 1]),
        ("FP16", [0.5, 1.5, 2.5]),
        ("BYTES", ["a", "", "c"]),
    ],
)
@pytest.mark.parametrize("width", [1, 2])
def test_every_datatype_alone_and_in_lists(tmp_path: Path, datatype: str, values: list[Any], width: int) -> None:
    spec = TensorSpec("x", datatype, (-1, width))
    dtype = object if datatype == "BYTES" else {"FP16": np.float16}.get(datatype, datatype.lower())
    array = np.repeat(np.array(values, dtype)[:, None], width, axis=1)
    capture = made(tmp_path, signature=Signature({"x": spec}, {"y": spec}, True, Roles()))
    capture.add(record(rows=3, columns={"x": array}, outputs={"y": array[::-1]}))
    capture.flush()
    capture.seal()
    found = rows_of(tmp_path)
    told = [value.tolist() for value in found.inputs["x"]] if width > 1 else found.inputs["x"].tolist()
    assert told == [row.tolist() if width > 1 else row.tolist()[0] for row in array]
    assert capture.dropped == dict.fromkeys(capture.dropped, 0)


def test_a_model_without_a_batch_is_one_row_a_request(tmp_path: Path) -> None:
    spec = TensorSpec("x", "FP32", (2, 2))
    capture = made(tmp_path, signature=Signature({"x": spec}, {"y": spec}, False, Roles()))
    capture.add(record(rows=1, columns={"x": np.ones((2, 2))}, outputs={"y": np.zeros((2, 2))}))
    capture.flush()
    capture.seal()
    assert [value.tolist() for value in rows_of(tmp_path).inputs["x"]] == [[1, 1, 1, 1]]


# ---- private columns


def test_private_values_are_hidden_before_anything_is_written(tmp_path: Path) -> None:
    private = {"carrier": "hash", "distance": "drop", "flight": "hash"}
    capture = made(tmp_path, private=private)
    capture.add(
        record(told=Told(1, keys=["secret-key", "other-key"]), columns={"carrier": ["UA"] * 2, "distance": [1, 2]})
    )
    capture.flush()
    written = b"".join(path.read_bytes() for path in (tmp_path / CAPTURE).rglob("*.arrows"))
    assert b"secret-key" not in written
    assert b"UAUA" not in written
    capture.seal()
    found = rows_of(tmp_path)
    secret = secret_of(tmp_path)
    assert found.key.tolist() == [hidden("secret-key", secret), hidden("other-key", secret)]
    assert found.inputs["carrier"].tolist() == [hidden("UA", secret)] * 2
    assert "distance" not in found.inputs
    assert os.stat(tmp_path / "private.key").st_mode & 0o077 == 0


def test_another_home_hides_otherwise_and_the_same_one_the_same(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    a, b = secret_of(tmp_path / "a"), secret_of(tmp_path / "b")
    assert a == secret_of(tmp_path / "a")
    assert hidden("UA", a) == hidden("UA", a) != hidden("UA", b)
    assert hidden("UA", a) != hidden("AA", a)
    assert not list(tmp_path.rglob(".private*"))


@pytest.mark.parametrize("name", ["carier", "departs", "late"])
def test_a_private_column_that_there_is_not_stops_the_start(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnavailableError, match=rf"capture.private.*{name}"):
        made(tmp_path, private={name: "hash"})
    inputs = {**SIGNATURE.inputs, "departs": CARRIER}
    with pytest.raises(UnavailableError, match="event time"):
        made(tmp_path, signature=Signature(inputs, SIGNATURE.outputs, True, ROLES), private={"departs": "drop"})


# ---- sampling


def test_sampling_keeps_all_rows_of_a_key_or_none_and_the_same_ones_everywhere() -> None:
    keys = [f"key{n % 500}" for n in range(2000)]
    kept = sampled(0.3, [f"r{n}" for n in range(2000)], keys)
    again = sampled(0.3, [f"other{n}" for n in range(2000)], keys)
    assert kept.tolist() == again.tolist()
    chosen = {keys[row] for row in kept}
    assert len(kept) == 4 * len(chosen)
    assert 0.2 < len(chosen) / 500 < 0.4
    assert set(sampled(0.1, keys, keys).tolist()) <= set(kept.tolist())
    by_request = sampled(0.5, ["r1", "r1", "r2", "r2"], [None] * 4)
    assert len(by_request) in (0, 2, 4)
    assert sampled(1.0, keys, keys) is None


def test_a_sampled_capture_writes_the_rows_of_the_sample(tmp_path: Path) -> None:
    capture = made(tmp_path, rate=0.5, private={"carrier": "hash"})
    requests = [f"r{n}" for n in range(60)]
    for request in requests:
        capture.add(record(request))
    capture.flush()
    capture.seal()
    kept = sampled(0.5, requests, [None] * 60)
    assert 10 < len(kept) < 50
    found = rows_of(tmp_path)
    assert found.request.tolist() == [requests[row] for row in kept for _ in range(2)]
    np.testing.assert_array_equal(found.inputs["distance"], [1.5, np.nan] * len(kept))
    assert capture.rows == 2 * len(kept)


# ---- files


def test_segments_are_sealed_by_size_and_by_age(tmp_path: Path) -> None:
    now = [0.0]
    spool = Spool(tmp_path / CAPTURE, SEGMENT_SUFFIX, steady=lambda: now[0])
    capture = made(tmp_path, spool=spool, segment=10_000, age=60)
    capture.add(record("r1"))
    capture.flush()
    assert sealed_in(tmp_path / CAPTURE) == []
    now[0] = 60
    capture.flush()
    assert len(sealed_in(tmp_path / CAPTURE)) == 1
    for n in range(200):
        capture.add(record(f"s{n}"))
    capture.flush()
    assert len(sealed_in(tmp_path / CAPTURE)) == 2
    assert list((tmp_path / CAPTURE / OPEN).iterdir()) == []
    now[0] = 1000
    capture.flush()
    assert len(sealed_in(tmp_path / CAPTURE)) == 2, "nothing came, so there is nothing to seal"
    assert len(rows_of(tmp_path)) == 402


def test_a_clock_that_jumps_neither_seals_early_nor_late_nor_mixes_names(tmp_path: Path) -> None:
    wall, steady = [1e9], [0.0]
    spool = Spool(tmp_path / CAPTURE, SEGMENT_SUFFIX, clock=lambda: wall[0], steady=lambda: steady[0])
    capture = made(tmp_path, spool=spool, age=60)
    for step, jump in enumerate((1e9, 2e9, 5e8, 1e9)):
        wall[0] = jump
        capture.add(record(f"r{step}"))
        capture.flush()
        assert len(sealed_in(tmp_path / CAPTURE)) == step
        steady[0] += 60
        capture.flush()
    assert sorted(rows_of(tmp_path).request) == sorted(f"r{n}" for n in range(4) for _ in range(2))


def torn(folder: Path, data: bytes) -> Path:
    """An open file of a writer that is dead."""
    place = folder / OPEN
    place.mkdir(parents=True, exist_ok=True)
    path = place / "0000000000001-1-1.arrows"
    path.write_bytes(data)
    return path


@pytest.fixture
def stream(tmp_path: Path) -> tuple[bytes, list[int]]:
    """Three batches, and where each ends."""
    capture = made(tmp_path / "made")
    ends: list[int] = []
    for n in range(3):
        capture.add(record(f"r{n}"))
        capture.flush()
        (path,) = (tmp_path / "made" / CAPTURE / OPEN).iterdir()
        ends.append(path.stat().st_size)
    return path.read_bytes(), ends


def test_the_torn_end_of_a_killed_writer_is_cut_wherever_it_died(
    tmp_path: Path, stream: tuple[bytes, list[int]]
) -> None:
    data, ends = stream
    for cut in (0, 1, 100, ends[0] - 1, ends[0], ends[0] + 1, ends[1] - 8, ends[1], ends[2] - 1, ends[2]):
        folder = tmp_path / str(cut)
        torn(folder, data[:cut])
        whole = sum(end <= cut for end in ends)
        sealed = rescue(folder, mend)
        assert len(sealed) == (1 if whole else 0)
        assert list((folder / OPEN).iterdir()) == []
        if whole:
            assert read_traffic(sealed).request.tolist() == [f"r{n}" for n in range(whole) for _ in range(2)]
            assert pl.read_ipc_stream(sealed[0]).height == 2 * whole


def test_rescue_again_after_dying_half_way_and_with_zeros_at_the_end(
    tmp_path: Path, stream: tuple[bytes, list[int]]
) -> None:
    data, _ = stream
    for name, ending in (("ended", b"\xff\xff\xff\xff\0\0\0\0"), ("zeros", bytes(4096))):
        torn(tmp_path / name, data + ending)
        (path,) = rescue(tmp_path / name, mend)
        assert len(read_traffic([path])) == 6


def test_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    capture = made(tmp_path)
    capture.add(record())
    capture.flush()
    assert rescue(tmp_path / CAPTURE, mend) == []
    capture.add(record("r2"))
    capture.flush()
    capture.seal()
    assert len(rows_of(tmp_path)) == 4


def test_a_file_that_is_no_segment_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.arrows"
    path.write_bytes(b"no arrow")
    with pytest.raises(DamagedError, match=r"x\.arrows"):
        read_traffic([path])
    with pytest.raises(DamagedError, match=r"x\.arrows"):
        summary(path)


def test_segments_of_different_models_are_read_together(tmp_path: Path) -> None:
    old = made(tmp_path)
    old.add(record("r1", rows=1))
    other = Signature({"distance": DISTANCE}, {"probability": OUTPUT}, True, Roles())
    new = Capture(tmp_path, {"endpoint": "flights", "engine": "d2"}, other, Rules.of({}), free=lambda place: 1 << 40)
    new.add(record("r2", rows=1))
    for capture in (old, new):
        capture.flush()
        capture.seal()
    found = rows_of(tmp_path)
    assert found.engine.tolist() == ["d1", "d2"]
    assert found.inputs["carrier"].tolist() == ["UA", None]
    assert found.take(np.array([1])).request.tolist() == ["r2"]


def test_no_segment_is_no_row() -> None:
    assert len(read_traffic([])) == 0


# ---- bad days


class Disk:
    """A disk that can be full, and then writes half of what it is given."""

    def __init__(self) -> None:
        self.full = False

    def __call__(self, file: int, data: bytes) -> int:
        if not self.full:
            return os.write(file, data)
        if len(data) < 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        os.write(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_drops_counts_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    disk = Disk()
    capture = made(tmp_path, spool=Spool(tmp_path / CAPTURE, SEGMENT_SUFFIX, write=disk))
    for request, full in (("first", True), ("r1", False), ("r2", True), ("r3", True), ("r4", False)):
        disk.full = full
        capture.add(record(request))
        capture.flush()
        assert ("No space" in capture.fault) == full
    disk.full = True
    capture.seal()
    assert sealed_in(tmp_path / CAPTURE) == []
    disk.full = False
    capture.seal()
    assert rows_of(tmp_path).request.tolist() == ["r1", "r1", "r4", "r4"]
    assert capture.counts() == {"capture_rows": 4, "capture_dropped.disk": 6}


def test_the_reserve_of_the_disk_is_left_alone(tmp_path: Path) -> None:
    room = [1000]
    capture = made(tmp_path, reserve=500, free=lambda place: room[0])
    capture.add(record("r1"))
    capture.flush()
    room[0] = 499
    capture.add(record("r2"))
    capture.flush()
    room[0] = 500
    capture.add(record("r3"))
    capture.flush()
    capture.seal()
    assert rows_of(tmp_path).request.tolist() == ["r1", "r1", "r3", "r3"]
    assert capture.counts() == {"capture_rows": 4, "capture_dropped.space": 2}


@pytest.mark.parametrize(("size", "rows", "fits"), [(capture_module.MOST_BYTES // 4, 1, 4), (1, 30_000, 3)])
def test_a_slow_disk_fills_the_buffer_and_no_more(tmp_path: Path, size: int, rows: int, fits: int) -> None:
    capture = made(tmp_path)
    outputs = {"probability": np.zeros((rows, 1), np.float32)}
    columns = {"carrier": ["UA"] * rows, "distance": np.zeros(rows)}
    for n in range(10):
        capture.add(Record((f"r{n}",), (rows,), size, Told(1), columns, outputs))
    assert capture.dropped["buffer"] == (10 - fits) * rows
    capture.flush()
    capture.add(Record(("after",), (rows,), size, Told(1), columns, outputs))
    capture.flush()
    assert capture.rows == (fits + 1) * rows


def test_one_request_larger_than_the_buffer_is_taken(tmp_path: Path) -> None:
    capture = made(tmp_path)
    capture.add(record(size=capture_module.MOST_BYTES * 2))
    capture.add(record("r2"))
    capture.flush()
    assert (capture.rows, capture.dropped["buffer"]) == (2, 2)


def test_a_value_that_no_column_takes_costs_its_rows_only(tmp_path: Path) -> None:
    capture = made(tmp_path)
    for bad in ({"carrier": ["x", "y"], "distance": [{}, 1]}, {"carrier": ["x", "y"]}):
        capture.add(record("bad", columns=bad))
        capture.add(record("good"))
        capture.flush()
    capture.seal()
    assert rows_of(tmp_path).request.tolist() == ["good"] * 4
    assert capture.counts() == {"capture_rows": 4, "capture_dropped.value": 4}


def test_half_a_surrogate_pair_is_written_as_a_mark(tmp_path: Path) -> None:
    capture = made(tmp_path)
    capture.add(record(rows=1, columns={"carrier": ["\ud800"], "distance": [1]}, told=Told(1, keys=["\udfff"])))
    capture.flush()
    capture.seal()
    assert rows_of(tmp_path).inputs["carrier"].tolist() == ["?"]


def test_the_thread_writes_and_seals_the_rest_when_it_is_stopped(tmp_path: Path) -> None:
    capture = made(tmp_path)
    capture.start()
    capture.add(record())
    capture.stop()
    assert len(rows_of(tmp_path)) == 2
    assert list((tmp_path / CAPTURE / OPEN).iterdir()) == []
    assert (tmp_path / CAPTURE / SEALED).is_dir()


def test_a_batch_that_was_answered_together_is_recorded_as_its_requests(tmp_path: Path) -> None:
    capture = made(tmp_path)
    columns = {"carrier": np.array([["AA"], ["B6"], ["UA"]], object), "distance": np.array([[1.0], [2.0], [3.0]])}
    outputs = {"probability": np.array([[0.1], [0.2], [0.3]], np.float32)}
    capture.add(Record(("r1", "r2"), (2, 1), 100, Told(7), columns, outputs))
    capture.add(record("r3", rows=1))
    capture.flush()
    capture.seal()
    found = rows_of(tmp_path)
    assert found.request.tolist() == ["r1", "r1", "r2", "r3"]
    assert found.row.tolist() == [0, 1, 0, 0]
    assert found.inputs["carrier"].tolist() == ["AA", "B6", "UA", "UA"]
    np.testing.assert_array_equal(found.outputs["probability"], np.float32([0.1, 0.2, 0.3, 0.25]))
