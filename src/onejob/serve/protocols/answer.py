"""The answer to a v2 inference request, from a template for each choice of outputs and shapes.

Of an answer's JSON only the ids differ from one to the next where the outputs go as bytes; what can differ (numbers as
JSON, the size of text) has a gap in the template that is filled each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from onejob.core.artifact import Json
from onejob.errors import InferenceError
from onejob.serve.protocols import tensors
from onejob.serve.protocols.classification import check_scored, classify
from onejob.serve.protocols.interface import Interface, Wanted

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]
Shapes = tuple[tuple[int, ...], ...]

MAX_TEMPLATES = 512
BINARY, TEXT_BINARY, JSON = range(3)


class Template:
    """The JSON of answers that have the same outputs in the same shapes: fixed text, with gaps between."""

    __slots__ = ("kinds", "pieces")

    def __init__(self, opening: bytes, interface: Interface, wanted: tuple[Wanted, ...], shapes: Shapes) -> None:
        self.kinds = tuple(_kind(interface, output) for output in wanted)
        pieces, text = [], opening
        for number, (output, kind, shape) in enumerate(zip(wanted, self.kinds, shapes, strict=True)):
            datatype = "BYTES" if output.classes else interface.outputs[output.name].datatype
            described = orjson.dumps({"name": output.name, "datatype": datatype, "shape": list(shape)})
            text += (b"," if number else b"") + described[:-1]
            if kind == BINARY:
                size = int(np.prod(shape)) * tensors.SIZES[datatype]
                text += b',"parameters":{"binary_data_size":%d}}' % size
                continue
            pieces.append(text + (b',"data":' if kind == JSON else b',"parameters":{"binary_data_size":'))
            text = b"}" if kind == JSON else b"}}"
        self.pieces = (*pieces, text + b"]}")


class Encoder:
    """Encodes the answers of one version of a model."""

    def __init__(self, interface: Interface, version: str, parameters: Mapping[str, Json] | None = None) -> None:
        """`parameters` come with each answer, and with them the request's id as `request_id`; None: no parameters."""
        self._interface = interface
        self._told = parameters is not None
        named = orjson.dumps({"model_name": interface.name, "model_version": version})[1:-1]
        if parameters is None:
            self._first, self._opening = named + b',"outputs":[', b""
        else:
            told = orjson.dumps(dict(parameters))[:-1] + (b"," if parameters else b"")
            self._first, self._opening = named + b',"parameters":' + told + b'"request_id":', b'},"outputs":['
        self._templates: dict[tuple[tuple[Wanted, ...], Shapes], Template] = {}

    def check(self, wanted: tuple[Wanted, ...]) -> None:
        """BadRequestError if classes are asked of an output that has none; best done before the model is asked."""
        for output in wanted:
            if output.classes:
                check_scored(self._interface.outputs[output.name].datatype)

    def encode(
        self, outputs: Arrays, wanted: tuple[Wanted, ...], identifier: str = "", request_id: str = ""
    ) -> tuple[bytes, int | None]:
        """An answer's body, and the length of its JSON if bytes follow it."""
        found = [self._array(outputs, output) for output in wanted]
        template = self._template(wanted, tuple([array.shape for array in found]))
        parts = [b'{"id":', orjson.dumps(identifier), b","] if identifier else [b"{"]
        parts.append(self._first)
        if self._told:
            parts.append(orjson.dumps(request_id))
        pieces, gap, tail = template.pieces, 0, []
        for kind, array, output in zip(template.kinds, found, wanted, strict=True):
            if kind == BINARY:
                tail.append(self._bytes(array, output.name))
                continue
            parts.append(pieces[gap])
            gap += 1
            datatype = "BYTES" if output.classes else self._interface.outputs[output.name].datatype
            if kind == JSON:
                parts.append(tensors.encode_json(array, datatype))
            else:
                tail.append(tensors.to_bytes(array, datatype))
                parts.append(b"%d" % len(tail[-1]))
        parts.append(pieces[gap])
        if not tail:
            return b"".join(parts), None
        text = b"".join(parts)
        return b"".join((text, *tail)), len(text)

    def _array(self, outputs: Arrays, output: Wanted) -> Array:
        array = outputs.get(output.name)
        if array is None:
            raise InferenceError(f"the model left no output {output.name!r}", place="engine")
        if not output.classes:
            return array
        interface = self._interface
        datatype, labels = interface.outputs[output.name].datatype, interface.labels.get(output.name, ())
        return classify(array, output.classes, datatype, labels, batched=interface.batched)

    def _bytes(self, array: Array, name: str) -> bytes:
        datatype = self._interface.outputs[name].datatype
        return array.tobytes() if array.dtype is tensors.VIEWED.get(datatype) else tensors.to_bytes(array, datatype)

    def _template(self, wanted: tuple[Wanted, ...], shapes: Shapes) -> Template:
        key = (wanted, shapes)
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            template = self._templates[key] = Template(self._opening, self._interface, wanted, shapes)
        return template


def _kind(interface: Interface, output: Wanted) -> int:
    if not output.binary:
        return JSON
    text = output.classes or interface.outputs[output.name].datatype == "BYTES"
    return TEXT_BINARY if text else BINARY
