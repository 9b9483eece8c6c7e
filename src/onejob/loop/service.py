"""The service of endpoints: their counters are collected at each one's interval, and looked at each minute for error
budgets that burn too fast. Counters aren't artifacts, so no step is needed, and what is found are signals like others.

Intervals are of the wall clock, which jumps: whoever was last served "in the future" is served at once.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from zoneinfo import ZoneInfo

from onejob.core.artifact import Json
from onejob.core.records import Endpoint, NewSignal
from onejob.loop.champion import block_begins, event_now
from onejob.loop.closing import UP
from onejob.loop.session import Session
from onejob.loop.trigger import SLO
from onejob.monitor.collect import collect_once, series_of
from onejob.monitor.plan import slo_signals
from onejob.monitor.slo import HOUR
from onejob.monitor.spec import Block, Slo, Spec

EVERY = 60.0
"""Seconds between two looks at how fast the error budgets burn."""


@dataclass(frozen=True)
class Service:
    """What `onejob up` does beside its passes, for all endpoints of this machine that weren't stopped."""

    session: Session
    collected: dict[str, float] = field(default_factory=dict)
    """Endpoint -> when its counters were collected last."""
    watched: dict[str, float] = field(default_factory=dict)
    """Endpoint -> when its budgets were looked at last."""

    def tend(self, only: str | None = None) -> None:
        """Whatever is due, of all or of one; what goes wrong with one endpoint is told, and the others are tended."""
        for endpoint in self.session.ledger.list_endpoints():
            if only not in (None, endpoint.name) or endpoint.state not in UP:
                continue
            if self.session.is_here((endpoint.handle or {}).get("host", "")):
                self.session.troubles.guard(f"service/{endpoint.name}", partial(self._tend, endpoint))

    def _tend(self, endpoint: Endpoint) -> None:
        folder, spec = self.session.home.endpoint(endpoint.name), _spec(endpoint)
        if not folder.is_dir():
            return  # it is only just wanted
        if self._is_due(self.collected, endpoint.name, spec.interval):
            collect_once(folder, self.session.clock(), every=spec.interval, keep=spec.keep)
        if self._is_due(self.watched, endpoint.name, EVERY):
            watch_service(self.session, endpoint.name)

    def _is_due(self, last: dict[str, float], name: str, every: float) -> bool:
        now = self.session.clock()
        if name in last and 0 <= now - last[name] < every:
            return False
        last[name] = now
        return True


def watch_service(session: Session, name: str) -> None:
    """Signals of an endpoint's service: once for each objective, severity, block of event time, and champion."""
    endpoint = session.ledger.get_endpoint(name)
    if endpoint is None or (spec := _spec(endpoint)).slo == Slo():
        return
    found = slo_signals(spec.slo, series_of(session.home.endpoint(name)), session.clock())
    if not found:
        return
    now = event_now(session, name)
    if now is None:
        now = session.clock()  # failed requests aren't captured, and it may have had no other
    block = _name(now, spec.block)
    told = {s.block for s in session.ledger.list_signals(name) if (s.kind, s.champion) == (SLO, endpoint.artifact)}
    signals: list[NewSignal] = []
    for alert in found:  # the fastest burn of an objective first: a ticket is no news after a page
        named = [f"{alert['evidence']['objective']} ({severity}), {block}" for severity in ("page", "ticket")]
        place = ("page", "ticket").index(alert["evidence"]["severity"])
        if told.isdisjoint(named[: place + 1]):
            told.add(named[place])
            signals.append(_signal(alert, named[place]))
    session.ledger.add_signals(name, signals, event_time=now, champion=endpoint.artifact)


def _signal(alert: Mapping[str, Json], named: str) -> NewSignal:
    long = alert["evidence"]["long"]
    says = f"{long['bad']:,.0f} of {long['total']:,.0f} requests in {long['window'] / HOUR:g} h"
    return NewSignal(SLO, named, alert["value"], alert["threshold"], {**alert["evidence"], "says": says})


def _spec(endpoint: Endpoint) -> Spec:
    return Spec.model_validate(endpoint.options.get("monitor") or {})


def _name(now: float, block: Block) -> str:
    """The block that goes on, by its beginning."""
    begins = datetime.datetime.fromtimestamp(block_begins(now, block.by, block.zone), ZoneInfo(block.zone))
    return begins.isoformat(timespec="minutes") if block.by == "hour" else begins.date().isoformat()
