"""A session: the adapters that one process of onejob works with; made by the factory, handed to every command."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

from onejob.core.records import Lease, Owner
from onejob.errors import OnejobError
from onejob.exec.local import LocalExecutor
from onejob.loop.home import Home
from onejob.loop.troubles import Troubles
from onejob.store.blobs import DirBlobs
from onejob.store.leases import alive
from onejob.store.ledger import SqlLedger


@dataclass(frozen=True, slots=True)
class Full:
    """What a step found when no slots were free: nothing changes for it while the same executions are live."""

    live: frozenset[str]
    asked: float
    told: float
    """When its reason was last written: the holders change faster than anybody reads."""


@dataclass(frozen=True)
class Session:
    """Ledger, blobs and executors of one home, and who we are."""

    home: Home
    ledger: SqlLedger
    blobs: DirBlobs
    executors: Mapping[str, LocalExecutor]
    owner: Owner
    clock: Callable[[], float]
    alive: Callable[[Owner], bool | None] = alive

    held: dict[tuple[str, int | str], Lease] = field(default_factory=dict)
    """Leases that we took, so that a pass every tenth of a second doesn't write each of them every time."""
    full: dict[tuple[int, str], Full] = field(default_factory=dict)
    """Steps (run, name) that wait for slots."""
    asked: set[int] = field(default_factory=set)
    """Runs whose endpoint was started on our account: if it fails or is stopped after that, the run has failed."""
    closed: dict[str, int] = field(default_factory=dict)
    """Endpoint -> the newest event when its loop was last closed: without another there is nothing new to see."""
    clocks: dict[str, tuple[tuple[int, ...], float]] = field(default_factory=dict)
    """Endpoint -> its newest segments, and the event time that they tell (loop/champion.py)."""
    troubles: Troubles = field(default_factory=Troubles)

    @property
    def ttl(self) -> float:
        """Seconds that a lease lasts without being renewed."""
        return self.home.settings.lease

    def hold(self, what: str, key: int | str) -> str | None:
        """The token of our lease on something, taken or renewed when half of it has passed; None: somebody else's."""
        lease = self.held.get((what, key))
        if lease is not None and 0 < lease.expires - self.clock() - self.ttl / 2 <= self.ttl:
            return lease.token
        lease = self.ledger.lease(what, key, self.owner, self.ttl)
        if lease is None:
            self.held.pop((what, key), None)
            return None
        self.held[what, key] = lease
        return lease.token

    def keep(self, what: str, key: int | str, lease: Lease | None) -> None:
        """Note a lease that we got otherwise, with a claim."""
        if lease is not None:
            self.held[what, key] = lease

    def drop(self, what: str, key: int | str) -> None:
        """Forget a lease that was lost, or is over."""
        self.held.pop((what, key), None)

    def is_free(self, lease: Lease | None) -> bool:
        """Whether asking for a lease is worth a write: nobody has it, or we have, or its holder is late or dead."""
        if lease is None or lease.owner == str(self.owner):
            return True
        if not 0 < lease.expires - self.clock() <= self.ttl:
            return True  # over; or so far ahead that a clock has jumped, which the ledger mends when it is asked
        return self.alive(Owner.parse(lease.owner)) is False

    def is_here(self, host: str) -> bool:
        """Whether something of that host is ours to look after: this machine, also as it was before a restart."""
        return not host or host.split("/")[0] == self.owner.host.split("/")[0]

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """While it lasts, a thread renews what we hold: hashing a large file must not look like being dead."""
        over = threading.Event()
        heart = threading.Thread(target=self._beat, args=(over,), daemon=True)
        heart.start()
        try:
            yield
        finally:
            over.set()
            heart.join()

    def _beat(self, over: threading.Event) -> None:
        while not over.wait(self.ttl / 3):
            with contextlib.suppress(OnejobError):  # tried again at the next beat; it is the token that decides
                self.renew()

    def renew(self) -> None:
        """Hold everything longer that is still ours."""
        for (what, key), lease in list(self.held.items()):
            if self.ledger.renew(what, key, lease.token, self.ttl):
                self.held[what, key] = Lease(lease.owner, lease.token, self.clock() + self.ttl)
            else:
                self.drop(what, key)

    def release(self) -> None:
        """Give everything up, for others to go on with at once."""
        for (what, key), lease in list(self.held.items()):
            self.ledger.release(what, key, lease.token)
        self.held.clear()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ledger.close()
