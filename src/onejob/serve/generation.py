"""A generation: one version of what an endpoint serves, with the places of its replicas."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from onejob.core.artifact import Json
from onejob.errors import OnejobError, StoreError
from onejob.serve.child import Child
from onejob.serve.rollout import Standing


@dataclass(eq=False)
class Place:
    """Where one replica of a generation runs, again and again if need be."""

    child: Child | None = None
    deaths: int = 0
    start_at: float = 0.0


@dataclass(eq=False)
class Generation:
    """One version of what is served: its socket and its replicas."""

    desired: Mapping[str, Json]
    listener: socket.socket
    places: list[Place] = field(default_factory=list)

    @property
    def number(self) -> int:
        return int(self.desired["generation"])

    @property
    def options(self) -> Mapping[str, Json]:
        options: Mapping[str, Json] = self.desired.get("options", {})
        return options

    @property
    def grace(self) -> float:
        return float(self.options.get("grace", 10.0))

    @property
    def address(self) -> tuple[str, int]:
        return self.desired.get("host") or "127.0.0.1", int(self.desired.get("port") or 0)

    @property
    def ready(self) -> int:
        return sum(1 for place in self.places if place.child and place.child.ready)

    def standings(self, now: float, limit: float) -> list[Standing]:
        """How its replicas stand, for `judge`; one that needs more than `limit` seconds to become ready is overdue."""
        return [
            Standing(
                ready=bool(place.child and place.child.ready),
                reported=bool(place.child and place.child.error),
                deaths=place.deaths,
                overdue=bool(place.child and not place.child.ready and now - place.child.started_mono > limit),
            )
            for place in self.places
        ]

    def why_not(self) -> OnejobError:
        """What kept it from serving."""
        for place in self.places:
            if place.child is not None and place.child.error is not None:
                return place.child.error
        return StoreError(
            f"the replicas of generation {self.number} die or hang at their start",
            place="replica",
            cure="The endpoint's log shows their last words.",
        )
