"""`triton_python_backend_utils` as a model of Triton's Python backend imports it, for models that run here as they are.

https://github.com/triton-inference-server/python_backend#usage says what each of these is to do; what can't be had here
(other models, decoupled answers) says so when it is called. Names and values are Triton's.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Properties = Mapping[str, Any]

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2

_KINDS = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64")
_DTYPES = ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32")
TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    f"TYPE_{kind}": np.dtype(dtype).type for kind, dtype in zip(_KINDS, (*_DTYPES, "float64"), strict=True)
} | {"TYPE_STRING": np.object_}
_NUMBERED: tuple[Any, ...] = (None, *TRITON_STRING_TO_NUMPY.values())
"""By the numbers of protobuf's enumeration."""
_NAMES = {np.dtype(dtype): name.removeprefix("TYPE_") for name, dtype in TRITON_STRING_TO_NUMPY.items()}


model_dir = ""
"""Set before a model runs."""


class TritonModelException(Exception):  # noqa: N818 - Triton's name
    """What a model raises, or gets, when something is wrong."""


class TritonError:
    """Why a request has no answer."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int | None = None) -> None:
        self._message, self._code = str(message), self.INTERNAL if code is None else code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    """A named array: text is an array of `bytes` objects."""

    def __init__(self, name: str, array: Any) -> None:
        made = np.asarray(array)
        if made.dtype.kind in "US":
            made = made.astype(object)
        if made.dtype not in _NAMES and not made.dtype.hasobject:
            raise TritonModelException(f"Tensor {name!r} has the type {made.dtype}, which Triton hasn't")
        self._name, self._array = name, made

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        return self._array

    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def triton_dtype(self) -> int:
        """By the numbers of protobuf's enumeration."""
        return int(numpy_to_triton_type(self._array.dtype.type) or 0)

    def is_cpu(self) -> bool:
        return True

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """From another framework's tensor, in this machine's memory; or its capsule."""
        if not hasattr(tensor, "__dlpack__"):
            tensor = _Capsule(tensor)
        return Tensor(name, np.from_dlpack(tensor))

    def to_dlpack(self) -> Any:
        return self.__dlpack__()

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        return np.ascontiguousarray(self._array).__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class _Capsule:
    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # this machine's memory


class InferenceRequest:
    """What came together: rows of the requests that were joined, as one request of that many rows."""

    def __init__(
        self,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        request_id: str = "",
        correlation_id: int | str = 0,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        **more: Any,
    ) -> None:
        self._inputs, self._outputs = list(inputs), list(requested_output_names)
        self._model = model_name

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def requested_output_names(self) -> list[str]:
        """All: each request takes of them what it asked for."""
        return self._outputs

    def model_name(self) -> str:
        return self._model

    def request_id(self) -> str:
        """Empty: the rows may be several requests'."""
        return ""

    def correlation_id(self) -> int:
        return 0

    def flags(self) -> int:
        return 0

    def timeout(self) -> int:
        return 0

    def parameters(self) -> str:
        return "{}"

    def trace(self) -> None:
        return None

    def preferred_memory(self) -> None:
        return None

    def is_cancelled(self) -> bool:
        return False

    def set_release_flags(self, flags: int) -> None:
        if flags != TRITONSERVER_REQUEST_RELEASE_ALL:
            raise TritonModelException("a request can't be kept for another call here")

    def get_response_sender(self) -> Any:
        raise TritonModelException("decoupled answers aren't there yet: return one response for each request")

    def exec(self, decoupled: bool = False, **_: Any) -> Any:
        raise TritonModelException(f"a model can't ask another one here: {self._model!r}")

    async def async_exec(self, decoupled: bool = False, **_: Any) -> Any:
        self.exec()


class InferenceResponse:
    """The outputs, or why there are none."""

    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None, **_: Any) -> None:
        self._outputs, self._error = list(output_tensors), error

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class Logger:
    """Lines in the endpoint's log."""

    INFO, WARNING, ERROR, VERBOSE = range(4)

    @classmethod
    def log(cls, message: str, level: int = INFO) -> None:
        print(f"{'IWEV'[level]} {message}", file=sys.stderr, flush=True)

    @classmethod
    def log_info(cls, message: str) -> None:
        cls.log(message, cls.INFO)

    @classmethod
    def log_warn(cls, message: str) -> None:
        cls.log(message, cls.WARNING)

    @classmethod
    def log_error(cls, message: str) -> None:
        cls.log(message, cls.ERROR)

    @classmethod
    def log_verbose(cls, message: str) -> None:
        """Nothing: Triton is not verbose unless it is told to be."""


