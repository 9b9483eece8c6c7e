"""Mistakes in a job file, in plain words: pydantic's errors translated, with the nearest valid name.

A union reports the errors of each of its members; here the member that fits best is chosen, so that one mistake is one
line.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from onejob.core.artifact import Json, canonical

Path = tuple[str | int, ...]
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake: where (keys and positions), and what is wrong, with the cure."""

    path: Path
    text: str


@dataclass(frozen=True, slots=True)
class _Fault:
    """One of pydantic's errors, with its real path and the members of unions that it went through."""

    path: Path
    tags: tuple[tuple[int, str], ...]
    """(how deep in the path, which member)."""
    kind: str
    value: Json
    words: Mapping[str, Any]
    message: str


def mistakes_of(
    model: type[BaseModel], data: Json, error: ValidationError, elsewhere: Mapping[str, str] | None = None
) -> list[Mistake]:
    """Every mistake that validation found, one for each place; `elsewhere`: keys of other tables -> which."""
    faults = [_fault(data, found) for found in error.errors(include_url=False)]
    grouped: dict[Path, list[_Fault]] = {}
    for fault in _best_members(faults):
        grouped.setdefault(fault.path, []).append(fault)
    return [Mistake(path, _said(model, path, group, elsewhere or {})) for path, group in grouped.items()]


def spell(path: Path) -> str:
    """A path as it is written: steps[2].split.test; a key that isn't a plain word is quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            word = part if part.replace("_", "a").replace("-", "a").isalnum() else f'"{part}"'
            text += f".{word}" if text else word
    return text


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'gpus'?` for the nearest of the known names, or nothing."""
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), names, n=1) or [n for n in names if len(name) > 2 and name in n][:1]
    return f" Did you mean {near[0]!r}?" if near else ""


def show(value: Json) -> str:
    """A value as a person wrote it, near enough, on one line and not too long."""
    text = repr(value) if isinstance(value, str) else canonical(value).decode()
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


# ---- from pydantic's errors to faults ----------------------------------------------------------------------------


def _fault(data: Json, error: Mapping[str, Any]) -> _Fault:
    """Tell the keys of a location from the names of union members, by following the data."""
    path: list[str | int] = []
    tags: list[tuple[int, str]] = []
    here, last = data, len(error["loc"]) - 1
    for at, part in enumerate(error["loc"]):
        if (isinstance(here, dict) and part in here) or (
            isinstance(here, list) and isinstance(part, int) and part < len(here)
        ):
            here = here[part]
            path.append(part)
        elif at == last and error["type"] in ("missing", "extra_forbidden"):
            path.append(part)
        elif part != "[key]":
            tags.append((len(path), str(part)))
    return _Fault(tuple(path), tuple(tags), error["type"], error["input"], error.get("ctx", {}), error["msg"])


def _best_members(faults: list[_Fault]) -> list[_Fault]:
    """Where a value failed as every member of a union, keep the faults of the member that fits best."""
    chosen = faults
    for depth in sorted({at for fault in faults for at, _ in fault.tags}):
        places = {fault.path[:depth] for fault in chosen if any(at == depth for at, _ in fault.tags)}
        for place in places:
            members: dict[str, list[_Fault]] = {}
            for fault in chosen:
                if fault.path[:depth] == place:
                    for at, tag in fault.tags:
                        if at == depth:
                            members.setdefault(tag, []).append(fault)
                            break
            # a member for which the value is of the right kind has no fault at the place itself
            fitting = {tag: group for tag, group in members.items() if all(len(f.path) > depth for f in group)}
            kept = min(fitting.values(), key=len) if fitting else [f for g in members.values() for f in g]
            dropped = [f for group in members.values() for f in group if f not in kept]
            chosen = [fault for fault in chosen if fault not in dropped]
    return chosen


# ---- from faults to words ----------------------------------------------------------------------------------------


def _said(model: type[BaseModel], path: Path, group: Sequence[_Fault], elsewhere: Mapping[str, str]) -> str:
    first = group[0]
    if first.kind == "extra_forbidden":
        known = list(_keys(model, path[:-1]))
        other = elsewhere.get(str(path[-1])) if len(path) == 1 else None
        hint = nearest(str(path[-1]), known) or (f" It is a key of [{other}]." if other else "")
        hint = hint or f" Known keys: {', '.join(known)}."
        return f"unknown key {path[-1]!r}.{hint}"
    if first.kind == "missing":
        wanted = _description(model, path)
        return f"is missing.{' ' + wanted if wanted else ''}"
    texts = dict.fromkeys(_text(fault) for fault in group)
    expected = [text.removeprefix("is not ") for text in texts if text.startswith("is not ")]
    if len(expected) == len(texts):
        return f"{show(first.value)} is not {' or '.join(expected)}"
    plain = "; ".join(text for text in texts if not text.startswith("is not "))
    if plain.startswith(("must ", "is ")):
        return f"{show(first.value)} {plain}"
    return f"{show(first.value)}: {plain}" if path and not isinstance(first.value, dict | list) else plain


