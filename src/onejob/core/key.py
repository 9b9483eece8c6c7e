"""The step key: what decides a step's result, each component stored, so that `why` is a difference that a person reads.

Two steps with the same key leave the same result, so the second one needn't run. A component enters the digest as a
value; `parts` of modules and the files of a source only serve to explain, and stay out of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from onejob.core.artifact import Json, canonical, digest_json, short
from onejob.core.code import Closure
from onejob.core.plan import Step

KEY_FORMAT = 1
ABSENT = "absent"
"""The version of a package that isn't installed."""
_EXPLAINING = frozenset({"sources"})
"""Components that only explain."""
_SHOWN = 60
_PARTS = 6


@dataclass(frozen=True)
class StepKey:
    """The components of a key, as JSON; `digest` names the step's result."""

    components: Mapping[str, Json]

    @cached_property
    def digest(self) -> str:
        counted = {name: value for name, value in self.components.items() if name not in _EXPLAINING}
        if isinstance(code := counted.get("code"), Mapping):
            counted["code"] = {**code, "project": _digests(code, "project"), "engine": _digests(code, "engine")}
        return digest_json(counted)


def build_key(
    step: Step,
    inputs: Mapping[str, str],
    closure: Closure,
    packages: Mapping[str, str],
    python: str,
    hardware: Json,
    *,
    sources: Mapping[str, Mapping[str, str]] | None = None,
) -> StepKey:
    """The key of a step whose inputs are known (name -> artifact digest).

    `sources` gives the files of inputs that are sources (input -> logical name -> digest), to explain by.
    """
    code = closure.to_json()
    components: dict[str, Json] = {
        "format": KEY_FORMAT,
        "stage": step.stage,
        "step": step.name,
        "entry": step.entry,
        "options": dict(step.options),
        "inputs": dict(inputs),
        "code": {name: code[name] for name in ("project", "engine", "reads")},
        "packages": dict(packages),
        "python": python,
        "hardware": None if step.hardware == "none" else hardware,
        "seed": step.seed,
        "world": step.needs.processes,
        "threads": step.threads,
    }
    if sources:
        components["sources"] = {name: dict(files) for name, files in sources.items()}
    return StepKey(components)


@dataclass(frozen=True)
class Change:
    """One difference between two keys."""

    component: str
    """The component, or its part: `code.project.helper.py`, `options.lr`, `packages.polars`."""
    old: Json
    new: Json
    text: str
    parts: tuple[str, ...] = field(default=())
    """For a module: which of its parts changed."""

    def sentence(self) -> str:
        """What a person reads: "helper.py changed (function scale)"."""
        return self.text


def explain(old: StepKey, new: StepKey) -> list[Change]:
    """Every difference between two keys, what a person changed first; empty exactly where their digests are equal."""
    found: list[Change] = []
    for name in sorted({*old.components, *new.components}, key=_place):
        if name not in _EXPLAINING:
            before, after = old.components.get(name), new.components.get(name)
            if not _same(before, after):
                found += _RULES.get(name, _plain(name.replace("_", " ")))(name, before, after, old, new)
    return found


Rule = Callable[[str, Json, Json, StepKey, StepKey], Iterator[Change]]


def _plain(said: str) -> Rule:
    """A component that is one value, or a table of values."""

    def rule(name: str, old: Json, new: Json, _old: StepKey, _new: StepKey) -> Iterator[Change]:
        for path, before, after in _differences("", old, new):
            plain = path.removesuffix(_ORDER)
            at = f"{said} {plain}" if plain else said
            if before is _NOTHING:
                text = f"{at} added: {_show(after)}"
            elif after is _NOTHING:
                text = f"{at} removed (was {_show(before)})"
            elif plain != path:
                text = f"{at}: other order: {_show(after)}"
            else:
                text = f"{at} {_turn(before, after)}"
            yield Change(_join(name, plain), _or_none(before), _or_none(after), text)

    return rule


def _inputs(name: str, old: Json, new: Json, old_key: StepKey, new_key: StepKey) -> Iterator[Change]:
    """A source is told by its files, where both keys know them."""
    for entry, before, after in _entries(old, new):
        files = [key.components.get("sources", {}).get(entry) for key in (old_key, new_key)]
        if files[0] and files[1] and not _same(*files):
            for file, was, now in _entries(*files):
                yield Change(f"inputs.{entry}.{file}", was, now, f"source {file} {_fate(was, now)}")
        elif before is None or after is None:
            yield Change(f"inputs.{entry}", before, after, f"input {entry} {_fate(before, after)}")
        else:
            yield Change(f"inputs.{entry}", before, after, f"input {entry} {short(before)} -> {short(after)}")


def _code(name: str, old: Json, new: Json, _old: StepKey, _new: StepKey) -> Iterator[Change]:
    old, new = old or {}, new or {}
    for file, before, after in _entries(_digests(old, "project"), _digests(new, "project")):
        parts = _parts(old.get("project", {}).get(file), new.get("project", {}).get(file))
        text = f"{file} changed ({_listed(parts)})" if before and after else f"{file} {_reached(before)}"
        yield Change(f"code.project.{file}", before, after, text, tuple(parts))
    for path, before, after in _entries(old.get("reads"), new.get("reads")):
        yield Change(f"code.reads.{path}", before, after, f"file {path} {_fate(before, after)}")
    engine = list(_entries(_digests(old, "engine"), _digests(new, "engine")))
    if engine:
        said = []
        for file, before, after in engine:
            parts = _parts(old.get("engine", {}).get(file), new.get("engine", {}).get(file))
            plain = file.removeprefix("onejob/")
            said.append(f"{plain}: {_listed(parts)}" if before and after else f"{plain} {_reached(before)}")
        more = f"; and {len(said) - _PARTS} more files" if len(said) > _PARTS else ""
        text = f"onejob's own code changed ({'; '.join(said[:_PARTS])}{more})"
        yield Change("code.engine", digest_json(_digests(old, "engine")), digest_json(_digests(new, "engine")), text)


