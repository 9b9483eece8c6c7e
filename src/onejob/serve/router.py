"""Which engine answers a request: the one that serves; or, while a new one is tried, that one for its share.

A request belongs to the new engine by the hash of its key (the value of `columns.id`, else the x-request-key header,
else the request's id), so one key is answered by one engine as long as the trial lasts, in every replica. What the new
engine can't answer, the old one answers. In a shadow trial the old one answers all, and the new one gets copies.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping

import numpy as np

from onejob.core.artifact import Json
from onejob.core.counters import Counters
from onejob.core.traffic import key_text
from onejob.serve.identify import Roles
from onejob.serve.model import Column, ServedModel
from onejob.serve.rollout import Tally
from onejob.serve.service import Identity, Service

SCALE = 1 << 64
CLIENTS_OWN = "failure.CANCELED"
"""Says nothing about the engine."""


class Router:
    """The engine that serves, the one that is tried, and the counters of both. It belongs to the loop's thread."""

    def __init__(self, main: Service, *, new: Service | None = None, share: float = 0.0, shadow: bool = False) -> None:
        self.main = main
        self.new = new
        self.shadow = shadow
        self.same = new is None or _asks_alike(main.model, new.model)
        """Whether both take and give the same, so that a request is decoded once."""
        self.gone = False
        """Whether it is asked no more: another version of the model has come, or the model was unloaded."""
        self._share = share
        self._leaving: list[Service] = []
        self._left: dict[str, tuple[Identity, Counters]] = {}
        """Of engines that have gone, by digest."""
        self._lock = threading.Lock()
        """A snapshot, taken by another thread, must see each engine once."""

    def choose(self, columns: Mapping[str, Column], header: str, request: str) -> Service | None:
        """The new engine if this request falls in its share, else None."""
        new = self.new
        if new is None or not new.ready:
            return None
        key = _key(columns, self.main.identity.roles) or header or request
        return new if picks(new.identity.digest, key, self._share) else None

    def settle(self, *, keep_new: bool) -> Service | None:
        """End the trial; gives the engine that leaves, which still answers what it has."""
        new = self.new
        if new is None:
            return None
        leaves = self.main if keep_new else new
        with self._lock:
            self.new = None
            self._leaving.append(leaves)
            if keep_new:
                self.main = new
                if new.shadow:
                    new.counters, new.shadow = Counters(), False  # copies were no requests
        return leaves

    def asked(self) -> list[Service]:
        """The engines that answer somebody."""
        return [service for service in (self.main, self.new) if service is not None and not service.shadow]

    @property
    def pending(self) -> int:
        """Requests that wait or run, whose answers somebody gets."""
        return sum(service.batcher.pending for service in self._all() if not service.shadow)

    def forget_idle(self, *, all_of_them: bool = False) -> list[Service]:
        """Let go of engines that have left and owe no answer; gives them, to be closed."""
        gone = [one for one in self._leaving if not one.batcher.pending or all_of_them]
        for service in gone:
            with self._lock:
                self._leaving.remove(service)
                if not service.shadow:
                    self._keep(service)
        return gone

    def close(self) -> list[Service]:
        """Ask no engine any more; gives them, to be closed."""
        return self._all()

    def _keep(self, service: Service) -> None:
        identity = service.identity
        counters = service.counted()
        before = self._left.get(identity.digest)
        self._left[identity.digest] = (identity, before[1] + counters if before else counters)

    def expire(self) -> None:
        for service in self._all():
            service.batcher.expire()

    def tallies(self) -> Json:
        """How the requests of both went, for the host; None when nothing is tried."""
        if self.new is None:
            return None
        return {"former": _tally(self.main.counters), "new": _tally(self.new.counters)}

    def counted(self) -> list[tuple[Identity, Counters]]:
        """Counters of each engine, those that have left too; may be called from another thread."""
        with self._lock:
            left = list(self._left.values())
            now = [(each.identity, each.counted()) for each in self._all() if not each.shadow]
        return left + now

    def _all(self) -> list[Service]:
        return [self.main, *([self.new] if self.new else []), *self._leaving]


def picks(salt: str, key: str, share: float) -> bool:
    """Whether a key falls in a share; the salt (the new engine's digest) makes each trial draw anew."""
    hashed = hashlib.blake2b(f"{salt} {key}".encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(hashed) < share * SCALE


def _key(columns: Mapping[str, Column], roles: Roles) -> str:
    """The key of the request's first row that has one."""
    column = columns.get(roles.id) if roles.id else None
    if column is None:
        return ""
    values = column.reshape(-1).tolist() if isinstance(column, np.ndarray) else column
    try:
        return next((key_text(value) for value in values if value is not None and value == value), "")
    except ValueError:
        return ""  # no key: the request will be refused for it


def _asks_alike(one: ServedModel, other: ServedModel) -> bool:
    return (one.inputs, one.outputs, one.raw) == (other.inputs, other.outputs, other.raw)


def _tally(counters: Counters) -> Json:
    failed = counters.failures - counters.get(CLIENTS_OWN) + counters.get("fallback")
    tally = Tally(counters.get("success"), failed, tuple(counters.latency))
    return {"answered": tally.answered, "failed": tally.failed, "latency": list(tally.latency)}
