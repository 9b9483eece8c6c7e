"""Takes the values of secrets out of what a task says: text, JSON, and a stream of bytes cut anywhere.

A value is also found as it looks inside JSON, in Python's repr, in a URL, and, if it has several lines, line by line.
What replaces it is `***name***`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from onejob.core.artifact import Json

SHORTEST_LINE = 8
"""Lines of a secret shorter than this are left alone: they might be anything."""
UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-~")


class Redactor:
    """Replaces the values of named secrets; without `lines`, only where a value stands whole."""

    def __init__(self, secrets: Mapping[str, str], *, lines: bool = True) -> None:
        self.secrets = dict(secrets)
        needles = {form: name for name, value in secrets.items() for form in _forms(value, lines)}
        self.names: dict[bytes, str] = needles
        # the longest first: an alternation takes the first that fits
        ordered = sorted(needles, key=len, reverse=True)
        self.pattern = re.compile(b"|".join(re.escape(needle) for needle in ordered)) if ordered else None

    def text(self, value: str) -> str:
        """The text without secrets; what can't be UTF-8 (half a file name, say) is spelt out as an escape."""
        return self.data(value.encode(errors="backslashreplace")).decode()

    def data(self, value: bytes) -> bytes:
        return self.pattern.sub(self._mask, value) if self.pattern else value

    def json(self, value: Json) -> Json:
        """The value with every string in it, keys included, redacted."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.json(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.json(item) for item in value]
        return value

    def found(self, value: bytes) -> str | None:
        """The name of the first secret in these bytes."""
        match = self.pattern.search(value) if self.pattern else None
        return self.names[match[0]] if match else None

    @property
    def longest(self) -> int:
        return max(map(len, self.names), default=0)

    def _mask(self, match: re.Match[bytes]) -> bytes:
        return mask(self.names[match[0]])


class Stream:
    """Redacts a stream of which we see one piece at a time; holds back what may be the beginning of a secret."""

    def __init__(self, redactor: Redactor) -> None:
        self.redactor = redactor
        self.held = b""

    def feed(self, piece: bytes) -> bytes:
        """What can be said after this piece."""
        if self.redactor.pattern is None:
            return piece
        data, out, position = self.held + piece, [], 0
        keep = _beginning(data, 0, self.redactor.names)
        for match in self.redactor.pattern.finditer(data):
            if match.start() >= keep:
                break
            out += [data[position : match.start()], mask(self.redactor.names[match[0]])]
            position = match.end()
            if position > keep:  # what was held back began inside this secret
                keep = _beginning(data, position, self.redactor.names)
        self.held = data[keep:]
        return b"".join([*out, data[position:keep]])

    def end(self) -> bytes:
        """What was held back when the stream ended: a secret cut off half-way isn't shown either."""
        held, self.held = self.held, b""
        for needle, name in self.redactor.names.items():
            if len(held) >= max(4, len(needle) // 2) and needle.startswith(held):
                return mask(name)
        return self.redactor.data(held)


def mask(name: str) -> bytes:
    return f"***{name}***".encode()


def _beginning(data: bytes, start: int, needles: Iterable[bytes]) -> int:
    """Where the longest tail of data[start:] that a secret begins with starts; len(data) if there is none."""
    best = len(data)
    for needle in needles:
        position = data.find(needle[:1], max(start, len(data) - len(needle) + 1), best)
        while position >= 0 and not needle.startswith(data[position:]):
            position = data.find(needle[:1], position + 1, best)
        best = position if position >= 0 else best
    return best


def _forms(value: str, lines: bool) -> set[bytes]:
    """How a value may look in a log."""
    values = {value, value.strip()}
    if lines:
        values |= {line.strip() for line in value.splitlines() if len(line.strip()) >= SHORTEST_LINE}
    texts = {form for v in values for form in (v, json.dumps(v)[1:-1], json.dumps(v, ensure_ascii=False)[1:-1])}
    texts |= {repr(v)[1:-1] for v in values} | {_percent(v) for v in values}
    return {text.encode(errors="surrogateescape") for text in texts if text}


def _percent(value: str) -> str:
    """As urllib.parse.quote(value, safe="") has it; importing that costs the shim a tenth of its start."""
    data = value.encode(errors="surrogateescape")
    return "".join(chr(byte) if byte in UNRESERVED else f"%{byte:02X}" for byte in data)
