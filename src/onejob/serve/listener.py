"""The listening socket of an endpoint: bound once by the host, inherited by every replica, so that none is ever
refused."""

from __future__ import annotations

import socket
from pathlib import Path

from onejob.errors import PortInUseError, UnavailableError

BACKLOG = 4096
_LISTEN = "0A"


def bind(host: str, port: int, *, preferred: int = 0) -> socket.socket:
    """A listening socket; port 0 takes `preferred` if free, else any free one. PortInUseError names the holder."""
    if port == 0 and preferred:
        try:
            return _bind(host, preferred)
        except OSError:
            pass  # somebody else has it by now
    try:
        return _bind(host, port)
    except OSError as error:
        if isinstance(error, socket.gaierror) or port == 0:
            raise UnavailableError(f"can't listen on {host}: {error}", place="[serve] host") from None
        raise _explain(host, port, error) from None


def holder(port: int, proc: Path = Path("/proc")) -> int | None:
    """The process that listens on a port, from /proc; None if it can't be seen (another user's)."""
    inodes = {inode for name in ("tcp", "tcp6") for inode in _listening(proc / "net" / name, port)}
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for folder in proc.glob("[0-9]*"):
        try:
            if any(str(link.readlink()) in wanted for link in (folder / "fd").iterdir()):
                return int(folder.name)
        except OSError:
            continue  # ended in between, or not ours to see
    return None


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _explain(host: str, port: int, error: OSError) -> Exception:
    if isinstance(error, PermissionError):
        return UnavailableError(
            f"port {port} may not be opened by this user", place="[serve] port", cure="Take one above 1023."
        )
    pid = holder(port)
    by = f" by process {pid}" if pid else ""
    return PortInUseError(
        f"port {port} on {host} is in use{by} ({error.strerror})",
        place="[serve] port",
        cure="Stop that process, or choose another port; port = 0 takes a free one.",
    )


def _listening(path: Path, port: int) -> list[str]:
    try:
        lines = path.read_text().splitlines()[1:]
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [row[9] for row in rows if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port]
