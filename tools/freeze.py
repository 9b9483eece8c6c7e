"""Write constraints.txt: the exact version of every package that `onejob[dev]` brings, as installed here.

Follows the requirements of the installed packages, so what merely happens to be installed beside them stays out. A
local version suffix (`+cpu`) is left out: the constraint holds for whichever build of that version one can get.
"""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = "onejob"
TARGET = Path(__file__).parent.parent / "constraints.txt"
ALSO = ("setuptools",)
"""Needed by torch on Python 3.12 and newer only."""
HEAD = (
    "# Exact versions of all that onejob[dev] needs: written by `make freeze`, used by `make demo` and `make test`.\n"
)


def closure(root: str, extras: frozenset[str]) -> dict[str, str]:
    """Name -> version of everything that a distribution with these extras needs, itself left out."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [(root, extras)]
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        installed = distribution(name)
        if name != root:
            found[name] = Version(installed.version).public
        for line in installed.requires or ():
            need = Requirement(line)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                todo.append((canonicalize_name(need.name), frozenset(need.extras)))
    return found


def main() -> None:
    found = closure(ROOT, frozenset({"dev"})) | {name: distribution(name).version for name in ALSO}
    lines = [f"{name}=={version}\n" for name, version in sorted(found.items())]
    TARGET.write_text(HEAD + "".join(lines))
    print(f"{TARGET.name}: {len(lines)} packages")


if __name__ == "__main__":
    main()
