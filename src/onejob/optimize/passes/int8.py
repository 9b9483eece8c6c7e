"""Static int8 quantisation for ONNX Runtime: QDQ, activations u8, weights s8 with a scale for each output channel.

u8 for activations and s8 for weights is what processors with VNNI multiply directly: s8 for both was 2.8 times slower
in a trial. Ranges are the least and greatest values over a fixed sample of training rows (other calibrations of this
quantiser gave the same scales, for more work).
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_static,
)

from onejob.core.context import StepContext
from onejob.core.faults import reach
from onejob.errors import StepError
from onejob.optimize.passes.graph import normalised, write
from onejob.optimize.rows import Rows, load_encoding, read_rows

BATCH = 64
QUANTISED = frozenset({"QuantizeLinear", "DequantizeLinear"})


class Sample(CalibrationDataReader):  # type: ignore[misc]  # the quantiser's class is untyped
    """Encoded rows in batches, in order."""

    def __init__(self, rows: Rows) -> None:
        self._batches = iter([rows.take(slice(start, start + BATCH)) for start in range(0, len(rows), BATCH)])

    def get_next(self) -> Mapping[str, np.ndarray[Any, Any]] | None:
        return next(self._batches, None)


def run(context: StepContext) -> None:
    """base + dataset -> candidate; the sample is spread evenly over the training rows.

    A graph that can't be quantised is a finding, not a failure of the job: the candidate then holds no model, and the
    reason in `meta["failed"]`.
    """
    base, family = context.inputs["base"], context.options["family"]
    encoding = load_encoding(family, base)
    rows = read_rows(context.inputs["dataset"], encoding, "train", most=context.options["calibration_rows"])
    out = context.out("candidate")
    shutil.copyfile(base.file("encoding.json"), out / "encoding.json")
    quantisation = {"format": "qdq", "activations": "u8", "weights": "s8", "per_channel": True, "calibration": "minmax"}
    options = {**base.meta["options"], **quantisation, "calibration_rows": len(rows)}
    meta = {**base.meta, "precision": "int8", "options": options}
    try:
        model = quantise(onnx.load(base.file("model.onnx")), rows, context.work / "quantised.onnx")
    except StepError as error:
        context.warn(f"{context.name}: {error}")
        context.emit("candidate", "candidate", {**meta, "failed": error.message})
        return
    reach("int8.quantised")
    write(model, out / "model.onnx")
    context.measure({"quantised": {"rows": len(rows), "nodes": _quantised(model)}})
    context.emit("candidate", "candidate", meta)


def quantise(model: onnx.ModelProto, rows: Rows, aside: Path) -> onnx.ModelProto:
    """The graph with QDQ nodes, calibrated on these rows; `aside` is written on the way. StepError if it can't be."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the quantiser's own calls to what numpy and onnx deprecate
            logging.disable(logging.WARNING)  # it advises a pre-processing that would tie the graph to this machine
            quantize_static(
                model,
                str(aside),
                Sample(rows),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                calibrate_method=CalibrationMethod.MinMax,
            )
        result = normalised(onnx.load(aside))
    except Exception as error:  # the quantiser raises plain errors of many kinds
        raise StepError(f"the quantiser failed with {type(error).__name__}: {' '.join(str(error).split())}") from error
    finally:
        logging.disable(logging.NOTSET)
    if not _quantised(result):
        raise StepError("no operator of this graph can be quantised")
    return result


def _quantised(model: onnx.ModelProto) -> int:
    return sum(node.op_type in QUANTISED for node in model.graph.node)
