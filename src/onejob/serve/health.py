"""Whether a model answers: it has answered a real inference lately, and nothing says that it doesn't.

A model that nobody asks is asked by ourselves, with the input that it was warmed up with, and nobody counts that.
"""

from __future__ import annotations

import time

from onejob.errors import OverloadedError
from onejob.serve.batch import Batcher
from onejob.serve.item import Item
from onejob.serve.model import ServedModel
from onejob.serve.policy import Limits

OVERDUE_NS, OVERDUE_TIMES = 700_000_000, 5.0
"""A batch that takes so long, and so many times as long as it should, makes its model unready while it lasts."""
PROBE_NS, PROBE_TIMES = 250_000_000, 20.0
"""A model that nobody asks is asked by ourselves so often; a slow one, after so many times what it takes."""
SUSPICIOUS_FAILURES = 3
"""So many engine failures in a row, and the engine must pass its warm-up again to stay ready."""
OWN = object()
"""Marks what is asked by ourselves (`Item.asked`)."""


class Health:
    """How one engine is. It belongs to the loop's thread."""

    def __init__(self, model: ServedModel, batcher: Batcher, limits: Limits) -> None:
        self.fault = ""
        """Why this engine will not answer any more: its replica must be replaced."""
        self.pause = ""
        """Why it doesn't answer now: that may pass."""
        self._model, self._batcher, self._limits = model, batcher, limits
        self._last_ok = time.perf_counter_ns()
        self._probe: Item | None = None
        self._probed = self._probe_failures = self._failures = 0

    @property
    def reason(self) -> str:
        """Why it isn't ready; "" if it is."""
        return self.fault or self.pause

    def answered(self, now: int) -> None:
        """It has just answered an inference."""
        self._last_ok, self._failures, self._probe_failures = now, 0, 0

    def failed(self) -> None:
        """It has failed on what a client asked. Several in a row: is it the engine, or what it was asked? The warm-up
        input tells."""
        self._failures += 1
        if self._failures < SUSPICIOUS_FAILURES or self.reason:
            return
        self._failures = 0
        try:
            self._model.warm_up(1)
        except Exception as broken:
            self.fault = f"the engine fails: {broken}"

    def excuse(self, ns: int) -> None:
        """So long it could not have answered: nothing of this process ran."""
        self._last_ok += ns
        self._batcher.excuse(ns)
        if self._probe is not None:
            self._probe.received += ns
            self._probe.deadline += ns

    def check(self, now: int) -> None:
        """Look whether the engine is well; ask it something if nobody else does. Called several times a second."""
        batcher = self._batcher
        if self.fault:
            return
        if dead := self._model.dead():
            self.pause = dead
        elif batcher.stuck_ns() > self._limits.timeout_ns:
            self._give_up(batcher.stuck_ns() / 1e9)
        elif batcher.overdue(OVERDUE_NS, OVERDUE_TIMES):
            busy, usual = batcher.stuck_ns() / 1e9, batcher.fit.predict(self._limits.rows) / 1e9
            self.pause = f"the engine has been busy with one batch for {busy:.1f} s, usual is {usual:.3g} s"
        elif self._probe is not None and now - self._probe.received > self._patience(OVERDUE_NS, OVERDUE_TIMES):
            self.pause = f"it has answered no inference for {(now - self._last_ok) / 1e9:.1f} s"
        elif not self._probe_failures:
            self.pause = ""
        idle = self._probe is None and not batcher.pending
        if idle and now - max(self._last_ok, self._probed) > self._patience(PROBE_NS, PROBE_TIMES):
            self._ask()

    def _give_up(self, seconds: float) -> None:
        """An engine in a process of its own is started again; any other takes its replica with it."""
        if self._model.apart:
            self.pause = f"the engine gave no answer for {seconds:.1f} s, and is started again"
            self._model.kill(f"no answer for {seconds:.1f} s")
        else:
            self.fault = "the engine hangs"

    def _patience(self, least: int, times: float) -> float:
        return max(least, times * self._batcher.fit.predict(1))

    def _ask(self) -> None:
        try:
            features, rows, signature = self._model.prepare(self._model.example(1))
        except Exception as error:
            self._probe_failures += 1
            self.pause = f"the engine fails: {error}"
            return
        self._probed = now = time.perf_counter_ns()
        self._probe = Item(features, rows, self._settled, now, now + self._limits.timeout_ns, signature)
        self._probe.asked = OWN
        try:
            self._batcher.submit(self._probe)
        except OverloadedError:
            self._probe = None

    def _settled(self, item: Item) -> None:
        self._probe = None
        if item.error is None or self._model.refuses(item.error):  # who refuses answers
            self._last_ok, self._probe_failures = time.perf_counter_ns(), 0
            return
        self._probe_failures += 1
        self.pause = f"the engine fails: {item.error}"
        if self._probe_failures >= SUSPICIOUS_FAILURES:
            self.fault = self.pause
