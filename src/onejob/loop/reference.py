"""`python -m onejob.loop.reference`: writes docs/job.md from the models that check the job file."""

from __future__ import annotations

from pathlib import Path

from onejob.core.reference import reference
from onejob.loop.planning import RUN, STAGES

PAGE = Path(__file__).parents[3] / "docs" / "job.md"
"""In a checkout; an installed package has no docs folder."""


def page() -> str:
    """The page, as it must be."""
    return reference(STAGES, RUN)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
