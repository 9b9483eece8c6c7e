"""A scraper at a real endpoint: the page parses, its histograms are those of all replicas, and no count ever falls,
whichever replica answers and whichever is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import tritonclient.http as triton
from prometheus_client.parser import text_string_to_metric_families
from served_models import Endpoint, endpoint, save_affine, wait_for

HISTOGRAMS = (
    "onejob_request_duration_seconds",
    "onejob_queue_duration_seconds",
    "onejob_compute_input_duration_seconds",
    "onejob_compute_infer_duration_seconds",
    "onejob_compute_output_duration_seconds",
)


def infer(made: Endpoint, rows: int, *, binary: bool) -> None:
    """By NVIDIA's client, on a connection of its own."""
    with triton.InferenceServerClient(f"127.0.0.1:{made.port}") as client:
        given = triton.InferInput("x", [rows, 4], "FP32")
        given.set_data_from_numpy(np.ones((rows, 4), np.float32), binary_data=binary)
        client.infer("affine", [given], outputs=[triton.InferRequestedOutput("y", binary_data=binary)])


def scrape(made: Endpoint) -> dict[str, float]:
    """Samples by name; of a histogram the sum over the buckets of each series is checked against its count."""
    with urlopen(f"http://127.0.0.1:{made.port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("le", "+Inf") == "+Inf" and "reason" not in sample.labels:
                found[sample.name] = found.get(sample.name, 0) + sample.value
    for name in (*HISTOGRAMS, "onejob_batch_rows", "onejob_batch_duration_seconds"):
        assert found[f"{name}_bucket"] == found[f"{name}_count"]
    return found


def counted(made: Endpoint, requests: int) -> bool:
    found = scrape(made)
    return all(found[f"{name}_count"] == requests for name in HISTOGRAMS)


def test_histograms_are_of_all_replicas_and_outlive_them(tmp_path: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        made.want(save_affine(tmp_path / "engine"), replicas=2)
        made.start().ready()
        for _ in range(10):
            infer(made, 1, binary=True)
            infer(made, 3, binary=False)
        wait_for(lambda: counted(made, 20))  # the other replica's figures are up to a second old
        found = scrape(made)
        assert found["onejob_batch_rows_sum"] == found["nv_inference_count_total"] == 40
        assert found["onejob_batch_rows_count"] == found["nv_inference_exec_count_total"] == 20
        parts = sum(found[f"{name}_sum"] for name in HISTOGRAMS[1:])
        assert abs(parts - found["onejob_request_duration_seconds_sum"]) < 1e-6
        assert found["onejob_model_ready"] == 1
        assert found["nv_cpu_memory_total_bytes"] > found["nv_cpu_memory_used_bytes"] > 0
        for victim in made.pids:
            before = scrape(made)
            os.kill(victim, signal.SIGKILL)
            made.wait(lambda state, gone=victim: gone not in made.pids and len(made.pids) == 2)
            made.ready()
            wait_for(lambda gone=victim: not (made.folder / "metrics" / f"{gone}.json").exists())
            assert counted(made, 20)
            after = scrape(made)
            assert after["onejob_request_duration_seconds_sum"] == before["onejob_request_duration_seconds_sum"]
        infer(made, 2, binary=True)
        wait_for(lambda: counted(made, 21))
        assert scrape(made)["onejob_batch_rows_sum"] == 42


def test_no_count_falls_from_one_scrape_to_the_next(tmp_path: Path) -> None:
    with endpoint(tmp_path / "ep") as made:
        made.want(save_affine(tmp_path / "engine"), replicas=2)
        made.start().ready()
        before: dict[str, float] = {}
        for round_ in range(60):
            infer(made, 1, binary=True)
            found = scrape(made)  # of either replica, milliseconds after the other
            for name, value in before.items():
                if name.endswith(("_total", "_count", "_sum", "_bucket")):
                    assert found[name] >= value, name
            before = found
            if round_ % 20 == 19:
                os.kill(made.pids[0], signal.SIGKILL)  # at once: it has told, and not yet left what it told
                made.wait(lambda state: len(made.pids) == 2)
                made.ready()
        assert 0 < before["onejob_request_duration_seconds_count"] <= 60
