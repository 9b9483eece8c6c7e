"""From an endpoint's folder to artifacts: whoever dies at whatever line, each row is there once and can be read."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Project, make_project

from onejob.core.artifact import Artifact, FileEntry
from onejob.core.state import EndpointState
from onejob.core.tensor import TensorSpec
from onejob.core.traffic import CAPTURE, LABELS, OPEN
from onejob.errors import NotFoundError
from onejob.loop import traffic
from onejob.loop.commands.keep import gc
from onejob.loop.commands.label import label
from onejob.loop.factory import open_session
from onejob.loop.reconcile import reconcile
from onejob.loop.session import Session
from onejob.loop.traffic import files_of, seal_traffic, told_of
from onejob.monitor.capture import read_traffic
from onejob.monitor.labels import read_labels
from onejob.serve.capture import Capture, Record, Rules, Signature
from onejob.serve.identify import Roles, Told
from onejob.serve.labels import LabelLog
from onejob.serve.spool import sealed_in
from onejob.testing.faults import armed

ROLES = Roles("late", None, "flight")
SPEC = {"x": TensorSpec("x", "FP64", (-1, 1))}
SEAL = """
import sys
from onejob.loop.factory import open_session
from onejob.loop.traffic import seal_traffic
with open_session(sys.argv[1]) as session:
    print(len(seal_traffic(session, "flights")))
"""


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    """A home with an endpoint that has a model's metadata, and no process."""
    with open_session(tmp_path / "home") as session:
        meta = {"format": 1, "columns": {"label": "late", "time": None, "id": "flight"}}
        engine = Artifact("engine", (FileEntry("a", *session.blobs.put(b"a")),), meta)
        session.blobs.put(engine.manifest_bytes())
        session.ledger.add_artifact(engine)
        options = {"monitor": {"interval": 5.0, "capture": {"private": {}}}}
        session.ledger.want_endpoint("flights", artifact=engine.digest, execution=None, options=options)
        session.home.endpoint("flights").mkdir(parents=True)
        yield session


def capture_of(session: Session) -> Capture:
    meta = {"endpoint": "flights", "engine": "d1"}
    signature = Signature(SPEC, {"y": SPEC["x"]}, True, ROLES)
    return Capture(session.home.endpoint("flights"), meta, signature, Rules.of({"reserve": 1}))


def fill(capture: Capture, first: int, last: int) -> None:
    for n in range(first, last):
        value = np.array([float(n)])
        capture.add(Record((f"r{n}",), (1,), 10, Told(n * 1_000_000, None, [f"k{n}"]), {"x": value}, {"y": value}))
    capture.flush()


def leave(session: Session) -> None:
    """Two sealed segments and a torn one of a dead writer; a sealed batch of labels and one of a dead writer."""
    folder = session.home.endpoint("flights")
    capture = capture_of(session)
    for first in (0, 10):
        fill(capture, first, first + 10)
        capture.seal()
    fill(capture, 20, 30)
    (path,) = (folder / CAPTURE / OPEN).iterdir()
    path.with_name("0000000000001-1-1.arrows").write_bytes(path.read_bytes() + b"\xff\xff\xff\xff\x40")
    path.unlink()
    log = LabelLog(folder, ROLES, None)
    log.take([(n, {"id": f"k{n}", "label": n % 2, "time": n + 100}) for n in range(5)])
    log.seal()
    log.take([(n, {"id": f"k{n}", "label": n % 2, "time": n + 100}) for n in range(5, 10)])
    (path,) = (folder / LABELS / OPEN).iterdir()
    path.with_name("0000000000002-1-1.jsonl").write_bytes(path.read_bytes() + b'{"order')
    path.unlink()


def seal(session: Session, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SEAL, str(session.home.root)]
    return subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=60)


def check(session: Session) -> None:
    """Every row once, in the ledger and in the blobs, and nothing left in the folder."""
    segments = session.ledger.list_segments("flights", kind="traffic")
    found = read_traffic(files_of(session, segments))
    assert sorted(found.request.tolist()) == sorted(f"r{n}" for n in range(30))
    assert [segment.rows for segment in segments] == [10, 10, 10]
    batches = session.ledger.list_segments("flights", kind="labels")
    assert sorted(one.key or "" for one in read_labels(files_of(session, batches))) == [f"k{n}" for n in range(10)]
    for place in (CAPTURE, LABELS):
        assert sealed_in(session.home.endpoint("flights") / place) == []
        assert list((session.home.endpoint("flights") / place / OPEN).iterdir()) == []


