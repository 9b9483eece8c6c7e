"""`sample`: keep some rows, chosen by the seed."""

from __future__ import annotations

import polars as pl

from onejob.data.steps import chance
from onejob.data.steps.dropped import Result, part

_CHANCE = "onejob_chance"


def sample(frame: pl.LazyFrame, *, rows: int | None, share: float | None, seed: int) -> Result:
    """About a share of the rows, or exactly so many; the order stays. The others are counted, not kept."""
    drawn = frame.with_columns(chance.of_rows(seed).alias(_CHANCE))
    if share is not None:
        stays = pl.col(_CHANCE) < share
    else:
        # ranks are all different, so exactly `rows` stay (or all, where there are fewer)
        stays = pl.col(_CHANCE).rank("ordinal") <= rows
    kept, dropped = part(drawn, stays, "not in the sample", keep=False)
    return kept.drop(_CHANCE), dropped
