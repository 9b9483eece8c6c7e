"""[monitor]: the table of the job file: what is recorded of an endpoint's requests, how often its counters are
collected, and for how long they are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from onejob.core.spec import Duration, Model, Size, StageSpec, uncounted


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


class Spec(StageSpec):
    """The options of [monitor]."""

    interval: Duration = uncounted(5.0, description="Time between two collections of the endpoint's counters.")
    keep: Duration = uncounted(7 * 86400.0, description="How long the collected series is kept.")
    capture: Capture = uncounted(Capture(), description="What is recorded of the requests that the endpoint answers.")
