"""Load things by dotted name: the only place, with the CLI's lazy commands, that imports inside a function."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from onejob.errors import UnavailableError


def load(path: str) -> Any:
    """The object that `package.module:name` names, or the module that `package.module` names.

    UnavailableError says which module is missing; an error inside the module itself is raised as it is.
    """
    module, _, name = path.partition(":")
    loaded = _import(module)
    if not name:
        return loaded
    try:
        return getattr(loaded, name)
    except AttributeError:
        known = ", ".join(sorted(n for n in vars(loaded) if not n.startswith("_"))[:12])
        raise UnavailableError(f"module {module!r} has no {name!r}", place=path, cure=f"It has: {known}.") from None


def _import(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        raise UnavailableError(
            f"needs the module {missing!r}, which is not installed",
            place=module,
            cure="`onejob doctor` says which extra brings it.",
        ) from error
