"""Capture and labels in real replicas: never in the way of an answer, and only a killed one's last second is lost."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from served_models import Endpoint, endpoint, save_affine, wait_for
from test_serve_host import Load, ask, small_disk

from onejob.core.faults import MARK
from onejob.core.traffic import CAPTURE, LABELS, OPEN
from onejob.monitor.capture import Traffic, read_traffic
from onejob.monitor.collect import counted
from onejob.monitor.joined import join
from onejob.monitor.labels import read_labels
from onejob.serve.labels import mend as mend_labels
from onejob.serve.segment import mend
from onejob.serve.spool import rescue, sealed_in
from onejob.testing.faults import armed

__all__ = ["small_disk"]  # a fixture, found by its name

META = {"engine": "onnxruntime", "columns": {"label": "late", "time": "departs", "id": "flight"}}
PREDICT, TAKE = "/v1/models/affine:predict", "/v1/models/affine/labels"


def record(key: Any = None, **more: Any) -> bytes:
    told = {"flight": key} if key is not None else {}
    return json.dumps({"instances": [{"x": [1, 1, 1, 1], **told, **more}]}).encode()


def captured(made: Endpoint) -> Traffic:
    """All that whole batches hold, those of dead writers too."""
    rescue(made.folder / CAPTURE, mend)
    return read_traffic(sealed_in(made.folder / CAPTURE))


def want(made: Endpoint, engine: Path, **capture: Any) -> Endpoint:
    rules = {"reserve": 1, **capture}
    made.want(engine, meta=META, monitor={"interval": 5.0, "capture": rules})
    return made


def test_what_clients_ask_is_captured_with_time_and_key_which_the_model_never_sees(tmp_path: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        want(made, save_affine(tmp_path / "engine")).start().ready()
        status, body = ask(made.port, PREDICT, record("UA1", departs="2013-03-01T08:00:00-05:00"))
        assert (status, json.loads(body)) == (200, {"predictions": [{"y": [3, 3, 3, 3]}]})
        assert ask(made.port, PREDICT, record())[0] == 200
        status, body = ask(made.port, PREDICT, record("UA1", departs="2013-03-01"))
        assert (status, "'departs', row 0: '2013-03-01' has no time zone" in body.decode()) == (400, True)
        x = triton.InferInput("x", [2, 4], "FP32")
        x.set_data_from_numpy(np.ones((2, 4), np.float32))
        flight = triton.InferInput("flight", [2, 1], "BYTES")
        flight.set_data_from_numpy(np.array([["UA2"], ["UA3"]], object))
        departs = triton.InferInput("departs", [2], "INT64")
        departs.set_data_from_numpy(np.array([10, 20]))
        client = triton.InferenceServerClient(f"127.0.0.1:{made.port}")
        answer = client.infer("affine", [departs, x, flight], request_id="mine")
        assert answer.as_numpy("y").shape == (2, 4)
        assert [tensor["name"] for tensor in client.get_model_metadata("affine")["inputs"]] == ["x"]
        client.close()
        assert made.stop() == 0
    found = captured(made)
    assert found.key.tolist() == ["UA1", None, "UA2", "UA3"]
    assert found.time[[0, 2, 3]].tolist() == [1_362_142_800_000_000, 10_000_000, 20_000_000]
    assert found.time[1] == found.arrived[1] > 1_700_000_000_000_000
    assert found.request[2:].tolist() == ["mine", "mine"]
    assert found.row.tolist() == [0, 0, 0, 1]
    assert [value.tolist() for value in found.outputs["y"]] == [[3, 3, 3, 3]] * 4
    assert set(found.engine) == {"ab" * 32}
    assert set(found.inputs) == {"x"}


@pytest.mark.parametrize("point", ["capture.before_write", "capture.after_write", "spool.before_seal"])
def test_a_replica_killed_in_the_middle_of_capture_loses_its_last_second_and_repeats_nothing(
    tmp_path: Path, point: str
) -> None:
    mark = tmp_path / "reached"
    with endpoint(tmp_path / "ep") as made:
        want(made, save_affine(tmp_path / "engine"), age=0.5).start(**armed(point, 3), **{MARK: str(mark)}).ready()
        with Load(made.port, clients=2):
            wait_for(mark.exists)
    found = captured(made)
    assert len(set(found.request.tolist())) == len(found), "each answered once is captured once"
    assert list((made.folder / CAPTURE / OPEN).iterdir()) == []
    assert len(found) > 0
    assert counted(made.folder).get("capture_rows", 0) <= len(found), "what was counted is there"


def test_kill_9_loses_only_what_was_answered_in_the_last_second(tmp_path: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        want(made, save_affine(tmp_path / "engine"), age=3600).start().ready()
        for n in range(20):
            assert ask(made.port, PREDICT, record(f"k{n}"))[0] == 200
        wait_for(lambda: counted(made.folder).get("capture_rows") == 20)
        victim = made.pids[0]
        assert rescue(made.folder / CAPTURE, mend) == [], "the writer lives"
        os.kill(victim, signal.SIGKILL)
        made.wait(lambda state: made.pids and made.pids != [victim])
        made.ready()
        assert ask(made.port, PREDICT, record("after"))[0] == 200
        assert made.stop() == 0
    found = captured(made)
    assert sorted(found.key.tolist()) == sorted([*(f"k{n}" for n in range(20)), "after"])


def test_without_room_rows_are_dropped_and_counted_and_serving_goes_on(tmp_path: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        want(made, save_affine(tmp_path / "engine"), reserve=1 << 60).start().ready()
        for _ in range(5):
            assert ask(made.port, PREDICT, record())[0] == 200
        dropped = 'onejob_capture_dropped_total{model="affine",version="1",reason="space"} 5\n'
        wait_for(lambda: dropped in ask(made.port, "/metrics", None)[1].decode())
        assert (
            'onejob_capture_rows_total{model="affine",version="1"} 0\n' in ask(made.port, "/metrics", None)[1].decode()
        )
        assert ask(made.port, PREDICT, record())[0] == 200
        assert made.stop() == 0
    assert len(captured(made)) == 0


def test_a_full_disk_costs_rows_and_no_request_and_capture_goes_on_when_there_is_room(
    tmp_path: Path, small_disk: Path
) -> None:
    with endpoint(tmp_path / "ep") as made:
        (made.folder / CAPTURE).symlink_to(small_disk)
        (small_disk / "filler").write_bytes(b"x" * 250_000)
        want(made, save_affine(tmp_path / "engine")).start().ready()
        with Load(made.port, clients=4) as load:
            wait_for(lambda: counted(made.folder).get("capture_dropped.disk", 0) > 0)
        assert load.failures == []
        assert {status for status, _, _ in load.answers} == {200}
        status, body = ask(made.port, TAKE, b'{"labels": [{"id": "a", "label": 1}]}')
        assert (status, json.loads(body)["accepted"]) == (200, 1), "labels lie elsewhere"
        (small_disk / "filler").unlink()
        before = counted(made.folder).get("capture_rows", 0)
        for n in range(3):
            assert ask(made.port, PREDICT, record(f"k{n}"))[0] == 200
        wait_for(lambda: counted(made.folder).get("capture_rows", 0) >= before + 3)
        assert made.stop() == 0
        assert captured(made).key.tolist()[-3:] == ["k0", "k1", "k2"]


def test_labels_for_a_full_disk_are_refused_as_a_whole(tmp_path: Path, small_disk: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        (made.folder / LABELS).symlink_to(small_disk)
        want(made, save_affine(tmp_path / "engine")).start().ready()
        many = json.dumps({"labels": [{"id": f"k{n}", "label": 1} for n in range(5000)]}).encode()
        status, body = ask(made.port, TAKE, many)
        assert (status, "no space" in body.decode()) == (507, True)
        assert ask(made.port, TAKE, b'{"labels": [{"id": "a", "label": 1}]}')[0] == 200
        assert made.stop() == 0
        assert [label.key for label in read_labels(sealed_in(made.folder / LABELS))] == ["a"]


def test_a_misspelt_private_column_stops_the_start(tmp_path: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        want(made, save_affine(tmp_path / "engine"), private={"fligth": "hash"}).start()
        state = made.wait(lambda state: state["state"] != "starting" or state["error"])
        assert "fligth" in state["error"]["message"]
    assert not (made.folder / CAPTURE).exists()


def test_without_monitor_nothing_is_recorded_and_no_label_taken(tmp_path: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        made.want(save_affine(tmp_path / "engine"), meta=META)
        made.start().ready()
        assert ask(made.port, PREDICT, record("k", departs=5))[0] == 200
        status, body = ask(made.port, TAKE, b'{"labels": []}')
        assert (status, "Add a [monitor] table" in body.decode()) == (404, True)
        assert made.stop() == 0
    assert not (made.folder / CAPTURE).exists()
    assert not (made.folder / LABELS).exists()


# ---- labels


def test_labels_are_taken_by_every_replica_and_meet_their_rows(tmp_path: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        made.want(save_affine(tmp_path / "engine"), meta=META, replicas=2, monitor={"capture": {"reserve": 1}})
        made.start().ready()
        early = {"labels": [{"id": "k3", "label": 1, "time": 50}]}
        assert ask(made.port, TAKE, json.dumps(early).encode())[0] == 200, "before its request"
        for n in range(10):
            assert ask(made.port, PREDICT, record(f"k{n}", departs=n))[0] == 200
        for n in range(10):
            message = {"labels": [{"id": f"k{n}", "label": n % 2, "time": 60}, {"id": f"k{n}"}]}
            status, body = ask(made.port, TAKE, json.dumps(message).encode())
            assert status == 200
            assert json.loads(body) == {
                "accepted": 1,
                "refused": 1,
                "rows": [{"line": 2, "value": f"k{n}", "reason": "has no late or label"}],
            }
        status, body = ask(made.port, TAKE + "?strict=true", json.dumps(message).encode())
        assert (status, json.loads(body)["accepted"]) == (422, 0)
        wait_for(lambda: counted(made.folder).get("labels") == 11)
        assert made.stop() == 0
    joined = join(captured(made), read_labels(sealed_in(made.folder / LABELS)))
    assert joined.label.tolist() == [n % 2 for n in range(10)]
    assert (joined.counts.duplicates, joined.counts.corrections) == (1, 0)


@pytest.mark.parametrize(("point", "kept"), [("labels.before_write", 1), ("labels.after_write", 2)])
def test_an_acknowledged_label_is_never_lost(tmp_path: Path, point: str, kept: int) -> None:
    with endpoint(tmp_path / "ep") as made:
        want(made, save_affine(tmp_path / "engine")).start(**armed(point, 2)).ready()
        assert ask(made.port, TAKE, b'{"labels": [{"id": "a", "label": 1}]}')[0] == 200
        with pytest.raises(OSError):
            ask(made.port, TAKE, b'{"labels": [{"id": "b", "label": 1}]}')
        made.wait(lambda state: bool(state["replicas"]) and state["replicas"][0]["ready"])
    rescue(made.folder / LABELS, mend_labels)
    found = read_labels(sealed_in(made.folder / LABELS))
    assert [label.key for label in found] == ["a", "b"][:kept]
