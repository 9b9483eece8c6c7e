"""The job file: TOML, checked against the models of its tables, with every mistake reported at once.

Each mistake is one line that names file, table, key and value, says what is expected, and gives the nearest valid name.
Nothing is converted silently: text is no number, and 1 is not true.
"""

from __future__ import annotations

import copy
import datetime
import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from onejob.core.artifact import Json
from onejob.core.mistakes import fields, mistakes_of, show, spell
from onejob.core.spec import Model, StageSpec
from onejob.errors import JobFileError

STAGES = ("data", "train", "optimize", "serve", "monitor")
"""The stages, in the order of the work."""
TABLES = ("data", "train", "run", "optimize", "serve", "monitor")
"""The tables, in the order of the page."""
NAME = re.compile(r"[a-z][a-z0-9_-]*")
NAME_WORDS = "lower-case letters, digits, '-' and '_', beginning with a letter"

_KEY = re.compile(r"""\.?(?:([A-Za-z0-9_-]+)|"([^"]*)"|'([^']*)')|\[(\d+)\]""")
_TOML_PLACE = re.compile(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", re.DOTALL)


@dataclass(frozen=True)
class Job:
    """A job file that was read and found right."""

    name: str
    stages: Mapping[str, StageSpec]
    """The tables that are there, in the order of the work."""
    run: Any
    """The [run] table; a RunSpec."""
    path: Path
    """The job file, as it was given."""
    project: Path
    """Its folder, absolute: where the user's modules and files are."""
    text: str

    def to_json(self) -> dict[str, Json]:
        """The resolved job: every option with its value, by table."""
        tables: dict[str, BaseModel] = {**self.stages, "run": self.run}
        return {"name": self.name, **{name: table.model_dump(mode="json") for name, table in tables.items()}}


def parse_job(
    source: Path | str,
    stages: Mapping[str, type[StageSpec]],
    run: type[Model],
    sets: Sequence[str] = (),
    *,
    project: Path | None = None,
) -> Job:
    """Read a job file (a Path) or the text of one (a str); `sets` are overrides such as "train.lr=0.01".

    JobFileError with every mistake.
    """
    path = source if isinstance(source, Path) else Path("job.toml")
    text = _read(source) if isinstance(source, Path) else source
    models: dict[str, type[Model]] = {name: stages[name] for name in STAGES if name in stages} | {"run": run}
    page = _Page(str(path), _toml(path, text))
    for word in sets:
        page.set(word)
    page.check_finite()
    page.check_top(models)
    specs = {name: page.check(name, model, models) for name, model in models.items() if name in page.data}
    if "run" not in page.data:
        specs["run"] = page.check("run", run, models)
    if page.mistakes:
        raise JobFileError(page.mistakes)
    return Job(
        name=page.data["name"],
        stages={name: spec for name, spec in specs.items() if isinstance(spec, StageSpec)},
        run=specs["run"],
        path=path,
        project=project or Path(os.path.abspath(path.parent)),
        text=text,
    )


# ---- reading -----------------------------------------------------------------------------------------------------


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except IsADirectoryError:
        inside = next(iter(sorted(path.glob("*.toml"))), path / "job.toml")
        raise JobFileError([f"{path} is a folder. Name the job file in it, such as {inside}."]) from None
    except (FileNotFoundError, NotADirectoryError):
        folder = path.parent
        known = [found.name for found in folder.glob("*.toml")] if folder.is_dir() else []
        near = difflib.get_close_matches(path.name, known, n=1, cutoff=0.5) or known[:1]
        cure = f"Did you mean {str(folder / near[0])!r}?" if near else "`onejob init` writes a first one."
        raise JobFileError([f"{path}: there is no such file. {cure}"]) from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        line = error.object[: error.start].count(b"\n") + 1
        message = f"{path}:{line}: not UTF-8 text (byte 0x{byte:02x} at {error.start}). Save it as UTF-8."
        raise JobFileError([message]) from None
    except OSError as error:
        raise JobFileError([f"{path}: can't be read: {error.strerror}."]) from None


def _toml(path: Path, text: str) -> dict[str, Json]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = _TOML_PLACE.fullmatch(str(error))
        lines = text.split("\n")
        number = int(match[2]) if match and match[2] else max(1, len(text.rstrip("\n").split("\n")))
        column = f":{match[3]}" if match and match[3] else ""
        said = match[1] if match else str(error)
        shown = lines[number - 1].strip() if number <= len(lines) else ""
        message = " ".join(said.split())
        raise JobFileError([f"{path}:{number}{column}: not TOML: {message}: {shown[:100]!r}"]) from None
    except RecursionError:
        raise JobFileError([f"{path}: not TOML that can be read: nested too deeply"]) from None


# ---- one page and its mistakes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Set:
    """An override, as given, and the place that it sets."""

    word: str
    path: tuple[str | int, ...]


@dataclass
class _Page:
    """A job file's values with overrides applied, and the mistakes found so far."""

    file: str
    data: dict[str, Json]
    mistakes: list[str] = field(default_factory=list)
    sets: list[_Set] = field(default_factory=list)
    infinite: set[tuple[str | int, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.written = copy.deepcopy(self.data)

    def set(self, word: str) -> None:
        """Apply one override."""
        dotted, equals, text = word.partition("=")
        path = _parse_path(dotted.strip())
        if not equals or not path:
            self.mistakes.append(f"--set {word}: write it as table.key=value, such as train.epochs=4.")
            return
        here: Json = self.data
        for at, part in enumerate(path):
            if isinstance(here, dict) and isinstance(part, str):
                here.setdefault(part, {})
            if not _holds(here, part):
                self.mistakes.append(f"--set {word}: {_no_place(path[:at], here, part)}")
                return
            if at == len(path) - 1:
                here[part] = _toml_value(text.strip())
            here = here[part]
        self.sets.append(_Set(word, path))

    def check_finite(self) -> None:
        """JSON has no inf and no nan, so neither has a key."""
        for path, value in _leaves(self.data, ()):
            if isinstance(value, float) and not math.isfinite(value):
                self.infinite.add(path)
                self._add(path, f"{value} is not a finite number")

    def check_top(self, models: Mapping[str, type[Model]]) -> None:
        """The name, and which tables there are."""
        name = self.data.get("name")
        if name is None:
            self.mistakes.append(f"{self.file} name: is missing. Give the job a name: {NAME_WORDS}.")
        elif not isinstance(name, str) or not NAME.fullmatch(name):
            self._add(("name",), f"{show(_plain(name))} is not a name for a job: {NAME_WORDS}.")
        for key, value in self.data.items():
            if key in models or key == "name":
                continue
            home = [table for table, model in models.items() if key in fields(model)]
            known = [table for table in TABLES if table in models]
            if near := difflib.get_close_matches(key.lower(), [*known, "name"], n=1):
                hint = f"Did you mean {near[0]!r}?" if near[0] == "name" else f"Did you mean [{near[0]}]?"
            elif home:
                hint = f"It is a key of {' and '.join(f'[{table}]' for table in home)}: write it below that line."
            else:
                hint = f"Tables: {', '.join(known)}."
            what = f"unknown table [{key}]" if isinstance(value, dict) else f"unknown key {key!r}"
            self._add((key,), f"{what}. {hint}", place=self.file)

    def check(self, table: str, model: type[Model], models: Mapping[str, type[Model]]) -> Model | None:
        """A table's model, or its mistakes."""
        value = self.data.get(table, {})
        if not isinstance(value, dict):
            many = " Write [x] once, not [[x]].".replace("x", table) if isinstance(value, list) else ""
            self._add((table,), f"{show(_plain(value))} is not a table.{many}", place=f"{self.file} [{table}]")
            return None
        plain = _plain(value)
        try:
            # JSON's strict mode takes a list for a tuple and text for a path, and no text for a number
            return model.model_validate_json(json.dumps(plain), strict=True)
        except ValidationError as error:
            elsewhere = {key: other for other in models for key in fields(models[other]) if other != table}
            for mistake in mistakes_of(model, plain, error, elsewhere):
                if (table, *mistake.path) not in self.infinite:
                    self._add((table, *mistake.path), mistake.text)
            return None

    def _add(self, path: tuple[str | int, ...], text: str, place: str = "") -> None:
        """Add a mistake, under the override that caused it, if one did."""
        for override in reversed(self.sets):
            depth = len(override.path)
            below = path[:depth] == override.path
            made = override.path[: len(path)] == path and not _has(self.written, path)
            if below or made:
                inner = f" {spell(path[depth:])}" if path[depth:] else ""
                self.mistakes.append(f"--set {override.word}{inner}: {text}")
                return
        if not place:
            place = f"{self.file} {spell(path)}" if len(path) == 1 else f"{self.file} [{path[0]}] {spell(path[1:])}"
            if len(path) == 1 and path[0] != "name":
                place = f"{self.file} [{path[0]}]"
        self.mistakes.append(f"{place}: {text}")


def _parse_path(dotted: str) -> tuple[str | int, ...]:
    """The parts of train.model.hidden[1] or data."my key"; empty if it isn't a path."""
    parts: list[str | int] = []
    at = 0
    while at < len(dotted):
        match = _KEY.match(dotted, at)
        starts_well = match and (not parts) != match[0].startswith((".", "["))
        if not match or not starts_well:
            return ()
        parts.append(int(match[4]) if match[4] else match[1] or match[2] or match[3] or "")
        at = match.end()
    return tuple(parts)


def _toml_value(text: str) -> Json:
    """A value of TOML, or the text itself where it isn't one."""
    try:
        read = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return read["value"] if set(read) == {"value"} else text


def _no_place(path: tuple[str | int, ...], here: Json, part: str | int) -> str:
    where = spell(path) or "the job file"
    if isinstance(here, list) and isinstance(part, int):
        return f"{where} has {len(here)} entries, counted from 0, and no [{part}]."
    kind = (
        "a list; name an entry, such as [0]" if isinstance(here, list) else "a table" if isinstance(here, dict) else ""
    )
    return f"{where} is {kind}." if kind else f"{where} is {show(_plain(here))}, which holds no {part!r}."


def _holds(here: Json, part: str | int) -> bool:
    if isinstance(here, dict):
        return part in here
    return isinstance(here, list) and isinstance(part, int) and part < len(here)


def _has(data: Json, path: tuple[str | int, ...]) -> bool:
    for part in path:
        if not _holds(data, part):
            return False
        data = data[part]
    return True


def _leaves(value: Json, path: tuple[str | int, ...]) -> list[tuple[tuple[str | int, ...], Json]]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, (*path, key))]
    if isinstance(value, list):
        return [leaf for at, inner in enumerate(value) for leaf in _leaves(inner, (*path, at))]
    return [(path, value)]


def _plain(value: Json) -> Json:
    """A value of TOML as JSON: dates and times as ISO text; what isn't finite was reported, and is zero from here."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, datetime.date | datetime.datetime | datetime.time):
        return value.isoformat()
    return 0.0 if isinstance(value, float) and not math.isfinite(value) else value
