"""The text of GET /metrics: Triton's names for Triton's things, and a latency histogram, which Triton has not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onejob.core.counters import BOUNDS_US, Counters, Snapshots
from onejob.serve.capture import REASONS as DROPPED

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


@dataclass(frozen=True)
class Reading:
    """What is told: counters by model (`name/version`) and by engine, over all replicas."""

    models: Mapping[str, Counters]
    engines: Mapping[str, Counters]
    pending: Mapping[str, int]
    serving: Mapping[str, str]
    """Model -> the digest of the engine that answers."""
    replicas: int

    @classmethod
    def of(cls, found: Snapshots, serving: Mapping[str, str]) -> Reading:
        pending: dict[str, int] = {}
        for snapshot in found.live.values():
            for model, data in snapshot.get("models", {}).items():
                pending[model] = pending.get(model, 0) + int(data.get("pending", 0))
        models = {**{model: Counters() for model in serving}, **found.by("models")}
        return cls(models, found.by("engines"), pending, serving, len(found.live))


def render(now: Reading) -> str:
    """Prometheus text for one endpoint; the counters are the sums over its replicas."""
    lines: list[str] = []
    labels = {model: _labels(model) for model in now.models}
    for name, text, counter, unit in COUNTERS:
        lines += _head(name, text, "counter")
        lines += [f"{name}{{{labels[model]}}} {own.get(counter) // unit}" for model, own in now.models.items()]
    lines += _head("nv_inference_request_failure", "Number of failed inference requests, all batch sizes", "counter")
    for model, own in now.models.items():
        for reason in REASONS:
            amount = own.get(f"failure.{reason}")
            lines.append(f'nv_inference_request_failure{{{labels[model]},reason="{reason}"}} {amount}')
    lines += _head("onejob_capture_dropped_total", "Rows that should have been recorded, and were not", "counter")
    for model, own in now.models.items():
        for reason in DROPPED:
            amount = own.get(f"capture_dropped.{reason}")
            lines.append(f'onejob_capture_dropped_total{{{labels[model]},reason="{reason}"}} {amount}')
    name = "nv_inference_pending_request_count"
    lines += _head(name, "Instantaneous number of pending requests", "gauge")
    lines += [f"{name}{{{labels[model]}}} {now.pending.get(model, 0)}" for model in now.serving]
    lines += _head("onejob_replicas", "Replicas that have left a snapshot and have not ended", "gauge")
    lines.append(f"onejob_replicas {now.replicas}")
    lines += _head("onejob_engine_info", "The engine that answers, by digest", "gauge")
    lines += [f'onejob_engine_info{{{_labels(m)},engine="{digest}"}} 1' for m, digest in now.serving.items()]
    lines += _head("onejob_engine_requests_total", "Requests by the engine that was asked, and what became", "counter")
    for engine, own in now.engines.items():
        for outcome, amount in outcomes(own).items():
            lines.append(f'onejob_engine_requests_total{{engine="{engine}",outcome="{outcome}"}} {amount}')
    name = "onejob_engine_request_duration_seconds"
    lines += _head(name, "Time from a request's first byte to its answer, by engine", "histogram")
    for engine, own in now.engines.items():
        lines += _histogram(name, f'engine="{engine}"', own)
    name = "onejob_request_duration_seconds"
    lines += _head(name, "Time from a request's first byte to its answer", "histogram")
    for model, own in now.models.items():
        lines += _histogram(name, labels[model], own)
    return "\n".join(lines) + "\n"


def _labels(model: str) -> str:
    name, _, version = model.rpartition("/")
    return f'model="{_escaped(name)}",version="{version}"'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


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