POINTS = [
    *((point, 1) for point in ("spool.before_rescue", "blobs.after_write", "blobs.after_rename", "traffic.before_add")),
    *((point, nth) for point in ("segments.before_commit", "traffic.after_add") for nth in (1, 4)),
]


@pytest.mark.parametrize(("point", "nth"), POINTS)
def test_dying_anywhere_while_sealing_loses_and_repeats_nothing(session: Session, point: str, nth: int) -> None:
    leave(session)
    assert seal(session, armed(point, nth)).returncode == -signal.SIGKILL
    again = seal(session)
    assert again.returncode == 0, again.stderr
    check(session)
    assert seal(session).stdout == "0\n", "twice is once"
    check(session)


def test_what_is_sealed_says_what_is_in_it_and_gc_keeps_it(session: Session) -> None:
    leave(session)
    assert len(seal_traffic(session, "flights")) == 5
    check(session)
    segment = session.ledger.list_segments("flights", kind="traffic", since=5.0, until=12.0)
    assert [(s.begins, s.ends) for s in segment] == [(0.0, 9.0), (10.0, 19.0)]
    meta = session.ledger.get_artifact(segment[1].digest).meta
    assert (meta["engines"], meta["endpoint"], meta["rows"]) == ({"d1": 10}, "flights", 10)
    gc(session, grace=0.0, keep_runs=0)
    check(session)
    session.ledger.drop_segments("flights", [segment[0].number])
    gc(session, grace=-1.0, keep_runs=0)
    with pytest.raises(NotFoundError):
        session.ledger.get_artifact(segment[0].digest)


def test_a_pass_of_the_loop_seals_what_a_stopped_endpoint_left(session: Session) -> None:
    session.ledger.set_endpoint("flights", EndpointState.STOPPED)
    leave(session)
    reconcile(session)
    check(session)


def test_a_file_that_is_no_segment_is_put_aside_and_told_and_the_others_are_sealed(session: Session) -> None:
    leave(session)
    bad = session.home.endpoint("flights") / CAPTURE / "sealed" / "0000000000000-1-1.arrows"
    bad.write_bytes(b"no arrow")
    seal_traffic(session, "flights")
    check(session)
    (warning,) = [e for e in session.ledger.events(subject="endpoint/flights") if e.kind == "warning"]
    assert Path(warning.data["file"]).read_bytes() == b"no arrow"


def test_nobody_seals_what_another_host_or_holder_looks_after(session: Session) -> None:
    leave(session)
    handle = {"host": "elsewhere/1"}
    session.ledger.set_endpoint("flights", session.ledger.get_endpoint("flights").state, handle=handle)  # type: ignore[union-attr]
    assert seal_traffic(session, "flights") == []
    assert seal_traffic(session, "nosuch") == []


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_label_files_of_a_stopped_endpoint(session: Session, tmp_path: Path) -> None:
    leave(session)
    table = write(tmp_path / "a.csv", "flight,late,label_time\nk1,0,200\nk2,,200\nk11,1,100\nnobody,1,100\n")
    view = label(session, "flights", table)
    assert (view.accepted, view.refused) == (3, 1)
    assert view.rows[0] == {"line": 3, "value": "k2", "reason": "has no late or label"}
    assert len(view.artifacts) == 3, "what waited is sealed with it"
    endpoint = session.ledger.get_endpoint("flights")
    assert endpoint is not None
    told = told_of(session, endpoint)
    assert (told["traffic"], told["labels"], told["label_coverage"]) == ("30 rows in 3 segments", 13, 0.3667)
    assert (told["labels_corrections"], told["labels_waiting"], told["label_delay_median"]) == (1, 1, 100.0)


