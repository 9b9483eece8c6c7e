"""`[run]`: the typed table of stage 3, where a job runs and what its steps get from their surroundings.

A secret is stored by name only: the job file says where it is found (an environment variable, or a file), and its value
is looked up when a step starts. It never enters a key, an artifact, the ledger or a log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from onejob.core.spec import Model, uncounted
from onejob.errors import JobFileError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Secret(Model):
    """Where a secret's value is found: in an environment variable, or in a file."""

    env: str | None = uncounted(None, description="The environment variable that holds it, where onejob is started.")
    file: str | None = uncounted(
        None, description="The file that holds it, relative to the job file or under `~`; a last line end is left out."
    )

    @model_validator(mode="after")
    def _one_place(self) -> Secret:
        if (self.env is None) == (self.file is None):
            raise ValueError("give one of 'env' (a variable's name) and 'file' (a path)")
        if self.env is not None and not _VARIABLE.fullmatch(self.env):
            raise ValueError("'env' is the name of an environment variable, not its value")
        return self


class RunSpec(Model):
    """Stage 3: where the job runs, and what decides it beside the stages' own options."""

    executor: str = uncounted("local", description="What runs the steps: `local` is this machine.")
    seed: int = Field(
        0, ge=0, lt=1 << 63, description="What all randomness starts from; the same seed, the same result."
    )
    secrets: dict[str, Secret] = uncounted(
        {},
        description="Variable that the steps get -> where its value is found, such as `TOKEN = { env = 'MY_TOKEN' }`. "
        "Only names are stored.",
    )
    env: dict[str, str] = Field(
        {}, description="Plain environment variables that the steps get. Their values are stored: not for secrets."
    )
    warnings: Literal["warn", "error"] = uncounted(
        "warn", description="Whether code that can't be followed is warned about, or stops the run before it starts."
    )

    @field_validator("env", "secrets")
    @classmethod
    def _variables(cls, table: dict[str, object]) -> dict[str, object]:
        wrong = [name for name in table if not _VARIABLE.fullmatch(name)]
        if wrong:
            raise ValueError(f"not the name of an environment variable: {', '.join(map(repr, wrong))}")
        return table

    @model_validator(mode="after")
    def _apart(self) -> RunSpec:
        both = sorted(set(self.env) & set(self.secrets))
        if both:
            raise ValueError(f"in 'env' and in 'secrets': {', '.join(both)}; a variable has one value")
        return self


def secret_values(spec: RunSpec, project: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Look up every secret of a job; JobFileError names, all at once, those that can't be found, never a value."""
    values: dict[str, str] = {}
    mistakes: list[str] = []
    for name, secret in spec.secrets.items():
        place = f"[run] secrets.{name}"
        if secret.env is not None:
            if environ.get(secret.env):
                values[name] = environ[secret.env]
            else:
                state = "empty" if secret.env in environ else "not set"
                mistakes.append(
                    f"{place}: the environment variable {secret.env} is {state}. Set it where onejob is started."
                )
            continue
        value, problem = _read(secret.file or "", project, environ)
        values[name] = value
        if problem:
            mistakes.append(f"{place}: {problem}")
    if mistakes:
        raise JobFileError(mistakes)
    return values


def _read(file: str, project: Path, environ: Mapping[str, str]) -> tuple[str, str]:
    """A secret's file: (value, what is wrong)."""
    home = environ.get("HOME", "~")
    path = project / (f"{home}{file[1:]}" if file == "~" or file.startswith("~/") else file)
    try:
        value = path.read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
    except FileNotFoundError:
        return "", f"there is no file {str(path)!r}. Make it, with the secret as its text."
    except UnicodeDecodeError:
        return "", f"{str(path)!r} is not UTF-8 text."
    except (OSError, ValueError) as error:
        return "", f"{str(path)!r} can't be read: {getattr(error, 'strerror', None) or error}."
    if not value:
        return "", f"{str(path)!r} is empty. Put the secret in it."
    if "\0" in value:
        return "", f"{str(path)!r} holds a zero byte, which no environment variable can hold."
    return value, ""
