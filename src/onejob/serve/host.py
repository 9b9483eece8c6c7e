"""The host of an endpoint: owns its listening socket and its replicas, and makes `desired.json` true.

    python -m onejob.serve.host FOLDER

One plain loop, no threads, nothing heavy imported. It starts replicas that inherit the socket, restarts one that
dies (with back-off) or stops being ready, and when the generation in `desired.json` changes it starts new replicas,
waits until all are ready, and only then lets the old ones drain. If the new ones fail, the old go on. Where the job
has a canary, the new replicas hold both engines, and the new one answers its share until it takes all or goes back
(serve/generation.py, serve/rollout.py). `state.json` always says how things stand; `rollout.json` is for the next host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from onejob.core.artifact import Json
from onejob.core.context import write_json
from onejob.core.faults import reach
from onejob.errors import ConflictError, OnejobError, from_json
from onejob.serve import retire
from onejob.serve.changes import Changes
from onejob.serve.child import Child
from onejob.serve.doorman import Doorman, Visitor
from onejob.serve.folder import (
    DESIRED,
    METRICS,
    PORT,
    REQUESTS,
    ROLLOUT,
    SHADOW,
    STATE,
    VERSIONS,
    read_json,
    replace_json,
    take_lock,
)
from onejob.serve.generation import Generation, Place, can_try, listener_for
from onejob.serve.grown import Scales
from onejob.serve.listener import port_of, release, shut_out
from onejob.serve.rollout import HEALTHY_SECONDS, Trial, backoff, judge, weigh

TICK_SECONDS = 0.2
BEAT_LIMIT = 10.0
"""A ready replica whose event loop has not beaten for so long hangs, and is replaced."""
START_LIMIT = 300.0
"""Longest time that a replica may take to become ready."""
HELD_SECONDS = 1.0
"""A pass that comes so much later than it should tells that this process was held up (stopped, frozen, starved)."""
KILL_SECONDS = 1.0
"""What a drained replica is given beyond its grace before it is killed."""

logger = logging.getLogger(__name__)


class Host:
    """The loop and its state; `run` returns the exit code."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._selector = selectors.DefaultSelector()
        self._current: Generation | None = None
        self._next: Generation | None = None
        self._leaving: list[tuple[Child, float]] = []
        """Replicas that drain, and when they are killed."""
        self._seen: tuple[int, int, int] | None = None
        self._tried = -1
        """The newest generation that was begun, so that a failed one isn't begun again."""
        self._error: OnejobError | None = None
        self._written: Json = None
        self._stopping = False
        self._look = True
        self._looked = time.monotonic()
        self._wake, self._woken = socket.socketpair()
        self._changes = Changes(folder)
        self._doorman = Doorman(self._selector)
        self._scales = Scales()

    def run(self) -> int:
        self._listen_to_signals()
        for name in (METRICS, REQUESTS):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        retire.retire(self._folder / METRICS, living=())
        while not self._stopping:
            self._follow()
            self._tend()
            if self._current is None and self._next is None and isinstance(self._error, ConflictError):
                self._write_state()
                return self._error.exit_code  # the port is taken and nothing is served: for the loop to judge
            self._write_state()
            self._wait()
        return self._stop()

    # ---- what should be

    def _follow(self) -> None:
        """Begin the generation that `desired.json` names, if it is another one."""
        path = self._folder / DESIRED
        try:
            stat = path.stat()
        except OSError:
            return
        seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        if seen == self._seen and not self._look:
            return
        self._look = False
        desired = read_json(path)
        if desired is None:
            return  # half written by somebody who doesn't rename: seen again when it is whole
        self._seen = seen
        if int(desired.get("generation", -1)) != self._tried:
            self._begin(desired)

    def _begin(self, desired: Mapping[str, Json]) -> None:
        self._tried = int(desired["generation"])
        self._error = None
        if self._next is not None:
            abandoned, self._next = self._next, None
            self._abandon(abandoned)
        desired = self._numbered(desired)
        try:
            listener = listener_for(self._folder, desired, self._current)
        except OnejobError as error:
            self._error = error
            logger.error("generation %s: %s", self._tried, error)
            return
        self._changes.begin(desired)
        logger.info("generation %s begins", self._tried)
        known = read_json(self._folder / ROLLOUT) or {}
        if self._current is None and (known.get("back") or {}).get("generation") == self._tried:
            self._error = from_json(known["back"]["error"])  # an earlier host tried it: no mixed state
            self._next = Generation.of(known["serving"], listener, None, None)
            return
        former = self._current.serving if self._current else known.get("serving")
        trial = Trial.of(desired.get("options", {})) if former and can_try(former, desired) else None
        if trial is not None and trial.shadow:
            shutil.rmtree(self._folder / SHADOW, ignore_errors=True)  # what the last one answered in the shadow
        self._next = Generation.of(desired, listener, former, trial)

    def _numbered(self, desired: Mapping[str, Json]) -> Mapping[str, Json]:
        """With the version of its model: each engine gets the next number when it first comes to this endpoint."""
        if "models" in desired:
            return desired
        digest = desired["engine"]["digest"]
        known = read_json(self._folder / VERSIONS) or {}
        if digest not in known:
            known[digest] = 1 + max(known.values(), default=0)
            try:
                write_json(self._folder / VERSIONS, known)
            except OSError as error:
                logger.error("versions.json can't be written: %s", error)
        return {**desired, "version": str(known[digest])}

    # ---- what is

    def _tend(self) -> None:
        """Hear, reap, start, judge, switch: one pass."""
        self._excuse(time.monotonic())
        for child in self._children():
            if child.control.fileno() >= 0:
                self._hear(child)
        now = time.monotonic()
        self._reap(now)
        for generation in (self._current, self._next):
            if generation is not None:
                self._start_due(generation, now)
        if self._current is not None:
            self._replace_unwell(self._current, now)
        if self._next is not None:
            self._judge_next(self._next, now)
        elif self._current is not None and self._current.tried is not None:
            self._weigh(self._current, now)
        elif self._current is not None:
            self._renew(self._current, now)
        for child, kill_at in self._leaving:
            if now >= kill_at:
                child.kill()
        self._tend_models(now)
        self._keep_door(now)

    def _excuse(self, now: float) -> None:
        """A host that was held up must not take that for its replicas' silence: they may have been, too."""
        held, self._looked = now - self._looked - TICK_SECONDS, now
        if held > HELD_SECONDS:
            logger.info("this process was held up for %.1f s", held)
            for child in self._children():
                child.excuse(held)
            self._leaving = [(child, kill_at + held) for child, kill_at in self._leaving]

    def _tend_models(self, now: float) -> None:
        """Carry on with changes of a repository's models; who missed one is replaced."""
        current = self._current
        ready = [child for child in current.children if child.ready] if current else []
        for child in ready:
            inbox, child.inbox = child.inbox, []
            for message in inbox:
                self._changes.hear(child, message)
        self._changes.tend(ready, self._next is not None, now)
        if self._changes.is_busy or current is None or "models" not in current.desired:
            return
        for place in current.places:
            late = place.child
            if late is not None and late.ready and late.revision != self._changes.revision:
                logger.info("replica %d is replaced: it serves models that have changed since it began", late.pid)
                place.child = None
                self._let_go([late], current.grace, now)

    def _keep_door(self, now: float) -> None:
        """While no replica is well, somebody must say so."""
        generation = self._current or self._next
        if generation is not None:
            self._doorman.keep(generation.listener, generation.children, now, generation.last_words)

    def _reap(self, now: float) -> None:
        ended = False
        for generation in (self._current, self._next):
            for place in generation.places if generation else ():
                if generation is not None and place.child is not None and place.child.ended():
                    ended = True
                    self._bury(generation, place, now)
        for child, _ in self._leaving:
            if child.ended():
                ended = True
                self._forget(child)
        self._leaving = [(child, at) for child, at in self._leaving if not child.ended()]
        if ended:
            self._retire_dead()

    def _bury(self, generation: Generation, place: Place, now: float) -> None:
        child = place.child
        assert child is not None
        self._hear(child)  # its last words
        generation.lost(child)
        healthy = child.ready_since is not None and now - child.ready_since >= HEALTHY_SECONDS
        place.deaths = 1 if healthy else place.deaths + 1
        place.start_at = now + backoff(place.deaths)
        place.why = str(child.error) if child.error else ""
        logger.error("replica %d ended with %s", child.pid, child.how_ended())
        self._forget(child)
        if child.error is None or generation is self._current:  # one that served is tried again, whatever it said
            place.child = None

    def _retire_dead(self) -> None:
        living = {child.pid for child in self._children() if not child.ended()}
        try:
            retire.retire(self._folder / METRICS, living)
        except OSError as error:
            logger.warning("counters of ended replicas stay where they are: %s", error)  # folded at the next death

    def _start_due(self, generation: Generation, now: float) -> None:
        for place in generation.places:
            if place.child is None and now >= place.start_at:
                reach("host.before_start")
                told = generation.told
                told["desired"] = self._changes.told(told["desired"])
                place.child = Child.start(self._folder, told, generation.listener)
                place.child.revision = self._changes.revision
                self._selector.register(place.child.control, selectors.EVENT_READ, place.child)

    def _replace_unwell(self, generation: Generation, now: float) -> None:
        for place in generation.places:
            child = place.child
            if child is None or child.ended():
                continue
            silent = child.ready and now - child.heard > BEAT_LIMIT
            late = not child.ready and now - child.started_mono > START_LIMIT
            if child.unready or silent or late:
                logger.error("replica %d is replaced: %s", child.pid, child.unready or "it doesn't answer")
                child.terminate()
                self._leaving.append((child, now + (0.0 if silent or late else generation.grace)))
                place.child, place.deaths = None, place.deaths + 1
                place.start_at = now + backoff(place.deaths - 1)

    def _judge_next(self, generation: Generation, now: float) -> None:
        verdict = judge(generation.standings(now, START_LIMIT))
        if verdict == "switch":
            self._switch(generation)
        elif verdict == "give up":
            why, self._next = generation.why_not(), None
            logger.error("generation %s is given up: %s", generation.number, why)
            if self._current is None or generation.desired is not self._current.desired:
                self._error = why  # else they were to replace others of the same, which go on
            if self._current is None and generation.tried is not None:  # after a restart: what served, serves
                generation.settle(keep_new=False)
                self._next = Generation.of(generation.desired, generation.listener, None, None)
            self._abandon(generation)

    def _renew(self, generation: Generation, now: float) -> None:
        """Where a replica has grown too much, start all anew beside the old ones, as for another generation."""
        if why := self._scales.why_too_heavy(generation.children, generation.options, now):
            logger.warning("%s: replicas are replaced", why)
            self._next = Generation.of(generation.desired, generation.listener, None, None)

    def _switch(self, generation: Generation) -> None:
        """The new replicas answer already: let the old ones go."""
        reach("host.before_switch")
        old, self._current, self._next = self._current, generation, None
        if generation.tried is not None:
            logger.info("generation %s is tried", generation.number)
            generation.tried.since = time.monotonic()
        else:
            logger.info("generation %s serves", generation.number)
        if generation.number == self._tried:
            self._error = None
            self._remember(generation.serving)
        if old is None:
            return
        now = time.monotonic()
        self._let_go([place.child for place in old.places if place.child is not None], old.grace, now)
        if old.listener is not generation.listener:
            self._doorman.leave()
            release(old.listener)

    def _let_go(self, children: list[Child], grace: float, now: float) -> None:
        for child in children:
            if not child.ended():
                child.drain(grace)
                self._leaving.append((child, now + grace + KILL_SECONDS))

    def _weigh(self, generation: Generation, now: float) -> None:
        """What becomes of the engine that is tried. It is written down before the replicas are told."""
        assert generation.tried is not None
        word, why = weigh(generation.tried.trial, generation.readings(now))
        if word == "wait":
            return
        reach("host.before_settle")
        if word == "full":
            logger.info("generation %s serves", generation.number)
            self._remember(generation.desired)
        else:
            error = generation.gone_back(why)
            logger.error("%s", error)
            self._error = error if generation.number == self._tried else self._error
            self._remember(generation.serving, back={"generation": generation.number, "error": error.to_json()})
        reach("host.after_settle")
        self._let_go(generation.settle(keep_new=word == "full"), generation.grace, now)

    def _remember(self, serving: Mapping[str, Json], back: Json = None) -> None:
        """What serves, and what went back, for the next host."""
        try:
            write_json(self._folder / ROLLOUT, {"serving": dict(serving), "back": back})
        except OSError as error:
            logger.error("rollout.json can't be written: %s", error)

    def _abandon(self, generation: Generation) -> None:
        for place in generation.places:
            if place.child is not None and not place.child.ended():
                place.child.kill()
                self._leaving.append((place.child, time.monotonic()))
        if generation.listener not in [one.listener for one in (self._current, self._next) if one is not None]:
            self._doorman.leave()
            release(generation.listener)

    # ---- edges

    def _children(self) -> list[Child]:
        generations = [g for g in (self._current, self._next) if g is not None]
        running = [place.child for g in generations for place in g.places if place.child is not None]
        return running + [child for child, _ in self._leaving]

    def _hear(self, child: Child) -> None:
        if not child.hear():
            self._forget(child)

    def _forget(self, child: Child) -> None:
        if child.control.fileno() >= 0:
            self._selector.unregister(child.control)
            child.control.close()

    def _wait(self) -> None:
        for key, _ in self._selector.select(TICK_SECONDS):
            match key.data:
                case Child():
                    self._hear(key.data)
                case Doorman():
                    self._doorman.accept()
                case Visitor():
                    self._doorman.look(key.data)
                case _:
                    self._woken.recv(4096)

    def _listen_to_signals(self) -> None:
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_stopping", True))
        signal.signal(signal.SIGINT, lambda *_: setattr(self, "_stopping", True))
        signal.signal(signal.SIGHUP, lambda *_: setattr(self, "_look", True))
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake up

    def _stop(self) -> int:
        """Let every replica finish what it has begun, then end."""
        logger.info("stopping")
        grace = max((g.grace for g in (self._current, self._next) if g), default=0.0)
        children = [child for child in self._children() if not child.ended()]
        for generation in (self._current, self._next):
            if generation is not None:
                shut_out(generation.listener)
        for child in children:
            child.terminate()
        self._doorman.close()
        self._close_listeners()
        kill_at = time.monotonic() + grace + KILL_SECONDS
        while children and time.monotonic() < kill_at:
            self._selector.select(0.05)
            self._drain_wakeups()
            children = [child for child in children if not child.ended()]
        for child in children:
            child.kill()
        self._current = self._next = None
        self._leaving = []
        if (known := read_json(self._folder / ROLLOUT) or {}).get("back"):
            self._remember(known["serving"])  # who starts it again asks for another trial
        self._retire_dead()
        self._error = None
        self._write_state(stopped=True)
        return 0

    def _drain_wakeups(self) -> None:
        for child in self._children():
            if child.control.fileno() >= 0:
                self._hear(child)
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def _close_listeners(self) -> None:
        for generation in (self._current, self._next):
            if generation is not None:
                release(generation.listener)

    def _write_state(self, *, stopped: bool = False) -> None:
        state = self._state(stopped)
        if state == self._written and (self._folder / STATE).exists():
            return  # a supervisor that was slow may have removed what another host had left, and hit ours
        try:
            replace_json(self._folder / STATE, state)  # no fsync: a busy disk would hold up the door and all restarts
            self._written = state
        except OSError as error:
            logger.error("state.json can't be written: %s", error)  # tried again at the next pass

    def _state(self, stopped: bool) -> dict[str, Json]:
        shown = self._current or self._next
        serving = shown.serving if shown else {}
        children = [place.child for place in (shown.places if shown else []) if place.child and not place.child.ended()]
        if self._current is not None and self._current.ready:
            word = "ready"
        elif shown is None:
            word = "failed" if self._error else "stopped" if stopped else "starting"
        else:
            word = "starting"
        port = port_of(shown.listener) if shown else (read_json(self._folder / PORT) or {}).get("port", 0)
        return {
            "pid": os.getpid(),
            "port": port,
            "state": word,
            "generation": int(serving["generation"]) if shown else self._tried,
            "digest": serving["engine"]["digest"] if shown else None,
            "replicas": [{"pid": c.pid, "ready": c.ready, "started": c.started} for c in children],
            "error": self._error.to_json() if self._error else None,
            "failed_generation": self._tried if self._error else None,
            "rollout": self._current.trial_state(time.monotonic()) if self._current else None,
        }


def _allow_connections() -> None:
    """As many open files as this process may have, for it and its replicas: a connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main(argv: list[str]) -> int:
    """Serve one endpoint folder until stopped; returns the exit code."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s host %(process)d %(message)s")
    folder = Path(argv[0]).resolve()
    _allow_connections()
    try:
        lock = take_lock(folder)
    except OnejobError as error:
        logger.error("%s", error)
        return error.exit_code
    try:
        return Host(folder).run()
    finally:
        os.close(lock)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
