"""A request on its way through an engine, as the batcher and every protocol know it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from onejob.serve.rows import Arrays, Raw


class Item:
    """One request on its way through the engine; `done` is called once, on the loop's thread.

    Made for each request, so no dataclass: only what differs from the defaults is set.
    """

    priority = 0
    """The lower, the sooner."""
    size = 0
    """Bytes of its message."""
    quick = False
    """Whether it is answered together with its whole batch (`answer`), not by `done`."""
    alike = False
    """Whether it can be answered together with others of its class (`answer_all`)."""
    own_id = ""
    """The id that its client gave it."""
    asked: Any = None
    """What its service wants to know of it when it is done."""
    queued = started = finished = 0
    begun = 0
    """Rows that the engine has been given."""
    settled = False
    outputs: Arrays | None = None
    error: Exception | None = None
    parts: list[Arrays] | None = None
    """Outputs of the rows so far, of one that runs in pieces."""

    def __init__(
        self,
        arrays: Arrays | Raw,
        rows: int,
        done: Callable[[Item], None],
        received: int,
        deadline: int,
        signature: Hashable = (),
    ) -> None:
        self.arrays = arrays
        self.rows = rows
        self.done = done
        self.received = received
        """When its first byte was handled, in the clock's nanoseconds."""
        self.deadline = deadline
        self.signature = signature
        """Shapes without the batch dimension: only equal ones can run together."""

    def answer(self, outputs: Arrays, start: int, stop: int, name: str) -> bool:
        """Answer a quick request with its rows of a batch's outputs; whether that went well."""
        raise NotImplementedError

    def answer_all(self, items: Sequence[Item], outputs: Arrays, ids: Sequence[str]) -> None:
        """Answer a batch of requests that are all `alike`, of which this is the first."""
        raise NotImplementedError

    def settle(self, outputs: Arrays | None, error: Exception | None, now: int) -> None:
        if self.settled:
            return  # cancelled, or past its deadline, while the engine had it
        self.settled, self.outputs, self.error, self.finished = True, outputs, error, now
        self.done(self)
