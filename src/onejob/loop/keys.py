"""The step key of a planned step, here and now: its code, packages, hardware and inputs, looked up and digested."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from onejob.core.artifact import Artifact, FileEntry, digest_file
from onejob.core.code import Closure, closure
from onejob.core.key import StepKey, build_key
from onejob.core.plan import Source, Step
from onejob.errors import SourceError
from onejob.machines.environment import distributions, hardware, python_version


@dataclass(frozen=True)
class Keyed:
    """A step with its key, and what could not be followed on the way."""

    key: StepKey
    warnings: tuple[str, ...]
    modules: tuple[str, ...]
    """Top-level modules outside the project that the step's code imports."""


def key_of(step: Step, inputs: Mapping[str, str], project: Path) -> Keyed:
    """The key of a step whose input digests are known."""
    code = code_of(step, project)
    counted = replace(step, options={**step.options, "env": dict(step.env)}) if step.env else step
    key = build_key(
        counted,
        inputs,
        code,
        distributions(code.modules),
        python_version(),
        hardware(step.hardware),
        sources={name: _files(value) for name, value in step.inputs.items() if isinstance(value, Source)},
    )
    return Keyed(key, code.warnings, code.modules)


def code_of(step: Step, project: Path) -> Closure:
    """Every module that the step can reach."""
    roots = (step.entry.partition(":")[0], *step.roots)
    return closure(roots, project, step.imports, step.reads, env=tuple(step.env), table=step.stage)


def _files(source: Source) -> dict[str, str]:
    return {entry.path: entry.digest for entry in source_artifact(source)[0].files}


_hashed: dict[tuple[str, int, int, int], str] = {}


def source_artifact(source: Source) -> tuple[Artifact, dict[str, str]]:
    """Source files as an artifact, hashed where they lie; gives it with each file's location.

    Digests are remembered within this process by path, inode, size and time of change.
    """
    entries = []
    for name, path in source.files:
        try:
            about = os.stat(path)
            mark = (path, about.st_ino, about.st_size, about.st_mtime_ns)
            if mark not in _hashed:
                _hashed[mark] = digest_file(Path(path))
        except OSError as error:
            raise SourceError(f"can't be read: {error.strerror}", place=path, cure="Check [data] source.") from error
        entries.append(FileEntry(name, _hashed[mark], about.st_size))
    return Artifact("source", tuple(entries)), dict(source.files)
