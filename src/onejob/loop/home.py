"""The home folder: where a machine keeps its ledger, blobs and work; and its settings.

One home serves all jobs of a machine (or of a team, with a PostgreSQL ledger), since they share its CPU and GPU slots.
"""

from __future__ import annotations

import errno
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from onejob.core.spec import Duration, Model
from onejob.errors import StoreError, UsageError

VARIABLE = "ONEJOB_HOME"


class Settings(Model):
    """`config.toml` in the home folder; every field may be left out."""

    ledger: str | None = Field(
        None,
        description="SQLAlchemy URL of the ledger, such as 'postgresql+psycopg://user@host/db'; unset: ledger.db here.",
    )
    cpus: float | None = Field(
        None, gt=0, description="CPU slots of the local executor; unset: all that this process may use."
    )
    gpus: list[int] | None = Field(
        None, description="GPU indices that the local executor may use; unset: all that are found."
    )
    lease: Duration = Field(
        30.0, description="How long a silent holder keeps its work when it can't be asked whether it lives."
    )


@dataclass(frozen=True)
class Home:
    """Paths below the home folder."""

    root: Path
    settings: Settings

    @property
    def ledger_url(self) -> str:
        return self.settings.ledger or f"sqlite:///{self.root / 'ledger.db'}"

    @property
    def blobs(self) -> Path:
        return self.root / "blobs"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    def work(self, execution: str) -> Path:
        return self.root / "work" / execution

    def scratch(self, key: str) -> Path:
        return self.root / "scratch" / key

    def endpoint(self, name: str) -> Path:
        return self.root / "endpoints" / name


def locate(explicit: str | Path | None = None) -> Path:
    """Where the home folder is: as given, else $ONEJOB_HOME, else ~/.onejob."""
    return Path(explicit or os.environ.get(VARIABLE) or Path.home() / ".onejob").expanduser().absolute()


def open_home(root: Path) -> Home:
    """Read the settings and make the folders; StoreError with the cure if the disk doesn't let us."""
    home = Home(root, read_settings(root / "config.toml"))
    try:
        for folder in (home.root, home.blobs, home.tmp, root / "work", root / "scratch", root / "endpoints"):
            folder.mkdir(parents=True, exist_ok=True)
        probe = home.tmp / f".write-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        what = "is on a read-only disk" if error.errno == errno.EROFS else f"can't be written ({error.strerror})"
        cure = f"Name another with --home or {VARIABLE}."
        raise StoreError(f"the home folder {what}", place=str(root), cure=cure) from error
    return home


def read_settings(path: Path) -> Settings:
    """The settings file; UsageError names each mistake."""
    if not path.exists():
        return Settings()
    try:
        return Settings(**tomllib.loads(path.read_text()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"is not TOML: {error}", place=str(path)) from error
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        known = ", ".join(Settings.model_fields)
        raise UsageError("; ".join(lines), place=str(path), cure=f"Known keys: {known}.") from error
