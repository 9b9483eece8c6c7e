"""FastAPI without its models: the request's body is read as it is, the engine runs at once, nothing is batched."""

import json
import os

import numpy as np
import onnxruntime as ort
from fastapi import FastAPI, Request
from fastapi.responses import Response

HEAD = "inference-header-content-length"
options = ort.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
session = ort.InferenceSession(os.environ["BENCH_MODEL"], options, providers=["CPUExecutionProvider"])
shape = [1, *session.get_inputs()[0].shape[1:]]
app = FastAPI()


@app.post("/infer")
async def infer(request: Request):
    body = await request.body()
    length = int(request.headers.get(HEAD, 0))
    if length:
        x = np.frombuffer(body, np.float32, offset=length).reshape(shape)
    else:
        x = np.array(json.loads(body)["inputs"][0]["data"], np.float32).reshape(shape)
    y = session.run(["y"], {"x": x})[0]
    entry = {"name": "y", "datatype": "FP32", "shape": list(y.shape)}
    if not length:
        return Response(json.dumps({"outputs": [{**entry, "data": y.ravel().tolist()}]}), media_type="application/json")
    head = json.dumps({"outputs": [{**entry, "parameters": {"binary_data_size": y.nbytes}}]}).encode()
    return Response(head + y.tobytes(), headers={HEAD: str(len(head))}, media_type="application/octet-stream")
