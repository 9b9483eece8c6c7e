"""States, as tables that a reader can check: which states there are, and which changes are legal.

A change that the table doesn't name is a bug of ours, and the ledger refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar


class RunState(StrEnum):
    """One execution of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class StepState(StrEnum):
    """One planned step of one run."""

    WAITING = "waiting"  # an input isn't there yet
    READY = "ready"  # its key is known
    RUNNING = "running"  # attached to an execution, its own or another run's
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"  # an earlier step failed


class ExecutionState(StrEnum):
    """One try at producing what a step key names."""

    CLAIMED = "claimed"  # ours to start
    RUNNING = "running"  # its shim was started
    DONE = "done"
    FAILED = "failed"  # it said what was wrong
    LOST = "lost"  # its processes died without a word: may be tried again
    CANCELLED = "cancelled"


class EndpointState(StrEnum):
    """A served name."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"


class PromotionState(StrEnum):
    """An engine that took another's place at an endpoint."""

    PROBATION = "probation"  # compared with the former one, which may come back by itself
    KEPT = "kept"
    ROLLED_BACK = "rolled_back"


RUN: Mapping[RunState, frozenset[RunState]] = {
    RunState.QUEUED: frozenset({RunState.RUNNING, RunState.FAILED, RunState.CANCELLED}),
    RunState.RUNNING: frozenset({RunState.DONE, RunState.FAILED, RunState.CANCELLED}),
    RunState.DONE: frozenset(),
    RunState.FAILED: frozenset(),
    RunState.CANCELLED: frozenset(),
}

STEP: Mapping[StepState, frozenset[StepState]] = {
    StepState.WAITING: frozenset({StepState.READY, StepState.FAILED, StepState.SKIPPED, StepState.CANCELLED}),
    StepState.READY: frozenset(
        {StepState.RUNNING, StepState.DONE, StepState.FAILED, StepState.SKIPPED, StepState.CANCELLED}
    ),
    # back to waiting: its execution was lost and it may be tried again, under the key that it has by then
    StepState.RUNNING: frozenset({StepState.WAITING, StepState.DONE, StepState.FAILED, StepState.CANCELLED}),
    StepState.DONE: frozenset(),
    StepState.FAILED: frozenset(),
    StepState.CANCELLED: frozenset(),
    StepState.SKIPPED: frozenset(),
}

EXECUTION: Mapping[ExecutionState, frozenset[ExecutionState]] = {
    ExecutionState.CLAIMED: frozenset(
        {
            ExecutionState.RUNNING,
            ExecutionState.DONE,
            ExecutionState.FAILED,
            ExecutionState.LOST,
            ExecutionState.CANCELLED,
        }
    ),
    ExecutionState.RUNNING: frozenset(
        {ExecutionState.DONE, ExecutionState.FAILED, ExecutionState.LOST, ExecutionState.CANCELLED}
    ),
    ExecutionState.DONE: frozenset(),
    ExecutionState.FAILED: frozenset(),
    ExecutionState.LOST: frozenset(),
    ExecutionState.CANCELLED: frozenset(),
}

ENDPOINT: Mapping[EndpointState, frozenset[EndpointState]] = {
    EndpointState.STARTING: frozenset(
        {EndpointState.READY, EndpointState.FAILED, EndpointState.STOPPING, EndpointState.STOPPED}
    ),
    EndpointState.READY: frozenset(
        {EndpointState.STARTING, EndpointState.FAILED, EndpointState.STOPPING, EndpointState.STOPPED}
    ),
    EndpointState.FAILED: frozenset({EndpointState.STARTING, EndpointState.STOPPING, EndpointState.STOPPED}),
    EndpointState.STOPPING: frozenset({EndpointState.STOPPED, EndpointState.STARTING}),
    EndpointState.STOPPED: frozenset({EndpointState.STARTING}),
}

PROMOTION: Mapping[PromotionState, frozenset[PromotionState]] = {
    PromotionState.PROBATION: frozenset({PromotionState.KEPT, PromotionState.ROLLED_BACK}),
    PromotionState.KEPT: frozenset({PromotionState.ROLLED_BACK}),  # by hand, however late
    PromotionState.ROLLED_BACK: frozenset(),
}

S = TypeVar("S", RunState, StepState, ExecutionState, EndpointState, PromotionState)


def allowed(table: Mapping[S, frozenset[S]], old: S, new: S) -> bool:
    """Whether a state may change from old to new; staying is always allowed (doing it twice is doing it once)."""
    return old == new or new in table[old]


def final(table: Mapping[S, frozenset[S]], state: S) -> bool:
    """Whether nothing follows this state."""
    return not table[state]
