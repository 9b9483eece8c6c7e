"""ONNX graphs with bytes that depend on the model alone: what tells of folders, times and tools is taken out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx

PRODUCER = "onejob"

STRIPPED = frozenset({"metadata_props", "doc_string"})
"""Fields of any message that hold stack traces, source paths and notes of the exporter."""


def normalised(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the graph without notes, with a fixed producer; what it computes and every name stay."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    _strip(result)
    result.producer_name = PRODUCER
    result.ClearField("producer_version")
    result.ClearField("domain")
    result.ClearField("model_version")
    for node in _nodes(result.graph):
        attributes = sorted(node.attribute, key=lambda one: one.name)
        del node.attribute[:]
        node.attribute.extend(attributes)
    opsets = sorted(result.opset_import, key=lambda one: one.domain)
    del result.opset_import[:]
    result.opset_import.extend(opsets)
    return result


def write(model: onnx.ModelProto, path: Path) -> None:
    """Check the graph in full, then write it durably, with its weights in the same file."""
    onnx.checker.check_model(model, full_check=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("wb") as file:
        file.write(model.SerializeToString(deterministic=True))
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _strip(message: Any) -> None:
    """Clear the fields of STRIPPED in this message and in all below it, but not in the weights' bytes."""
    for field, value in message.ListFields():
        if field.name in STRIPPED:
            message.ClearField(field.name)
        elif field.message_type is not None:
            # a repeated field gives many messages, any other one
            for child in [value] if hasattr(value, "ListFields") else list(value):
                _strip(child)


def _nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Every node, those of subgraphs too."""
    found = []
    for node in graph.node:
        found.append(node)
        for attribute in node.attribute:
            for subgraph in [attribute.g] if attribute.HasField("g") else list(attribute.graphs):
                found.extend(_nodes(subgraph))
    return found
