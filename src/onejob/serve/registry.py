"""The models of a replica, by name and version: what every protocol looks up, and what comes and goes while it runs.

An endpoint of a job has one model; while an engine is tried it has two versions, and a request that names none goes
where the router says. An endpoint of a model repository has many, each with versions of its own: the newest answers a
request that names none. It belongs to the loop's thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from onejob.core.artifact import Json
from onejob.core.counters import Counters, Snapshots, read_snapshots
from onejob.errors import NotFoundError
from onejob.machines.usage import Meter
from onejob.serve.describe import batching
from onejob.serve.folder import replace_json
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
        self._log_dropped = 0
        self._folder: Path | None = None
        """Where replicas leave their counters; known as soon as there is a model."""
        self._meter = Meter()
        self._lock = threading.Lock()
        """A snapshot, taken by another thread, must see each engine once."""
        self._writing = threading.Lock()

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
            self._folder = next((router.main.metrics for router in versions.values()), self._folder)
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
                self._left = self._left.plus([router])
            gone += router.close()
        return gone

    def expire(self) -> None:
        for router in [*self.routers(), *self._leaving]:
            router.expire()

    # ---- counters

    def snapshot(self) -> dict[str, Json]:
        """The counters as they are left in `metrics/`: the sum, by engine, by model and version; from any thread."""
        with self._lock:
            routers = [*self.routers(), *self._leaving]
            left = self._left.plus(routers)
        total = sum(left.models.values(), Counters())
        now = {(one.identity.name, one.identity.version): _now(one) for router in routers for one in router.asked()}
        self._log_dropped = next((router.main.log.dropped for router in routers), self._log_dropped)
        total.values["log_dropped"] = self._log_dropped  # they share one log
        return {
            "id": self.process,
            "digest": self.digest,
            "generation": self.generation,
            "time": time.time(),
            "pending": sum(router.pending for router in routers),
            "machine": asdict(self._meter.read()),
            **total.to_json(),
            "engines": {digest: counters.to_json() for digest, counters in left.engines.items()},
            "models": {
                f"{name}/{version}": {**counters.to_json(), "now": now.get((name, version), {})}
                for (name, version), counters in left.models.items()
            },
        }

    def leave(self) -> None:
        """Write the snapshot to `metrics/`; from any thread."""
        with self._writing:
            self._write(self.snapshot())

    def all_snapshots(self) -> Snapshots:
        """What all replicas have left, ended ones too, and this one's as it is now; reads files.

        Its own is written first: what was told once is never lost, should it be killed, and each replica that is asked
        next tells as much. A counter that fell would be taken by Prometheus for one that began again at 0.
        """
        with self._writing:
            mine = self.snapshot()
            with contextlib.suppress(OSError):
                self._write(mine)
        found = read_snapshots(self._folder) if self._folder else Snapshots({}, Counters(), ())
        return found.with_own(mine)

    def _write(self, snapshot: Json) -> None:
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_json(self._folder / f"{self.process.partition(':')[0]}.json", snapshot)


@dataclass(frozen=True)
class _Left:
    """Counters by engine, and by model and version."""

    engines: Mapping[str, Counters]
    models: Mapping[tuple[str, str], Counters]

    def plus(self, routers: Iterable[Router]) -> _Left:
        engines, models = dict(self.engines), dict(self.models)
        for router in routers:
            for identity, counters in router.counted():
                key = (identity.name, identity.version)
                engines[identity.digest] = _sum(engines.get(identity.digest), counters)
                models[key] = _sum(models.get(key), counters)
        return _Left(engines, models)


def _sum(before: Counters | None, counters: Counters) -> Counters:
    return counters if before is None else before + counters


def _now(service: Service) -> dict[str, Json]:
    """What isn't counted, but so at the moment."""
    return {"ready": service.ready, "queued": service.batcher.queued, **batching(service)}


def _number(version: str) -> tuple[int, str]:
    return (int(version) if version.isdigit() else 0, version)
