"""Bodies that were compressed, and answers that shall be."""

from __future__ import annotations

import re
import zlib

LEAST, MOST = 1 << 10, 1 << 20
"""A shorter answer isn't compressed, whatever the client accepts; nor a longer one, which would keep the loop."""


_NEVER = re.compile(rb"\s*q\s*=\s*0(\.0*)?\s*")


class TooLargeError(ValueError):
    """A body inflates to more than its bound."""


def inflate(body: bytes, encoding: bytes, limit: int) -> bytes:
    """A gzip or deflate body as it was; ValueError if it is damaged, TooLargeError beyond `limit` bytes."""
    if encoding in (b"gzip", b"x-gzip"):
        windows = [31]
    elif encoding == b"deflate":
        windows = [15, -15]  # zlib's frame as the standard says, or none as some send
    else:
        raise ValueError(f"unknown content encoding {encoding.decode('latin-1')!r}")
    for window in windows:
        inflator = zlib.decompressobj(window)
        try:
            data = inflator.decompress(body, limit + 1)
        except zlib.error:
            continue
        if len(data) > limit:
            raise TooLargeError(f"the body inflates to more than {limit} bytes")
        if inflator.eof and not inflator.unused_data:
            return data
    raise ValueError(f"the body is not whole {encoding.decode('latin-1')} data")


def compress(body: bytes, accepted: bytes) -> tuple[bytes, bytes]:
    """An answer as the client would rather have it, and the header line that says so; small ones aren't worth it."""
    if not accepted or not LEAST <= len(body) <= MOST:
        return body, b""
    welcome = {
        name.strip()
        for name, _, rest in (part.partition(b";") for part in accepted.lower().split(b","))
        if not _NEVER.fullmatch(rest)
    }
    for name, window in ((b"gzip", 31), (b"deflate", 15)):
        if name in welcome:
            made = zlib.compressobj(1, wbits=window)
            return made.compress(body) + made.flush(), b"Content-Encoding: %b\r\n" % name
    return body, b""
