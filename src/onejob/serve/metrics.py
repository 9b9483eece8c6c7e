"""The text of GET /metrics: Triton's names for Triton's things, and a latency histogram, which Triton has not."""

from __future__ import annotations

from collections.abc import Mapping

from onejob.core.counters import BOUNDS_US, Counters
from onejob.serve.capture import REASONS as DROPPED
from onejob.serve.service import VERSION

# (metric, help, counter, unit divisor)
COUNTERS: tuple[tuple[str, str, str, int], ...] = (
    ("nv_inference_request_success", "Number of successful inference requests, all batch sizes", "success", 1),
    ("nv_inference_count", "Number of inferences performed (does not include cached requests)", "rows", 1),
    ("nv_inference_exec_count", "Number of model executions performed", "executions", 1),
    ("nv_inference_request_duration_us", "Cumulative inference request duration", "request_ns", 1000),
    ("nv_inference_queue_duration_us", "Cumulative inference queuing duration", "queue_ns", 1000),
    ("nv_inference_compute_input_duration_us", "Cumulative compute input duration", "input_ns", 1000),
    ("nv_inference_compute_infer_duration_us", "Cumulative compute inference duration", "infer_ns", 1000),
    ("nv_inference_compute_output_duration_us", "Cumulative inference compute output duration", "output_ns", 1000),
    ("onejob_capture_rows_total", "Rows of answered requests that were recorded", "capture_rows", 1),
    ("onejob_labels_total", "Labels that were accepted", "labels", 1),
    ("onejob_request_log_dropped", "Lines of the request log that could not be written", "log_dropped", 1),
)
REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
EDGES = tuple(range(3, len(BOUNDS_US), 4))
"""Every fourth bucket is exposed: one an octave."""


def render(
    model: str, digest: str, counters: Counters, *, engines: Mapping[str, Counters], pending: int, replicas: int
) -> str:
    """Prometheus text for one endpoint; the counters are the sums over its replicas, and those of each engine."""
    labels = f'model="{model}",version="{VERSION}"'
    lines: list[str] = []
    for name, text, counter, unit in COUNTERS:
        lines += [*_head(name, text, "counter"), f"{name}{{{labels}}} {counters.get(counter) // unit}"]
    lines += _head("nv_inference_request_failure", "Number of failed inference requests, all batch sizes", "counter")
    for reason in REASONS:
        amount = counters.get(f"failure.{reason}")
        lines.append(f'nv_inference_request_failure{{{labels},reason="{reason}"}} {amount}')
    lines += _head("onejob_capture_dropped_total", "Rows that should have been recorded, and were not", "counter")
    for reason in DROPPED:
        amount = counters.get(f"capture_dropped.{reason}")
        lines.append(f'onejob_capture_dropped_total{{{labels},reason="{reason}"}} {amount}')
    lines += _head("nv_inference_pending_request_count", "Instantaneous number of pending requests", "gauge")
    lines.append(f"nv_inference_pending_request_count{{{labels}}} {pending}")
    lines += _head("onejob_replicas", "Replicas that have left a snapshot and have not ended", "gauge")
    lines.append(f"onejob_replicas{{{labels}}} {replicas}")
    lines += _head("onejob_engine_info", "The engine that answers, by digest", "gauge")
    lines.append(f'onejob_engine_info{{{labels},engine="{digest}"}} 1')
    lines += _head("onejob_engine_requests_total", "Requests by the engine that was asked, and what became", "counter")
    for engine, own in engines.items():
        for outcome, amount in outcomes(own).items():
            lines.append(f'onejob_engine_requests_total{{{labels},engine="{engine}",outcome="{outcome}"}} {amount}')
    name = "onejob_engine_request_duration_seconds"
    lines += _head(name, "Time from a request's first byte to its answer, by engine", "histogram")
    for engine, own in engines.items():
        lines += _histogram(name, f'{labels},engine="{engine}"', own)
    name = "onejob_request_duration_seconds"
    lines += _head(name, "Time from a request's first byte to its answer", "histogram")
    lines += _histogram(name, labels, counters)
    return "\n".join(lines) + "\n"


def outcomes(counters: Counters) -> dict[str, int]:
    """What became of an engine's requests: answered; failed; handed to the old engine, which answered."""
    return {"success": counters.get("success"), "failure": counters.failures, "fallback": counters.get("fallback")}


def _histogram(name: str, labels: str, counters: Counters) -> list[str]:
    lines: list[str] = []
    latency = counters.latency
    for edge in EDGES:
        lines.append(f'{name}_bucket{{{labels},le="{BOUNDS_US[edge] / 1e6:.9g}"}} {sum(latency[: edge + 1])}')
    total = sum(latency)
    seconds = (counters.get("request_ns") + counters.get("failure_ns")) / 1e9
    return [
        *lines,
        f'{name}_bucket{{{labels},le="+Inf"}} {total}',
        f"{name}_sum{{{labels}}} {seconds:.9g}",
        f"{name}_count{{{labels}}} {total}",
    ]


def _head(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
