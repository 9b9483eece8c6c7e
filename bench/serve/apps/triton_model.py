"""Triton's Python backend: what came in one batch is run as one."""

import os

import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = os.path.join(args["model_repository"], args["model_version"], "model.onnx")
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        parts = [pb.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        y = self.session.run(["y"], {"x": np.concatenate(parts) if len(parts) > 1 else parts[0]})[0]
        answers, start = [], 0
        for part in parts:
            answers.append(pb.InferenceResponse([pb.Tensor("y", y[start : start + len(part)])]))
            start += len(part)
        return answers
