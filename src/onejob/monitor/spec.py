"""[monitor]: the table of the job file: what is recorded of an endpoint's requests, what is watched in it, when a model
is trained anew, and which new model may take the place of the old one.

All durations but those of collecting and of files are in event time. The unit of evidence is a block (a day).
"""

from __future__ import annotations

from typing import Annotated, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, field_validator, model_validator

from onejob.core.spec import Duration, Model, Size, StageSpec, uncounted

DAY = 86_400.0
BLOCK_SECONDS = {"hour": 3600.0, "day": DAY, "week": 7 * DAY}
"""How long a block is, about: a day of a zone may have 23 hours or 25."""


class Capture(Model):
    """What an endpoint records of the requests that it answers: inputs, outputs, event time, key, engine."""

    rate: float = uncounted(
        1.0,
        ge=0,
        le=1,
        description="Share of the rows that is recorded; the hash of a row's key (else of the request's id) decides.",
    )
    private: dict[str, Literal["hash", "drop"]] = Field(
        {},
        description="Columns that must not be recorded as they are: 'hash' keeps a stand-in by which equal values can "
        "still be joined, 'drop' nothing.",
        json_schema_extra={"onejob_uncounted": True},
    )
    segment: Size = uncounted(64 << 20, description="Size at which a file of records is sealed.")
    age: Duration = uncounted(60.0, description="Age at which a file of records is sealed, however small it is.")
    reserve: Size = uncounted(
        256 << 20, description="Space on the disk that is left free: below it rows are dropped and counted."
    )


class Block(Model):
    """The unit of evidence: rows that came together are one observation, because they share their weather."""

    by: Literal["hour", "day", "week"] = Field("day", description="How long a block of event time is.")
    zone: str = Field("UTC", description="The time zone whose days and weeks they are, such as 'America/New_York'.")
    rows_min: int = Field(
        30, ge=1, description="A block with fewer labelled rows counts for nothing: it is mostly noise."
    )

    @field_validator("zone")
    @classmethod
    def _known_zone(cls, zone: str) -> str:
        try:
            ZoneInfo(zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError("no time zone is called so; names are such as 'UTC' and 'America/New_York'") from None
        return zone


class Harm(Model):
    """Does the model lose to the forecast that a row's label is the usual one of late?"""

    alpha: float = Field(
        0.01, gt=0, lt=1, description="Chance of a false alarm in all time, of the form that is a probability."
    )
    run_length: float = Field(
        100, gt=1, description="Blocks from one false alarm to the next, on average at least, of the restarted form."
    )
    reference_blocks: int = Field(
        28, ge=1, description="How many blocks back the share of labels is taken that is the reference's forecast."
    )


class Slo(Model):
    """What is promised of the service; watched by burn rates over two windows each."""

    p99_ms: float | None = Field(None, gt=0, description="99 % of the requests are answered in so many milliseconds.")
    error_rate: float | None = Field(None, gt=0, lt=1, description="No more than this share of the requests fails.")


class Retrain(Model):
    """When a model is trained anew, on all that has been seen; without this table never."""

    on: list[Literal["labels", "harm", "warning", "schedule", "hand"]] = Field(
        ["labels", "harm", "schedule"],
        min_length=1,
        description="The signals on which it is; harm alone comes late. By hand (`onejob signal`) always works.",
    )
    labels_min: int = Field(
        5000, ge=1, description="Fresh labels that are a signal 'labels'; with fewer no signal but a hand starts a run."
    )
    every: Duration = Field(30 * DAY, description="Event time between two signals 'schedule'.")
    cooldown: Duration = Field(7 * DAY, description="Event time after a retraining in which no other starts.")
    budget: int = Field(4, ge=1, description="Most retrainings that start within a day of event time.")
    history: Annotated[Literal["all"] | Duration, Field(union_mode="left_to_right")] = Field(
        "all", description="How far back the rows go that are trained on: 'all', or a duration before the cut."
    )
    hold_out: Duration = Field(
        7 * DAY,
        description="So much of the latest traffic is not trained on: the gate compares on it, and on what follows.",
    )


class Gate(Model):
    """Which challenger may take the champion's place; without this table none does by itself."""

    promote: Literal["better", "not_worse"] = Field(
        description="Whether it must be proven better than the champion, or only proven not to be worse."
    )
    margin: float = Field(
        ge=0, description="Of the loss: by so much better at least, or by so much worse at most; in nats, or in shares."
    )
    metric: Literal["log_loss", "absolute_error"] | None = Field(
        None, description="The loss that is compared; unset: log loss for classes, absolute error for numbers."
    )
    blocks_min: int = Field(
        7, ge=2, description="Blocks of labelled traffic that neither model was trained on, at least."
    )
    slices: list[str] | None = Field(
        None,
        description="Columns of which no value may be surely worse; unset: the categories with few values.",
    )
    approve: Literal["auto", "hand"] = Field(
        "auto", description="Whether what the gate lets through is promoted by itself, or waits for `onejob promote`."
    )
    probation: Duration = Field(
        14 * DAY,
        description="How long a new champion is compared with the former one, and rolled back if it does harm.",
    )
    replay: int = uncounted(200, ge=0, description="Captured requests that both models answer, for errors and latency.")


class Spec(StageSpec):
    """The options of [monitor]."""

    interval: Duration = uncounted(5.0, description="Time between two collections of the endpoint's counters.")
    keep: Duration = uncounted(7 * DAY, description="How long the collected series is kept.")
    capture: Capture = uncounted(Capture(), description="What is recorded of the requests that the endpoint answers.")
    block: Block = Field(Block(), description="The unit of evidence.")
    horizon: Duration = Field(
        30 * DAY, description="How long a label may take: a row without one by then counts as one that never gets any."
    )
    harm: Harm = Field(Harm(), description="When the model is said to do harm.")
    slo: Slo = Field(Slo(), description="What is promised of the service.")
    retrain: Retrain | None = Field(None, description="When a model is trained anew; unset: never by itself.")
    gate: Gate | None = Field(None, description="Which new model is promoted; unset: none by itself.")

    @model_validator(mode="after")
    def _one_process(self) -> Spec:
        if self.resources.processes != 1:
            raise ValueError("resources: the monitor's steps work in one process; leave 'processes' at 1")
        return self
