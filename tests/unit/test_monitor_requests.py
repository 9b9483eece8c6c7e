"""Finding a request by its id in the rotated files of several replicas."""

from __future__ import annotations

import json
from pathlib import Path

from onejob.monitor.requests import find_in_endpoints, find_request, recent


def write(folder: Path, name: str, *records: tuple[str, float], torn: str = "") -> None:
    (folder / "requests").mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({"id": i, "time": t}, separators=(",", ":")) + "\n" for i, t in records)
    (folder / "requests" / name).write_text(text + torn)


def test_find(tmp_path: Path) -> None:
    flights = tmp_path / "flights"
    write(flights, "0001-7.jsonl", ("a", 1.0), ("b", 2.0), ("ü\"'", 3.0))
    write(flights, "0002-8.jsonl", ("c", 4.0), ("a", 5.0), torn='{"id":"d"')
    assert find_request(flights, "b") == {"id": "b", "time": 2.0}
    assert find_request(flights, "a") == {"id": "a", "time": 5.0}  # the newest of two that a client named alike
    assert find_request(flights, "d") is None
    assert find_request(flights, "nope") is None
    assert find_request(tmp_path / "none", "a") is None
    assert find_in_endpoints(tmp_path, "c") == ("flights", {"id": "c", "time": 4.0})
    assert find_in_endpoints(tmp_path, "z") is None
    assert [record["id"] for record in recent(flights, 3)] == ["a", "c", "ü\"'"]


def test_ids_are_found_as_they_are_written(tmp_path: Path) -> None:
    from onejob.core.artifact import canonical

    (tmp_path / "requests").mkdir()
    (tmp_path / "requests" / "1-1.jsonl").write_bytes(canonical({"digest": "d", "id": 'ü"x', "rows": 1}) + b"\n")
    assert find_request(tmp_path, 'ü"x') == {"digest": "d", "id": 'ü"x', "rows": 1}