def _packages(name: str, old: Json, new: Json, _old: StepKey, _new: StepKey) -> Iterator[Change]:
    for package, before, after in _entries(old, new):
        if before in (None, ABSENT) and after not in (None, ABSENT):
            text = f"package {package} added ({after})"
        elif after in (None, ABSENT):
            was = "is not installed" if after == ABSENT else "is no longer imported"
            text = f"package {package} {was}" + ("" if before in (None, ABSENT) else f" (was {before})")
        else:
            text = f"{package} {before} -> {after}" if before else f"package {package} {after}"
        yield Change(f"packages.{package}", before, after, text)


def _python(name: str, old: Json, new: Json, _old: StepKey, _new: StepKey) -> Iterator[Change]:
    yield Change(name, old, new, f"Python {old} -> {new}")


_RULES: Mapping[str, Rule] = {
    "code": _code,
    "options": _plain("option"),
    "inputs": _inputs,
    "seed": _plain("seed"),
    "packages": _packages,
    "world": _plain("world size"),
    "threads": _plain("threads"),
    "hardware": _plain("hardware"),
    "python": _python,
    "entry": _plain("entry"),
    "stage": _plain("stage"),
    "step": _plain("step"),
    "format": _plain("format of the key"),
}
"""Component -> how its differences are told, in this order."""


def _place(name: str) -> tuple[int, str]:
    order = list(_RULES)
    return (order.index(name) if name in order else len(order), name)


# ---- differences -------------------------------------------------------------------------------------------------

_NOTHING = object()
_ORDER = "\0order"


def _differences(path: str, old: Json, new: Json) -> Iterator[tuple[str, Json, Json]]:
    """(dotted path, old, new) of every leaf that differs; `_NOTHING` where there is none."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}):
            before, after = old.get(name, _NOTHING), new.get(name, _NOTHING)
            if before is _NOTHING or after is _NOTHING or not _same(before, after):
                yield from _differences(_join(path, _quoted(name)), before, after)
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple):
        yield from _list_differences(path, old, new)
    else:
        yield path, old, new


def _list_differences(path: str, old: Sequence[Json], new: Sequence[Json]) -> Iterator[tuple[str, Json, Json]]:
    before, after = [canonical(item) for item in old], [canonical(item) for item in new]
    if before != after and sorted(before) == sorted(after):
        yield path + _ORDER, old, new
        return
    # autojunk would find nothing alike among the entries that are frequent in a long list
    for tag, i, j, k, m in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        paired = min(j - i, m - k)
        for at in range(paired):
            if before[i + at] != after[k + at]:
                yield from _differences(f"{path}[{k + at}]", old[i + at], new[k + at])
        yield from ((f"{path}[{at}]", old[at], _NOTHING) for at in range(i + paired, j))
        yield from ((f"{path}[{at}]", _NOTHING, new[at]) for at in range(k + paired, m))


def _entries(old: Json, new: Json) -> Iterator[tuple[str, Json, Json]]:
    """(name, old, new) of the entries of two tables that differ; None where there is none."""
    old, new = old or {}, new or {}
    for name in sorted({*old, *new}):
        if (name in old) != (name in new) or not _same(old.get(name), new.get(name)):
            yield name, old.get(name), new.get(name)


def _same(old: Json, new: Json) -> bool:
    """Equal as the digest sees it: 1, 1.0 and true are three values."""
    return canonical(old) == canonical(new)


def _digests(code: Mapping[str, Json], name: str) -> dict[str, str]:
    return {file: module["digest"] for file, module in code.get(name, {}).items()}


def _parts(old: Json, new: Json) -> list[str]:
    """Names of a module's parts that differ."""
    before, after = (old or {}).get("parts", {}), (new or {}).get("parts", {})
    return [part for part, _, _ in _entries(before, after)]


# ---- words -------------------------------------------------------------------------------------------------------


def _listed(parts: Sequence[str]) -> str:
    if not parts:
        return "order of its parts"
    more = f"; and {len(parts) - _PARTS} more" if len(parts) > _PARTS else ""
    return "; ".join(parts[:_PARTS]) + more


def _reached(before: Json) -> str:
    return "is no longer reached" if before else "is reached now"


def _fate(before: Json, after: Json) -> str:
    return "added" if before is None else "removed" if after is None else "changed"


def _turn(before: Json, after: Json) -> str:
    old, new = _show(before), _show(after)
    return f"{old} -> {new}" if old != new else f"changed (both begin with {old})"


def _show(value: Json) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) and _bare(value) else canonical(value).decode()
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _bare(text: str) -> bool:
    """Whether text reads as itself without quotes: a word that is no number."""
    plain = text.replace("_", "a").replace("-", "a").replace(".", "a").replace(":", "a")
    return plain.isalnum() and text[0].isalpha() and text not in ("none", "null", "true", "false")


def _quoted(name: str) -> str:
    return name if name.replace("_", "a").replace("-", "a").isalnum() else f'"{name}"'


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _or_none(value: Json) -> Json:
    return None if value is _NOTHING else value
