"""The typed [train.model] table of the tabular family."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from onejob.core.spec import Model

Width = Annotated[int, Field(ge=1)]


class Options(Model):
    """What a tabular model learns and how large it is."""

    task: Literal["binary", "multiclass", "regression"] | None = Field(
        None,
        description="What the label is; unset: yes/no or 0/1 is binary, text and whole numbers are multiclass, "
        "other numbers are regression.",
    )
    hidden: list[Width] = Field([128, 64], description="Widths of the hidden layers; empty makes a linear model.")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="Share of hidden units left out in each training step.")
    embedding: int = Field(
        32, ge=1, description="Largest width of a category's embedding; columns with few values get less."
    )
    min_count: int = Field(
        5, ge=1, description="A category's value that is seen less often in training counts as unknown."
    )
