"""What is asked: an address, a path, and the bytes of a request. Pure, but for asking the resolver."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from onejob.core.artifact import Json
from onejob.errors import NotFoundError, UsageError

SCHEMES = ("http", "https", "http+unix")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    host: str
    """As it was written: for the Host header and for TLS."""
    port: int = 0
    ip: str = ""
    """What it resolved to."""
    tls: bool = False
    socket: str = ""
    """The path of a Unix socket, which stands in the place of ip and port."""

    @property
    def authority(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.socket or self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    @property
    def local(self) -> bool:
        """Whether it is this machine for certain."""
        return not self.socket and (self.ip.startswith("127.") or self.ip in ("::1", "0.0.0.0", "::"))

    def to_json(self) -> dict[str, Json]:
        return {"host": self.host, "port": self.port, "ip": self.ip, "tls": self.tls, "socket": self.socket}


@dataclass(frozen=True, slots=True)
class Target:
    """A server's address, and requests that are made and have been tried."""

    name: str
    """As the person named it."""
    address: Address
    requests: tuple[bytes, ...]
    """Whole ones, sent in turn."""
    until_eof: bool = False
    """An answer ends with its connection."""
    about: Mapping[str, Json] = field(default_factory=dict)
    """`method`, `path`, `model`, `body`: for a person to read."""


def is_url(text: str) -> bool:
    """Whether it is a URL rather than the name of an endpoint."""
    return "://" in text


def split_url(text: str) -> tuple[Address, str]:
    """The address, not resolved yet, and the path with its query, of a URL; UsageError says what is wrong with it.

    `http+unix://%2Frun%2Fserver.sock/path` names a Unix socket.
    """
    cure = "Such as http://127.0.0.1:8000, http://host/v2/models/NAME, or http+unix://%2Frun%2Fserver.sock."
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"it is no URL: {error}", place=text, cure=cure) from None
    if parts.scheme not in SCHEMES:
        raise UsageError(f"{parts.scheme}:// can't be asked", place=text, cure=cure)
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    if not (path.isascii() and path.isprintable()) or " " in path:
        raise UsageError("its path must be percent-encoded", place=text, cure=cure)
    if parts.scheme == "http+unix":
        name = unquote(parts.netloc)
        if not name.startswith("/"):
            raise UsageError("it names no socket", place=text, cure=cure)
        return Address("localhost", socket=name), path
    if not parts.hostname:
        raise UsageError("it names no host", place=text, cure=cure)
    tls = parts.scheme == "https"
    return Address(parts.hostname, port or (443 if tls else 80), tls=tls), path


def resolved(address: Address) -> list[Address]:
    """The same with each IP address that the host's name has; NotFoundError if it has none."""
    if address.socket:
        return [address]
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise NotFoundError(f"the host can't be found: {error.strerror}", place=address.host) from None
    ips = dict.fromkeys(str(info[4][0]) for info in found)
    return [Address(address.host, address.port, ip, address.tls) for ip in ips]


def render(method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes, authority: str) -> bytes:
    """The bytes of a request; of headers by the same name, the last one counts."""
    lines = {"host": ("Host", authority)}
    if body or method not in ("GET", "DELETE"):
        lines["content-length"] = ("Content-Length", str(len(body)))
    for name, value in headers:
        lines[name.lower()] = (name, value)
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.values())
    return f"{method} {path or '/'} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


def parse_header(text: str) -> tuple[str, str]:
    """`Name: value`; UsageError if it isn't one."""
    name, colon, value = text.partition(":")
    name, value = name.strip(), value.strip()
    proper = name and all(letter.isalnum() or letter in "!#$%&'*+-.^_`|~" for letter in name) and name.isascii()
    if not colon or not proper or "\r" in value or "\n" in value or not _fits_latin(value):
        raise UsageError(f"{text!r} is no header", place="--header", cure="Such as --header 'Authorization: Bearer x'.")
    return name, value


def _fits_latin(text: str) -> bool:
    try:
        text.encode("latin-1")
    except UnicodeEncodeError:
        return False
    return True
