"""Where servers are started for a case, each in a folder of its own, checked, and ended with the case."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serve import wire
from serve.models import Model
from serve.processes import FailedError, Tree, free_port
from serve.servers import Launch, Server, Setting, install
from serve.wire import Message


@dataclass(frozen=True)
class Cores:
    """Which cores the server and the load may use, as `taskset -c` takes them."""

    server: str = "1"
    load: str = "0"


@dataclass(frozen=True)
class Running:
    """A server that has answered rightly."""

    server: Server
    model: Model
    port: int
    tree: Tree
    first: float
    """Seconds from its start to its first answer."""
    work: Path

    def message(self, wire_name: str) -> Message:
        return self.server.message(wire_name, self.model)


@dataclass(frozen=True)
class Stage:
    """Where the environments and the models are, and which cores are whose."""

    envs: Path
    models: Path
    cores: Cores

    @contextmanager
    def running(self, server: Server, model: Model, *, replicas: int = 1, cores: str = "") -> Iterator[Running]:
        """One server, from its start until the block ends."""
        with self.launched(server, model, replicas=replicas, cores=cores) as (setting, tree):
            name = next(iter(server.wires))
            first = wire.first_answer(setting.port, server.message(name, model), tree)
            found = Running(server, model, setting.port, tree, first, setting.work)
            for each in server.wires:
                self._check(found, each)
            tree.boost()
            yield found

    @contextmanager
    def launched(
        self, server: Server, model: Model, *, replicas: int = 1, cores: str = "", names: Sequence[str] = ()
    ) -> Iterator[tuple[Setting, Tree]]:
        """The same, not waited for; with `names`, one that loads and unloads models under these names on demand."""
        work = Path(tempfile.mkdtemp(prefix=f"onejob-bench-{server.name}-"))
        home, logs = work / "server", work / "log"
        home.mkdir()
        ports = (free_port(), free_port(), free_port())
        file = model.file(self.models).resolve()
        setting = Setting(install(server, self.envs), home, model, file, ports[0], replicas, ports[1:], names)
        launch: Launch = server.launch(setting)
        tree = Tree(launch.argv, cores or self.cores.server, logs, launch.env)
        try:
            tree.boost()
            yield setting, tree
        finally:
            tree.stop()
            shutil.rmtree(work, ignore_errors=True)

    def _check(self, found: Running, wire_name: str) -> None:
        got = wire.ask(found.port, found.message(wire_name))
        wanted = wire.expected(self.models, found.model).ravel()
        if got.shape != wanted.shape or not np.allclose(got, wanted, atol=1e-3):
            raise FailedError(f"{found.server.name} answers {wire_name} wrongly: {got[:5]}, not {wanted[:5]}")
