"""From what a person names to requests that were tried: a URL, a model's metadata, a body from a file."""

from __future__ import annotations

import re
from collections.abc import Sequence

from onejob.core.artifact import Json
from onejob.errors import UsageError
from onejob.serve.bench import probe
from onejob.serve.bench.body import BINARY, inputs_of, make_body
from onejob.serve.bench.target import Address, Target, render, split_url
from onejob.serve.bench.wish import Wish

PATIENCE = 30.0
"""Seconds for the first answer: a server may still warm up."""
MODEL = re.compile(r"(?P<base>.*/v2/models/(?P<model>[^/]+)(/versions/[^/]+)?)(/infer)?/?")
OCTETS, JSON_TYPE = "application/octet-stream", "application/json"


def prepare(name: str, url: str, wish: Wish) -> Target:
    """Requests for a target, one of which has been answered well.

    A server's address alone, or a model's, means KServe v2: the body is made from the model's metadata, unless the
    person brings one. Any other path is asked as it stands.
    """
    address, path = split_url(url)
    address = probe.reach(address, PATIENCE)
    bare = path.rstrip("/") in ("", "/v2")
    inference = MODEL.fullmatch(path)
    if inference or wish.model or (bare and not wish.data and not wish.method):
        base = _model_path(address, path, wish, inference)
        return _inference(name, address, base, wish)
    return _plain(name, address, path, wish)


def _model_path(address: Address, path: str, wish: Wish, inference: re.Match[str] | None) -> str:
    """`/v2/models/NAME`, with what stands before it."""
    if inference:
        if wish.model and wish.model != inference["model"]:
            raise UsageError(f"the URL names the model {inference['model']!r}", place="--model", cure="Leave it out.")
        return inference["base"]
    before = path.rstrip("/").removesuffix("/v2")
    return f"{before}/v2/models/{wish.model or probe.model_of(address, PATIENCE, wish.headers)}"


def _inference(name: str, address: Address, base: str, wish: Wish) -> Target:
    path = f"{base}/infer"
    model = base.rpartition("/models/")[2]
    if wish.data:
        return _tried(name, address, wish.method or "POST", path, _own(wish), {"model": model})
    inputs = inputs_of(probe.metadata_of(address, base, PATIENCE, wish.headers))
    bodies: list[tuple[list[tuple[str, str]], bytes]] = []
    for number in range(wish.bodies):
        body, length = make_body(inputs, batch=wish.batch, form=wish.form, shapes=wish.shapes, seed=wish.seed + number)
        headers = [("Content-Type", JSON_TYPE if length is None else OCTETS)]
        if length is not None:
            headers.append(("Inference-Header-Content-Length", str(length)))
        bodies.append(([*headers, *wish.headers], body))
    form = "binary tensors" if wish.form == BINARY else "JSON"
    about = {"model": model, "form": form, "batch": wish.batch}
    return _tried(name, address, wish.method or "POST", path, bodies, about)


def _plain(name: str, address: Address, path: str, wish: Wish) -> Target:
    method = wish.method or ("POST" if wish.data else "GET")
    return _tried(name, address, method, path or "/", _own(wish) or [(list(wish.headers), b"")], {})


def _own(wish: Wish) -> list[tuple[list[tuple[str, str]], bytes]]:
    """The person's own bodies, each with its headers."""
    return [([("Content-Type", wish.data_type), *wish.headers], body) for body in wish.data]


def _tried(
    name: str,
    address: Address,
    method: str,
    path: str,
    bodies: Sequence[tuple[list[tuple[str, str]], bytes]],
    about: dict[str, Json],
) -> Target:
    """The target, once the first of its requests was answered well."""
    if method == "HEAD":
        raise UsageError("an answer to HEAD has no end that can be seen", place="--method", cure="Ask with GET.")
    headers, body = bodies[0]
    answer = probe.ask(address, method, path, headers, body, PATIENCE)
    cure = "Try --format json, --batch, --shape, or a body of your own with --data." if "form" in about else ""
    probe.check(answer, f"{method} {path}", cure)
    requests = tuple(render(method, path, headers, body, address.authority) for headers, body in bodies)
    told = {"method": method, "path": path, "bytes": len(body), **about}
    return Target(name, address, requests, answer.until_eof, told)
