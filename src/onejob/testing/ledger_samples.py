"""Samples for tests of a ledger: a clock that the test sets, owners, runs, artifacts, claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from onejob.core.artifact import Artifact, FileEntry, digest_bytes
from onejob.core.plan import Existing, Output, Plan, Serving, Step
from onejob.core.ports import Ledger
from onejob.core.records import Claim, ClaimRequest, Execution, NewRun, Owner
from onejob.core.state import ExecutionState

OpenLedger = Callable[..., Ledger]
A = Owner("here", 100, 1.5)
B = Owner("here", 200, 2.5)
FAR = Owner("elsewhere", 100, 1.5)
TTL = 30.0


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def some_step(name: str, *after: str) -> Step:
    """A step that reads what earlier steps leave."""
    inputs = {step: Output(step, "out") for step in after}
    return Step(name, name, "onejob.nowhere:run", {"lr": 0.1, "text": "naïve\0"}, inputs, ("out",))


def new_run(job: str = "flights", *names: str) -> NewRun:
    """A run of a chain of steps (`data`, `train`)."""
    chain = names or ("data", "train")
    steps = tuple(some_step(name, *chain[max(0, i - 1) : i]) for i, name in enumerate(chain))
    refs = {f"{job}/engine@champion": Output(chain[-1], "out")}
    serving = Serving(job, Existing("ab" * 32), {"port": 0})
    plan = Plan(steps, serving, refs)
    return NewRun(job, "/home/a b'c/\udcff", {"name": job}, plan, {"kind": "person", "user": "ann"}, ("train",))


def some_artifact(text: str, kind: str = "dataset") -> Artifact:
    """An artifact of one file that holds the text."""
    return Artifact(kind, (FileEntry("a.txt", digest_bytes(text.encode()), len(text)),), {"format": 1})


def request(run: int, key: str = "k1", **more: Any) -> ClaimRequest:
    """A wish for one of two CPUs, unless told otherwise."""
    values: dict[str, Any] = {"key": key, "step": "train", "job": "flights", "run": run, "inputs": {}, "host": "here"}
    values |= {"needs": {"cpus": 1.0, "gpus": 0.0}, "capacity": {"cpus": 2.0, "gpus": []}, "executor": "local"}
    return ClaimRequest(**{**values, **more})


def won(claim: Claim) -> tuple[Execution, str]:
    """The execution and token of a claim that was won."""
    assert claim.answer == "won", claim
    assert claim.execution is not None
    assert claim.execution.lease is not None
    return claim.execution, claim.execution.lease.token


def leave(ledger: Ledger, run: int, key: str, outputs: Mapping[str, Artifact], **more: Any) -> Execution:
    """Claim a key, run it, and leave the outputs."""
    execution, token = won(ledger.claim(request(run, key, **more), A, TTL))
    ledger.start_execution(execution.id, token, {"pid": 1})
    ledger.finish_execution(execution.id, token, ExecutionState.DONE, outputs=outputs)
    return ledger.get_execution(execution.id)
