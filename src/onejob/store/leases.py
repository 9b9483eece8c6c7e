"""Leases: the right to work on a run, an execution or an endpoint, while it lasts.

A lease has an owner (host, pid and the process's start time), a token and a time at which it expires. It is free when
it has expired, or when its owner is a process of this host that is dead. Times come from wall clocks, and these jump;
what makes work safe is therefore the token alone: whoever takes a lease over gets a new token, and every change made
under the old one is refused (LeaseLostError). A clock that jumps may thus cost work, never correctness:

- forward: a live lease looks expired and is taken over; its old holder learns so at its next change or renewal.
- backward: a lease would seem to last for long. Nobody may hold more than the time he asked for, so a lease whose end
  is further away than that is cut to that time from now, and is free soon after, if its holder doesn't renew it.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Connection, Row, Table, select
from sqlalchemy.sql.elements import ColumnElement

from onejob.core.records import Lease, Owner
from onejob.core.state import EXECUTION, ExecutionState, final
from onejob.errors import NotFoundError, UsageError
from onejob.store.rows import NO_LEASE, Part, change
from onejob.store.schema import ENDPOINT
from onejob.store.schema import EXECUTION as EXECUTION_TABLE
from onejob.store.schema import RUN as RUN_TABLE

PROC = Path("/proc")
TOKEN_BYTES = 16

LEASED: dict[str, tuple[Table, Column[Any]]] = {
    "run": (RUN_TABLE, RUN_TABLE.c.id),
    "execution": (EXECUTION_TABLE, EXECUTION_TABLE.c.id),
    "endpoint": (ENDPOINT, ENDPOINT.c.name),
}


class SqlLeases(Part):
    """Take, hold longer, and give up leases."""

    def lease(self, what: str, key: int | str, owner: Owner, ttl: float) -> Lease | None:
        """Take it if it is free, expired, ours already, or its owner is dead; an ended execution is nobody's: None."""
        where = _where(what, key)
        with self._db.write() as connection:
            row = _row(connection, what, key, where)
            if what == "execution" and final(EXECUTION, ExecutionState(row.state)):
                return None
            why = self._free(row, owner)
            if not why:
                self._cut(connection, what, where, row)
                return None
            token = row.lease_token if why == "ours" else self._token(TOKEN_BYTES)
            lease = Lease(str(owner), token, self._clock() + ttl)
            change(connection, LEASED[what][0], where, lease_values(lease, ttl))
            if why in ("expired", "dead"):
                data = {"from": row.lease_owner, "owner": str(owner), "why": why}
                self._event(connection, f"{what}/{key}", "taken over", data)
            return lease

    def renew(self, what: str, key: int | str, token: str, ttl: float) -> bool:
        """Hold it longer: also when it has expired, as long as nobody took it."""
        where = _where(what, key)
        with self._db.write() as connection:
            row = _row(connection, what, key, where)
            if row.lease_owner is None or row.lease_token != token:
                return False
            values = {"lease_expires": self._clock() + ttl, "lease_ttl": ttl}
            change(connection, LEASED[what][0], where, values)
            return True

    def release(self, what: str, key: int | str, token: str) -> None:
        """Give it up; a lease that is somebody else's by now is left alone."""
        where = _where(what, key)
        with self._db.write() as connection:
            row = _row(connection, what, key, where)
            if row.lease_owner is not None and row.lease_token == token:
                change(connection, LEASED[what][0], where, {**NO_LEASE, "lease_token": None})

    def _free(self, row: Row[Any], owner: Owner) -> str:
        """Why the lease may be taken, or nothing."""
        if row.lease_owner is None:
            return "free"
        if row.lease_owner == str(owner):
            return "ours"
        if row.lease_expires <= self._clock():
            return "expired"
        return "dead" if self._alive(Owner.parse(row.lease_owner)) is False else ""

    def _cut(self, connection: Connection, what: str, where: ColumnElement[bool], row: Row[Any]) -> None:
        """A lease ends no later than its own length from now: the clock went back since it was taken."""
        longest = self._clock() + row.lease_ttl
        if row.lease_expires > longest:
            change(connection, LEASED[what][0], where, {"lease_expires": longest})


def lease_values(lease: Lease, ttl: float) -> dict[str, Any]:
    """A lease as columns."""
    return {
        "lease_owner": lease.owner,
        "lease_token": lease.token,
        "lease_expires": lease.expires,
        "lease_ttl": ttl,
    }


def _where(what: str, key: int | str) -> ColumnElement[bool]:
    if what not in LEASED:
        raise UsageError(f"nobody can lease a {what!r}", cure=f"There are: {', '.join(LEASED)}.")
    return LEASED[what][1] == key


def _row(connection: Connection, what: str, key: int | str, where: ColumnElement[bool]) -> Row[Any]:
    row = connection.execute(select(LEASED[what][0]).where(where)).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no {what} {key}")
    return row


# ---- processes -----------------------------------------------------------------------------------------------------


def this_process() -> Owner:
    """Who we are: a name for all that shares our process ids (machine, boot, pid namespace), pid, start time."""
    return Owner(host_name(), os.getpid(), _start_time(os.getpid()) or 0.0)


def alive(owner: Owner) -> bool | None:
    """Whether the owner's process lives; None if it isn't of this host, or can't be told."""
    if owner.host != host_name() or not PROC.is_dir():
        return None
    return _start_time(owner.pid) == owner.started


def host_name() -> str:
    """Process ids mean something only within one boot and one pid namespace, so both are part of the name."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text()[:8]
        namespace = os.readlink(PROC / "self/ns/pid").strip("pid:[]")
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()}/{boot}/{namespace}"


def _start_time(pid: int) -> float | None:
    """Seconds from boot to the start of a process; None if it is gone, or a zombie."""
    try:
        stat = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses, and may itself hold any of these.
    fields = stat[stat.rindex(")") + 2 :].split()
    state, ticks = fields[0], int(fields[19])
    return None if state in "ZX" else round(ticks / os.sysconf("SC_CLK_TCK"), 2)