def test_labels_of_rows_that_show_does_not_read_are_not_called_unknown(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(session)
    label(session, "flights", write(tmp_path / "a.csv", "flight,late,label_time\nk15,0,200\n"))
    monkeypatch.setattr(traffic, "RECENT_ROWS", 10)
    endpoint = session.ledger.get_endpoint("flights")
    assert endpoint is not None
    told = told_of(session, endpoint)
    assert told["label_coverage"] == 0.1, "of the last of three segments"
    assert "labels_waiting" not in told


def test_a_parquet_file_by_other_names(session: Session, tmp_path: Path) -> None:
    pl: Any = pytest.importorskip("polars")
    path = tmp_path / "truth.parquet"
    at = pl.Series([0, 3_600_000_000]).cast(pl.Datetime("us", "UTC"))
    pl.DataFrame({"k": ["k1", "k2"], "truth": [True, None], "known": at}).write_parquet(path)
    view = label(session, "flights", path, columns={"key": "k", "label": "truth", "time": "known"})
    assert (view.accepted, view.refused) == (1, 1)
    (segment,) = session.ledger.list_segments("flights", kind="labels")
    (found,) = read_labels(files_of(session, [segment]))
    assert (found.key, found.value, found.time) == ("k1", True, 0)


def _write_many(folder: Path, who: int) -> None:
    log = LabelLog(folder, ROLES, None)
    for n in range(20):
        log.take([(1, {"id": f"{who}-{n}", "label": 1}), (2, {"id": f"{who}-{n}-b", "label": 0})])
    log.seal()


def test_writers_at_once_get_numbers_of_their_own(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_write_many, args=(tmp_path, who)) for who in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = read_labels(sealed_in(tmp_path / LABELS))
    assert len(found) == 120
    assert len({label.order for label in found}) == 60


JOB = """
[monitor]
capture = { reserve = "1B", age = "1s" }
"""


@pytest.fixture
def flights(tmp_path: Path) -> Project:
    """The tiny job with a key and [monitor]."""
    project = make_project(tmp_path, stages="all")
    job = (project.folder / "job.toml").read_text().replace('time = "day" }', 'time = "day", id = "flight" }')
    project.write("job.toml", job + JOB)
    head, *rows = (project.folder / "rows.csv").read_text().splitlines()
    project.write("rows.csv", "\n".join([f"{head},flight", *(f"{row},f{n}" for n, row in enumerate(rows))]) + "\n")
    return project


def ask(url: str, message: Any) -> Any:
    done = subprocess.run(
        ["curl", "-sS", "--max-time", "20", url, "-d", json.dumps(message)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_a_job_with_monitor_from_answers_to_joined_labels(flights: Project) -> None:
    """Through the front door: served, asked, labelled by HTTP and by a file, shown."""
    view = flights.json("run", "job.toml")
    try:
        url = f"{view['endpoint']['url']}/v1/models/tiny"
        for n in range(20):
            one = {
                "carrier": "AA",
                "distance": 100 + n,
                "hour": 8,
                "flight": f"q{n}",
                "day": f"2024-03-{n + 1:02d}T00:00Z",
            }
            assert "predictions" in ask(f"{url}:predict", {"instances": [one]})
        labels = [{"id": f"q{n}", "label": n % 2, "time": f"2024-03-{n + 2:02d}T00:00Z"} for n in range(10)]
        assert ask(f"{url}/labels", {"labels": labels})["accepted"] == 10
    finally:
        assert flights.cli("stop", "tiny").returncode == 0
    lines = [f"q{n},{n % 2},2024-03-{n + 3:02d}T00:00Z" for n in range(9, 15)]
    lines += ["q15,maybe,", "nobody,1,", lines[-1], "q16,0,never", "q9,0,2024-03-20T00:00Z"]
    flights.write("truth.csv", "\n".join(["flight,late,label_time", *lines]) + "\n")
    done = flights.cli("label", "tiny", "truth.csv", "--json")
    view = json.loads(done.stdout)
    assert (done.returncode, view["accepted"], view["refused"]) == (0, 9, 2)
    assert [row["line"] for row in view["rows"]] == [8, 11]
    shown = flights.json("show", "tiny")["details"]
    assert (shown["captured"], shown["dropped"], shown["label_coverage"]) == (20, 0, 0.75)
    assert (shown["labels_duplicates"], shown["labels_conflicts"], shown["labels_waiting"]) == (2, 1, 1)
    assert (shown["label_delay_median"], shown["labels_pending"]) == (86400.0, 5)
    text = " ".join(flights.cli("show", "tiny").stdout.split())
    assert "captured 20 rows, 0 dropped; 20 rows in" in text
    assert "19, coverage 75.0%, delay 1 d (90 %: 2 d), 2 duplicates" in text
    strict = flights.cli("label", "tiny", "truth.csv", "--strict")
    assert (strict.returncode, "0 labels for tiny, 2 rows refused" in strict.stdout) == (4, True)
