"""The text of GET /metrics: Triton's names for Triton's things, and what Triton doesn't tell: histograms of latency and
of what it is made of, sizes of batches, and what the batcher decides.

Counts are sums over an endpoint's replicas. `docs/metrics.md` lists every metric; tests compare it with this page, and
this page with a real Triton's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from onejob.core.artifact import Json
from onejob.core.counters import BOUNDS_NS, EDGES_NS, Counters, Snapshots
from onejob.serve.capture import REASONS as DROPPED

# (metric, help, counter, unit divisor); those of Triton in its words
COUNTERS: tuple[tuple[str, str, str, int], ...] = (
    ("nv_inference_request_success", "Number of successful inference requests, all batch sizes", "success", 1),
    ("nv_inference_count", "Number of inferences performed (does not include cached requests)", "rows", 1),
    (
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        "executions",
        1,
    ),
    (
        "nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        "request_ns",
        1000,
    ),
    (
        "nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        "queue_ns",
        1000,
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        "input_ns",
        1000,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        "infer_ns",
        1000,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        "output_ns",
        1000,
    ),
    ("onejob_capture_rows_total", "Rows of answered requests that were recorded", "capture_rows", 1),
    ("onejob_labels_total", "Labels that were accepted", "labels", 1),
)
# (metric, help, counter, what it is told apart by as the label `reason`)
REASONED: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (
        "nv_inference_request_failure",
        "Number of failed inference requests, all batch sizes",
        "failure",
        ("REJECTED", "CANCELED", "BACKEND", "OTHER"),
    ),
    (
        "onejob_capture_dropped_total",
        "Rows that should have been recorded, and were not",
        "capture_dropped",
        DROPPED,
    ),
)

# (metric, help, what of a replica's `now`, unit divisor, how replicas are put together)
GAUGES: tuple[tuple[str, str, str, float, Callable[[Sequence[float]], float]], ...] = (
    (
        "nv_inference_pending_request_count",
        "Instantaneous number of pending requests awaiting execution per-model.",
        "queued",
        1,
        sum,
    ),
    ("onejob_model_ready", "Whether the model answers in every replica", "ready", 1, min),
    ("onejob_queue_rows", "Rows that wait for the engine", "waiting_rows", 1, sum),
    ("onejob_batch_target_rows", "Rows up to which requests are batched; mean of the replicas", "size", 1, fmean),
    ("onejob_batch_target_wait_seconds", "How long a batch waits for company; mean", "wait_us", 1e6, fmean),
    ("onejob_batch_fixed_seconds", "What a batch is reckoned to take whatever its size; mean", "fixed_us", 1e6, fmean),
    ("onejob_batch_row_seconds", "What each row of a batch is reckoned to add; mean", "row_us", 1e6, fmean),
)
# (metric, help, what of the machine)
MACHINE = (
    ("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", "cpu"),
    ("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", "memory"),
    ("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", "used"),
)
# of CUDA, which isn't used: Triton has them without a GPU too
POOLS = (
    ("nv_pinned_memory_pool_total_bytes", "Pinned memory pool total memory size, in bytes"),
    ("nv_pinned_memory_pool_used_bytes", "Pinned memory pool used memory size, in bytes"),
)
# (metric, help, part)
PARTS = (
    ("onejob_queue_duration_seconds", "Time from when a request was read until the engine began with it", "queue"),
    ("onejob_compute_input_duration_seconds", "Time to read a request", "input"),
    ("onejob_compute_infer_duration_seconds", "Time of a request in the engine, with its batch", "infer"),
    ("onejob_compute_output_duration_seconds", "Time to write the answer", "output"),
)
LATENCY = "onejob_request_duration_seconds", "Time from a request's first byte to its answer, or refusal"
ENGINE_LATENCY = "onejob_engine_request_duration_seconds", f"{LATENCY[1]}, by engine"
BATCH_TIME = "onejob_batch_duration_seconds", "Time of a batch in the engine"
BATCH_ROWS = "onejob_batch_rows", "Rows of a batch"
ENGINE_REQUESTS = "onejob_engine_requests_total", "Requests by the engine that was asked, and what became of them"
ENGINE_INFO = "onejob_engine_info", "The engine that answers, by digest"
REPLICAS = "onejob_replicas", "Replicas that have left a snapshot and have not ended"
LOG_DROPPED = "onejob_request_log_dropped_total", "Lines of the request log that could not be written"

SECONDS = tuple(f"{edge / 1e9:.9g}" for edge in EDGES_NS)
AT = tuple(bisect_left(BOUNDS_NS, edge) for edge in EDGES_NS)
"""The fine bucket that ends where a coarse one does."""
ROWS = tuple(2**power for power in range(11))
GONE = 16
"""So many models that have gone are still told of, those counted last: else every version that ever served would be."""


@dataclass(frozen=True)
class Reading:
    """What is told: counters by model (`name/version`) and by engine, over all replicas, and what is so now."""

    total: Counters
    models: Mapping[str, Counters]
    engines: Mapping[str, Counters]
    now: Mapping[str, Sequence[Mapping[str, Json]]]
    """Model -> what each replica says of it."""
    serving: Mapping[str, str]
    """Model -> the digest of the engine that answers."""
    machine: Mapping[str, Json]
    replicas: int

    @classmethod
    def of(cls, found: Snapshots, serving: Mapping[str, str]) -> Reading:
        replicas = sorted(found.live.values(), key=lambda snapshot: float(snapshot.get("time", 0)))
        told = [snapshot.get("models", {}) for snapshot in replicas]
        now = {model: [data[model]["now"] for data in told if data.get(model, {}).get("now")] for model in serving}
        counted = found.by("models")
        gone = [model for model in counted if model not in serving][-GONE:]
        models = {model: counted.get(model, Counters()) for model in (*serving, *gone)}
        machine = replicas[-1].get("machine", {}) if replicas else {}
        return cls(found.total(), models, found.by("engines"), now, serving, machine, len(replicas))


def render(now: Reading) -> str:
    """Prometheus text for one endpoint."""
    models = {_labels(model): own for model, own in now.models.items()}
    lines = [*_counts(models), *_gauges(now), *_durations(models), *_batches(models), *_of_engines(now)]
    lines += [*_head(*REPLICAS, "gauge"), f"{REPLICAS[0]} {now.replicas}"]
    lines += [*_head(*LOG_DROPPED, "counter"), f"{LOG_DROPPED[0]} {now.total.get('log_dropped')}"]
    return "\n".join(lines) + "\n"


def outcomes(counters: Counters) -> dict[str, int]:
    """What became of an engine's requests: answered; failed; handed to the old engine, which answered."""
    return {"success": counters.get("success"), "failure": counters.failures, "fallback": counters.get("fallback")}


