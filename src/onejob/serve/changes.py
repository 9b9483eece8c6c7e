"""Carries a change of a repository's models to all replicas, one change at a time: all open it, then all use it.

The host's side of serve/loader.py. What is served now is in `models.json` before any replica uses it, so replicas that
start later, and the next host, serve the same.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from onejob.core.artifact import Json
from onejob.core.context import write_json
from onejob.core.faults import reach
from onejob.errors import ConflictError, OnejobError, StoreError, from_json
from onejob.serve.folder import read_json
from onejob.serve.repository import MODELS

STATE = "models.json"
NEW_SECONDS = 120.0
"""How long a copy that was made, or asked for again, is kept though nobody serves it."""
OPEN_LIMIT = 300.0
"""Longest time that opening a model may take."""

logger = logging.getLogger(__name__)


class Replica(Protocol):
    """As far as a change needs one."""

    revision: int
    """Of the models that it serves."""

    def send(self, message: Json) -> None: ...
    def ended(self) -> bool: ...


@dataclass(eq=False)
class _Change:
    ticket: int
    verb: str
    name: str
    versions: list[Json]
    asker: Replica
    number: int
    """Of the question, as the asker counts them."""
    part: list[Replica] = field(default_factory=list)
    waits: set[Replica] = field(default_factory=set)
    using: bool = False
    since: float = 0.0
    error: OnejobError | None = None


class Changes:
    """The models that are served, and the changes that wait."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._base = ""
        self._models: dict[str, list[Json]] = {}
        self._unloaded: list[str] = []
        self._queue: deque[_Change] = deque()
        self._now: _Change | None = None
        self._tickets = 0
        self._clear_at = 0.0
        """When there may be copies to remove."""
        self.revision = 0

    def begin(self, desired: Mapping[str, Json]) -> None:
        """Another version of the endpoint: its models, with the changes that were made to them before."""
        base = desired["engine"]["digest"]
        known = read_json(self._folder / STATE) or {}
        if base == self._base:
            return
        self._base = base
        models = known["models"] if known.get("base") == base else _by_name(desired.get("models") or [])
        self._models = {name: list(versions) for name, versions in models.items()}
        self._unloaded = list(known.get("unloaded", ())) if known.get("base") == base else []
        self.revision += 1

    def told(self, desired: Mapping[str, Json]) -> dict[str, Json]:
        """What a replica that starts now should serve."""
        if "models" not in desired or desired["engine"]["digest"] != self._base:
            return dict(desired)
        models = [version for versions in self._models.values() for version in versions]
        return {**desired, "models": models, "unloaded": list(self._unloaded)}

    @property
    def is_busy(self) -> bool:
        """Whether a change is under way."""
        return self._now is not None

    def hear(self, replica: Replica, message: Mapping[str, Json]) -> None:
        """A question, or a step of the change under way."""
        change = self._now
        if "ask" in message:
            versions = list(message.get("versions") or ())
            self._tickets += 1
            made = _Change(self._tickets, message["verb"], message["model"], versions, replica, int(message["ask"]))
            self._queue.append(made)
        elif change is not None and message.get("opened", message.get("used")) == change.ticket:
            change.waits.discard(replica)
            if message.get("error"):
                change.error = change.error or from_json(message["error"])
            if "used" in message:
                replica.revision = self.revision

    def tend(self, replicas: Iterable[Replica], busy: bool, now: float) -> None:
        """Go on with the change under way, or begin the next; `replicas` are those that are ready."""
        if self._now is None and self._queue:
            self._begin(self._queue.popleft(), list(replicas), busy, now)
        change = self._now
        if change is None:
            if now > self._clear_at:
                self._clear(now)
            return
        change.waits = {replica for replica in change.waits if not replica.ended()}
        if change.waits and now - change.since < OPEN_LIMIT:
            return
        if change.waits and not change.using:
            change.error = change.error or StoreError("a replica takes too long to open it", place=change.name)
        if change.using or change.error is not None:
            self._end(change, now)
        else:
            self._use(change, now)

    def _begin(self, change: _Change, replicas: list[Replica], busy: bool, now: float) -> None:
        if busy or not replicas:
            error = ConflictError("the endpoint's replicas are just starting", cure="Ask again in a moment.")
            _answer(change, error)
            return
        change.part, change.since, self._now = replicas, now, change
        if change.verb == "unload":
            self._use(change, now)
            return
        change.waits = set(replicas)
        reach("host.before_open")
        for replica in replicas:
            replica.send({"open": change.ticket, "model": change.name, "versions": change.versions})

    def _use(self, change: _Change, now: float) -> None:
        """All could open it: from here on it is what is served."""
        if change.verb == "load":
            self._models[change.name] = change.versions
            self._unloaded = [name for name in self._unloaded if name != change.name]
        else:
            self._models.pop(change.name, None)
            self._unloaded = [*(name for name in self._unloaded if name != change.name), change.name]
        try:
            write_json(self._folder / STATE, {"base": self._base, "models": self._models, "unloaded": self._unloaded})
        except OSError as error:
            logger.error("models.json can't be written: %s", error)  # served all the same, until the host ends
        reach("host.before_use")
        self.revision += 1
        change.using, change.since = True, now
        change.waits = {replica for replica in change.part if not replica.ended()}
        word = {"use": change.ticket} if change.verb == "load" else {"unload": change.ticket, "model": change.name}
        for replica in change.waits:
            replica.send(word)

    def _end(self, change: _Change, now: float) -> None:
        self._now = None
        if not change.using:
            for replica in change.part:
                replica.send({"drop": change.ticket})
        _answer(change, None if change.using else change.error)
        logger.info("model %s: %s %s", change.name, change.verb, change.error or "done")
        self._clear(now)

    def _clear(self, now: float) -> None:
        """Remove copies of models that nobody serves or waits for; not new ones, which a replica may be about to ask
        for."""
        used = [*self._models.values(), *(change.versions for change in self._queue)]
        self._clear_at = math.inf
        kept = {version["engine"]["digest"] for versions in used for version in versions}
        for path in (self._folder / MODELS).glob("*"):
            if path.name in kept or path.name.startswith("."):
                continue
            if _age(path) > NEW_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
            else:
                self._clear_at = now + NEW_SECONDS


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _answer(change: _Change, error: OnejobError | None) -> None:
    change.asker.send({"answer": change.number, "error": error.to_json() if error else None})


def _by_name(models: Iterable[Json]) -> dict[str, list[Json]]:
    found: dict[str, list[Json]] = {}
    for model in models:
        found.setdefault(model["name"], []).append(model)
    return found
