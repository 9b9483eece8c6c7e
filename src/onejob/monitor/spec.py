"""[monitor]: the table of the job file: how often an endpoint's counters are collected, and for how long they are
kept."""

from __future__ import annotations

from onejob.core.spec import Duration, StageSpec, uncounted


class Spec(StageSpec):
    """The options of [monitor]."""

    interval: Duration = uncounted(5.0, description="Time between two collections of the endpoint's counters.")
    keep: Duration = uncounted(7 * 86400.0, description="How long the collected series is kept.")
