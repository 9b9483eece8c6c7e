"""A fixed collection of what clients must not send, or may though it looks odd, with what they must hear.

For the models of hostile.py. Each was written down because a server somewhere fell over it, or ours did.
"""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onejob.testing.hostile import ask, infer

INFER = b"/v2/models/m/infer"
GOOD, GOOD_LENGTH = infer("m", {"x": np.array([1, 2], "<f4")})
PLAIN, _ = infer("m", {"x": np.array([1, 2], "<f4")}, binary=False)
CLASSES = b',"outputs":[{"name":"y","parameters":{"classification":99}}]}'


@dataclass(frozen=True)
class Case:
    name: str
    data: bytes
    statuses: tuple[int, ...]
    """Of its answers, in order."""


def _tensor(datatype: Any = "FP32", shape: Any = (1, 2), **more: Any) -> bytes:
    """A message with one input; its `data` is [1, 2], unless `more` says something else."""
    entry = {"name": "x", "datatype": datatype, "shape": shape, **({} if more else {"data": [1, 2]}), **more}
    return ask(INFER, json.dumps({"inputs": [entry]}).encode())


def _binary(size: Any, data: bytes, shape: Any = (1, 2), length: int | None = None, model: str = "m") -> bytes:
    names = {"m": ("x", "FP32"), "t": ("text", "BYTES")}[model]
    entry = {"name": names[0], "datatype": names[1], "shape": shape, "parameters": {"binary_data_size": size}}
    text = json.dumps({"inputs": [entry]}).encode()
    return ask(b"/v2/models/%b/infer" % model.encode(), text + data, len(text) if length is None else length)


def _posted(body: bytes) -> bytes:
    return ask(INFER, body)


def _packed(body: bytes, encoding: bytes = b"gzip") -> bytes:
    return ask(INFER, body, None, b"Content-Encoding: %b\r\n" % encoding)


def _text(length: int, data: bytes) -> bytes:
    return struct.pack("<I", length) + data


def _extended(rank: int) -> bytes:
    """A tensor of one value in so many dimensions."""
    return _tensor(shape=[1] * rank, data=[1])


def _many(count: int) -> bytes:
    entries = ",".join(f'{{"name":"{number}","datatype":"FP32","shape":[0],"data":[]}}' for number in range(count))
    return _posted(f'{{"inputs":[{entries}]}}'.encode())


def _nested(depth: int, place: str) -> bytes:
    entry = '{"name":"x","datatype":"FP32","shape":[1,2],"data":[1,2]}'
    deep = "[" * depth + "1,2" + "]" * depth
    parts = {
        "data": f'{{"inputs":[{entry.replace("[1,2]}", deep + "}")}]}}',
        "shape": f'{{"inputs":[{entry.replace("[1,2],", deep + ",")}]}}',
        "id": f'{{"id":{deep},"inputs":[{entry}]}}',
        "parameters": f'{{"parameters":{deep},"inputs":[{entry}]}}',
        "outputs": f'{{"outputs":{deep},"inputs":[{entry}]}}',
        "inputs": f'{{"inputs":{deep}}}',
        "unknown": f'{{"x":{deep},"inputs":[{entry}]}}',
    }
    return _posted(parts[place].encode())


