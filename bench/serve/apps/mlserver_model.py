"""MLServer: a custom runtime; its adaptive batching joins requests before `predict` sees them."""

import onnxruntime as ort
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Onnx(MLModel):
    async def load(self):
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = self.settings.parameters.uri
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return True

    async def predict(self, payload):
        x = NumpyCodec.decode_input(payload.inputs[0])
        y = self.session.run(["y"], {"x": x})[0]
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", y)])
