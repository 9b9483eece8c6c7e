"""The tabular model: one embedding a category, the numbers beside them, and an MLP.

Everything random is a function of counters, never of a generator's state: parameters of the seed, dropout of (seed,
step, layer, global row, unit). So a row is treated the same whichever rank holds it, and a resumed training goes on as
it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from onejob.core.artifact import Json
from onejob.families.tabular.encode import Encoding, Label
from onejob.families.tabular.options import Options

GAMMA = 0x9E3779B97F4A7C15
WORD = (1 << 64) - 1


class Tabular(nn.Module):
    """Embeddings, an MLP, and what is learnt from their output; the subclasses say which features there are."""

    def __init__(self, encoding: Encoding, options: Options) -> None:
        super().__init__()
        self.label = encoding.label
        sizes = [len(column.values) + 1 for column in encoding.categories]
        widths = [_width(size, options.embedding) for size in sizes]
        self.embeddings = nn.ModuleList(nn.Embedding(*pair) for pair in zip(sizes, widths, strict=True))
        numbers = next((spec.shape[1] for spec in encoding.features if spec.name == "numbers"), 0)
        width = numbers + sum(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise([width, *options.hidden]))
        self.drops = nn.ModuleList(Dropout(options.dropout, layer) for layer in range(len(self.layers)))
        self.head = nn.Linear([width, *options.hidden][-1], max(1, len(self.label.classes)))

    def rows(self, seed: int, step: int, rows: Tensor) -> None:
        """Say which global rows the next training forward holds, in which step; `rows` is int64 [n]."""
        for drop in self.drops:
            assert isinstance(drop, Dropout)
            drop.key(seed, step, rows)

    def loss(self, outputs: Sequence[Tensor], label: Tensor) -> Tensor:
        """One loss a row: cross entropy, or the squared error in units of the label's spread."""
        return _loss(self.label, outputs[0], label)

    def _outputs(self, parts: list[Tensor]) -> tuple[Tensor]:
        hidden = torch.cat(parts, dim=1)
        for layer, drop in zip(self.layers, self.drops, strict=True):
            hidden = drop(functional.relu(layer(hidden)))
        result = self.head(hidden)
        if self.label.task == "regression":
            result = result * self.label.std + self.label.mean
        return (result,)

    def _embedded(self, categories: Tensor) -> list[Tensor]:
        return [layer(categories[:, index]) for index, layer in enumerate(self.embeddings)]


class CategoriesAndNumbers(Tabular):
    def forward(self, categories: Tensor, numbers: Tensor) -> tuple[Tensor]:
        return self._outputs([*self._embedded(categories), numbers])


class CategoriesOnly(Tabular):
    def forward(self, categories: Tensor) -> tuple[Tensor]:
        return self._outputs(self._embedded(categories))


class NumbersOnly(Tabular):
    def forward(self, numbers: Tensor) -> tuple[Tensor]:
        return self._outputs([numbers])


class Dropout(nn.Module):
    """Dropout whose mask is a hash of (seed, step, layer, global row, unit)."""

    def __init__(self, share: float, layer: int) -> None:
        super().__init__()
        self.share = share
        self.layer = layer
        self._rows: Tensor | None = None

    def key(self, seed: int, step: int, rows: Tensor) -> None:
        if self.share:
            start = mix_int(mix_int(mix_int(seed) ^ step) ^ self.layer)
            self._rows = mix(rows ^ _signed(start))

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training or not self.share:
            return hidden
        assert self._rows is not None, "rows() comes before a training forward"
        assert len(self._rows) == len(hidden), "rows() named other rows than these"
        unit = torch.arange(hidden.shape[1], dtype=torch.int64) * _signed(GAMMA)
        bits = _shift(mix(self._rows[:, None] + unit[None, :]), 40)  # 24 bits: as many as float32 holds
        keep = bits >= int(self.share * (1 << 24))
        return hidden * keep * (1.0 / (1.0 - self.share))


def build(encoding: Encoding, options: Mapping[str, Json], seed: int = 0) -> Tabular:
    """The module for an encoding; its parameters depend on the seed alone."""
    kinds: dict[tuple[str, ...], type[Tabular]] = {
        ("categories", "numbers"): CategoriesAndNumbers,
        ("categories",): CategoriesOnly,
        ("numbers",): NumbersOnly,
    }
    kind = kinds[tuple(spec.name for spec in encoding.features)]
    # torch's own initialisation draws from the process's generator; on "meta" it would import the compiler: 1.5 s
    with torch.random.fork_rng(devices=[]):
        module = kind(encoding, Options(**options))
    _initialise(module, torch.Generator().manual_seed(seed & WORD >> 1))
    return module


def _initialise(module: Tabular, generator: torch.Generator) -> None:
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.Embedding):
                part.weight.normal_(0.0, 0.05, generator=generator)
                part.weight[0] = 0.0  # a value never seen says nothing, until rare values teach it something
            elif isinstance(part, nn.Linear):
                bound = (6.0 / (part.in_features + part.out_features)) ** 0.5
                part.weight.uniform_(-bound, bound, generator=generator)
                part.bias.zero_()


def _width(values: int, most: int) -> int:
    """Width of an embedding: fastai's rule of thumb, 1.6 n^0.56."""
    return int(min(most, max(1, round(1.6 * values**0.56))))


def _loss(label: Label, output: Tensor, truth: Tensor) -> Tensor:
    match label.task:
        case "binary":
            return functional.binary_cross_entropy_with_logits(output[:, 0], truth.to(output.dtype), reduction="none")
        case "multiclass":
            return functional.cross_entropy(output, truth, reduction="none")
        case "regression":
            return ((output[:, 0] - truth.to(output.dtype)) / label.std) ** 2


def mix(values: Tensor) -> Tensor:
    """SplitMix64's finaliser on an int64 tensor: every input bit changes about half of the output bits."""
    values = (values ^ _shift(values, 30)) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ _shift(values, 27)) * _signed(0x94D049BB133111EB)
    return values ^ _shift(values, 31)


def mix_int(value: int) -> int:
    """The same for one number, with the generator's increment first, so that 0 doesn't stay 0."""
    value = (value + GAMMA) & WORD
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & WORD
    return value ^ value >> 31


def _shift(values: Tensor, bits: int) -> Tensor:
    """A logical shift to the right: int64 has only the arithmetic one."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> Any:
    """A 64-bit word as the int64 with the same bits."""
    return word - (1 << 64) if word >> 63 else word
