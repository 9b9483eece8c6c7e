"""Harm: does the model lose to a reference forecast, or to another model? Two answers, valid however often one looks.

One observation is a block's mean difference d of paired, bounded losses (the model's minus the reference's); a gain
(d below 0) counts up to `bound`, so d lies in [-bound, 4.595] for log losses. The hypothesis that a healthy model
fulfils, H0: *given all earlier blocks, the next d is at most 0 on average*. Against it a gambler bets the share b of
its wealth, which each block multiplies by 1 + b·d/bound: never negative, and under H0 at most 1 on average, so that the
wealth can't be made to grow, whatever is looked at and whenever. Several shares are played side by side and averaged,
since the size of the harm isn't known beforehand.

- *e-process* (a probability): the wealth from the first block on. In a stream that never harms, the chance that it
  ever reaches 1/alpha, in all time, is at most alpha (Ville's inequality).
- *restarted form* (a run length): Shiryaev-Roberts, a new gambler joins at every block. In a stream that never harms,
  there are on average at least `run_length` blocks until a false alarm; so false alarms do come, as often as that. In
  return, harm that begins after a good year is found as fast as harm on the first day.

What H0 doesn't cover: days that resemble the day before. docs/monitor-decides.md has the sources, and what the bench
measured. The state is the list of counted blocks and nothing else; the figures are worked out from it. So a block that
is counted twice counts once, one that comes late takes its place in time, and a correction replaces what it corrects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from onejob.core.artifact import Json
from onejob.monitor.blocks import Array, Block

BETS = (0.03, 0.1, 0.3, 0.6, 0.95)
"""Shares of the wealth that are bet, side by side; small ones find small harm, large ones find great harm soon."""
BOUND = 0.3
"""Nats: a block's gain over the reference counts up to this. The smaller, the sooner harm is found; but a model that
earns its keep by a few great gains would look harmful if they were cut off (on the flights, hardly a day's is)."""


@dataclass(frozen=True, slots=True)
class Harm:
    """What has been counted so far, and by which rules: a value that serialises to JSON."""

    alpha: float = 0.01
    """The e-process: the chance of a false alarm, ever."""
    run_length: float = 365.0
    """The restarted form: blocks from one false alarm to the next, on average at least."""
    bound: float = BOUND
    blocks: tuple[Block, ...] = ()
    """Oldest first, one for each id."""

    def to_json(self) -> dict[str, Json]:
        return {
            "alpha": self.alpha,
            "run_length": self.run_length,
            "bound": self.bound,
            "blocks": [block.to_json() for block in self.blocks],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Harm:
        blocks = tuple(Block.from_json(block) for block in data["blocks"])
        return cls(float(data["alpha"]), float(data["run_length"]), float(data["bound"]), blocks)


@dataclass(frozen=True, slots=True)
class Reading:
    """What the blocks say, as evidence for a signal."""

    blocks: int
    clipped: int
    """Blocks whose gain was beyond the bound, and counted as the bound."""
    mean: float
    """The mean difference of losses over all blocks; above 0 the model loses."""
    e_value: float
    """The e-process now."""
    e_peak: float
    """The highest that it has been: 1/e_peak bounds the chance of such a stream without harm."""
    e_threshold: float
    e_alarm: str | None
    """The block at which the e-process first reached its threshold."""
    run_value: float
    """The restarted form now; it begins anew after each alarm."""
    run_threshold: float
    run_alarms: tuple[str, ...]
    """The blocks at which the restarted form reached its threshold."""

    def to_json(self) -> dict[str, Json]:
        return {**dataclasses.asdict(self), "run_alarms": list(self.run_alarms), "says": self.says()}

    def says(self) -> dict[str, str]:
        """Each number with what it promises, in words."""
        return {
            "e_process": f"false-alarm probability: at most {1 / self.e_threshold:g} in all time, looked at whenever",
            "restarted": f"run length: on average at least {self.run_threshold:g} blocks to a false alarm",
        }


def update(state: Harm, block: Block) -> Harm:
    """Count a block whose labels have been waited for; the same id again replaces it, in whatever order they come."""
    kept = [other for other in state.blocks if other.id != block.id]
    return dataclasses.replace(state, blocks=tuple(sorted([*kept, block], key=lambda each: each.id)))


def update_all(state: Harm, blocks: Iterable[Block]) -> Harm:
    """Count many blocks: the same as one after the other."""
    merged = {block.id: block for block in (*state.blocks, *blocks)}
    return dataclasses.replace(state, blocks=tuple(merged[name] for name in sorted(merged)))


def read(state: Harm) -> Reading:
    """Work out both forms from the list of blocks."""
    values = np.array([block.value for block in state.blocks])
    bets = fractions(values, state.bound)
    wealth = e_process(bets)
    runs, alarms = restarted(bets, state.run_length)
    over = np.flatnonzero(wealth >= 1 / state.alpha)
    return Reading(
        blocks=len(values),
        clipped=int(np.sum(values < -state.bound)),
        mean=float(values.mean()) if len(values) else 0.0,
        e_value=float(wealth[-1]) if len(values) else 1.0,
        e_peak=float(max(1.0, wealth.max())) if len(values) else 1.0,
        e_threshold=1 / state.alpha,
        e_alarm=state.blocks[int(over[0])].id if over.size else None,
        run_value=float(runs[-1]) if len(values) else 0.0,
        run_threshold=state.run_length,
        run_alarms=tuple(state.blocks[at].id for at in alarms),
    )


def fractions(values: Array, bound: float) -> Array:
    """[blocks] -> what each bet makes of its stake in each block, [blocks, bets]; each positive."""
    counted = np.maximum(values, -bound) / bound
    return np.asarray(1 + counted[..., None] * np.array(BETS))


def e_process(factors: Array) -> Array:
    """The mixture's wealth after each block; in logarithms until the end, since a year of harm would overflow."""
    logs = np.cumsum(np.log(factors), axis=-2)
    top = logs.max(axis=-1)
    mixed = top + np.log(np.mean(np.exp(logs - top[..., None]), axis=-1))
    return np.asarray(np.exp(np.minimum(mixed, 700.0)))


def restarted(factors: Array, run_length: float) -> tuple[Array, list[int]]:
    """The Shiryaev-Roberts form after each block, and the blocks at which it alarmed (and began anew)."""
    sums = np.zeros(factors.shape[-1])
    path = np.zeros(len(factors))
    alarms: list[int] = []
    for position, factor in enumerate(factors):
        sums = (sums + 1) * factor
        path[position] = sums.mean()
        if path[position] >= run_length:
            alarms.append(position)
            sums = np.zeros_like(sums)
    return path, alarms
