"""The messages of Triton's model repository extension: what a load, an unload, an index asks for."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from onejob.core.artifact import Json
from onejob.errors import BadRequestError
from onejob.serve.protocols import words

FILE = "file:"


@dataclass(frozen=True)
class Load:
    """What to load a model from, where it isn't the repository alone."""

    config: Mapping[str, Json] | None = None
    """Instead of the repository's configuration."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Path below the model's folder (`1/model.onnx`) -> content; instead of the repository's files."""


def parse_load(body: bytes, model: str) -> Load:
    """A load request; its body may be empty. BadRequestError in Triton's words."""
    parameters = _parameters(body)
    config: Mapping[str, Json] | None = None
    files: dict[str, bytes] = {}
    for name, value in parameters.items():
        if name != "config" and not name.startswith(FILE):
            raise BadRequestError(f"unexpected error on creating Triton parameter: there is no parameter '{name}'")
        if not isinstance(value, str):
            raise BadRequestError(f"attempt to access JSON non-string as string: '{name}' is {words.brief(value)}")
        if name == "config":
            config = _config(value, model)
        else:
            path = _inside(name.removeprefix(FILE), model)
            files[path] = _content(value, name)
    if files and config is None:
        raise _not_loaded(model, "files that come with a request need a 'config' with them")
    return Load(config, files)


def parse_unload(body: bytes) -> bool:
    """An unload request: whether the models that this one is made of go too."""
    return _flag(_parameters(body).get("unload_dependents", False))


def parse_index(body: bytes) -> bool:
    """An index request: whether only what is ready is asked for."""
    return _flag(_message(body).get("ready", False))


def _message(body: bytes) -> Mapping[str, Json]:
    message = words.parse_value(body) if body else {}
    return message if isinstance(message, dict) else {}


def _parameters(body: bytes) -> Mapping[str, Json]:
    parameters = _message(body).get("parameters", {})
    if not isinstance(parameters, dict):
        raise BadRequestError(f"attempt to get members for non-object: 'parameters' is {words.brief(parameters)}")
    return parameters


def _flag(value: Json) -> bool:
    if not isinstance(value, bool):
        raise BadRequestError(f"attempt to access JSON non-boolean as boolean: {words.brief(value)}")
    return value


def _config(text: str, model: str) -> Mapping[str, Json]:
    try:
        config = words.parse_value(text.encode())
    except BadRequestError as error:
        raise _not_loaded(model, f"'config' is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise _not_loaded(model, "'config' must be a JSON object, as text")
    return config


def _inside(path: str, model: str) -> str:
    """The path as given, if it stays within the model's folder."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path or "\\" in path or path.endswith("/"):
        raise _not_loaded(model, f"invalid file parameter '{FILE}{path}': it must stay within the model's folder")
    return str(PurePosixPath(path))


def _content(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequestError(f"the content of '{name}' is not base64: {error}") from None


def _not_loaded(model: str, why: str) -> BadRequestError:
    return BadRequestError(f"failed to load '{model}', failed to poll from model repository: {why}")
