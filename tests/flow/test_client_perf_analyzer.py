"""NVIDIA's perf_analyzer, unmodified, measures an endpoint: it reads config and statistics, and asks by libcurl."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from client_models import program, served_repository

QUICK = (
    "--measurement-mode",
    "count_windows",
    "--measurement-request-count",
    "20",
    "-p",
    "100",
    "-r",
    "3",
    "-s",
    "999",
)
"""It measures by the second, and ends when three windows differ by no more than so many percent."""
RUNS = {
    "binary": ("-m", "affine"),
    "many at once": ("-m", "affine", "-x", "1", "-b", "4", "--async", "--concurrency-range", "8"),
    "every datatype": ("-m", "same", "-b", "2", "--string-length", "5"),
    "JSON": ("-m", "pair", "--input-tensor-format=json", "--output-tensor-format=json"),
    "at a rate": ("-m", "classes", "--request-rate-range", "50", "--collect-metrics", "--metrics-url", "METRICS"),
    "data of its own": ("-m", "text", "--input-data", "text.json"),
}
"""Each a model or version of its own, since the counts of the server are compared."""
BATCH = {"many at once": 4, "every datatype": 2}
TEXTS = {
    "data": [{"text_input": {"content": ["Zürich"], "shape": [1]}, "repeat": [2]}, {"text_input": ["b"], "repeat": [1]}]
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What it prints of each run; all at once, since each takes three seconds at least."""
    analyzer = program("perf_analyzer", "perf_analyzer")
    folder = tmp_path_factory.mktemp("perf")
    (folder / "text.json").write_text(json.dumps(TEXTS))
    with served_repository(folder) as made:
        address = f"127.0.0.1:{made.port}"
        running = {}
        for name, run in RUNS.items():
            options = [f"{address}/metrics" if option == "METRICS" else option for option in run]
            command = [analyzer, *options, *QUICK, "-u", address, "-i", "http"]
            running[name] = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        printed = {name: process.communicate(timeout=120)[0].decode() for name, process in running.items()}
        wrong = {name: printed[name] for name, process in running.items() if process.returncode}
    assert wrong == {}
    return printed


def figure(report: str, name: str) -> float:
    found = re.search(rf"{name}: ([\d.]+)", report)
    assert found is not None, report
    return float(found[1])


@pytest.mark.parametrize("name", RUNS)
def test_it_measures(reports: dict[str, str], name: str) -> None:
    report = reports[name]
    requests, batch = figure(report, "Request count"), BATCH.get(name, 1)
    assert requests >= 60, "three windows of twenty"
    assert figure(report, "Throughput") > 0
    assert figure(report, "Inference count") >= 0.9 * requests * batch, "as the server counts them"
    assert "error" not in report.lower()
    assert re.search(r"Avg request latency: \d+ usec \(overhead \d+ usec \+ queue \d+ usec \+ compute input", report)


def test_a_wrong_model_is_told_in_words(tmp_path: Path) -> None:
    analyzer = program("perf_analyzer", "perf_analyzer")
    with served_repository(tmp_path) as made:
        command = [analyzer, "-m", "nope", "-u", f"127.0.0.1:{made.port}", "-i", "http"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "Request for unknown model: 'nope' is not found" in done.stdout + done.stderr