BODIES: Sequence[bytes] = (
    *(
        b"",
        b"{",
        b"}",
        b"[]",
        b"null",
        b"1",
        b'"x"',
        b"{}",
        b"\x00",
        b"\xff\xfe{}",
        b"NaN",
        b"Infinity",
        b"\xef\xbb\xbf",
    ),
    *(b'{"inputs":[]}', b'{"inputs":{}}', b'{"inputs":null}', b'{"inputs":[null]}', b'{"inputs":[[]]}'),
    *(b'{"inputs":["x"]}', b"{'inputs':[]}", PLAIN + b"x", PLAIN[:-1]),
    *(PLAIN.replace(b'"x"', b'"\\ud800"'), PLAIN.replace(b'"x"', b'"\xff"')),
)
DATATYPES: Sequence[Any] = ("FP64", "INT32", "BYTES", "fp32", "", None, 5, ["FP32"], "F" * 10_000)
SHAPES: Sequence[Any] = (
    *([], [0, 2], [2, 0], [1], [2], [1, 3], [-1, 2], [1, -2], [1, 2, 1], [1.0, 2], ["1", 2], [True, 2], [[1, 2]]),
    *([None, 2], None, 5, {}, "1,2", [2**31, 2], [2**63, 2], [2**64, 2], [10**30, 2], [2**32, 2**32]),
    *([1] * 100, [1] * 5000, [*[1] * 69, 2], [*[1] * 32, 2]),
)
DATA: Sequence[Any] = (
    *([], [1], [1, 2, 3], None, 5, "12", {}, [[1], [2, 3]], [1, [2]], [[1], 2], ["1", "2"], [True, False], [1, {}]),
    *([1e39, 0], [10**400, 0]),
)
PARAMETERS: Sequence[bytes] = (
    *(b"[]", b"5", b'{"timeout":-1}', b'{"timeout":"x"}', b'{"priority":1.5}', b'{"priority":99999999999999999999}'),
    *(b'{"binary_data_output":1}', b'{"sequence_id":4}', b'{"triton_x":1}', b'{"a":[]}'),
)
SIZES: Sequence[tuple[Any, bytes, Any]] = (
    *((8, b"", (1, 2)), (8, bytes(7), (1, 2)), (8, bytes(9), (1, 2)), (7, bytes(7), (1, 2)), (0, b"", (1, 2))),
    *((-8, bytes(8), (1, 2)), ("8", bytes(8), (1, 2)), (8.0, bytes(8), (1, 2)), (True, bytes(1), (1, 2))),
    *((2**63, bytes(8), (1, 2)), (2**64, bytes(8), (1, 2)), (8, bytes(8), (2**32, 2**32)), (8, bytes(8), (2**61, 2))),
    *((0, b"", (0, 2)), (0, b"", (0, 2**62)), (16, bytes(16), (1, 2)), (8, bytes(8), (2, 2))),
)
"""(what is said, what is sent, the shape)."""
TEXTS: Sequence[tuple[bytes, int]] = (
    *(
        (_text(5, b"abc"), 1),
        (_text(2**32 - 1, b"abc"), 1),
        (_text(3, b"abc") + b"\x00", 1),
        (b"\x03\x00", 1),
        (b"", 1),
    ),
    *((_text(0, b"") * 3, 1), (_text(0, b""), 2), (_text(2, b"\xff\xfe"), 1), (_text(3, b"abc") + _text(9, b""), 2)),
)
"""(bytes of the tensor, how many elements they should be)."""
PLACES = ("data", "shape", "id", "parameters", "outputs", "inputs")
MESSAGES: Sequence[Case] = (
    Case("as it should be", ask(INFER, GOOD, GOOD_LENGTH), (200,)),
    Case("plain", _posted(PLAIN), (200,)),
    *(Case(f"body {body[:12]!r}", _posted(body), (400,)) for body in BODIES),
    *(Case(f"nested in {place}", _nested(depth, place), (400,)) for depth in (40, 1000, 5000) for place in PLACES),
    Case("nested where nobody looks", _nested(1000, "unknown"), (200,)),
    Case("nested where nobody looks, deeper than JSON may be", _nested(100_000, "unknown"), (400,)),
    *(Case(f"datatype {value!r:.20}", _tensor(datatype=value), (400,)) for value in DATATYPES),
    *(Case(f"shape {value!r:.30}", _tensor(shape=value), (400,)) for value in SHAPES),
    *(Case(f"data {value!r:.30}", _tensor(data=value), (400,)) for value in DATA),
    Case("data with nothing known", _tensor(data=[None, 1]), (200,)),
    Case("data with NaN and infinity", _tensor(data=[float("nan"), float("inf")]), (200,)),
    *(Case(f"one value in {rank} dimensions", _extended(rank), (400,)) for rank in (3, 32, 33, 64, 65, 70)),
    Case("two sources", _tensor(data=[1, 2], parameters={"binary_data_size": 8}), (400,)),
    Case("no source", _tensor(parameters={}), (400,)),
    Case("an input twice", _posted(PLAIN.replace(b"}]", b"}," + PLAIN[PLAIN.index(b"[") + 1 : -2] + b"]")), (400,)),
    Case("thousands of inputs", _many(20_000), (400,)),
    Case("outputs that are none", _posted(PLAIN[:-1] + b',"outputs":[{"name":"nope"}]}'), (400,)),
    Case("more classes than there are", _posted(PLAIN[:-1] + CLASSES), (200,)),
    *(Case(f"parameter {text!r}", _posted(PLAIN[:-1] + b',"parameters":%b}' % text), (400,)) for text in PARAMETERS),
    *(Case(f"{len(data)} bytes said to be {size!r} for {shape}", _binary(size, data, shape), (400,))
      for size, data, shape in SIZES),
    *(Case(f"JSON of {length}", _binary(8, bytes(8), length=length), (400,)) for length in (1, 5, 10**6, 10**30)),
    *(Case(f"text {data!r:.30}", _binary(len(data), data, (rows, 1), model="t"), (400,)) for data, rows in TEXTS),
    Case("text, empty", _binary(4, _text(0, b""), (1, 1), model="t"), (200,)),
)  # fmt: skip
"""Proper HTTP, one request each."""

