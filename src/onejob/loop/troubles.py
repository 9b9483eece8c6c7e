"""Troubles: what goes wrong with one thing doesn't stop the others; it is told once, and tried again ever later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from onejob.errors import OnejobError

FIRST = 1.0
LONGEST = 60.0
logger = logging.getLogger("onejob.loop")


@dataclass(frozen=True, slots=True)
class Trouble:
    """The newest failure of one subject."""

    text: str
    times: int
    again: float
    """When it may be tried again, on a clock that doesn't jump."""


@dataclass(frozen=True)
class Troubles:
    """Subjects (`run/12`, `endpoint/flights`) whose last try failed."""

    clock: Callable[[], float] = time.monotonic
    known: dict[str, Trouble] = field(default_factory=dict)

    def guard(self, subject: str, work: Callable[[], object]) -> bool:
        """Do the work, unless its last failure is too fresh; whether it was done. A failure is logged, not raised."""
        before = self.known.get(subject)
        if before is not None and self.clock() < before.again:
            return False
        try:
            work()
        except Exception as error:  # whatever it is, the other runs and endpoints go on
            self._note(subject, before, error)
            return False
        self.known.pop(subject, None)
        return True

    def _note(self, subject: str, before: Trouble | None, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        times = before.times + 1 if before else 1
        self.known[subject] = Trouble(text, times, self.clock() + min(LONGEST, FIRST * 2.0 ** min(times - 1, 16)))
        if before is None or before.text != text:
            # The traceback of a bug is worth having; an error of the tree says all there is to say.
            logger.error("%s: %s", subject, error, exc_info=None if isinstance(error, OnejobError) else error)
