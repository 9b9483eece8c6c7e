"""The listening socket of an endpoint: bound once by the host, inherited by every replica, so that none is ever
refused. It is a TCP port, or a Unix socket, whose file is there as long as the host listens."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from onejob.core.address import socket_path
from onejob.errors import OnejobError, PortInUseError, UnavailableError

BACKLOG = 4096
MODE = 0o600
"""Of a Unix socket's file: who may not write to it can't connect."""
SO_ATTACH_FILTER = 26
_FILTER = struct.Struct("HBBI")
_NO_SYN = (
    (0x30, 0, 0, 13),  # load the byte of the TCP header that holds the flags
    (0x45, 0, 1, 0x02),  # has it SYN?
    (0x06, 0, 0, 0),  # then drop it
    (0x06, 0, 0, 0xFFFFFFFF),
)
"""A classic BPF program: (operation, jump if true, jump if false, operand)."""
_LISTEN = "0A"
_ACCEPTS = "00010000"


class UnixListener(socket.socket):
    """A Unix socket that listens, and which file is its own."""

    file: tuple[int, int] | None = None
    """Device and inode."""


def bind(host: str, port: int, *, preferred: int = 0) -> socket.socket:
    """A listening socket; port 0 takes `preferred` if free, else any free one. PortInUseError names the holder.

    `unix:/run/model.sock` is a Unix socket, in the place of a file that nobody listens at any more.
    """
    if (path := socket_path(host)) is not None:
        return _bind_unix(path)
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


def shut_out(listener: socket.socket) -> None:
    """Let nobody new knock; who has knocked is still let in.

    A listener that is closed resets the connections that wait in its queue, with what their clients have sent. So
    packets that would open another one are dropped first (a client sends them again a second later, and is refused),
    and the queue can be emptied for good.
    """
    if listener.family == socket.AF_UNIX:
        return
    program = ctypes.create_string_buffer(b"".join(_FILTER.pack(*line) for line in _NO_SYN))
    with contextlib.suppress(OSError):  # a system that can't: then who knocks in the last instant is reset
        listener.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(_NO_SYN), ctypes.addressof(program))
        )


def release(listener: socket.socket) -> None:
    """Listen no more; a Unix socket's file goes first, so that nobody is refused by one that is there."""
    if isinstance(listener, UnixListener) and listener.file is not None:
        with contextlib.suppress(OSError):  # it is gone, or the socket is closed already
            path = Path(listener.getsockname())
            if _identity(path) == listener.file:
                path.unlink()
    listener.close()


def forget(host: str) -> None:
    """Remove the file of a Unix socket that nobody listens at any more; whatever else is there is left alone."""
    path = socket_path(host)
    if path is not None:
        with contextlib.suppress(OSError, OnejobError), _alone_in(path.parent):
            _clear(path)


def port_of(listener: socket.socket) -> int:
    """The port; 0 of a Unix socket."""
    return 0 if listener.family == socket.AF_UNIX else int(listener.getsockname()[1])


def holder(at: int | Path, proc: Path = Path("/proc")) -> int | None:
    """The process that listens on a port, or at a Unix socket's file, from /proc; None if it can't be seen."""
    if isinstance(at, Path):
        inodes = set(_listening_at(proc / "net" / "unix", at))
    else:
        inodes = {inode for name in ("tcp", "tcp6") for inode in _listening(proc / "net" / name, at)}
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


def _bind_unix(path: Path) -> UnixListener:
    sock = UnixListener(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(sock.fileno(), MODE)  # before there is a file: it is never open to more than that
        with _alone_in(path.parent):
            _clear(path)
            sock.bind(str(path))
            sock.file = _identity(path)
            sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        cure = "Make its folder first." if error.errno == errno.ENOENT else ""
        raise UnavailableError(f"can't listen at {path}: {error.strerror}", place="[serve] host", cure=cure) from None
    except Exception:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Nobody else is between looking and binding."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _clear(path: Path) -> None:
    """Remove what a listener that has ended left behind."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UnavailableError(
            f"{path} is there already, and is no socket", place="[serve] host", cure="Choose another path."
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        refused = caller.connect_ex(str(path)) == errno.ECONNREFUSED
    if not refused:
        pid = holder(path)
        by = f" by process {pid}" if pid else ""
        raise PortInUseError(
            f"the socket {path} is in use{by}",
            place="[serve] host",
            cure="Stop that process, or choose another path.",
        )
    path.unlink()


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


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


def _listening_at(table: Path, path: Path) -> list[str]:
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return []
    rows = [line.split(maxsplit=7) for line in lines]
    return [row[6] for row in rows if len(row) == 8 and row[3] == _ACCEPTS and row[7] == str(path)]
