"""`python -m onejob.loop.reference`: writes docs/job.md from the models that check the job file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from onejob.core.reference import reference
from onejob.data.options import STEPS
from onejob.families.tabular.options import Options as Tabular
from onejob.loop.planning import RUN, STAGES

PAGE = Path(__file__).parents[3] / "docs" / "job.md"
"""In a checkout; an installed package has no docs folder."""

DETAILS: Mapping[str, Sequence[tuple[str, type[BaseModel]]]] = {
    "data": [(f"A step of [data]: {name}", model) for name, model in STEPS.items()],
    "train": [("[train.model] of the family tabular", Tabular)],
}
"""Tables whose keys hold more than their own model says."""


def page() -> str:
    """The page, as it must be."""
    return reference(STAGES, RUN, DETAILS)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
