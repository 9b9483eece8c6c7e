"""What a model says of itself: metadata, configuration and statistics, in the messages of Triton's extensions.

Plain dictionaries, so that every protocol can send them.
"""

from __future__ import annotations

from collections.abc import Mapping

from onejob import __version__
from onejob.core.artifact import Json
from onejob.core.counters import Counters
from onejob.core.tensor import TensorSpec
from onejob.serve.service import VERSION, Service

EXTENSIONS = ["binary_tensor_data", "parameters", "statistics", "model_configuration"]
PLATFORMS = {"onnxruntime": "onnxruntime_onnx", "openvino": "openvino", "pytorch": "pytorch_libtorch"}


def server_metadata() -> dict[str, Json]:
    return {"name": "onejob", "version": __version__, "extensions": EXTENSIONS}


def model_metadata(service: Service) -> dict[str, Json]:
    model = service.model
    return {
        "name": service.identity.name,
        "versions": [VERSION],
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
    """Triton's statistics of the model, from counters summed over the endpoint's replicas."""
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
    stats = {
        "name": service.identity.name,
        "version": VERSION,
        "last_inference": service.last_inference,
        "inference_count": counters.get("rows"),
        "execution_count": executions,
        "inference_stats": {**spent, "fail": fail, "cache_hit": none, "cache_miss": none},
        "batch_stats": _batch_stats(counters.values),
        "memory_usage": [],
    }
    return {"model_stats": [stats]}


def repository_index(service: Service) -> list[Json]:
    ready = service.ready
    state = {"state": "READY"} if ready else {"state": "UNAVAILABLE", "reason": service.unready_reason}
    return [{"name": service.identity.name, "version": VERSION, **state}]


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
    sizes = sorted(int(name.removeprefix("batch.")) for name in values if name.startswith("batch."))
    none = {"count": 0, "ns": 0}
    return [
        {
            "batch_size": size,
            "compute_input": none,
            "compute_infer": {"count": values[f"batch.{size}"], "ns": values.get(f"batch_ns.{size}", 0)},
            "compute_output": none,
        }
        for size in sizes
    ]
