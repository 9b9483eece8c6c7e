"""A generation: one version of what an endpoint serves, with the places of its replicas."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onejob.core.artifact import Json
from onejob.errors import InferenceError, OnejobError, StoreError
from onejob.serve.child import Child
from onejob.serve.folder import PORT, read_json, replace_json
from onejob.serve.listener import bind, port_of
from onejob.serve.rollout import Readings, Standing, Tally, Trial


@dataclass(eq=False)
class Place:
    """Where one replica of a generation runs, again and again if need be."""

    child: Child | None = None
    deaths: int = 0
    start_at: float = 0.0
    why: str = ""
    """What the last one here that couldn't start said."""


@dataclass(eq=False)
class Tried:
    """A new engine beside the one that serves, in the same replicas."""

    former: Mapping[str, Json]
    """What goes on serving; `desired.json` as it was."""
    trial: Trial
    since: float = math.inf
    """When its first request can have come; by the monotonic clock."""
    deaths: int = 0
    past: tuple[Tally, Tally] = (Tally(), Tally())
    """Of replicas that have ended: with the former engine, with the new."""


@dataclass(eq=False)
class Generation:
    """One version of what is served: its socket and its replicas."""

    desired: Mapping[str, Json]
    listener: socket.socket
    places: list[Place]
    tried: Tried | None = None

    @classmethod
    def of(
        cls,
        desired: Mapping[str, Json],
        listener: socket.socket,
        former: Mapping[str, Json] | None,
        trial: Trial | None,
    ) -> Generation:
        """A generation that takes over at once; or, beside a former one, that is tried first."""
        tried = Tried(former, trial) if former is not None and trial is not None else None
        made = cls(desired, listener, [], tried)
        made.places = [Place() for _ in range(_replicas(made.serving))]
        return made

    @property
    def serving(self) -> Mapping[str, Json]:
        """What answers, but for the share of what is tried."""
        return self.tried.former if self.tried else self.desired

    @property
    def last_words(self) -> str:
        """Why a replica could not start; empty if none has said so."""
        return next((place.why for place in self.places if place.why), "")

    @property
    def children(self) -> list[Child]:
        """Its replicas, whatever they are doing."""
        return [place.child for place in self.places if place.child is not None]

    @property
    def number(self) -> int:
        return int(self.desired["generation"])

    @property
    def told(self) -> dict[str, Json]:
        """What its replicas are told."""
        if self.tried is None:
            return {"desired": dict(self.desired)}
        former, trial = dict(self.tried.former), self.tried.trial
        return {
            "desired": dict(self.desired),
            "trial": {"former": former, "share": trial.share, "shadow": trial.shadow},
        }

    def readings(self, now: float) -> Readings:
        """How the trial stands."""
        assert self.tried is not None
        former, new = self.tried.past
        faulty = ""
        for place in self.places:
            if place.child is not None:
                theirs = _tallies(place.child)
                former, new = former + theirs[0], new + theirs[1]
                faulty = faulty or place.child.faulty
        return Readings(former, new, now - self.tried.since, self.tried.deaths, faulty)

    def lost(self, child: Child) -> None:
        """A replica has ended while an engine is tried: what it counted stays."""
        if self.tried is not None and not math.isinf(self.tried.since):
            former, new = _tallies(child)
            self.tried.past = (self.tried.past[0] + former, self.tried.past[1] + new)
            self.tried.deaths += 1

    def settle(self, *, keep_new: bool) -> list[Child]:
        """End the trial: its replicas are told, and as many stay as what goes on wants; gives those to be drained."""
        assert self.tried is not None
        if not keep_new:
            self.desired = self.tried.former
        self.tried = None
        running = [place.child for place in self.places if place.child is not None]
        for child in running:
            child.settle("new" if keep_new else "former", self.grace)
        wanted = _replicas(self.desired)
        surplus = self.places[wanted:]
        self.places = self.places[:wanted] + [Place() for _ in range(wanted - len(self.places))]
        return [place.child for place in surplus if place.child is not None]

    @property
    def options(self) -> Mapping[str, Json]:
        options: Mapping[str, Json] = self.serving.get("options", {})
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

    def trial_state(self, now: float) -> Json:
        """The trial as `state.json` tells it; None when nothing is tried."""
        if self.tried is None or math.isinf(self.tried.since):
            return None
        trial, stands = self.tried.trial, self.readings(now)
        return {
            "generation": self.number,
            "digest": self.desired["engine"]["digest"],
            "share": trial.share,
            "shadow": trial.shadow,
            "new": stands.new.to_json(),
            "former": stands.former.to_json(),
        }

    def gone_back(self, why: str) -> OnejobError:
        """Why the former engine took over again."""
        return InferenceError(
            f"generation {self.number} was tried and went back: {why}",
            place="[serve] rollout",
            cure="The endpoint goes on with the engine it had. Run the job again to try once more.",
        )

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


def can_try(former: Mapping[str, Json], desired: Mapping[str, Json]) -> bool:
    """Whether a version may be tried beside the one that serves: another engine, at the same address."""
    one, other = former["engine"], desired["engine"]
    here = all(former.get(name) == desired.get(name) for name in ("name", "host", "port"))
    return bool(here and one["digest"] != other["digest"] and Path(one["dir"]).is_dir())


def listener_for(folder: Path, desired: Mapping[str, Json], current: Generation | None) -> socket.socket:
    """The present socket if the address stays, else a new one; port 0 keeps the endpoint's port over restarts."""
    host, port = desired.get("host") or "127.0.0.1", int(desired.get("port") or 0)
    if current is not None and current.address[0] == host and port in (0, port_of(current.listener)):
        return current.listener
    known = read_json(folder / PORT) or {}
    listener = bind(host, port, preferred=int(known.get("port") or 0))
    if took := port_of(listener):
        replace_json(folder / PORT, {"port": took})
    return listener


def _replicas(desired: Mapping[str, Json]) -> int:
    return max(1, int(desired.get("options", {}).get("replicas", 1)))


def _tallies(child: Child) -> tuple[Tally, Tally]:
    told = child.tallies
    return (Tally.of(told["former"]), Tally.of(told["new"])) if told else (Tally(), Tally())
