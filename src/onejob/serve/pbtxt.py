"""Reads protobuf's text format as far as a config.pbtxt needs it: messages, lists, numbers, text, enums, comments.

https://protobuf.dev/reference/protobuf/textformat-spec/; a field that occurs again becomes a list.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from onejob.core.artifact import Json

_TOKEN = re.compile(
    r"""\s+ | \#[^\n]* | (?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*') | (?P<word>[A-Za-z_][\w.]*)
    | (?P<number>[-+]?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)[fF]?) | (?P<mark>[][{}<>:,;-])""",
    re.VERBOSE,
)
_WORDS: dict[str, Json] = {"true": True, "false": False, "True": True, "False": False}
_CLOSES = {"{": "}", "<": ">"}


def parse(text: str) -> dict[str, Json]:
    """The message; ValueError says in which line it ends to be one."""
    tokens = _Tokens(list(_split(text)))
    return _message(tokens, "")


class _Tokens:
    def __init__(self, found: list[tuple[str, str, int]]) -> None:
        self._found = found
        self._at = 0

    def peek(self) -> tuple[str, str, int]:
        return self._found[self._at] if self._at < len(self._found) else ("end", "", self._line)

    def take(self) -> tuple[str, str, int]:
        token = self.peek()
        self._at += 1
        return token

    def skip(self, *marks: str) -> bool:
        kind, text, _ = self.peek()
        if kind == "mark" and text in marks:
            self._at += 1
            return True
        return False

    @property
    def _line(self) -> int:
        return self._found[-1][2] if self._found else 1


def _split(text: str) -> Iterator[tuple[str, str, int]]:
    at, line = 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"line {line}: {text[at]!r} isn't expected here")
        if match.lastgroup:
            yield match.lastgroup, match.group(), line
        line += match.group().count("\n")
        at = match.end()


def _message(tokens: _Tokens, close: str) -> dict[str, Json]:
    found: dict[str, Json] = {}
    while True:
        kind, name, line = tokens.take()
        if (kind == "end" and not close) or (kind == "mark" and name == close):
            return found
        if kind != "word":
            raise ValueError(f"line {line}: a field's name is wanted, not {name or 'the end'!r}")
        colon = tokens.skip(":")
        value = _value(tokens, colon)
        tokens.skip(",", ";")
        if name not in found:
            found[name] = value
        else:
            before = found[name] if isinstance(found[name], list) else [found[name]]
            found[name] = before + (value if isinstance(value, list) else [value])


def _value(tokens: _Tokens, colon: bool) -> Json:
    kind, text, line = tokens.take()
    if kind == "mark" and text in _CLOSES:
        return _message(tokens, _CLOSES[text])
    if kind == "mark" and text == "[":
        values: list[Json] = []
        while not tokens.skip("]"):
            values.append(_value(tokens, True))
            tokens.skip(",")
        return values
    if not colon:
        raise ValueError(f"line {line}: a colon or a message is wanted before {text or 'the end'!r}")
    if kind == "text":
        words = [ast.literal_eval(text)]
        while tokens.peek()[0] == "text":
            words.append(ast.literal_eval(tokens.take()[1]))
        return "".join(words)
    if kind == "number":
        bare = text.rstrip("fF") if not text.lower().startswith(("0x", "-0x", "+0x")) else text
        return int(bare, 0) if re.fullmatch(r"[-+]?(0[xX][0-9a-fA-F]+|[1-9]\d*|0)", bare) else float(bare)
    if kind == "word":
        return _WORDS.get(text, text)
    raise ValueError(f"line {line}: a value is wanted, not {text or 'the end'!r}")
