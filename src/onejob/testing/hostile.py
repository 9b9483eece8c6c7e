"""What a client must never send, and may: streams of requests, right and wrong in every way that one can be wrong.

Strategies of hypothesis make them: tensors that lie about their datatype or shape, sizes that don't add up, JSON that
isn't, bodies cut short or packed, heads that are too large or say two things, several requests in a row, in any pieces.
They are for three models: `m` (FP32 [-1, 2], y = 2 x + 1), `t` (BYTES [-1, 1], the same text back) and `k` (one input
of each of several datatypes, given back).
"""

from __future__ import annotations

import copy
import gzip
import itertools
import json
import re
import struct
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

KINDS: Mapping[str, str] = {
    "FP16": "<f2",
    "BF16": "<u2",
    "FP64": "<f8",
    "INT8": "<i1",
    "UINT64": "<u8",
    "BOOL": "?",
    "BYTES": "O",
}
MODELS: Mapping[str, Sequence[tuple[str, str, int]]] = {
    "m": [("x", "FP32", 2)],
    "t": [("text", "BYTES", 1)],
    "k": [(name.lower(), name, 1) for name in KINDS],
}
"""Model -> (input, datatype, width of a row)."""

DEEP = {b'"@deep"': b"[" * 200 + b"]" * 200, b'"@deeper"': b"[" * 1010 + b"]" * 1010}
"""Stand-ins in JUNK, since Python itself doesn't write what is nested so deep."""
JUNK: Sequence[Any] = (
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64, 2**200, -(2**63), 1.5, 1e308, -0.0),
    *("", "x", "y", "FP32", "fp32", "BYTES", "INT64", "BF16", "m", "1", "é\u2028", "\x00", "a" * 300, "nan"),
    *([], [[]], [[], [1]], [1], [-1], [0], [0, 2], [2, 0], [1, 2], [1, -2], [2**40, 2**40], [1] * 70, [None, None]),
    *(["a", "b"], [True, False], [[1, 2], [3]], [1e400, float("nan")], [float("inf")], "@deep", "@deeper"),
    *({}, {"a": 1}, {"binary_data_size": 8}, {"binary_data_size": -1}, {"binary_data_size": 2**63}, {"data": [1]}),
    *({"classification": 1}, {"classification": 2**40}, {"binary_data": True}, {"shared_memory_region": "r"}),
    *({"binary_data_output": True}, {"priority": 1}, {"timeout": 1}, {"timeout": 2**63}, {"sequence_id": 3}),
)
PLAIN: Sequence[tuple[bytes, Any]] = (
    (b"/v1/models/m:predict", {"instances": [{"x": [1, 2]}, {"x": [3, 4]}]}),
    (b"/v1/models/t:predict", {"instances": ["a", "b"]}),
    (b"/v1/models/k:predict", {"instances": [{name.lower(): 1 for name in KINDS}]}),
    (b"/v2/models/m/generate", {"x": [1, 2], "id": "7", "parameters": {"priority": 1}}),
    (b"/v2/models/t/generate", {"text": "a"}),
    (b"/v2/models/t/generate_stream", {"text": "a", "parameters": {"timeout": 10**7}}),
    (b"/v2/models/k/generate_stream", {name.lower(): 0 for name in KINDS}),
    (b"/v2/repository/index", {"ready": True}),
    (b"/v2/repository/models/nope/load", {"parameters": {"config": "{}", "file:1/model.onnx": "aGk="}}),
    (b"/v2/repository/models/nope/unload", {"parameters": {"unload_dependents": True}}),
)
"""(path, message) of what is not v2's inference."""
URLS: Sequence[bytes] = (
    *(b"/", b"*", b"//", b"/v2", b"/v2/", b"/v2?x=1", b"/v2/health/live", b"/v2/health/ready", b"/v2/models/m"),
    *(
        b"/v2/models/m/config",
        b"/v2/models/m/ready",
        b"/v2/models/m/versions/1/infer",
        b"/v2/models/m/versions/9/infer",
    ),
    *(b"/v2/models//infer", b"/v2/models/%00/infer", b"/v2/models/%6D/infer", b"/v2/models/..%2f..%2fetc/infer"),
    *(b"/v2/models/m/generate", b"/v2/models/m/generate_stream", b"/v2/repository/index", b"/v1/models/m:predict"),
    *(b"/v2/repository/models/../load", b"/v2/repository/models/%2e%2e/load", b"/v2/repository/models//load"),
    *(b"/v2/repository/models/nope/unload", b"/v2/repository/models/" + b"n" * 300 + b"/load", b"/v1/models/m/labels"),
    *(
        b"http://h/v2/models/m/infer",
        b"/\xff\xfe",
        b"/%",
        b"/%zz",
        b"/" + b"a" * 5000,
        b"/v2/models/m/stats",
        b"/metrics",
    ),
)
HEADERS: Sequence[tuple[bytes, bytes]] = (
    *((b"X-Request-Id", value) for value in (b"", b"mine", b"a b", b"\xff\xfe", b"x" * 129, b"x" * 5000, b"a\tb")),
    *((b"Connection", value) for value in (b"close", b"keep-alive", b"Upgrade", b"close, keep-alive", b"Te")),
    *((b"uPgRaDe", value) for value in (b"h2c", b"websocket", b"")),
    *((b"Expect", value) for value in (b"100-continue", b"100-CONTINUE", b"200-ok")),
    *((b"Content-Encoding", value) for value in (b"gzip", b"deflate", b"br", b"identity", b"gzip, gzip", b"\xff")),
    *((b"Content-Type", value) for value in (b"application/json", b"text/csv", b"\xff", b"")),
    *((b"Accept-Encoding", value) for value in (b"gzip", b"deflate", b"*;q=0", b"gzip;q=x", b",,,")),
    *((b"iNfErEnCe-HeAdEr-CoNtEnT-lEnGtH", value) for value in (b"0", b"1", b"-1", b"9" * 30, b"x", b" 5 ", b"")),
    *(
        (b"Content-Length", value)
        for value in (b"0", b"5", b"-1", b"+5", b"0x5", b"9" * 5000, b"5, 5", b"18446744073709551617")
    ),
    *(
        (b"Transfer-Encoding", value)
        for value in (b"chunked", b"identity", b"gzip, chunked", b"chunked, chunked", b"x")
    ),
    *(
        (b"X-Request-Key", b"\xe9"),
        (b"Host", b""),
        (b"Range", b"bytes=0-1"),
        (b"Trailer", b"x"),
        (b"Cookie", b"c" * 9000),
    ),
    *(
        (b"", b"v"),
        (b"a b", b"v"),
        (b"a", b"v\r\n folded"),
        (b"a", b"\x00"),
        (b"a" * 70_000, b"v"),
        (b"a", b"v" * 70_000),
    ),
)
METHODS = (
    b"POST",
    b"GET",
    b"PUT",
    b"DELETE",
    b"OPTIONS",
    b"PATCH",
    b"TRACE",
    b"CONNECT",
    b"PRI",
    b"post",
    b"",
    b"X" * 50,
)
VERSIONS = (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/1.2", b"HTTP/2.0", b"HTTP/0.9", b"http/1.1", b"HTTP/1.1 ", b"")


@dataclass(frozen=True)
class Stream:
    """What one client sends on one connection."""

    data: bytes
    cuts: tuple[int, ...]
    """Where it is cut into pieces."""
    requests: int | None
    """How many requests there are to answer; None where the stream itself is wrong."""

    @property
    def pieces(self) -> list[bytes]:
        ends = [0, *self.cuts, len(self.data)]
        return [self.data[start:stop] for start, stop in itertools.pairwise(ends) if stop > start]


# ---- messages


def encode(values: np.ndarray[Any, Any] | Sequence[bytes], datatype: str) -> bytes:
    """A tensor's bytes."""
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(value)) + bytes(value) for value in values)
    assert isinstance(values, np.ndarray)
    return values.tobytes()


