"""The exported graph run by OpenVINO, in fp32: the same bytes under another engine."""

from __future__ import annotations

import shutil

from onejob.core.context import StepContext
from onejob.core.faults import reach


def run(context: StepContext) -> None:
    """base -> candidate; the engine asks OpenVINO for f32 and reads back that it got it."""
    base, out = context.inputs["base"], context.out("candidate")
    for name in ("model.onnx", "encoding.json"):
        shutil.copyfile(base.file(name), out / name)
    reach("openvino.written")
    meta = {**base.meta, "engine": "openvino", "options": {**base.meta["options"], "precision": "f32"}}
    context.emit("candidate", "candidate", meta)
