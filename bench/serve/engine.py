"""The engine's own limit: ONNX Runtime alone, one thread, the same batch again and again.

python -P bench/serve/engine.py MODEL.onnx BATCH SECONDS

It prints {"rate": rows a second, "cpu": microseconds of CPU time a row} as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import onnxruntime as ort

WARM = 3


def main(path: str, batch: int, seconds: float) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    shape = session.get_inputs()[0].shape[1:]
    x = np.random.default_rng(7).standard_normal((batch, *shape)).astype(np.float32)
    for _ in range(WARM):
        session.run(["y"], {"x": x})
    rows, begun, cpu = 0, time.perf_counter(), time.process_time()
    while (took := time.perf_counter() - begun) < seconds:
        session.run(["y"], {"x": x})
        rows += batch
    print(json.dumps({"rate": rows / took, "cpu": (time.process_time() - cpu) / rows * 1e6}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
