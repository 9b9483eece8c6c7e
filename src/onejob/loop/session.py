"""A session: the adapters that one process of onejob works with; made by the factory, handed to every command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from onejob.core.records import Lease, Owner
from onejob.exec.local import LocalExecutor
from onejob.loop.home import Home
from onejob.store.blobs import DirBlobs
from onejob.store.ledger import SqlLedger


@dataclass(frozen=True)
class Session:
    """Ledger, blobs and executors of one home, and who we are."""

    home: Home
    ledger: SqlLedger
    blobs: DirBlobs
    executors: Mapping[str, LocalExecutor]
    owner: Owner
    clock: Callable[[], float]

    @property
    def ttl(self) -> float:
        """Seconds that a lease lasts without being renewed."""
        return self.home.settings.lease

    held: dict[tuple[str, int | str], Lease] = field(default_factory=dict)
    """Leases that we took, so that a pass every tenth of a second doesn't write each of them every time."""

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

    def is_here(self, host: str) -> bool:
        """Whether something of that host is ours to look after: this machine, also as it was before a restart."""
        return not host or host.split("/")[0] == self.owner.host.split("/")[0]

    def drop(self, what: str, key: int | str) -> None:
        """Forget a lease that was lost."""
        self.held.pop((what, key), None)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ledger.close()
