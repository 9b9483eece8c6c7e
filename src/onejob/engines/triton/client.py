"""Asks a Triton over HTTP: KServe v2 with binary tensors, one connection that is kept."""

from __future__ import annotations

import http.client
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onejob.core.artifact import Json
from onejob.core.tensor import DATATYPES, TensorSpec
from onejob.errors import InferenceError

Array = np.ndarray[Any, Any]
LENGTH = "Inference-Header-Content-Length"
_SIZE = struct.Struct("<I")


class Client:
    """A connection to a server on this machine; whoever uses it from several threads must take turns."""

    def __init__(self, port: int, timeout: float | None = None) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)

    def ask(self, method: str, path: str, body: Json = None) -> Json:
        """A message of JSON; InferenceError with the server's words, OSError if it can't be reached."""
        _, data = self._send(method, path, json.dumps(body).encode() if body is not None else b"", {})
        return json.loads(data) if data else None

    def infer(self, name: str, arrays: Mapping[str, Array], inputs: Sequence[TensorSpec]) -> dict[str, Array]:
        """The model's outputs, in the shapes of the wire; `arrays` too have these."""
        tensors = [(spec, to_bytes(arrays[spec.name], spec.datatype)) for spec in inputs]
        head = json.dumps(
            {
                "inputs": [
                    {
                        "name": spec.name,
                        "datatype": spec.datatype,
                        "shape": list(arrays[spec.name].shape),
                        "parameters": {"binary_data_size": len(data)},
                    }
                    for spec, data in tensors
                ],
                "parameters": {"binary_data_output": True},
            }
        ).encode()
        body = b"".join([head, *(data for _, data in tensors)])
        size, data = self._send("POST", f"/v2/models/{name}/infer", body, {LENGTH: str(len(head))})
        return _outputs(data, size)

    def close(self) -> None:
        self._connection.close()

    def _send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Size of the answer's JSON, and the answer."""
        try:
            self._connection.request(method, path, body, dict(headers))
            answer = self._connection.getresponse()
            data = answer.read()
        except http.client.HTTPException as error:
            self._connection.close()
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        except OSError:
            self._connection.close()
            raise
        if answer.status != 200:
            raise InferenceError(_words(data) or f"{answer.status} {answer.reason}", place="Triton")
        return int(answer.headers.get(LENGTH) or len(data)), data


def to_bytes(array: Array, datatype: str) -> bytes:
    """Little-endian bytes, in row-major order; text with a 4-byte length before each."""
    if datatype != "BYTES":
        return np.ascontiguousarray(array, np.dtype(DATATYPES[datatype]).newbyteorder("<")).tobytes()
    texts = [one if isinstance(one, bytes) else str(one or "").encode() for one in array.reshape(-1).tolist()]
    return b"".join(_SIZE.pack(len(one)) + one for one in texts)


def from_bytes(data: memoryview, datatype: str, shape: Sequence[int]) -> Array:
    """The array again; text comes as bytes."""
    if datatype != "BYTES":
        return np.frombuffer(data, np.dtype(DATATYPES[datatype]).newbyteorder("<")).reshape(shape)
    found, at = [], 0
    while at < len(data):
        (length,) = _SIZE.unpack_from(data, at)
        found.append(bytes(data[at + 4 : at + 4 + length]))
        at += 4 + length
    array = np.empty(len(found), object)
    array[:] = found
    return array.reshape(shape)


def _outputs(data: bytes, size: int) -> dict[str, Array]:
    found, at, view = {}, size, memoryview(data)
    for output in json.loads(view[:size].tobytes())["outputs"]:
        length = output["parameters"]["binary_data_size"]
        found[output["name"]] = from_bytes(view[at : at + length], output["datatype"], output["shape"])
        at += length
    return found


def _words(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"])
    except (ValueError, KeyError, TypeError):
        return data.decode(errors="replace").strip()[:500]
