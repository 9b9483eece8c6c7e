"""[serve]: the table of the job file, and what it plans: an endpoint on the engine (or, without [optimize], the
checkpoint)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from onejob.core.address import check_host, socket_path
from onejob.core.artifact import Json
from onejob.core.plan import Existing, Output, Plan, Serving, Upstream
from onejob.core.spec import Duration, Model, Resources, Size, StageSpec, uncounted
from onejob.errors import JobFileError

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class Batch(Model):
    """How requests that arrive together are run together."""

    max: int = uncounted(64, ge=1, le=65536, description="Most rows that the engine runs at once.")
    wait_ms: float = uncounted(
        2.0,
        ge=0,
        le=1000,
        description="Longest time a request waits for others to join it. How long it does wait, up to this, is learnt: "
        "never longer than the company would save, and not at all if it comes alone.",
    )
    latency_ms: float | None = uncounted(
        None, gt=0, description="Latency that is wanted: batches are made no larger than keeps it; unset: up to 'max'."
    )


class Rollout(Model):
    """How a new engine takes the place of one that serves already."""

    canary: float = uncounted(
        0.0,
        ge=0,
        le=1,
        description="Share of the requests that a new engine answers at first; 0 switches as soon as it has started.",
    )
    hold: Duration = uncounted(
        600.0, description="How long the new engine answers its share, or copies, before it answers everything."
    )
    requests: int = uncounted(
        100,
        ge=0,
        description="Least number of requests that it must have answered by then; until it has, it goes on with its "
        "share. Latency is judged from so many on.",
    )
    shadow: bool = uncounted(
        False, description="Whether the new engine only answers copies of its share: recorded apart, and never sent."
    )
    max_errors: float = uncounted(
        0.01,
        ge=0,
        le=1,
        description="How much larger the share of its requests that fail may be than the old engine's; beyond that the "
        "old one takes over again.",
    )
    max_slower: float = uncounted(
        1.5,
        ge=1,
        description="How many times the old engine's 90th percentile of latency the new one's may be; beyond that the "
        "old one takes over again. A difference under a millisecond and batch.wait_ms doesn't count.",
    )


class ServeResources(Resources):
    """What a replica needs; by default it holds no slot, so that serving never keeps a training step waiting."""

    cpus: float = uncounted(0.0, ge=0, description="CPU cores that each replica holds of the executor's slots.")
    memory: Size | None = uncounted(
        None,
        description="Memory for each replica, such as '2GiB'; when one uses more, all are replaced, without a failed "
        "request. Unset means no limit.",
    )


class Spec(StageSpec):
    """The options of [serve]."""

    name: str | None = uncounted(
        None, pattern=NAME, description="The endpoint's name, which is also the model's; unset means the job's name."
    )
    host: str = uncounted(
        "127.0.0.1",
        description="Address to listen on; '0.0.0.0' opens it to the network, 'unix:/run/model.sock' is a Unix socket.",
    )
    port: int = uncounted(
        0, ge=0, le=65535, description="Port to listen on; 0 takes a free one and keeps it while the endpoint lives."
    )
    engine: Literal["own", "triton"] = uncounted(
        "own",
        description="What runs the model: the engine that the artifact names, in the replica; or a Triton server below "
        "each replica, with that engine as its backend (docs/engine-triton.md).",
    )
    replicas: int = uncounted(1, ge=1, le=256, description="How many processes answer requests.")
    batch: Batch = uncounted(Batch(), description="How requests that arrive together are run together.")
    threads: int | None = uncounted(
        None,
        ge=1,
        le=1024,
        description="Threads of the engine in each replica; unset: the cores that it may use, over the replicas.",
    )
    queue: int = uncounted(
        1024, ge=1, description="Most rows that may wait in a replica; beyond that a request is answered with 503."
    )
    timeout: Duration = uncounted(30.0, description="Longest time a request may take; then it is answered with 504.")
    grace: Duration = uncounted(
        10.0, description="How long a replica that is being replaced or stopped may finish what it has begun."
    )
    rollout: Rollout = uncounted(Rollout(), description="How a new engine takes the place of one that serves already.")
    resources: ServeResources = Field(ServeResources(), description="What each replica needs to run.")

    @field_validator("host")
    @classmethod
    def _somewhere(cls, host: str) -> str:
        return check_host(host)

    @field_validator("port")
    @classmethod
    def _of_an_address(cls, port: int, info: ValidationInfo) -> int:
        if port and socket_path(info.data.get("host", "")) is not None:
            raise ValueError("a Unix socket has no port")
        return port

    def options(self) -> dict[str, Json]:
        """What the host and its replicas are told, as JSON."""
        told = {"host", "port", "replicas", "batch", "threads", "queue", "timeout", "grace"}
        run = {} if self.engine == "own" else {"engine": self.engine}
        rollout = {"rollout": self.rollout.model_dump(mode="json")} if self.rollout.canary else {}
        bound = {"memory": self.resources.memory} if self.resources.memory is not None else {}
        return {**self.model_dump(mode="json", include=told), **run, **bound, **rollout}


def plan(spec: Spec, upstream: Upstream) -> Plan:
    """No step of its own: an endpoint that serves what the stages before this one leave."""
    artifact = upstream.outputs.get("engine") or upstream.outputs.get("checkpoint")
    if not isinstance(artifact, Output | Existing):
        raise JobFileError(["[serve] has no model to serve. Add [train], or name an engine or checkpoint that exists."])
    return Plan(steps=(), serving=Serving(spec.name or upstream.job, artifact, spec.options()))
