"""LitServe: its batching joins decoded requests.

python litserve_app.py MODEL.onnx PORT BATCH WAIT_SECONDS WORKERS
"""

import sys

import litserve
import numpy as np
import onnxruntime as ort


class Onnx(litserve.LitAPI):
    def setup(self, device):
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])

    def decode_request(self, request):
        return np.array(request["x"], np.float32)[0]

    def batch(self, inputs):
        return np.stack(inputs)

    def predict(self, x):
        return self.session.run(["y"], {"x": x})[0]

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output):
        return {"y": [output.tolist()]}


if __name__ == "__main__":
    port, batch, wait, workers = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    api = Onnx(max_batch_size=batch, batch_timeout=wait)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=workers)
    server.run(host="127.0.0.1", port=port, num_api_servers=1, log_level="warning", generate_client_file=False)
