"""The page for Prometheus: every metric of Triton's as Triton has it, histograms that add up, counts that no replica's
end loses or doubles; and that documentation and dashboard name what is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from test_serve_http import Server, message, serve

from onejob.core.counters import BOUNDS_NS, EDGES_NS, PART_NAMES, Counters, Snapshots, read_snapshots
from onejob.errors import DeadlineError
from onejob.machines.usage import Meter
from onejob.serve.item import Item
from onejob.serve.metrics import GONE, Reading, render
from onejob.serve.retire import retire

ROOT = Path(__file__).parents[2]
INFER = "/v2/models/m/infer"
DURATIONS = (
    "onejob_queue_duration_seconds",
    "onejob_compute_input_duration_seconds",
    "onejob_compute_infer_duration_seconds",
    "onejob_compute_output_duration_seconds",
)
HISTOGRAMS = (*DURATIONS, "onejob_request_duration_seconds", "onejob_batch_duration_seconds", "onejob_batch_rows")


def families(text: str) -> dict[str, Metric]:
    """What Prometheus' own parser makes of a page, checked more strictly than it does."""
    found: dict[str, Metric] = {}
    for family in text_string_to_metric_families(text):
        assert family.name not in found, f"{family.name} is there twice"
        assert family.type != "unknown", family.name
        assert family.documentation, family.name
        series = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
        assert len(series) == len(set(series)), f"{family.name} has a series twice"
        found[family.name] = family
    return found


def value(found: Mapping[str, Metric], name: str, **labels: str) -> float:
    """Of the one sample of this name that has these labels; the parser ends the name of each counter in `_total`."""
    names = (name, f"{name}_total")
    samples = [one for family in found.values() for one in family.samples if one.name in names]
    values = [one.value for one in samples if labels.items() <= one.labels.items()]
    assert len(values) == 1, f"{name} {labels}: {values}"
    return float(values[0])


def buckets(found: Mapping[str, Metric], name: str) -> Iterator[list[tuple[float, float]]]:
    """Of each of a histogram's series: upper bounds and cumulative counts."""
    series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    for sample in found[name].samples:
        if sample.name == f"{name}_bucket":
            labels = dict(sample.labels)
            bound = float(labels.pop("le"))
            series.setdefault(tuple(sorted(labels.items())), []).append((bound, sample.value))
    yield from series.values()


