"""The models of a replica, by name and version: what every protocol looks up, and what comes and goes while it runs.

An endpoint of a job has one model; while an engine is tried it has two versions, and a request that names none goes
where the router says. An endpoint of a model repository has many, each with versions of its own: the newest answers a
request that names none. It belongs to the loop's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from onejob.core.artifact import Json
from onejob.core.counters import Counters, Snapshots, read_snapshots
from onejob.errors import NotFoundError
from onejob.serve.router import Router
from onejob.serve.service import Service


@dataclass(frozen=True, slots=True)
class Found:
    """Who answers: the engine itself, if the request names its version; else whom the router chooses."""

    router: Router
    service: Service
    pinned: bool


class Registry:
    """Models by name; their versions, the newest last."""

    def __init__(self, digest: str, process: str, generation: int) -> None:
        self._digest = digest
        self.process = process
        self.generation = generation
        self.changes = 0
        """Grows whenever a model comes or goes."""
        self.unavailable: dict[str, str] = {}
        """Models that are known and not loaded, and why."""
        self._models: dict[str, dict[str, Router]] = {}
        self._leaving: list[Router] = []
        self._left = _Left({}, {})
        self._lock = threading.Lock()
        """A snapshot, taken by another thread, must see each engine once."""

    @property
    def digest(self) -> str:
        """Of what the endpoint serves: the engine, or the repository."""
        only = self.only
        return only.main.identity.digest if only else self._digest

    def put(self, name: str, versions: Mapping[str, Router]) -> None:
        """Serve these versions of a model from now on, and no others; those that leave answer what they have."""
        with self._lock:
            gone = [router for version, router in self._models.get(name, {}).items() if version not in versions]
            gone += [r for v, r in self._models.get(name, {}).items() if v in versions and versions[v] is not r]
            self._models[name] = dict(sorted(versions.items(), key=lambda each: _number(each[0])))
            self._let_go(gone)
            self.unavailable.pop(name, None)
            self.changes += 1

    def remove(self, name: str, why: str) -> None:
        """Serve a model no more."""
        with self._lock:
            self._let_go(list(self._models.pop(name, {}).values()))
            self.unavailable[name] = why
            self.changes += 1

    def _let_go(self, routers: list[Router]) -> None:
        self._leaving += routers
        for router in routers:
            router.gone = True

    def versions_of(self, name: str) -> Mapping[str, Router]:
        return self._models.get(name, {})

    def find(self, name: str, version: str | None = None) -> Found:
        """NotFoundError in Triton's words."""
        versions = self._models.get(name)
        if not versions:
            what = "has no available versions" if name in self.unavailable else "is not found"
            raise NotFoundError(f"Request for unknown model: '{name}' {what}")
        if version is None:
            router = versions[next(reversed(versions))]
            return Found(router, router.main, False)
        for router in versions.values():
            for service in (router.main, router.new):
                if service is not None and service.identity.version == version and not service.shadow:
                    return Found(router, service, True)
        raise NotFoundError(f"Request for unknown model: '{name}' version {version} is not found")

    def names(self) -> list[str]:
        return list(self._models)

    def services(self, name: str | None = None) -> list[Service]:
        """Every version that can be asked, of one model or of all."""
        models = self._models.values() if name is None else [self._models.get(name, {})]
        return [service for versions in models for router in versions.values() for service in router.asked()]

    def routers(self) -> Iterator[Router]:
        for versions in list(self._models.values()):
            yield from versions.values()

    @property
    def only(self) -> Router | None:
        """The one router of an endpoint that serves one model."""
        routers = list(self.routers())
        return routers[0] if len(routers) == 1 else None

    @property
    def unready(self) -> str:
        """Why a model is not ready; "" if all are."""
        return next((f"{s.identity.name}: {s.unready_reason}" for s in self.services() if not s.ready), "")

    def forget_idle(self, *, all_of_them: bool = False) -> list[Service]:
        """Let go of engines that have left and owe no answer; gives them, to be closed."""
        gone: list[Service] = []
        for router in self.routers():
            gone += router.forget_idle(all_of_them=all_of_them)
        for router in [one for one in self._leaving if all_of_them or not one.pending]:
            with self._lock:
                self._leaving.remove(router)
                self._left = self._left + _Left.of(router)
            gone += router.close()
        return gone

    def expire(self) -> None:
        for router in [*self.routers(), *self._leaving]:
            router.expire()

    # ---- counters

    def snapshot(self) -> dict[str, Json]:
        """The counters as they are left in `metrics/`: the sum, by engine, by model and version; from any thread."""
        with self._lock:
            left, routers = self._left, [*self.routers(), *self._leaving]
            for router in routers:
                left = left + _Left.of(router)
        total = sum(left.models.values(), Counters())
        asked = [service for router in routers for service in router.asked()]
        pending = {(one.identity.name, one.identity.version): one.batcher.pending for one in asked}
        if dropped := next((router.main.log.dropped for router in routers), 0):
            total.values["log_dropped"] = dropped  # they share one log
        return {
            "id": self.process,
            "digest": self.digest,
            "generation": self.generation,
            "time": time.time(),
            "pending": sum(router.pending for router in routers),
            **total.to_json(),
            "engines": {digest: counters.to_json() for digest, counters in left.engines.items()},
            "models": {
                f"{name}/{version}": {**counters.to_json(), "pending": pending.get((name, version), 0)}
                for (name, version), counters in left.models.items()
            },
        }

    def all_snapshots(self) -> Snapshots:
        """What all replicas have left, ended ones too, and this one's as it is now; reads files."""
        mine = self.snapshot()
        folder = next((router.main.metrics for router in self.routers()), None)
        return read_snapshots(folder).with_own(mine) if folder else Snapshots({}, Counters(), ()).with_own(mine)


@dataclass(frozen=True)
class _Left:
    """Counters by engine, and by model and version."""

    engines: Mapping[str, Counters]
    models: Mapping[tuple[str, str], Counters]

    @classmethod
    def of(cls, router: Router) -> _Left:
        engines: dict[str, Counters] = {}
        models: dict[tuple[str, str], Counters] = {}
        for identity, counters in router.counted():
            engines[identity.digest] = engines.get(identity.digest, Counters()) + counters
            key = (identity.name, identity.version)
            models[key] = models.get(key, Counters()) + counters
        return cls(engines, models)

    def __add__(self, other: _Left) -> _Left:
        engines, models = dict(self.engines), dict(self.models)
        for digest, counters in other.engines.items():
            engines[digest] = engines.get(digest, Counters()) + counters
        for key, counters in other.models.items():
            models[key] = models.get(key, Counters()) + counters
        return _Left(engines, models)


def _number(version: str) -> tuple[int, str]:
    return (int(version) if version.isdigit() else 0, version)