HEAD = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(PLAIN)
CHUNKS = b"5\r\n" + PLAIN[:5] + b"\r\n" + b"%x\r\n" % (len(PLAIN) - 5) + PLAIN[5:] + b"\r\n0\r\n\r\n"
LIVE = b"GET /v2/health/live HTTP/1.1\r\n\r\n"
LENGTHS = (b"-1", b"+5", b"0x10", b"1e2", b"5 5", b"9" * 25, b"9" * 5000)
VERSIONS = ((b"HTTP/9.9", 400), (b"FTP/1.1", 400), (b"", 400), (b"HTTP/2.0", 505), (b"HTTP/0.9", 505))
STREAMS: Sequence[Case] = (
    Case("chunks", HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS + LIVE, (200, 200)),
    Case("chunks, said loudly", HEAD + b"TRANSFER-ENCODING: CHUNKED\r\n\r\n" + CHUNKS + LIVE, (200, 200)),
    Case("chunks and a length", HEAD + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS, (400,)),
    Case("a chunk of no size", HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", (400,)),
    Case("a chunk of any size", HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 17 + b"\r\n", (400,)),
    Case("a chunk that goes on", HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n", (400,)),
    Case("gzip said as transfer", HEAD + LENGTH + b"Transfer-Encoding: gzip\r\n\r\n" + PLAIN, (400,)),
    Case("mixed case", HEAD + b"cOnTeNt-LeNgTh:%d\r\n\r\n" % len(PLAIN) + PLAIN + LIVE, (200, 200)),
    Case("length twice", HEAD + LENGTH * 2 + b"\r\n" + PLAIN, (400,)),
    *(Case(f"length {text!r:.20}", HEAD + b"Content-Length: " + text + b"\r\n\r\n", (400,)) for text in LENGTHS),
    Case("a length that is too large", HEAD + b"Content-Length: 99999999999\r\n\r\n", (413,)),
    Case("a line without a name", HEAD + b": v\r\n\r\n", (400,)),
    Case("a space before the colon", HEAD + b"Content-Length : 5\r\n\r\nhello", (400,)),
    Case("a folded line", HEAD + b"A: b\r\n c\r\n" + LENGTH + b"\r\n" + PLAIN, (400,)),
    Case("a null in a header", HEAD + b"A: \x00\r\n\r\n", (400,)),
    Case("bare line feeds", LIVE.replace(b"\r\n", b"\n"), (400,)),
    Case("bare returns", LIVE.replace(b"\r\n", b"\r"), (400,)),
    Case("empty lines before a request", b"\r\n\r\n\r\n" + LIVE, (200,)),
    Case("a long header", HEAD + b"A: " + b"x" * 70_000, (431,)),
    Case("many headers", HEAD + b"A: b\r\n" * 12_000, (431,)),
    Case("a long URL", b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", (431,)),
    Case("a large head that is allowed", HEAD + b"A: " + b"x" * 60_000 + b"\r\n" + LENGTH + b"\r\n" + PLAIN, (200,)),
    *(Case(f"version {text!r}", b"GET /v2 " + text + b"\r\n\r\n", (status,)) for text, status in VERSIONS),
    Case("HTTP/2 from the start", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400,)),
    Case("TLS", bytes.fromhex("160301020001000001fc0303"), (400,)),
    Case("an upgrade", LIVE[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + LIVE, (200, 200)),
    Case("CONNECT", b"CONNECT h:1 HTTP/1.1\r\n\r\n", (405,)),
    Case("waits to be told", HEAD + LENGTH + b"Expect: 100-continue\r\n\r\n" + PLAIN + LIVE, (200, 200)),
    Case("an encoding that nobody knows", _packed(PLAIN, b"br") + LIVE, (400, 200)),
    Case("gzip", _packed(gzip.compress(PLAIN, mtime=0)) + LIVE, (200, 200)),
    Case("gzip cut short", _packed(gzip.compress(PLAIN, mtime=0)[:-3]) + LIVE, (400, 200)),
    Case("gzip twice", _packed(gzip.compress(gzip.compress(PLAIN, mtime=0), mtime=0)) + LIVE, (400, 200)),
    Case("gzip and then something", _packed(gzip.compress(PLAIN, mtime=0) + b"x") + LIVE, (400, 200)),
    Case("no gzip", _packed(PLAIN) + LIVE, (400, 200)),
    Case("deflate", _packed(zlib.compress(PLAIN), b"deflate") + LIVE, (200, 200)),
    Case("a bomb", _packed(gzip.compress(bytes((64 << 20) + 1), 9, mtime=0)) + LIVE, (413, 200)),
    Case("a bomb just within bounds", _packed(gzip.compress(bytes(60 << 20), 9, mtime=0)) + LIVE, (400, 200)),
    Case("a bad one between good ones", _posted(PLAIN) + _posted(b"{") + _posted(PLAIN), (200, 400, 200)),
    Case("nobody's path", b"GET /%00%ff HTTP/1.1\r\n\r\nGET //v2//models HTTP/1.1\r\n\r\n" + LIVE, (404, 404, 200)),
    Case("a model of no name", ask(b"/v2/models//infer", PLAIN), (404,)),
    Case("out of the repository", ask(b"/v2/repository/models/..%2f..%2fetc/load", b"{}"), (404,)),
    Case("no length, no body", b"POST /v2/models/m/infer HTTP/1.1\r\n\r\n" + LIVE, (400, 200)),
    Case("whole address", b"GET http://h/v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n", (200,)),
)  # fmt: skip
"""One or several requests, and what isn't one."""

UNFINISHED: Sequence[bytes] = (
    b"",
    b"P",
    b"POST /v2/models/m/infer HTTP/1.1\r\nContent-Le",
    HEAD + LENGTH + b"\r\n",
    HEAD + LENGTH + b"\r\n" + PLAIN[:-1],
    HEAD + b"Content-Length: 60000000\r\n\r\n" + b"x" * 100_000,
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS[:-4],
    ask(INFER, GOOD, GOOD_LENGTH)[:-1],
    LIVE[:-1],
)
"""Requests that never end: they have no answer, whatever the client does next."""
