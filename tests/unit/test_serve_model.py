"""What a family's code gives is what clients are told they get, or an error of those alone who asked for it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from onejob.core.tensor import TensorSpec
from onejob.engines import LoadedModel
from onejob.errors import InferenceError
from onejob.serve.batch import Batcher
from onejob.serve.item import Item
from onejob.serve.model import ServedModel
from onejob.serve.policy import Limits

X = TensorSpec("x", "FP32", (-1, 1))
ODD = {
    1: (lambda y: {"z": y}, "the model left no output 'y'"),
    2: (lambda y: None, "decode gave NoneType, not a dict of its outputs"),
    3: (lambda y: {"y": y.astype(object)}, "output 'y' is BYTES, not FP32 as declared"),
    4: (lambda y: {"y": y.astype(str)}, "not FP32 as declared"),
    5: (lambda y: {"y": y.repeat(2, axis=1)}, r"output 'y' has shape \[1, 2\], not \[-1, 1\] as declared"),
    6: (lambda y: {"y": np.float32(5)}, r"output 'y' has shape \[\], not \[-1, 1\] as declared"),
    7: (lambda y: {"y": np.concatenate([y, y])}, r"output 'y' has shape \[2, 1\] for 1 rows"),
}


class Copy:
    """An engine that answers what it is asked."""

    inputs = outputs = (X,)
    precision = ""

    def infer(self, arrays: Any) -> Any:
        return {"y": arrays["x"]}

    def close(self) -> None:
        pass


class Encoding:
    """A user's own, that goes wrong for some numbers; whatever else runs beside them gets that too."""

    inputs = features = (X,)
    served = (TensorSpec("y", "FP32", (-1, 1)),)

    def encode(self, columns: Any) -> Any:
        return columns

    def encode_label(self, column: Any) -> Any:
        return column

    def decode(self, outputs: Any) -> Any:
        y = outputs["y"]
        for number, (give, _) in ODD.items():
            if number in y:
                return give(y)
        return {"y": y.astype(np.float64), "extra": y}


def ask(model: ServedModel, numbers: list[float]) -> list[Item]:
    """Each number's request, all run as one batch."""

    async def work() -> list[Item]:
        batcher = Batcher(model.infer, Limits(rows=8, queue=16), inline=True)
        answered: list[Item] = []
        for number in numbers:
            array = np.array([[number]], np.float32)
            batcher.submit(Item({"x": array}, 1, answered.append, 0, 1 << 62, ((1,),)))
        while len(answered) < len(numbers):
            await asyncio.sleep(0)
        batcher.close()
        return answered

    return asyncio.run(work())


@pytest.fixture
def model() -> ServedModel:
    engine: LoadedModel = Copy()
    return ServedModel(engine, Encoding())


@pytest.mark.parametrize("number", ODD)
def test_only_who_asked_for_what_was_not_promised_is_told(model: ServedModel, number: int) -> None:
    before, odd, after = ask(model, [40, number, 50])
    assert isinstance(odd.error, InferenceError)
    with pytest.raises(InferenceError, match=ODD[number][1]):
        raise odd.error
    assert [(one.outputs or {})["y"].tolist() for one in (before, after)] == [[[40]], [[50]]]


def test_a_number_comes_in_the_datatype_promised_and_nothing_beside_it(model: ServedModel) -> None:
    (told,) = ask(model, [40])
    assert told.outputs is not None
    assert {name: array.dtype for name, array in told.outputs.items()} == {"y": np.float32}
