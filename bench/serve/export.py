"""Writes mlp.onnx and resnet18.onnx into a folder: random weights of a fixed seed, a dynamic batch, opset 17.

python -P bench/serve/export.py FOLDER
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

OPSET = 17
SEED = 7


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(width, out, 3, stride)
        self.second = convolution(out, out, 3, 1)
        self.shortcut = nn.Identity() if width == out and stride == 1 else convolution(width, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


def resnet18(classes: int = 1000) -> nn.Module:
    """ResNet-18 (He et al. 2015, table 1): 11.7 M parameters."""
    layers: list[nn.Module] = [convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for out in (64, 128, 256, 512):
        layers += [Block(width, out, 1 if width == out else 2), Block(out, out, 1)]
        width = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def convolution(width: int, out: int, size: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(width, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out))


def main(folder: Path) -> None:
    torch.manual_seed(SEED)
    for name, module, shape in (("mlp", mlp(), (64,)), ("resnet18", resnet18(), (3, 64, 64))):
        example, aside = torch.zeros(1, *shape), folder / f"{name}.aside"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the plain exporter is called old: its graphs are the plainest
            torch.onnx.export(
                module.eval(),
                (example,),
                str(aside),
                input_names=["x"],
                output_names=["y"],
                dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
                opset_version=OPSET,
                dynamo=False,
            )
        aside.replace(folder / f"{name}.onnx")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
