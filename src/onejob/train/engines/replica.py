"""One rank's copy of the model: parameters, optimizer, and all gradients in one flat bucket.

The gradients are views into the bucket, so adding them up over the ranks is one call and no copy. Behind them ride the
loss and the wish to stop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from onejob.errors import DamagedError
from onejob.train.checkpoint import Tensors

EXTRA = 2  # the loss, and how many ranks want to stop
MOMENTUM = 0.9  # of sgd


class Replica:
    """A model in training."""

    def __init__(self, module: nn.Module, optimizer: str, weight_decay: float) -> None:
        self.module = module.train()
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.optimizer = _optimizer(optimizer, list(self.parameters.values()), weight_decay)
        self.bucket = torch.zeros(sum(p.numel() for p in self.parameters.values()) + EXTRA)
        self.gradients = self.bucket[:-EXTRA]
        start = 0
        for parameter in self.parameters.values():
            parameter.grad = self.bucket[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()

    def clear(self) -> None:
        """Before a backward pass: gradients are added into the bucket."""
        self.bucket.zero_()

    def norm(self) -> float:
        """The length of the whole gradient."""
        return float(torch.linalg.vector_norm(self.gradients, dtype=torch.float64))

    def step(self, lr: float, clip: float, norm: float) -> None:
        """Change the parameters by the gradient, shortened to `clip` (0: as it is)."""
        if 0 < clip < norm:
            self.gradients.mul_(clip / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def weights(self) -> dict[str, NDArray[Any]]:
        """What the trained model is made of; copies."""
        return {name: tensor.detach().numpy().copy() for name, tensor in self.module.state_dict().items()}

    def tensors(self) -> dict[str, NDArray[Any]]:
        """All that the next step depends on: `model/<name>` and `optimizer/<what>/<name>`."""
        found = {f"model/{name}": tensor.detach().numpy() for name, tensor in self.module.state_dict().items()}
        for name, parameter in self.parameters.items():
            for what, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optimizer/{what}/{name}"] = value.detach().numpy()
        return found

    def restore(self, tensors: Tensors) -> None:
        """Go on from what `tensors` gave; DamagedError if it belongs to another model."""
        model = {n.removeprefix("model/"): _tensor(a) for n, a in tensors.items() if n.startswith("model/")}
        try:
            self.module.load_state_dict(model)
        except RuntimeError as error:
            raise DamagedError(f"the checkpoint belongs to another model: {error}") from error
        for name, array in tensors.items():
            kind, _, rest = name.partition("/")
            if kind == "optimizer":
                what, _, parameter = rest.partition("/")
                self.optimizer.state[self.parameters[parameter]][what] = _tensor(array)


def _optimizer(name: str, parameters: list[nn.Parameter], weight_decay: float) -> torch.optim.Optimizer:
    # biases and other vectors are not pulled towards zero: they don't overfit
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=MOMENTUM, foreach=False)
    return torch.optim.AdamW(groups, lr=0.0, foreach=False)


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.array(array))  # a copy: what comes from a file is read-only
