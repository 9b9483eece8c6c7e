"""Ask a server before the load begins: what its models are, and whether it answers the request that will be sent.

One plain request at a time, through the standard library's client.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from onejob.core.artifact import Json
from onejob.errors import BadRequestError, InferenceError, NotFoundError
from onejob.serve.bench.target import Address, resolved

TEXT = 400
"""Characters of an answer that are shown."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    body: bytes
    until_eof: bool
    """Nothing but the end of the connection says where it ends."""

    @property
    def text(self) -> str:
        """What it says is wrong, as far as it says so."""
        try:
            message = json.loads(self.body)
        except ValueError:
            message = None
        words = message.get("error") if isinstance(message, dict) else None
        text = words if isinstance(words, str) else self.body.decode("utf-8", "replace").strip()
        return text[:TEXT]


class _Connection(http.client.HTTPConnection):
    """To an address that is known already: no name is asked for again, and a Unix socket will do."""

    def __init__(self, address: Address, timeout: float) -> None:
        super().__init__(address.host, address.port or None, timeout=timeout)
        self._address = address

    def connect(self) -> None:
        at = self._address
        if at.socket:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(self.timeout)
            self.sock.connect(at.socket)
        else:
            self.sock = socket.create_connection((at.ip, at.port), timeout=self.timeout)
        if at.tls:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=at.host)


def ask(
    address: Address, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes, timeout: float
) -> Answer:
    """One request and its answer; InferenceError if there is none."""
    connection = _Connection(address, timeout)
    try:
        connection.putrequest(method, path or "/", skip_host=True, skip_accept_encoding=True)
        sent = {"host": address.authority} | {name.lower(): value for name, value in headers}
        if body or method not in ("GET", "DELETE"):
            sent.setdefault("content-length", str(len(body)))
        for name, value in sent.items():
            connection.putheader(name, value)
        connection.endheaders(body or None)
        response = connection.getresponse()
        until_eof = response.length is None and not response.chunked
        return Answer(response.status, response.read(), until_eof)
    except (OSError, http.client.HTTPException) as error:
        words = f"no answer: {error}" if str(error) else f"no answer: {type(error).__name__}"
        raise InferenceError(words, place=place_of(address), cure="Is it running?") from None
    finally:
        connection.close()


def reach(address: Address, timeout: float) -> Address:
    """The same with the first of its IP addresses that takes a connection."""
    found = resolved(address)
    problem: OSError | None = None
    for one in found:
        connection = _Connection(one, timeout)
        try:
            connection.connect()
        except OSError as error:
            problem = error
        else:
            return one
        finally:
            connection.close()
    untrusted = isinstance(problem, ssl.SSLCertVerificationError)
    cure = "The variable SSL_CERT_FILE names certificates to trust." if untrusted else "Is it running?"
    raise InferenceError(f"no connection: {problem}", place=place_of(address), cure=cure)


def model_of(address: Address, timeout: float, headers: Sequence[tuple[str, str]]) -> str:
    """The one model that a KServe v2 server has; NotFoundError names them if there are several, or none."""
    answer = ask(
        address, "POST", "/v2/repository/index", [*headers, ("Content-Type", "application/json")], b"{}", timeout
    )
    try:
        listed = json.loads(answer.body) if answer.status == 200 else None
    except ValueError:
        listed = None
    if not isinstance(listed, list):
        cure = "Name one with --model; if it isn't a KServe v2 server, give a path, or a body with --data FILE."
        raise NotFoundError("it doesn't say which models it has", place=place_of(address), cure=cure)
    names = sorted({str(one["name"]) for one in listed if isinstance(one, dict) and one.get("name")})
    if len(names) == 1:
        return names[0]
    cure = f"Name one with --model: {', '.join(names[:20])}." if names else "Load one first."
    raise NotFoundError(f"it has {len(names)} models", place=place_of(address), cure=cure)


def metadata_of(address: Address, path: str, timeout: float, headers: Sequence[tuple[str, str]]) -> dict[str, Json]:
    """What a model says of itself; NotFoundError if it can't."""
    answer = ask(address, "GET", path, headers, b"", timeout)
    try:
        metadata = json.loads(answer.body) if answer.status == 200 else None
    except ValueError:
        metadata = None
    if not isinstance(metadata, dict):
        cure = "Give a body with --data FILE if it isn't a KServe v2 server."
        raise NotFoundError(f"{path} answers {answer.status}: {answer.text}", place=place_of(address), cure=cure)
    return metadata


def check(answer: Answer, what: str, cure: str) -> None:
    """BadRequestError if the request was refused: measuring how quickly that is done is no use."""
    if not 200 <= answer.status < 300:
        raise BadRequestError(f"it answers {answer.status} to the request: {answer.text}", place=what, cure=cure)


def place_of(address: Address) -> str:
    """The address as an error names it."""
    return address.socket or f"{'https' if address.tls else 'http'}://{address.authority}"