def ask(path: bytes, body: bytes, header_length: int | None = None, extra: bytes = b"") -> bytes:
    """A proper POST."""
    length = b"" if header_length is None else b"Inference-Header-Content-Length: %d\r\n" % header_length
    head = b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n%b%b\r\n" % (path, len(body), length, extra)
    return head + body


def infer(model: str, arrays: Mapping[str, Any], *, binary: bool = True, **more: Any) -> tuple[bytes, int | None]:
    """The body of a proper inference request, and the length of its JSON if bytes follow it."""
    entries: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for name, datatype, width in MODELS[model]:
        values = arrays[name]
        entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": [len(values) // width, width]}
        if binary:
            parts.append(encode(values, datatype))
            entry["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            entry["data"] = [each.decode("latin-1") if isinstance(each, bytes) else each.item() for each in values]
        entries.append(entry)
    if binary:
        more["parameters"] = {"binary_data_output": True, **more.get("parameters", {})}
    text = json.dumps({**more, "inputs": entries}).encode()
    return b"".join((text, *parts)), len(text) if binary else None


@st.composite
def arrays(draw: st.DrawFn, model: str) -> dict[str, Any]:
    """Proper tensors of a model, of the same rows."""
    rows = draw(st.sampled_from((1, 1, 2, 5)))
    found: dict[str, Any] = {}
    for name, datatype, width in MODELS[model]:
        count = rows * width
        if datatype == "BYTES":
            found[name] = draw(
                st.lists(st.sampled_from((b"", b"a", b"tea", b"x" * 40)), min_size=count, max_size=count)
            )
        elif datatype == "FP32":
            numbers = draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
            found[name] = np.array(numbers, "<f4")
        else:
            found[name] = np.frombuffer(bytes(draw(st.integers(0, 1)) for _ in range(count)), "u1").astype(
                KINDS[datatype]
            )
    return found


@st.composite
def bodies(draw: st.DrawFn, models: Collection[str]) -> tuple[str, bytes, int | None]:
    """(model, body, length of its JSON) of an inference request that has none, one or several things wrong."""
    model = draw(st.sampled_from(sorted(models)))
    body, length = infer(model, draw(arrays(model)), binary=draw(st.booleans()), **draw(extras()))
    text, data = (body, b"") if length is None else (body[:length], body[length:])
    wrong = draw(st.integers(0, 6))
    if wrong in (1, 2):
        text = _dumped(draw(spoiled(json.loads(text))))
    elif wrong == 3:
        text = draw(torn(text))
    if length is not None:
        length = len(text)
        if wrong == 4:
            data = draw(torn(data))
        elif wrong == 5:
            length = draw(st.sampled_from((0, 1, length - 1, length + 1, length + len(data), len(data), 10**9, 10**18)))
    if wrong == 6:
        length = draw(st.sampled_from((None, 0, len(text))))
    return model, text + data, length


@st.composite
def extras(draw: st.DrawFn) -> dict[str, Any]:
    """What a message may say beside its inputs."""
    more: dict[str, Any] = {}
    if draw(st.booleans()):
        return more
    for name, values in (
        ("id", ("", "mine", "7", 5, None, "ü")),
        ("outputs", ([], [{"name": "y"}], [{"name": "nope"}], [{"name": "y", "parameters": {"classification": 2}}])),
        (
            "parameters",
            ({}, {"priority": 1}, {"timeout": 10**7}, {"timeout": 1}, {"own": "x"}, {"binary_data_output": 1}),
        ),
    ):
        if draw(st.booleans()):
            more[name] = draw(st.sampled_from(values))
    return more


@st.composite
def spoiled(draw: st.DrawFn, message: Any) -> Any:
    """A message with something in it replaced, left out or doubled."""
    for _ in range(draw(st.integers(1, 2))):
        owner: Any = message
        while True:
            keys = list(owner) if isinstance(owner, dict) else list(range(len(owner)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(owner[key], dict | list) and owner[key] and draw(st.booleans()):
                owner = owner[key]
                continue
            how = draw(st.integers(0, 4))
            if how == 0:
                del owner[key]
            elif how == 1 and isinstance(owner, list):
                owner.append(copy.deepcopy(owner[key]))
            elif how == 1:
                owner[draw(st.sampled_from(("data", "parameters", "shape", "name")))] = copy.deepcopy(owner[key])
            else:
                owner[key] = copy.deepcopy(draw(st.sampled_from(JUNK)))
            break
    return message


@st.composite
def torn(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes cut short, made longer, or changed."""
    at = draw(st.integers(0, max(0, len(data) - 1)))
    more = draw(
        st.sampled_from(
            (b"", b"\x00", b"\xff" * 4, b"\x00\x00\x00\x80", b"{", b'"', b"\\u", b"]", b"\r\n\r\n", b"9" * 40)
        )
    )
    how = draw(st.integers(0, 3))
    if how == 0:
        return data[:at]
    if how == 1:
        return data + more
    return data[:at] + more + data[at + (len(more) if how == 2 else 0) :]


# ---- streams


@st.composite
def proper(draw: st.DrawFn, models: Collection[str]) -> bytes:
    """A request that is proper HTTP, whatever its message is."""
    if draw(st.integers(0, 5)) == 0:
        url = draw(st.sampled_from([url for url in URLS if url.startswith(b"/") and url.isascii()]))
        return b"GET %b HTTP/1.1\r\nHost: h\r\n\r\n" % url
    if draw(st.integers(0, 5)) == 0:
        return draw(plain())
    model, body, length = draw(bodies(models))
    extra = draw(
        st.sampled_from((b"", b"", b"X-Request-Id: mine\r\n", b"aCCept: */*\r\n", b"X: " + b"y" * 3000 + b"\r\n"))
    )
    path = b"/v2/models/%b/infer" % model.encode()
    packed = draw(st.integers(0, 9))
    if packed in (0, 1):
        extra += b"Content-Encoding: %b\r\n" % (b"gzip" if packed else b"deflate")
        squeezed = gzip.compress(body, 1, mtime=0) if packed else zlib.compress(body, 1)
        body = squeezed if draw(st.integers(0, 3)) else draw(torn(squeezed))
    if packed == 2:
        told = b"" if length is None else b"Inference-Header-Content-Length: %d\r\n" % length
        return b"POST %b HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\n" % (path, told) + draw(chunked(body))
    return ask(path, body, length, extra)


@st.composite
def plain(draw: st.DrawFn) -> bytes:
    """A message that isn't v2's inference: v1's records, generate's fields, the repository extension's."""
    path, message = copy.deepcopy(draw(st.sampled_from(PLAIN)))
    if draw(st.booleans()):
        return ask(path, _dumped(draw(spoiled(message))))
    text = json.dumps(message).encode()
    return ask(path, draw(torn(text)) if draw(st.booleans()) else text)


@st.composite
def chunked(draw: st.DrawFn, body: bytes) -> bytes:
    """A body in chunks, as it may be sent."""
    step = draw(st.sampled_from((1, 7, 100, 10_000)))
    extension = draw(st.sampled_from((b"", b"", b";a=b", b';q="' + b"x" * 500 + b'"')))
    chunks = [body[start : start + step] for start in range(0, min(len(body), 300 * step), step)]
    chunks.append(body[300 * step :])
    found = b"".join(b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks if chunk)
    return found + b"0\r\n" + draw(st.sampled_from((b"", b"", b"content-encoding: gzip\r\n"))) + b"\r\n"


@st.composite
def improper(draw: st.DrawFn, models: Collection[str]) -> bytes:
    """A request that says what it likes."""
    _, body, length = draw(bodies(models))
    lines = [(b"Content-Length", b"%d" % len(body))] if draw(st.booleans()) else []
    lines += draw(st.lists(st.sampled_from(HEADERS), max_size=3))
    if length is not None and draw(st.booleans()):
        lines.append((b"Inference-Header-Content-Length", b"%d" % length))
    method = b"POST" if draw(st.booleans()) else draw(st.sampled_from(METHODS))
    version = b"HTTP/1.1" if draw(st.booleans()) else draw(st.sampled_from(VERSIONS))
    end, colon = draw(
        st.sampled_from(((b"\r\n", b": "), (b"\r\n", b":"), (b"\n", b": "), (b"\r\n", b" : "), (b"\r", b": ")))
    )
    url = draw(st.sampled_from((*URLS, *[b"/v2/models/m/infer"] * 30)))
    head = end.join([b" ".join((method, url, version)), *(name + colon + value for name, value in lines), b"", b""])
    return head + (draw(chunked(body)) if any(value == b"chunked" for _, value in lines) else body)


@st.composite
def alike(draw: st.DrawFn, models: Collection[str]) -> list[bytes]:
    """Requests that differ in their numbers, as one client sends them, and some of them by a little more."""
    model = draw(st.sampled_from(sorted({"m", "k"} & set(models))))
    first, binary = draw(arrays(model)), draw(st.booleans())
    more: dict[str, Any] = {} if draw(st.booleans()) else draw(extras())
    extra = draw(st.sampled_from((b"", b"", b"X-Any: 1\r\n")))
    path = b"/v2/models/%b/infer" % model.encode()
    found = []
    for number in range(draw(st.integers(2, 5))):
        given = {name: values if isinstance(values, list) else values + number for name, values in first.items()}
        if model == "k":
            given = first
        body, length = infer(model, given, binary=binary, **copy.deepcopy(more))
        request = ask(path, body, length, extra)
        if number and draw(st.integers(0, 2)) == 0:
            head, _, body = request.partition(b"\r\n\r\n")
            if draw(st.booleans()):
                body = draw(torn(body))
                if draw(st.booleans()):
                    head = re.sub(rb"t-Length: \d+\r\n(?=Inf|X|$)", b"t-Length: %d\r\n" % len(body), head + b"\r\n")[
                        :-2
                    ]
            else:
                head = draw(torn(head))
            request = head + b"\r\n\r\n" + body
        found.append(request)
    return found


@st.composite
def streams(draw: st.DrawFn, models: Collection[str] = frozenset(MODELS)) -> Stream:
    """One to four requests in a row; the last of them perhaps improper, or the whole torn."""
    if draw(st.integers(0, 2)) == 0:
        parts = draw(alike(models))
        lengths = [len(part) for part in parts]
        return Stream(b"".join(parts), draw(cuts(sum(lengths), lengths)), None)
    parts = draw(st.lists(proper(models), min_size=1, max_size=4))
    count: int | None = len(parts)
    wrong = draw(st.integers(0, 3))
    if wrong == 1:
        parts.append(draw(improper(models)))
        count = None
    data = b"".join(parts)
    if wrong == 2:
        data, count = draw(torn(data)), None
    return Stream(data, draw(cuts(len(data), [len(part) for part in parts])), count)


@st.composite
def cuts(draw: st.DrawFn, length: int, requests: Sequence[int]) -> tuple[int, ...]:
    """Places to cut so many bytes at: nowhere, between the requests, or anywhere."""
    how = draw(st.integers(0, 3))
    if how == 0 or length < 2:
        return ()
    if how < 3:
        return tuple(np.cumsum(requests)[:-1].tolist())
    return tuple(sorted(draw(st.sets(st.integers(1, length - 1), max_size=8))))


def _dumped(message: Any) -> bytes:
    text = json.dumps(message).encode()
    for name, deep in DEEP.items():
        text = text.replace(name, deep)
    return text
