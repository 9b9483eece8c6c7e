"""A model's config.pbtxt: what Triton is told of a model. Pure.

https://github.com/triton-inference-server/server/blob/main/docs/user_guide/model_configuration.md
Where max_batch_size is not 0 the batch is left out of `dims`. A tensor that has no other dimension must have one there:
it is [1], and `reshape` takes it away again, so a client sends [rows, 1] for what the model knows as [rows].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onejob.core.tensor import TensorSpec
from onejob.errors import UnavailableError

PYTHON = "python"


@dataclass(frozen=True, slots=True)
class Native:
    """A backend of Triton's own that runs what one of our engines runs."""

    backend: str
    platform: str = ""
    file: str = ""
    """If it isn't the one that the backend looks for."""
    batches: bool = True
    """Whether Triton may join requests for it."""
    exact: bool = True
    """Whether it computes in the precision that the model has."""
    parameters: tuple[tuple[str, str], ...] = ()
    threads: str = ""
    """Name of the parameter that says how many."""


NATIVE: Mapping[str, Native] = {
    "onnxruntime": Native(
        "onnxruntime",
        "onnxruntime_onnx",
        parameters=(("inter_op_thread_count", "1"),),
        threads="intra_op_thread_count",
    ),
    # it refuses batches smaller than max_batch_size, or fills them up: so the batch is one dimension like others;
    # and where the processor has bfloat16 it takes that, and can't be told otherwise
    "openvino": Native(
        "openvino",
        file="model.onnx",
        batches=False,
        exact=False,
        parameters=(("NUM_STREAMS", "1"),),
        threads="INFERENCE_NUM_THREADS",
    ),
}
"""Our engine -> Triton's backend. Other engines run inside its Python backend."""


@dataclass(frozen=True, slots=True)
class Batching:
    """How Triton joins requests and runs them."""

    most: int = 64
    dynamic: bool = True
    delay_us: int | None = None
    """How long a request may wait for others; None: Triton's default, not at all."""
    instances: int = 1


@dataclass(frozen=True, slots=True)
class Config:
    """A model as Triton knows it."""

    name: str
    backend: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batching: Batching
    platform: str = ""
    file: str = ""
    batches: bool = True
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def max_batch_size(self) -> int:
        """0 where Triton may not join requests: not every tensor begins with the batch."""
        batched = all(spec.shape[:1] == (-1,) for spec in (*self.inputs, *self.outputs))
        return self.batching.most if batched and self.batches else 0

    @property
    def widened(self) -> frozenset[str]:
        """Tensors that have one dimension more on the wire, of size 1."""
        bare = ((-1,), ()) if self.max_batch_size else ((),)
        return frozenset(spec.name for spec in (*self.inputs, *self.outputs) if spec.shape in bare)


def config(
    name: str,
    engine: str,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    *,
    native: bool,
    threads: int = 1,
    batching: Batching,
) -> Config:
    """For a model that our `engine` runs; `native`: by Triton's own backend, where there is one for it.

    UnavailableError for a datatype that the Python backend doesn't have.
    """
    found = NATIVE.get(engine) if native else None
    if found is None:
        if bad := next((spec.name for spec in (*inputs, *outputs) if spec.datatype == "BF16"), None):
            raise UnavailableError("Triton's Python backend has no BF16", place=f"tensor {bad!r}", cure="Use FP32.")
        return Config(name, PYTHON, inputs, outputs, batching)
    parameters = {found.threads: str(threads), **dict(found.parameters)}
    return Config(name, found.backend, inputs, outputs, batching, found.platform, found.file, found.batches, parameters)


def text(told: Config) -> str:
    """The file, in protobuf's text format."""
    most = told.max_batch_size
    lines = [f"name: {quoted(told.name)}", f"backend: {quoted(told.backend)}"]
    lines += [f"platform: {quoted(told.platform)}"] if told.platform else []
    lines += [f"default_model_filename: {quoted(told.file)}"] if told.file else []
    lines += [f"max_batch_size: {most}"]
    lines += [_tensor("input", spec, most) for spec in told.inputs]
    lines += [_tensor("output", spec, most) for spec in told.outputs]
    if most and told.batching.dynamic:
        delay = told.batching.delay_us
        lines.append("dynamic_batching {}" if delay is None else _message("dynamic_batching", _delay(delay)))
    lines.append(_message("instance_group", [f"count: {told.batching.instances}", "kind: KIND_CPU"]))
    for key, value in told.parameters.items():
        lines.append(_message("parameters", [f"key: {quoted(key)}", f"value {{ string_value: {quoted(value)} }}"]))
    return "\n".join(lines) + "\n"


def quoted(value: str) -> str:
    """A string of the text format."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(one if one.isprintable() else _octal(one) for one in escaped) + '"'


def _octal(character: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in character.encode())


def _tensor(kind: str, spec: TensorSpec, most: int) -> str:
    inner = spec.shape[1:] if most else spec.shape
    datatype = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
    fields = [f"name: {quoted(spec.name)}", f"data_type: {datatype}", f"dims: {_list(inner or (1,))}"]
    fields += [] if inner else ["reshape { shape: [] }"]
    return _message(kind, fields)


def _delay(delay: int) -> Sequence[str]:
    return [f"max_queue_delay_microseconds: {delay}"]


def _list(sizes: Sequence[int]) -> str:
    return "[ " + ", ".join(map(str, sizes)) + " ]"


def _message(name: str, fields: Sequence[str]) -> str:
    return "\n".join([f"{name} {{", *(f"  {line}" for line in fields), "}"])
