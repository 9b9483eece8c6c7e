"""The composition root: the only place that turns names and URLs into adapters."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from onejob import plugins
from onejob.core.plugin import load
from onejob.loop.home import Home, locate, open_home
from onejob.loop.session import Session
from onejob.store.blobs import DirBlobs
from onejob.store.leases import this_process
from onejob.store.ledger import SqlLedger


def open_session(home: str | Path | None = None, *, clock: Callable[[], float] = time.time) -> Session:
    """Open the home folder (as given, else $ONEJOB_HOME, else ~/.onejob) with its ledger, blobs and executors."""
    place = open_home(locate(home))
    local = load(plugins.resolve("executor", "local"))
    return Session(
        home=place,
        ledger=open_ledger(place, clock),
        blobs=DirBlobs(place.blobs, place.tmp),
        executors={"local": local(cpus=place.settings.cpus, gpus=place.settings.gpus)},
        owner=this_process(),
        clock=clock,
    )


def open_ledger(home: Home, clock: Callable[[], float] = time.time) -> SqlLedger:
    """The ledger that the home's settings name."""
    return SqlLedger(home.ledger_url, clock=clock)
