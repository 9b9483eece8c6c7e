"""Export a checkpoint to ONNX (fp32) and prove it on real rows: the candidate that the others are made from.

The exporter is known to produce graphs that load and run and answer wrongly, so the graph must give PyTorch's outputs
on encoded rows of the held-out split, alone and as a batch. It also writes source paths and stack traces into the
graph: the bytes here depend on the weights and the model's code, never on the folder or the process.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import torch
from safetensors.torch import load_file

from onejob.core.artifact import Json
from onejob.core.context import InputArtifact, StepContext
from onejob.core.faults import reach
from onejob.core.plugin import load
from onejob.engines import onnxruntime
from onejob.errors import DamagedError, StepError
from onejob.optimize.accept import SAME, difference, worst_row
from onejob.optimize.passes.graph import normalised, write
from onejob.optimize.rows import Rows, load_encoding, read_rows

Array = np.ndarray[Any, Any]

OPSET = 20
CHECKED = 1024
"""Held-out rows on which the graph must agree with PyTorch; every one of them is compared again before the choice."""


def run(context: StepContext) -> None:
    """checkpoint + dataset -> candidate: `model.onnx`, `encoding.json`."""
    torch.set_num_threads(context.threads)
    checkpoint, family = context.inputs["checkpoint"], context.options["family"]
    encoding = load_encoding(family, checkpoint)
    rows = read_rows(context.inputs["dataset"], encoding, "holdout", most=CHECKED)
    module = _module(family, checkpoint, encoding)
    out = context.out("candidate")
    write(normalised(_exported(module, encoding, rows)), out / "model.onnx")
    reach("export.written")
    shutil.copyfile(checkpoint.file("encoding.json"), out / "encoding.json")
    meta = _meta(family, checkpoint)
    error = _check(context, module, encoding, rows, meta)
    context.measure({"export": {"rows": len(rows), "max_error": error, "opset": OPSET}})
    context.emit("candidate", "candidate", meta)


def _meta(family: str, checkpoint: InputArtifact) -> dict[str, Json]:
    return {
        "format": 1,
        "family": family,
        "engine": "onnxruntime",
        "precision": "fp32",
        "options": {"opset": OPSET},
        "model": checkpoint.meta["model"],
        "columns": checkpoint.meta.get("columns"),
    }


def _module(family: str, checkpoint: InputArtifact, encoding: Any) -> torch.nn.Module:
    """The family's module with the checkpoint's weights, ready to answer."""
    module = load(f"{family}.model:build")(encoding, checkpoint.meta["model"])
    path = checkpoint.file("model.safetensors")
    try:
        module.load_state_dict(load_file(path), strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        message = f"the weights don't fit the model of {family}: {' '.join(str(error).split())}"
        raise DamagedError(message, place=str(path), cure="`onejob verify` says what is damaged.") from error
    module.eval()
    assert isinstance(module, torch.nn.Module)
    return module


def _exported(module: torch.nn.Module, encoding: Any, rows: Rows) -> onnx.ModelProto:
    """The graph, with a batch that varies; StepError with the exporter's words."""
    batch = torch.export.Dim("batch", min=1)
    # more rows than one: an example of one row would be taken for a constant
    few = rows.take(np.arange(3) % len(rows))
    names = [spec.name for spec in encoding.features]
    # the exporter speaks at length of operators of other packages that the model doesn't have
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of its own calls to what it deprecates
            program = torch.onnx.export(
                module,
                tuple(torch.from_numpy(few[name]) for name in names),
                dynamo=True,
                opset_version=OPSET,
                input_names=names,
                output_names=[spec.name for spec in encoding.outputs],
                dynamic_shapes=tuple({0: batch} for _ in names),
                external_data=False,
                verbose=False,
            )
    except Exception as error:  # torch raises errors of many kinds here, from the user's module too
        text = str(error).split("\n## ")[0].strip()
        raise StepError(f"the model can't be exported to ONNX: {text}", place=type(module).__name__) from error
    assert program is not None
    return program.model_proto


def _check(context: StepContext, module: torch.nn.Module, encoding: Any, rows: Rows, meta: Mapping[str, Json]) -> float:
    """The greatest difference between the graph and PyTorch; StepError, with the row, above the tolerance."""
    names = [spec.name for spec in encoding.features]
    with torch.no_grad():
        outputs = module(*(torch.from_numpy(values) for values in (rows.take(slice(None))[name] for name in names)))
    expected = {spec.name: value.numpy() for spec, value in zip(encoding.outputs, outputs, strict=True)}
    model = onnxruntime.open_model(context.out("candidate"), meta, threads=context.threads)
    try:
        got = model.infer(rows.take(slice(None)))
        require_agreement(expected, got, rows)
        alone = model.infer(rows.take(slice(0, 1)))
        require_agreement({name: values[:1] for name, values in expected.items()}, alone, rows)
    finally:
        model.close()
    return difference(expected, got)


def require_agreement(expected: Mapping[str, Array], got: Mapping[str, Array], rows: Rows) -> None:
    """StepError, with the row and its features, where the graph's outputs aren't PyTorch's."""
    error = difference(expected, got)
    if error <= SAME:
        return
    row = worst_row(expected, got)
    features = {name: values[0].tolist() for name, values in rows.take(slice(row, row + 1)).items()}
    wanted = {name: values[row].tolist() for name, values in expected.items()}
    answered = {name: values[row].tolist() for name, values in got.items() if len(values) > row}
    raise StepError(
        f"the exported graph differs from PyTorch by {error:.3g} (allowed: {SAME:g}), most at checked row {row}: "
        f"{features} gives {answered}, not {wanted}",
        place="optimize.export",
        cure="An operator of the model is exported wrongly; serve without [optimize], or write it in another way.",
    )