async def page(server: Server) -> dict[str, Metric]:
    status, headers, body = await server.ask("GET", "/metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return families(body.decode())


def test_every_metric_of_tritons_is_there_as_triton_has_it(tmp_path: Path) -> None:
    theirs = families((ROOT / "tests" / "golden" / "metrics.txt").read_text())
    assert len(theirs) == 15

    async def work(server: Server) -> None:
        ours = await page(server)
        for name, family in theirs.items():
            assert ours[name].type == family.type, name
            assert ours[name].documentation == family.documentation
            assert {tuple(sorted(one.labels)) for one in ours[name].samples} == {
                tuple(sorted(one.labels)) for one in family.samples
            }, name
        reasons = {one.labels["reason"] for one in theirs["nv_inference_request_failure"].samples}
        assert {one.labels["reason"] for one in ours["nv_inference_request_failure"].samples} == reasons
        assert {name for name in ours if name.startswith("nv_")} == set(theirs), "none of our own has their name"

    serve(tmp_path, work)


def test_the_histograms_add_up(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        for rows in (1, 3, 3):
            assert (await server.ask("POST", INFER, message([1, 2] * rows)))[0] == 200
        assert (await server.ask("POST", INFER, b"{"))[0] == 400
        found = await page(server)
        for name in HISTOGRAMS:
            (series,) = buckets(found, name)
            bounds, counts = zip(*series, strict=True)
            assert list(bounds) == sorted(bounds)
            assert list(counts) == sorted(counts)
            assert bounds[-1] == float("inf")
            assert counts[-1] == value(found, f"{name}_count", model="m", version="1")
        assert value(found, "onejob_request_duration_seconds_count", model="m") == 4, "the refused one too"
        assert all(value(found, f"{name}_count") == 3 for name in DURATIONS), "the answered ones"
        counters = server.service.counters
        parts = sum(value(found, f"{name}_sum") for name in DURATIONS)
        assert parts == pytest.approx(counters.get("request_ns") / 1e9), "parts make the whole"
        (rows_of_batches,) = buckets(found, "onejob_batch_rows")
        assert rows_of_batches[:4] == [(1, 1), (2, 1), (4, 3), (8, 3)]
        assert value(found, "onejob_batch_rows_sum") == 7
        assert value(found, "onejob_batch_duration_seconds_count") == 3
        assert value(found, "onejob_batch_duration_seconds_sum") == pytest.approx(
            value(found, "onejob_compute_infer_duration_seconds_sum"), rel=0.5
        )

    serve(tmp_path, work)


def test_each_is_counted_in_the_bucket_that_holds_it(tmp_path: Path) -> None:
    """A batch of requests that are answered together; times to the bound are within it."""

    async def work(server: Server) -> None:
        now, counters = 10**12, server.service.counters
        items = []
        for wait in (25_000, 25_001, 3_000_000):  # queued so long before the engine began, and received 10 us before
            item = Item({}, 1, lambda item: None, now - 100_000 - wait - 10_000, now)
            item.queued = now - 100_000 - wait
            items.append(item)
        items[0].started, items[0].finished = now - 100_000, now - 50_000
        server.service._count_answered(items, now)
        found = families(render(Reading.of(server.registry.all_snapshots(), {"m/1": "d1"})))

        def within(name: str, bound: float) -> float:
            (series,) = buckets(found, name)
            return dict(series)[bound]

        assert [within("onejob_queue_duration_seconds", bound) for bound in (1e-5, 2.5e-5, 5e-5, 1e-3, 5e-3)] == [
            0,
            1,
            2,
            2,
            3,
        ]
        assert within("onejob_compute_input_duration_seconds", 1e-5) == 3
        assert [within("onejob_compute_infer_duration_seconds", bound) for bound in (2.5e-5, 5e-5)] == [0, 3]
        assert [within("onejob_compute_output_duration_seconds", bound) for bound in (2.5e-5, 5e-5)] == [0, 3]
        assert [within("onejob_request_duration_seconds", bound) for bound in (1e-4, 2.5e-4, 2.5e-3, 5e-3)] == [
            0,
            2,
            2,
            3,
        ]
        assert sum(counters.get(f"{part}_ns") for part in ("queue", "input", "infer", "output")) == counters.get(
            "request_ns"
        )

    serve(tmp_path, work)


def test_the_exposed_bounds_are_bounds_of_the_fine_histogram() -> None:
    assert set(EDGES_NS) <= set(BOUNDS_NS)
    assert list(BOUNDS_NS) == sorted(set(BOUNDS_NS))
    assert max(b / a for a, b in pairwise(BOUNDS_NS)) < 1.15


def test_what_waited_too_long_is_rejected_and_what_the_engine_had_is_not(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        for started in (0, 5):
            item = Item({}, 1, lambda item: None, 0, 0)
            item.started = started
            server.service.answered("id", item, DeadlineError("late", place="request"), 504, 0)
        found = await page(server)
        assert value(found, "nv_inference_request_failure", reason="REJECTED") == 1, "as Triton says of the queue"
        assert value(found, "nv_inference_request_failure", reason="OTHER") == 1

    serve(tmp_path, work)


def test_what_the_batcher_decides_can_be_read(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        found = await page(server)
        assert value(found, "onejob_batch_target_rows", model="m", version="1") == 8
        assert value(found, "onejob_model_ready", model="m") == 1
        for name in ("onejob_batch_fixed_seconds", "onejob_batch_row_seconds", "onejob_batch_target_wait_seconds"):
            assert value(found, name) >= 0
        server.service.health.fault = "it is broken"
        for rows in (1, 2):
            item = Item({"x": np.ones((rows, 2), np.float32)}, rows, lambda item: None, 0, 1 << 62)
            server.service.batcher.submit(item)
        found = families(render(Reading.of(server.registry.all_snapshots(), {"m/1": "d1"})))
        assert value(found, "onejob_model_ready", model="m") == 0
        assert value(found, "nv_inference_pending_request_count", model="m", version="1") == 2
        assert value(found, "onejob_queue_rows", model="m") == 3

    serve(tmp_path, work)


def snapshot(pid: int, counters: Counters, **now: Any) -> dict[str, Any]:
    told = {**counters.to_json(), "now": now}
    machine = {"cpu": 0.25, "memory": 25_276_502_016, "used": 1000 + pid}
    return {
        "id": f"{pid}:1.0",
        "time": float(pid),
        "machine": machine,
        **counters.to_json(),
        "models": {"m/1": told},
        "engines": {"d1": counters.to_json()},
    }


def some(milliseconds: int, last: int = 0) -> Counters:
    counters = Counters({"success": 1, "batch.4": 1, "batch_ns.4": 5}, last=last)
    for part in PART_NAMES:
        (counters.parts or counters.make_parts())[part][milliseconds % len(EDGES_NS)] += 1
    counters.observe(milliseconds * 1_000_000)
    return counters


NOW = {"ready": True, "queued": 1, "waiting_rows": 2, "size": 8, "wait_us": 500, "fixed_us": 10.0, "row_us": 1.0}


def test_replicas_are_put_together() -> None:
    live = {
        "1:1.0": snapshot(1, some(1), **NOW),
        "2:1.0": snapshot(2, some(2), **{**NOW, "ready": False, "size": 4}),
        "3:1.0": {**snapshot(3, some(3)), "models": {"m/1": some(3).to_json()}},  # it holds the model no more
    }
    found = families(render(Reading.of(Snapshots(live, Counters(), ()), {"m/1": "d1"})))
    assert value(found, "onejob_model_ready") == 0, "one of them is not"
    assert value(found, "nv_inference_pending_request_count") == 2
    assert value(found, "onejob_batch_target_rows") == 6
    assert value(found, "onejob_batch_target_wait_seconds") == 0.0005
    assert value(found, "onejob_batch_rows_count") == 3
    assert value(found, "nv_cpu_utilization") == 0.25
    assert value(found, "nv_cpu_memory_total_bytes") == 25_276_502_016
    assert value(found, "nv_cpu_memory_used_bytes") == 1003, "of the newest"
    assert value(found, "onejob_replicas") == 3


def test_an_ended_replicas_histograms_are_folded_once(tmp_path: Path) -> None:
    def leave(pid: int, counters: Counters) -> None:
        (tmp_path / f"{pid}.json").write_text(json.dumps(snapshot(pid, counters, **NOW)))

    leave(1, some(1, last=70))
    leave(2, some(2, last=50))
    expected = some(1, last=70) + some(2, last=50)
    for _ in range(2):
        for total in (read_snapshots(tmp_path).total(), read_snapshots(tmp_path).by("models")["m/1"]):
            assert total == expected
        retire(tmp_path, {2})
        leave(1, some(1, last=70))  # as if the host had died between folding and deleting
    retire(tmp_path, ())
    assert [path.name for path in tmp_path.iterdir()] == ["retired.json"]
    found = read_snapshots(tmp_path)
    assert found.total() == found.by("models")["m/1"] == found.by("engines")["d1"] == expected
    assert all(sum(counts) == 2 for counts in expected.parts.values())
    text = render(Reading.of(found, {}))
    assert value(families(text), "onejob_queue_duration_seconds_count", model="m", version="1") == 2


def test_counters_grow_and_are_kept_as_they_are() -> None:
    early, more = some(1), some(2, last=9)
    late = early + more
    assert Counters.from_json(json.loads(json.dumps(late.to_json()))) == late
    assert late.since(early).parts == more.parts
    assert late.since(Counters()) == late
    copied = late.copy()
    late.parts["queue"][0] += 1
    late.observe(1)
    late.count("success")
    assert copied == early + more, "a copy stays"
    assert Counters.from_json({"parts": {"queue": [1, 2]}}).parts["queue"][:3] == [1, 2, 0], "of fewer buckets"


def test_models_that_have_gone_are_forgotten_at_last() -> None:
    counters = some(1)
    models = {f"m/{version}": counters.to_json() for version in range(100)}
    live = {"1:1.0": {**snapshot(1, counters), "models": models}}
    found = families(render(Reading.of(Snapshots(live, Counters(), ()), {"m/5": "d1", "new/1": "d2"})))
    told = [one.labels["version"] for one in found["nv_inference_count"].samples if one.labels["model"] == "m"]
    assert told == ["5", *map(str, range(100 - GONE, 100))]
    assert value(found, "nv_inference_count", model="new") == 0, "a series begins at 0"


def test_names_that_need_escapes(tmp_path: Path) -> None:
    odd = 'a "b"\\c\nd/e'
    found = families(render(Reading.of(Snapshots({}, Counters(), ()), {f"{odd}/1": "d1"})))
    assert value(found, "nv_inference_count", model=odd, version="1") == 0
    assert value(found, "onejob_engine_info", model=odd, engine="d1") == 1


def test_statistics_are_of_all_replicas(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        (tmp_path / "metrics").mkdir()
        other = snapshot(7, some(3, last=1 << 45), **NOW)
        (tmp_path / "metrics" / "7.json").write_text(json.dumps(other))
        assert (await server.ask("POST", INFER, message([1, 2])))[0] == 200
        for path in ("/v2/models/m/stats", "/v2/models/m/versions/1/stats", "/v2/models/stats"):
            (told,) = json.loads((await server.ask("GET", path))[2])["model_stats"]
            assert told["inference_stats"]["success"]["count"] == 2
            assert told["last_inference"] == 1 << 45, "the other replica's, which was the last"
            sizes = {one["batch_size"]: one for one in told["batch_stats"]}
            assert sizes.keys() == {1, 4}
            for part in ("compute_input", "compute_infer", "compute_output"):
                assert sizes[4][part]["count"] == 1
            assert sizes[4]["compute_infer"]["ns"] == 5
            assert told["response_stats"] == {}
            assert told["batching"]["max"] == 8

    serve(tmp_path, work)


def test_the_use_of_the_machine(tmp_path: Path) -> None:
    def write(user: int, idle: int, waiting: int) -> None:
        (tmp_path / "stat").write_text(f"cpu  {user} 5 10 {idle} {waiting} 0 0 0 3 0\ncpu0 1 1 1 1 1\n")

    write(100, 1000, 50)
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemFree: 10 kB\nMemAvailable:   600 kB\n")
    seconds = [0.0]
    meter = Meter(tmp_path, lambda: seconds[0])
    assert meter.read().cpu == 0.0
    write(130, 1060, 60)
    seconds[0] = 0.1
    assert meter.read().cpu == 0.0, "too early to tell"
    seconds[0] = 1.0
    told = meter.read()
    assert told.cpu == pytest.approx(0.3), "30 of 100 ticks; waiting for a disk is idle"
    assert (told.memory, told.used) == (1000 * 1024, 400 * 1024)
    (tmp_path / "stat").unlink()
    (tmp_path / "meminfo").unlink()
    seconds[0] = 2.0
    told = meter.read()
    assert (told.cpu, told.memory, told.used) == (0.0, 0, 0)


def metric_names(folder: Path) -> set[str]:
    told: dict[str, str] = {}

    async def work(server: Server) -> None:
        told["text"] = (await server.ask("GET", "/metrics"))[2].decode()

    serve(folder, work)
    return set(re.findall(r"^# TYPE (\S+)", told["text"], flags=re.MULTILINE))


def test_every_metric_is_documented_and_every_documented_one_is_there(tmp_path: Path) -> None:
    rows = re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "metrics.md").read_text(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(metric_names(tmp_path))


@pytest.mark.parametrize("name", ["metrics.md", "grafana.json"])
def test_queries_ask_for_what_is_there(name: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / name).read_text()
    if name.endswith(".json"):
        queries = [target["expr"] for panel in json.loads(text)["panels"] for target in panel.get("targets", ())]
    else:
        queries = re.findall(r"```promql\n(.*?)```", text, flags=re.DOTALL)
    asked = set(re.findall(r"\b(?:nv|onejob)_\w+", "\n".join(queries)))
    there = metric_names(tmp_path)
    there |= {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}
    assert len(queries) > 5
    assert asked <= there
    assert {"onejob_request_duration_seconds_bucket", "onejob_batch_rows_sum"} <= asked
