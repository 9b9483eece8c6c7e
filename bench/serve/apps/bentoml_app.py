"""BentoML: a batchable API."""

import os

import bentoml
import numpy as np
import onnxruntime as ort

BATCH, WAIT_MS = int(os.environ["BENCH_BATCH"]), int(os.environ["BENCH_WAIT_MS"])


@bentoml.service(workers=int(os.environ["BENCH_WORKERS"]), logging={"access": {"enabled": False}})
class Onnx:
    def __init__(self):
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = os.environ["BENCH_MODEL"]
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    @bentoml.api(batchable=True, max_batch_size=BATCH, max_latency_ms=WAIT_MS)
    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.session.run(["y"], {"x": np.asarray(x, np.float32)})[0]
