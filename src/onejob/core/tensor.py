"""Names and types of tensors, in the words of the KServe v2 protocol; pure data, no arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DATATYPES: Mapping[str, str] = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "BF16": "float32",
    "BYTES": "object",
}
"""Datatype of the protocol -> numpy dtype of its arrays. numpy has no BF16: float32 holds all of its values."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's name, datatype, and shape with -1 where it varies; the first dimension is the batch."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}
