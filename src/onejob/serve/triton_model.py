"""Models of Triton's Python backend in a repository: which files are one, and the configuration that they are told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from onejob.core.artifact import Json

_CLASS = re.compile(r"^class\s+TritonPythonModel\b|^from\s+\S+\s+import\b.*\bTritonPythonModel\b", re.MULTILINE)
_LISTS = ("input", "output", "instance_group")


def is_one(path: Path) -> bool:
    """Whether a file is Python with Triton's class in it."""
    return path.suffix == ".py" and _CLASS.search(path.read_text(errors="replace")) is not None


def complete(config: Mapping[str, Json], name: str) -> dict[str, Json]:
    """A configuration as Triton tells it to a model: lists where protobuf repeats, maps by key, and what is unset.

    https://github.com/triton-inference-server/common/blob/main/protobuf/model_config.proto
    """
    found: dict[str, Json] = {"platform": "", "backend": "python", "max_batch_size": 0, **config, "name": name}
    for key in _LISTS:
        found[key] = [_tensor(one) for one in _list(found.get(key))]
    found["parameters"] = _map(found.get("parameters"))
    if samples := _list(found.get("model_warmup")):
        found["model_warmup"] = [{**one, "inputs": _samples(one.get("inputs"))} for one in samples]
    found.setdefault("default_model_filename", "model.py")
    found.setdefault("version_policy", {"latest": {"num_versions": 1}})
    return found


def _list(value: Json) -> list[Json]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _tensor(told: Json) -> Json:
    """Sizes as numbers: protobuf's JSON has large ones as text, its text format a single one without a list."""
    if not isinstance(told, Mapping):
        return told
    made = dict(told)
    if "dims" in made:
        made["dims"] = [_number(size) for size in _list(made["dims"])]
    if isinstance(made.get("reshape"), Mapping):
        made["reshape"] = {"shape": [_number(size) for size in _list(made["reshape"].get("shape"))]}
    return made


def _samples(inputs: Json) -> Json:
    return {name: _tensor(told) for name, told in _map(inputs).items()}


def _number(size: Json) -> Json:
    return int(size) if isinstance(size, str) and re.fullmatch(r"-?\d+", size) else size


def _map(value: Json) -> dict[str, Json]:
    """Protobuf's text format has a map as messages with `key` and `value`, its JSON as an object."""
    if isinstance(value, Mapping) and not {"key", "value"} >= value.keys():
        return dict(value)
    entries = [one for one in _list(value) if isinstance(one, Mapping) and "key" in one]
    return {str(one["key"]): one.get("value", {}) for one in entries}
