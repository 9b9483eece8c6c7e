"""What a model takes and gives, and whether the tensors of a request fit it, in Triton's words where they don't."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from onejob.core.tensor import TensorSpec
from onejob.errors import BadRequestError
from onejob.serve.protocols import tensors, words

MOST_TOLD = 100
"""Names, or sizes of a shape, that an error tells."""
Specs = Mapping[str, TensorSpec]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Interface:
    """What a model takes and gives, as far as messages are concerned."""

    name: str
    inputs: Specs
    outputs: Specs
    raw: bool = False
    """Whether the inputs are a family's raw columns: nulls are welcome, and [rows] for [rows, 1] or the reverse."""
    extras: tuple[str, ...] = ()
    """Names that may be among the inputs too, with any datatype, one value a row."""
    optional: frozenset[str] = frozenset()
    """Inputs that may be left out."""
    octets: bool = False
    """Whether BYTES elements come as bytes; else as text, and what isn't UTF-8 is refused."""
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Output -> what its classes are called."""

    @cached_property
    def batched(self) -> bool:
        """Whether the first dimension of all tensors is the batch."""
        return all(spec.shape[:1] == (-1,) for spec in (*self.inputs.values(), *self.outputs.values()))

    @cached_property
    def all_outputs(self) -> tuple[tuple[Wanted, ...], tuple[Wanted, ...]]:
        """All outputs as JSON, and all as bytes."""
        return tuple(Wanted(name, False) for name in self.outputs), tuple(Wanted(name, True) for name in self.outputs)

    @cached_property
    def required(self) -> int:
        return len([name for name in self.inputs if name not in self.optional])


class Wanted(NamedTuple):
    """An output that the client asks for: as bytes or JSON, and the best `classes` of it instead of all if not 0."""

    name: str
    binary: bool
    classes: int = 0


class Part(NamedTuple):
    """A tensor in a request: at `offset` in the bytes after the head, or in `data`, read already."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    offset: int
    size: int
    data: Array | None


def fit(parts: Sequence[Part], interface: Interface, identifier: str) -> int:
    """Whether the model takes these tensors; the rows of the batch."""
    if len(parts) != len(interface.inputs) or any(part.name not in interface.inputs for part in parts):
        _check_names(parts, interface, identifier)
    rows: int | None = None
    for part in parts:
        spec = interface.inputs.get(part.name)
        if spec is None:
            continue
        if part.datatype != spec.datatype:
            raise refused(
                identifier,
                f"inference input '{part.name}' data-type is '{part.datatype}', but model '{interface.name}' expects "
                f"'{spec.datatype}'",
            )
        if interface.batched:
            rows = _check_rows(part, interface.name, rows, identifier)
        if part.shape != spec.shape and not _fits(part.shape, spec.shape, interface.raw):
            expected, got = (str(list(shape[:MOST_TOLD])).replace(" ", "") for shape in (spec.shape, part.shape))
            raise refused(
                identifier,
                f"unexpected shape for input '{part.name}' for model '{interface.name}'. "
                f"Expected {expected}, got {got}. ",
            )
    for part in parts:
        size = math.prod(part.shape) * tensors.SIZES.get(part.datatype, 0)
        if part.data is None and part.datatype != "BYTES" and part.size != size:
            raise wrong_size(part.name, interface.name, size, part.size, identifier)
    return rows if rows is not None else 1


def _check_names(parts: Sequence[Part], interface: Interface, identifier: str) -> None:
    given = [part.name for part in parts if part.name not in interface.extras or part.name in interface.inputs]
    missing = [name for name in interface.inputs if name not in given and name not in interface.optional]
    unknown = [name for name in given if name not in interface.inputs]
    if unknown and interface.required <= len(given) <= len(interface.inputs):
        raise BadRequestError(f"unexpected inference input '{unknown[0]}' for model '{interface.name}'")
    if missing or unknown:
        most, least = len(interface.inputs), interface.required
        expected = f"{most} inputs" if most == least else f"number of inputs between {least} and {most}"
        told, lacking = (",".join(f"'{name}'" for name in names[:MOST_TOLD]) for names in (given, missing))
        raise refused(
            identifier,
            f"expected {expected} but got {len(given)} inputs for model '{interface.name}'. Got input(s) [{told}], "
            f"but missing required input(s) [{lacking}]. Please provide all required input(s).",
        )


def _check_rows(part: Part, model: str, rows: int | None, identifier: str) -> int:
    if not part.shape:
        raise refused(identifier, f"input '{part.name}' has no shape but model requires batch dimension for '{model}'")
    if part.shape[0] == 0:
        raise refused(
            identifier, f"inference request batch-size must be >= 1 for '{model}': a request needs one row or more"
        )
    if rows is not None and part.shape[0] != rows:
        raise refused(identifier, f"input '{part.name}' batch size does not match other inputs for '{model}'")
    return part.shape[0]


def _fits(shape: tuple[int, ...], expected: tuple[int, ...], raw: bool) -> bool:
    if len(shape) == len(expected) and all(want in (-1, size) for want, size in zip(expected, shape, strict=True)):
        return True
    # some clients know a column as [rows], some as [rows, 1]
    return raw and expected in ((-1,), (-1, 1)) and bool(shape) and shape[1:] in ((), (1,))


def wrong_size(name: str, model: str, expected: int, got: int, identifier: str) -> BadRequestError:
    text = f"input byte size mismatch for input '{name}' for model '{model}'. Expected {expected}, got {got}"
    return refused(identifier, text)


def refused(identifier: str, text: str) -> BadRequestError:
    return BadRequestError(words.of_request(identifier, text))