def _text(fault: _Fault) -> str:
    words = _WORDS.get(fault.kind)
    if words is None:
        plain = fault.message[:1].lower() + fault.message[1:]
        return " ".join(plain.split())
    return words(fault) if callable(words) else words


def _choice(fault: _Fault) -> str:
    choices = str(fault.words.get("expected", ""))
    names = [part.strip(" '") for part in choices.replace(" or ", ",").split(",")]
    hint = nearest(fault.value, names) if isinstance(fault.value, str) else ""
    return f"is not {choices}{'.' if hint else ''}{hint}"


def _own(fault: _Fault) -> str:
    """What a model's own check said."""
    return " ".join(str(fault.words.get("error", fault.message)).split())


def _bound(relation: str, key: str) -> Callable[[_Fault], str]:
    return lambda fault: f"must be {relation} {show(fault.words.get(key))}"


def _length(relation: str, key: str) -> Callable[[_Fault], str]:
    def text(fault: _Fault) -> str:
        count = fault.words.get(key)
        unit = "characters" if isinstance(fault.value, str) else "entries"
        return f"must have {relation} {count} {unit if count != 1 else unit[:-1] if unit != 'entries' else 'entry'}"

    return text


_WHOLE = "is not a whole number"
_NUMBER = "is not a number"
_TABLE = "is not a table"
_LIST = "is not a list"
_TEXT = "is not text (in quotes)"

_WORDS: Mapping[str, str | Callable[[_Fault], str]] = {
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "int_parsing_size": "is too large",
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "is not a finite number",
    "bool_type": "is not true or false",
    "bool_parsing": "is not true or false",
    "string_type": _TEXT,
    "string_sub_type": _TEXT,
    "string_unicode": _TEXT,
    "list_type": _LIST,
    "tuple_type": _LIST,
    "set_type": _LIST,
    "frozen_set_type": _LIST,
    "dict_type": _TABLE,
    "mapping_type": _TABLE,
    "model_type": _TABLE,
    "model_attributes_type": _TABLE,
    "dataclass_type": _TABLE,
    "none_required": "must be left out",
    "literal_error": _choice,
    "enum": _choice,
    "greater_than": _bound("greater than", "gt"),
    "greater_than_equal": _bound("at least", "ge"),
    "less_than": _bound("less than", "lt"),
    "less_than_equal": _bound("at most", "le"),
    "multiple_of": _bound("a multiple of", "multiple_of"),
    "too_short": _length("at least", "min_length"),
    "too_long": _length("at most", "max_length"),
    "string_too_short": _length("at least", "min_length"),
    "string_too_long": _length("at most", "max_length"),
    "string_pattern_mismatch": lambda fault: f"must match the pattern {fault.words.get('pattern')}",
    "date_type": "is not a date, such as 2013-02-20",
    "date_parsing": "is not a date, such as 2013-02-20",
    "date_from_datetime_parsing": "is not a date, such as 2013-02-20",
    "datetime_type": "is not a time, such as 2013-02-20T12:00:00",
    "datetime_parsing": "is not a time, such as 2013-02-20T12:00:00",
    "datetime_from_date_parsing": "is not a time, such as 2013-02-20T12:00:00",
    "value_error": _own,
    "assertion_error": _own,
}
"""Kind of error -> what is said of the value."""


# ---- what the models say -----------------------------------------------------------------------------------------


def fields(model: type[BaseModel]) -> dict[str, Any]:
    """A model's fields by the key that the job file uses."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a value of this type may be: itself, or members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from models_in(member)
    elif hasattr(annotation, "__metadata__"):
        yield from models_in(get_args(annotation)[0])


def _at(model: type[BaseModel], path: Path) -> list[Any]:
    """The types that the value at a path may have."""
    here: list[Any] = [model]
    for part in path:
        here = [inner for annotation in here for inner in _inside(annotation, part)]
    return here


def _inside(annotation: Any, part: str | int) -> Iterator[Any]:
    for model in models_in(annotation):
        if part in fields(model):
            yield fields(model)[str(part)].annotation
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        for member in arguments:
            if not (isinstance(member, type) and issubclass(member, BaseModel)):
                yield from _inside(member, part)
    elif hasattr(annotation, "__metadata__"):
        yield from _inside(arguments[0], part) if not list(models_in(annotation)) else ()
    elif isinstance(origin, type) and arguments:
        yield arguments[-1] if issubclass(origin, Mapping) == isinstance(part, str) else None


def _keys(model: type[BaseModel], path: Path) -> Iterator[str]:
    """The keys that a table at a path may have."""
    found = {key: None for annotation in _at(model, path) for inner in models_in(annotation) for key in fields(inner)}
    yield from found


def _description(model: type[BaseModel], path: Path) -> str:
    owners = [inner for annotation in _at(model, path[:-1]) for inner in models_in(annotation)]
    texts = [fields(owner)[str(path[-1])].description for owner in owners if path[-1] in fields(owner)]
    return next((text for text in texts if text), "")