def _counts(models: Mapping[str, Counters]) -> Iterator[str]:
    for name, text, counter, unit in COUNTERS:
        yield from _head(name, text, "counter")
        for labels, own in models.items():
            yield f"{name}{{{labels}}} {own.get(counter) // unit}"
    for name, text, counter, reasons in REASONED:
        yield from _head(name, text, "counter")
        for labels, own in models.items():
            for reason in reasons:
                yield f'{name}{{{labels},reason="{reason}"}} {own.get(f"{counter}.{reason}")}'


def _gauges(now: Reading) -> Iterator[str]:
    for name, text, what, unit, together in GAUGES:
        yield from _head(name, text, "gauge")
        for model, replicas in now.now.items():
            if replicas:
                yield f"{name}{{{_labels(model)}}} {together([float(own[what]) for own in replicas]) / unit:.9g}"
    for name, text, what in MACHINE:
        yield from _head(name, text, "gauge")
        yield f"{name} {now.machine.get(what, 0)}"
    for name, text in POOLS:
        yield from _head(name, text, "gauge")
        yield f"{name} 0"


def _durations(models: Mapping[str, Counters]) -> Iterator[str]:
    yield from _head(*LATENCY, "histogram")
    for labels, own in models.items():
        yield from _latency(LATENCY[0], labels, own)
    for name, text, part in PARTS:
        yield from _head(name, text, "histogram")
        for labels, own in models.items():
            yield from _part(name, labels, own, part, own.get(f"{part}_ns"))


def _batches(models: Mapping[str, Counters]) -> Iterator[str]:
    yield from _head(*BATCH_TIME, "histogram")
    for labels, own in models.items():
        spent = sum(amount for name, amount in own.values.items() if name.startswith("batch_ns."))
        yield from _part(BATCH_TIME[0], labels, own, "batch", spent)
    yield from _head(*BATCH_ROWS, "histogram")
    for labels, own in models.items():
        sizes = {int(name[6:]): amount for name, amount in own.values.items() if name.startswith("batch.")}
        counts = [0] * (len(ROWS) + 1)
        for size, amount in sizes.items():
            counts[bisect_left(ROWS, size)] += amount
        rows = sum(size * amount for size, amount in sizes.items())
        yield from _histogram(BATCH_ROWS[0], labels, ROWS, counts, rows)


def _of_engines(now: Reading) -> Iterator[str]:
    yield from _head(*ENGINE_INFO, "gauge")
    yield from (f'{ENGINE_INFO[0]}{{{_labels(m)},engine="{digest}"}} 1' for m, digest in now.serving.items())
    yield from _head(*ENGINE_REQUESTS, "counter")
    for engine, own in now.engines.items():
        for outcome, amount in outcomes(own).items():
            yield f'{ENGINE_REQUESTS[0]}{{engine="{engine}",outcome="{outcome}"}} {amount}'
    yield from _head(*ENGINE_LATENCY, "histogram")
    for engine, own in now.engines.items():
        yield from _latency(ENGINE_LATENCY[0], f'engine="{engine}"', own)


def _latency(name: str, labels: str, counters: Counters) -> Iterator[str]:
    """The fine histogram, told in the coarse buckets."""
    upto = list(accumulate(counters.latency))
    at = [upto[index] for index in AT]
    counts = [now - before for now, before in zip([*at, upto[-1]], [0, *at], strict=True)]
    spent = counters.get("request_ns") + counters.get("failure_ns")
    return _histogram(name, labels, SECONDS, counts, spent / 1e9)


def _part(name: str, labels: str, counters: Counters, part: str, nanoseconds: int) -> Iterator[str]:
    counts = counters.parts.get(part) or [0] * (len(EDGES_NS) + 1)
    return _histogram(name, labels, SECONDS, counts, nanoseconds / 1e9)


def _histogram(name: str, labels: str, bounds: Sequence[object], counts: Sequence[int], total: float) -> Iterator[str]:
    upto = list(accumulate(counts))
    for bound, amount in zip((*bounds, "+Inf"), upto, strict=True):
        yield f'{name}_bucket{{{labels},le="{bound}"}} {amount}'
    yield f"{name}_sum{{{labels}}} {total}"
    yield f"{name}_count{{{labels}}} {upto[-1]}"


def _labels(model: str) -> str:
    name, _, version = model.rpartition("/")
    return f'model="{_escaped(name)}",version="{version}"'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _head(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
