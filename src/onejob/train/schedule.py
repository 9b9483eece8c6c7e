"""The learning rate of each step: a pure function of the step, so a resumed training needs to remember nothing."""

from __future__ import annotations

import math


def rate(step: int, total: int, *, lr: float, schedule: str, warmup: int) -> float:
    """The learning rate of step 0 ... total - 1: a linear warm-up, then constant or half a cosine."""
    if step < warmup:
        return lr * (step + 1) / (warmup + 1)
    if schedule == "constant":
        return lr
    return lr * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
