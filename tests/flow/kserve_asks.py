"""Asks an endpoint with KServe's own Python client, in the client's own environment: `kserve_asks.py URL`.

Prints one JSON object: what came back, by the name of the question. Run by test_client_kserve.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

NUMBERS = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP16", "FP32", "FP64")
DTYPES = {name: name.lower().replace("fp", "float") for name in NUMBERS}
URL = sys.argv[1]


def tensor(name: str, datatype: str, array: Any, binary: bool) -> InferInput:
    made = InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def values(datatype: str) -> Any:
    return np.array([[1, 0, 2], [3, 1, 5]], dtype=DTYPES[datatype])


def texts_of(array: Any) -> Any:
    """As lists, with text as text: in JSON it comes as such, in binary as bytes."""
    return [[one.decode() if isinstance(one, bytes) else one for one in row] for row in array.tolist()]


async def asked(question: Any) -> Any:
    """What came back, or the error's class and words."""
    try:
        return await question
    except Exception as error:
        return [type(error).__name__, str(error)]


async def every_datatype(client: InferenceRESTClient, binary: bool) -> list[str]:
    """Which datatypes came back unchanged."""
    names = [name for name in NUMBERS if binary or name != "FP16"]  # it has no JSON form for FP16
    inputs = [tensor(name, name, values(name), binary) for name in names]
    others = {name: np.array([[1, 0, 2], [3, 1, 5]]).astype(np.float32) for name in NUMBERS if name not in names}
    texts = np.array([[b"a", b"", "Zürich".encode()], [b"x", b"y", b"z"]], dtype=object)
    truths = np.array([[True, False, True], [False, False, True]])
    inputs += [tensor("BYTES", "BYTES", texts, binary), tensor("BOOL", "BOOL", truths, binary)]
    outputs = [RequestedOutput(f"{one.name}_too", {"binary_data": binary}) for one in inputs]
    inputs += [tensor(name, "FP16", array.astype(np.float16), True) for name, array in others.items()]
    bf16 = InferInput("BF16", [2, 3], "BF16", data=[1, 2, 3, 4, 5, 6])  # numpy has none: it is sent as JSON
    request = InferRequest("same", [*inputs, bf16], request_outputs=outputs)
    answer = await client.infer(URL, request, model_name="same")
    came = {one.name.removesuffix("_too"): one for one in answer.outputs}
    same = []
    for one in inputs:
        if one.name in came:
            sent, got = one.as_numpy(), came[one.name].as_numpy()
            if sent.dtype == got.dtype and texts_of(sent) == texts_of(got):
                same.append(one.name)
    return sorted(same)


async def main() -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    told: dict[str, Any] = {}
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        told["live"] = await asked(client.is_server_live(URL))
        told["ready"] = await asked(client.is_server_ready(URL))
        told["model ready"] = await asked(client.is_model_ready(URL, "affine"))
        told["other ready"] = await asked(client.is_model_ready(URL, "nope"))
        for binary in (True, False):
            told[f"datatypes, binary {binary}"] = await asked(every_datatype(client, binary))
        request = InferRequest("affine", [tensor("x", "FP32", x, True)], request_id="k-1", parameters={"priority": 1})
        headers: dict[str, str] = {}
        answer = await client.infer(URL, request, model_name="affine", response_headers=headers)
        told["infer"] = [answer.id, answer.model_name, answer.model_version, answer.outputs[0].as_numpy().tolist()]
        told["headers"] = {name: headers.get(name) for name in ("x-request-id", "x-onejob-engine")}
        told["unknown model"] = await asked(client.infer(URL, request, model_name="nope"))
        bad = InferRequest("affine", [tensor("x", "FP32", x[:, :3], False)])
        told["bad shape"] = await asked(client.infer(URL, bad, model_name="affine"))
    async with InferenceRESTClient(RESTConfig(protocol="v1")) as client:
        told["v1 live"] = await asked(client.is_server_live(URL))
        told["v1 ready"] = await asked(client.is_model_ready(URL, "affine"))
        told["v1 predict"] = await asked(client.infer(URL, {"instances": x.tolist()}, model_name="affine"))
        told["v1 bad"] = await asked(client.infer(URL, {"instances": [["a"]]}, model_name="affine"))
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main())
