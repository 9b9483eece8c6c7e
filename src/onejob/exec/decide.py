"""What the shim decides, as pure functions: when a gang is at its end, why, and with which exit code.

Numbers follow the shell: 128+n for signal n, 124 for a time limit, 127 for a command that can't be started.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from onejob.core.artifact import Json

TIMEOUT_CODE = 124
NO_START_CODE = 127
KILLED_CODE = 128 + signal.SIGKILL
STOPPED_CODE = 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True)
class Order:
    """What a shim is to run: `shim.json`."""

    id: str
    argv: tuple[str, ...]
    processes: int = 1
    gpu_ids: tuple[int, ...] = ()
    memory: int | None = None
    timeout: float | None = None
    grace: float = 10.0
    arrive: float | None = None
    secrets: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Order:
        tuples = {name: tuple(data[name]) for name in ("argv", "gpu_ids", "secrets")}
        return cls(**{**data, **tuples})


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a task ended: `exit.json` without its time."""

    code: int
    cause: str = ""
    """`exit`, `signal`, `timeout`, `arrive`, `memory`, `start`, `stopped`; empty when all went well."""
    reason: str = ""
    rank: int | None = None


def failed(ended: Mapping[int, int], world: int) -> Verdict | None:
    """The verdict on ranks that ended at the same moment ({rank: wait status}), None if none of them failed.

    One that was killed comes first: its companions fail because of it, and not the other way round.
    """
    bad = {rank: exit_code(status) for rank, status in ended.items() if status != 0}
    if not bad:
        return None
    rank = min(bad, key=lambda rank: (bad[rank] not in (KILLED_CODE, 128 + signal.SIGSEGV), rank))
    code, who = bad[rank], f"rank {rank}" if world > 1 else "the process"
    if code > 128:
        return Verdict(code, "signal", f"{who} was killed by {_signal_name(code - 128)}", rank)
    return Verdict(code, "exit", f"{who} exited with code {code}", rank)


def exit_code(status: int) -> int:
    """A wait status as an exit code: 128+n for signal n."""
    number = status & 0x7F
    return 128 + number if number else status >> 8


def overdue(order: Order, elapsed: float, missing: Collection[int]) -> Verdict | None:
    """The verdict on a gang that runs too long, or of which a rank doesn't arrive."""
    if order.timeout is not None and elapsed >= order.timeout:
        return Verdict(TIMEOUT_CODE, "timeout", f"ran past its limit of {order.timeout:g} s")
    if order.arrive is not None and missing and elapsed >= order.arrive:
        reason = f"{ranks(missing)} never arrived (within {order.arrive:g} s)"
        return Verdict(TIMEOUT_CODE, "arrive", reason, min(missing))
    return None


def too_big(order: Order, used: int) -> Verdict | None:
    """The verdict on a task that holds more memory than it asked for."""
    if order.memory is None or used <= order.memory:
        return None
    reason = f"used {_size(used)} of memory, more than the {_size(order.memory)} it asked for"
    return Verdict(KILLED_CODE, "memory", reason)


def at_the_end(verdict: Verdict | None, codes: Mapping[int, int]) -> Verdict:
    """The last word, once every rank has ended ({rank: exit code}).

    A task that was asked to stop and had finished all the same is done; one that stopped keeps its own exit code.
    """
    if verdict is None:
        return Verdict(0)
    if verdict.cause != "stopped":
        return verdict
    bad = [codes[rank] for rank in sorted(codes) if codes[rank]]
    return Verdict(bad[0], "stopped", verdict.reason) if bad else Verdict(0)


def next_pause(now: float, deadlines: Collection[float | None], longest: float) -> float:
    """How long to wait for news before something falls due."""
    return max(0.0, min([longest, *(deadline - now for deadline in deadlines if deadline is not None)]))


def ranks(numbers: Collection[int]) -> str:
    """rank 1; ranks 1, 3"""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, sorted(numbers)))}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _size(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"
