"""The two models that all servers serve: a small MLP, where the server is what costs, and a ResNet-18 on images of
64x64, where the engine is. Both take `x` and give `y`, in FP32, a batch of any size.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Model:
    """A model's name, and what it takes and gives."""

    name: str
    shape: tuple[int, ...]
    """Of one row of `x`."""
    classes: int
    batch: int
    """Most rows that a server may run at once."""

    def file(self, folder: Path) -> Path:
        return folder / f"{self.name}.onnx"


MLP = Model("mlp", (64,), 10, 64)
RESNET = Model("resnet18", (3, 64, 64), 1000, 16)
MODELS = {model.name: model for model in (MLP, RESNET)}


def make(folder: Path) -> None:
    """Write the files that are not there yet, in a process of its own: who measures needs no PyTorch."""
    folder.mkdir(parents=True, exist_ok=True)
    if not all(model.file(folder).exists() for model in MODELS.values()):
        script = Path(__file__).with_name("export.py")
        subprocess.run([sys.executable, "-P", str(script), str(folder)], check=True)
