"""JSON messages, and what Triton says when something in them is missing or of another type.

A client's handling of Triton's errors shall hold here too, so an error begins with Triton's words; what follows names
the place and the value. Triton answers most of these with 500; they are the client's mistakes, and 400 here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import orjson

from onejob.core.artifact import Json
from onejob.errors import BadRequestError

MAX_UNSIGNED = 2**64 - 1
_BUFFER = "failed to parse the request JSON buffer"
_BOM = b"\xef\xbb\xbf"


def parse_value(body: bytes | memoryview) -> Json:
    """Any JSON value, and NaN and Infinity where numbers may be; BadRequestError."""
    try:
        return orjson.loads(body)
    except ValueError as error:
        text = bytes(body)
        if not text:
            raise BadRequestError(f"{_BUFFER}: The document is empty. at 0") from None
        if b"NaN" in text or b"Infinity" in text or text.startswith(_BOM):
            return _parse_extended(text.removeprefix(_BOM))
        raise BadRequestError(f"{_BUFFER}: {error}") from None


def parse_object(body: bytes | memoryview) -> dict[str, Json]:
    """A JSON object, or BadRequestError."""
    message = parse_value(body)
    if not isinstance(message, dict):
        raise BadRequestError(f"{_BUFFER}: an object is wanted")
    return message


def member(owner: Json, name: str) -> Json:
    """What an object holds by that name."""
    if not isinstance(owner, dict) or name not in owner:
        raise BadRequestError(f"Unable to parse '{name}': attempt to access non-existing object member '{name}'")
    return owner[name]


def text_of(value: Json, what: str) -> str:
    if not isinstance(value, str):
        raise wrong_type(value, what, "string")
    return value


def list_of(value: Json, what: str) -> list[Json]:
    if not isinstance(value, list):
        raise wrong_type(value, what, "array")
    return value


def flag_of(value: Json, what: str) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(value, what, "boolean")
    return value


def unsigned_of(value: Json, what: str, verb: str = "parse") -> int:
    if type(value) is not int or not 0 <= value <= MAX_UNSIGNED:
        raise wrong_type(value, what, "unsigned-integer", verb)
    return value


def object_of(value: Json) -> Mapping[str, Json]:
    """Parameters of a tensor; what isn't an object counts as none, as in Triton."""
    return value if isinstance(value, dict) else {}


def wrong_type(value: Json, what: str, wanted: str, verb: str = "parse") -> BadRequestError:
    return BadRequestError(
        f"Unable to {verb} '{what}': attempt to access JSON non-{wanted} as {wanted}: {brief(value)}"
    )


def brief(value: Json) -> str:
    """A value as JSON, cut short."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "something nested very deep"
    return text if len(text) <= 60 else f"{text[:59]}…"


def of_request(identifier: str, text: str) -> str:
    """An error of the request as a whole; Triton tells the request's id where there is one."""
    return f"[request id: {identifier}] {text}" if identifier else text


def _parse_extended(text: bytes) -> Json:
    try:
        value = json.loads(text.decode())
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"{_BUFFER}: {error}") from None
    return value
