"""Slots: whether a wish for CPUs and GPUs fits beside what is held already; pure arithmetic.

CPU slots say how many processes we start, they bind nothing: a wish for more than there is may run alone, or a small
machine could never do it. GPUs are devices: a whole one belongs to one task, fractions below 1 share one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onejob.core.artifact import Json
from onejob.errors import UsageError

EPSILON = 1e-9
"""Fractions are sums of binary numbers: ten times 0.1 is one."""
NAMED_HOLDERS = 3


@dataclass(frozen=True, slots=True)
class Held:
    """What a live execution holds: whole devices first in `gpu_ids`, the shared one last."""

    execution: str
    label: str
    """For a person: `train of flights`."""
    cpus: float = 0.0
    gpus: float = 0.0
    gpu_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Granted:
    """It fits; on these devices."""

    gpu_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Full:
    """It has to wait; what for, in one line."""

    reason: str


def choose(needs: Mapping[str, Json], capacity: Mapping[str, Json], held: Sequence[Held]) -> Granted | Full:
    """Fit `{"cpus", "gpus"}` into `{"cpus", "gpus": [ids]}` beside what is held; UsageError if it never can."""
    cpus, gpus = float(needs.get("cpus", 0.0)), float(needs.get("gpus", 0.0))
    devices = tuple(capacity.get("gpus", ()))
    if math.ceil(gpus - EPSILON) > len(devices):
        raise UsageError(f"asks for {_count(gpus, 'GPU')}, and there are {len(devices)}", cure="Ask for fewer `gpus`.")
    if full := _cpus_missing(cpus, float(capacity.get("cpus", 0.0)), held):
        return full
    return _choose_devices(gpus, devices, held)


def shares(held: Held) -> dict[int, float]:
    """How much of each device an execution holds."""
    whole = math.floor(held.gpus + EPSILON)
    rest = held.gpus - whole
    taken = dict.fromkeys(held.gpu_ids[:whole], 1.0)
    if rest > EPSILON and len(held.gpu_ids) > whole:
        taken[held.gpu_ids[whole]] = rest
    return taken


def _cpus_missing(cpus: float, total: float, held: Sequence[Held]) -> Full | None:
    holders = [h for h in held if h.cpus > 0]
    used = sum(h.cpus for h in holders)
    alone = cpus > total and not holders
    if cpus <= 0 or alone or used + cpus <= total + EPSILON:
        return None
    free = max(0.0, total - used)
    return Full(f"waiting for {_count(cpus, 'CPU')}: {_number(free)} of {_number(total)} free{_holders(holders)}")


def _choose_devices(gpus: float, devices: Sequence[int], held: Sequence[Held]) -> Granted | Full:
    if gpus <= EPSILON:
        return Granted()
    free = dict.fromkeys(devices, 1.0)
    for one in held:
        for device, share in shares(one).items():
            if device in free:
                free[device] -= share
    whole = math.floor(gpus + EPSILON)
    rest = gpus - whole
    unused = sorted(device for device, left in free.items() if left > 1.0 - EPSILON)
    chosen = unused[:whole]
    if len(chosen) == whole and rest > EPSILON:
        # The fullest device that still takes it, so that whole ones stay whole.
        fits = [(left, device) for device, left in free.items() if device not in chosen and left >= rest - EPSILON]
        chosen += [device for _, device in sorted(fits)[:1]]
    if len(chosen) == math.ceil(gpus - EPSILON):
        return Granted(tuple(chosen))
    holders = [h for h in held if h.gpu_ids]
    have = f"{len(unused)} of {len(devices)} free" if whole else f"no device has {_number(rest)} left"
    return Full(f"waiting for {_count(gpus, 'GPU')}: {have}{_holders(holders)}")


def _count(number: float, noun: str) -> str:
    return f"{_number(number)} {noun}" if number <= 1 else f"{_number(number)} {noun}s"


def _number(number: float) -> str:
    return f"{round(number, 3):g}"


def _holders(holders: Sequence[Held]) -> str:
    if not holders:
        return ""
    named = ", ".join(f"execution {h.execution} ({h.label})" for h in holders[:NAMED_HOLDERS])
    more = f" and {len(holders) - NAMED_HOLDERS} more" if len(holders) > NAMED_HOLDERS else ""
    return f", held by {named}{more}"
