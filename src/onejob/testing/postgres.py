"""A throw-away PostgreSQL for tests: a cluster of its own in a short temporary folder, reached through a Unix socket.

It listens on no port, writes nothing durably, and dies with the process that started it. `initdb` refuses root, so as
root it runs as the user `postgres`, whom the Debian package makes.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from onejob.errors import UnavailableError

CURE = "Install it with `apt-get install postgresql`."
START_SECONDS = 60.0
PR_SET_PDEATHSIG = 1
SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "max_connections": "200",
    "shared_buffers": "32MB",
    "autovacuum": "off",
}


class PostgresServer:
    """`with PostgresServer() as server: url = server.database("name")`; UnavailableError if PostgreSQL isn't there."""

    def __init__(self) -> None:
        self._programs = find_programs()
        self.folder = Path(tempfile.mkdtemp(prefix="onejob-pg-", dir="/tmp"))
        self._as: Mapping[str, Any] = {}
        if os.geteuid() == 0:
            account = pwd.getpwnam("postgres")
            self._as = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
            os.chown(self.folder, account.pw_uid, account.pw_gid)
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PostgresServer:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def url(self, database: str) -> str:
        """The URL of a database of this server."""
        return f"postgresql+psycopg://postgres@/{database}?host={self.folder}"

    def database(self, name: str) -> str:
        """Make a new, empty database; gives its URL."""
        self._execute(f'CREATE DATABASE "{name}"')
        return self.url(name)

    def drop(self, name: str) -> None:
        """Remove a database, whoever is connected to it."""
        self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def stop(self) -> None:
        """Stop the server at once and remove its folder."""
        if self._server is not None:
            self._server.send_signal(signal.SIGQUIT)
            self._server.wait(timeout=START_SECONDS)
            self._server = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        data = self.folder / "data"
        initdb = [
            str(self._programs / "initdb"),
            "-D",
            str(data),
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-sync",
        ]
        made = subprocess.run(initdb, capture_output=True, text=True, cwd="/", **self._as)
        if made.returncode != 0:
            raise UnavailableError(f"initdb failed: {made.stderr.strip()}", place=str(data), cure=CURE)
        settings = [part for name, value in SETTINGS.items() for part in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("wb") as log:
            self._server = subprocess.Popen(
                [self._programs / "postgres", "-D", data, "-k", self.folder, *settings],
                stdout=log,
                stderr=log,
                cwd="/",
                preexec_fn=_die_with_parent,
                **self._as,
            )
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self._execute("SELECT 1")
                return
            except OperationalError:
                assert self._server is not None
                if self._server.poll() is not None or time.monotonic() > deadline:
                    log = (self.folder / "log").read_text(errors="replace")
                    raise UnavailableError(f"the server did not start: {log[-500:]}", place=str(self.folder)) from None
                time.sleep(0.05)

    def _execute(self, statement: str) -> None:
        engine = create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                connection.execute(text(statement))
        finally:
            engine.dispose()


def find_programs() -> Path:
    """The folder with `initdb` and `postgres`, of the newest version; UnavailableError if there is none."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if found:
        return max(found, key=lambda path: int(path.parent.name) if path.parent.name.isdigit() else 0)
    initdb = shutil.which("initdb")
    if initdb is None:
        raise UnavailableError("PostgreSQL is not installed", place="/usr/lib/postgresql", cure=CURE)
    return Path(initdb).resolve().parent


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGQUIT)
