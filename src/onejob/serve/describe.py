"""What a model says of itself: metadata, configuration and statistics, in the messages of Triton's extensions.

Plain dictionaries, so that every protocol can send them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from onejob import __version__
from onejob.core.artifact import Json
from onejob.core.counters import Counters
from onejob.core.tensor import TensorSpec
from onejob.serve.service import Service

EXTENSIONS = [
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "parameters",
    "schedule_policy",
    "statistics",
]
PLATFORMS = {"onnxruntime": "onnxruntime_onnx", "openvino": "openvino", "pytorch": "pytorch_libtorch"}


def server_metadata() -> dict[str, Json]:
    return {"name": "onejob", "version": __version__, "extensions": EXTENSIONS}


def model_metadata(service: Service, versions: Sequence[str]) -> dict[str, Json]:
    model = service.model
    return {
        "name": service.identity.name,
        "versions": list(versions),
        "platform": _platform(service),
        "inputs": [spec.to_json() for spec in model.inputs.values()],
        "outputs": [spec.to_json() for spec in model.outputs.values()],
    }


def model_config(service: Service) -> dict[str, Json]:
    """Triton's model configuration: what perf_analyzer and other tools read before they start."""
    model, name = service.model, service.identity.name
    batched = model.batchable
    return {
        "name": name,
        "platform": _platform(service),
        "backend": service.identity.meta.get("engine", "pytorch"),
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": service.limits.rows if batched else 0,
        "input": [
            {**_tensor_config(spec, batched), "format": "FORMAT_NONE", "allow_ragged_batch": False, "optional": False}
            for spec in model.inputs.values()
        ],
        "output": [{**_tensor_config(spec, batched), "label_filename": ""} for spec in model.outputs.values()],
        "dynamic_batching": {
            "preferred_batch_size": [service.limits.rows],
            "max_queue_delay_microseconds": service.limits.wait_ns // 1000,
        },
        "instance_group": [{"name": name, "kind": "KIND_CPU", "count": 1, "gpus": []}],
        "parameters": {"onejob_engine": {"string_value": service.identity.digest}},
    }


def statistics(service: Service, counters: Counters) -> dict[str, Json]:
    """Triton's statistics of one version of a model, from counters summed over the endpoint's replicas."""
    success, executions = counters.get("success"), counters.get("executions")
    spent = {
        part: {"count": success, "ns": counters.get(f"{counter}_ns")}
        for part, counter in (
            ("success", "request"),
            ("queue", "queue"),
            ("compute_input", "input"),
            ("compute_infer", "infer"),
            ("compute_output", "output"),
        )
    }
    none = {"count": 0, "ns": 0}
    fail = {"count": counters.failures, "ns": counters.get("failure_ns")}
    return {
        "name": service.identity.name,
        "version": service.identity.version,
        "last_inference": counters.last,
        "inference_count": counters.get("rows"),
        "execution_count": executions,
        "inference_stats": {**spent, "fail": fail, "cache_hit": none, "cache_miss": none},
        "batch_stats": _batch_stats(counters.values),
        "memory_usage": [],
        "response_stats": {},
        "batching": batching(service),
    }


def batching(service: Service) -> dict[str, Json]:
    """What the batcher has learnt, and what it does: of this replica, and beyond Triton's statistics."""
    batcher, limits = service.batcher, service.limits
    return {
        "fixed_us": round(batcher.fit.fixed / 1000, 3),
        "row_us": round(batcher.fit.each / 1000, 3),
        "size": batcher.choice.size,
        "wait_us": batcher.choice.wait_ns // 1000,
        "max": limits.rows,
        "max_wait_us": limits.wait_ns // 1000,
        "goal_us": limits.goal_ns // 1000 or None,
        "thread": "loop" if batcher.inline else "worker",
        "waiting_rows": batcher.waiting,
    }


def repository_index(services: Iterable[Service], unavailable: Mapping[str, str], ready: bool) -> list[Json]:
    """Every model and version; those that can be asked only, if `ready`."""
    told: list[Json] = []
    for service in services:
        state = {"state": "READY"} if service.ready else {"state": "UNAVAILABLE", "reason": service.unready_reason}
        if service.ready or not ready:
            told.append({"name": service.identity.name, "version": service.identity.version, **state})
    for name, why in unavailable.items() if not ready else ():
        told.append({"name": name, "version": "1", "state": "UNAVAILABLE", "reason": why})
    return sorted(told, key=lambda one: (one["name"], int(one["version"]) if one["version"].isdigit() else 0))


def _platform(service: Service) -> str:
    engine = str(service.identity.meta.get("engine", "pytorch"))
    return PLATFORMS.get(engine, engine)


def _tensor_config(spec: TensorSpec, batched: bool) -> dict[str, Json]:
    data_type = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
    config: dict[str, Json] = {
        "name": spec.name,
        "data_type": data_type,
        "dims": list(spec.shape),
        "is_shape_tensor": False,
    }
    if batched:
        config["dims"] = list(spec.shape[1:]) or [1]
        if len(spec.shape) == 1:
            config["reshape"] = {"shape": []}  # a column: [rows], sent as [rows, 1] by clients that read this
    return config


def _batch_stats(values: Mapping[str, int]) -> list[Json]:
    """Joining the inputs and splitting the outputs is within the engine's time here."""
    sizes = sorted(int(name.removeprefix("batch.")) for name in values if name.startswith("batch."))
    return [
        {
            "batch_size": size,
            "compute_input": {"count": values[f"batch.{size}"], "ns": 0},
            "compute_infer": {"count": values[f"batch.{size}"], "ns": values.get(f"batch_ns.{size}", 0)},
            "compute_output": {"count": values[f"batch.{size}"], "ns": 0},
        }
        for size in sizes
    ]
