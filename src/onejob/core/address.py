"""Where an endpoint listens, as `[serve] host` says it, and the URL that it goes by."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

UNIX = "unix:"
LONGEST = 107
"""Bytes that the kernel takes for the path of a socket."""


def socket_path(host: str) -> Path | None:
    """The file of a Unix socket, if the host names one (`unix:/run/model.sock`)."""
    return Path(host.removeprefix(UNIX)) if host.startswith(UNIX) else None


def check_host(host: str) -> str:
    """The same; ValueError says why nobody can listen there."""
    if (path := socket_path(host)) is None:
        return host
    if not path.is_absolute() or path == Path("/") or "\0" in host:
        raise ValueError("a Unix socket is named by an absolute path, such as 'unix:/run/model.sock'")
    if len(str(path).encode()) > LONGEST:
        raise ValueError(f"the path of a Unix socket has at most {LONGEST} bytes")
    return f"{UNIX}{path}"


def url_of(host: str, port: int) -> str:
    """Such as `http://127.0.0.1:8000`, or `http+unix://%2Frun%2Fmodel.sock`."""
    if (path := socket_path(host)) is not None:
        return f"http+unix://{quote(str(path), safe='')}"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