class Metric:
    """A number of the model's own; it counts, and isn't shown by /metrics."""

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        self._value = 0.0

    def increment(self, value: float) -> None:
        self._value += value

    def set(self, value: float) -> None:
        self._value = value

    def observe(self, value: float) -> None:
        self._value += value

    def value(self) -> float:
        return self._value


class MetricFamily:
    """Numbers of one name."""

    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name, self.description, self.kind = name, description, kind

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Any = None) -> Metric:  # noqa: N802 - Triton's
        return Metric(labels)


class ModelConfig:
    """A configuration that `auto_complete_config` completes: what it says of a tensor must fit what is there."""

    def __init__(self, model_config: str) -> None:
        self._config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        known = int(self._config.get("max_batch_size") or 0)
        if known > max_batch_size:
            raise ValueError(f"max_batch_size is {known} in the configuration, and {max_batch_size} in the model")
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._config:
                raise ValueError(f"dynamic_batching is set by the model, and the configuration has {other}")
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        if unknown := set(transaction_policy_dict) - {"decoupled"}:
            raise ValueError(f"model_transaction_policy has no {', '.join(sorted(unknown))}")
        self._config["model_transaction_policy"] = dict(transaction_policy_dict)

    def add_input(self, input: Mapping[str, Any]) -> None:
        self._add("input", input, {"name", "data_type", "dims", "optional"})

    def add_output(self, output: Mapping[str, Any]) -> None:
        self._add("output", output, {"name", "data_type", "dims"})

    def _add(self, kind: str, told: Mapping[str, Any], known: set[str]) -> None:
        if unknown := set(told) - known:
            raise ValueError(f"{kind} {told.get('name')!r} has no {', '.join(sorted(unknown))}")
        if missing := {"name", "data_type", "dims"} - set(told):
            raise ValueError(f"{kind} {told.get('name')!r} lacks {', '.join(sorted(missing))}")
        listed = self._config[kind] = list(self._config.get(kind) or [])
        there = next((one for one in listed if one.get("name") == told["name"]), None)
        if there is None:
            listed.append(dict(told))
            return
        for name in ("data_type", "dims"):
            if there.get(name) not in (None, told[name]):
                raise ValueError(f"{kind} {told['name']!r}: {name} is {there[name]}, and the model says {told[name]}")
            there[name] = told[name]


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    return _named(inference_request.inputs(), name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    return _named(inference_response.output_tensors(), name)


def get_input_config_by_name(model_config: Properties, name: str) -> Any:
    """The properties of an input; None if it has no such one."""
    return next((one for one in model_config.get("input", ()) if one["name"] == name), None)


def get_output_config_by_name(model_config: Properties, name: str) -> Any:
    """The properties of an output; None if it has no such one."""
    return next((one for one in model_config.get("output", ()) if one["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Properties) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """numpy's type of, say, `TYPE_FP32`."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """numpy's type of a number of protobuf's enumeration; None of one that it hasn't."""
    return _NUMBERED[data_type] if 0 < data_type < len(_NUMBERED) else None


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The number, in protobuf's enumeration, of numpy's type."""
    wanted = np.dtype(np.object_ if data_type is np.bytes_ else data_type)
    return next((at for at, known in enumerate(_NUMBERED) if at and np.dtype(known) == wanted), None)


def serialize_byte_tensor(input_tensor: Array) -> bytes | tuple[()] | None:
    """Text as Triton sends it, each with its length in front; nothing of no text, None of other types."""
    if not input_tensor.size:
        return ()
    if not input_tensor.dtype.hasobject and input_tensor.dtype.kind != "S":
        return None
    texts = [one if isinstance(one, bytes) else str(one).encode() for one in input_tensor.reshape(-1).tolist()]
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """What `serialize_byte_tensor` made, as an array of `bytes`."""
    found, at = [], 0
    while at < len(encoded_tensor):
        (length,) = struct.unpack_from("<I", encoded_tensor, at)
        found.append(bytes(encoded_tensor[at + 4 : at + 4 + length]))
        at += 4 + length
    return np.array(found, dtype=object)


def get_model_dir() -> str:
    """The folder of this version."""
    return model_dir


def load_model(*_: Any, **__: Any) -> Any:
    raise TritonModelException("a model can't load another one here")


def unload_model(*_: Any, **__: Any) -> Any:
    raise TritonModelException("a model can't unload another one here")


def is_model_ready(*_: Any, **__: Any) -> bool:
    raise TritonModelException("a model can't ask for another one here")


def _named(tensors: Iterable[Tensor], name: str) -> Tensor | None:
    return next((one for one in tensors if one.name() == name), None)
