"""What the protocol's messages cost: microseconds to read a request and to write its answer, without network or model.

    taskset -c 0 python bench/serve/codecs.py

The least of several rounds, so that neighbours don't count. MLP: FP32 [1, 64] in, [1, 10] out; ResNet: FP32
[1, 3, 64, 64] in, [1, 1000] out.
"""

from __future__ import annotations

import json
import timeit
from collections.abc import Callable

import numpy as np

from onejob.core.tensor import TensorSpec
from onejob.serve.protocols.answer import Encoder
from onejob.serve.protocols.interface import Interface
from onejob.serve.protocols.plan import Plans

ROUNDS = 9
SHAPES = {"MLP": ((1, 64), (1, 10)), "ResNet-18": ((1, 3, 64, 64), (1, 1000))}


def interface(taken: tuple[int, ...], given: tuple[int, ...]) -> Interface:
    return Interface(
        "model",
        {"x": TensorSpec("x", "FP32", (-1, *taken[1:]))},
        {"y": TensorSpec("y", "FP32", (-1, *given[1:]))},
    )


def request(x: np.ndarray, *, binary: bool, identifier: str = "") -> tuple[bytes, int | None]:
    """A body as NVIDIA's client sends it."""
    entry: dict[str, object] = {"name": "x", "shape": list(x.shape), "datatype": "FP32"}
    head: dict[str, object] = {"id": identifier} if identifier else {}
    if not binary:
        entry["data"] = [float(str(value)) for value in x.reshape(-1)]
        return json.dumps({**head, "inputs": [entry]}).encode(), None
    entry["parameters"] = {"binary_data_size": x.nbytes}
    text = json.dumps({**head, "inputs": [entry], "parameters": {"binary_data_output": True}}, separators=(",", ":"))
    return text.encode() + x.tobytes(), len(text)


def least(what: Callable[[], object]) -> float:
    """Microseconds of a call."""
    number = max(1, int(0.02 / max(timeit.timeit(what, number=3) / 3, 1e-9)))
    return min(timeit.repeat(what, number=number, repeat=ROUNDS)) / number * 1e6


def measure(name: str, x: np.ndarray, y: np.ndarray, *, binary: bool, identifier: str = "") -> None:
    known = interface(x.shape, y.shape)
    plans, encoder = Plans(known), Encoder(known, "1", {"engine": "0" * 64})
    body, length = request(x, binary=binary, identifier=identifier)
    plan, told, arrays = plans.read(body, length)
    assert np.array_equal(arrays["x"], x)
    wanted, outputs = plan.head.outputs, {"y": y}
    reading = least(lambda: plans.read(body, length))
    writing = least(lambda: encoder.encode(outputs, wanted, told, "0123456789abcdef0123456789"))
    form = "binary" if binary else "JSON"
    print(
        f"{name:10} {form:7} id {'yes' if identifier else 'no ':3} {len(body):8,d} B  read {reading:8.2f} us  "
        f"write {writing:8.2f} us  both {reading + writing:8.2f} us"
    )


def main() -> None:
    generator = np.random.default_rng(0)
    for name, (taken, given) in SHAPES.items():
        x, y = (generator.random(shape, dtype=np.float32) for shape in (taken, given))
        measure(name, x, y, binary=True)
        measure(name, x, y, binary=True, identifier="request-000001")
        measure(name, x, y, binary=False)


if __name__ == "__main__":
    main()
