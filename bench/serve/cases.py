"""The cases: which servers do what, in turns, and what is counted.

In a case all its servers run at once and are asked by turns, each for some seconds, so that what else the machine does
meets them alike; a turn of all of them gives one ratio for each pair. The servers that are not asked are idle; what an
idle one costs is measured too, and one that takes more than BUSY of the core is paused meanwhile. Microseconds of CPU
time a request (of all processes of the server) are what to judge by.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from serve.models import MLP, RESNET, Model
from serve.processes import FailedError, boost
from serve.servers import SERVERS
from serve.stage import Running, Stage
from serve.wrk import Figures, Load

WARM_SECONDS = 1.0
IDLE_SECONDS = 2.0
BUSY = 0.02
ENGINE = "engine alone"


@dataclass(frozen=True)
class Case:
    """One row of what is to be shown."""

    name: str
    title: str
    model: Model
    wire: str
    connections: int
    servers: Sequence[str]
    engine_batch: int = 0
    """Beside the engine alone at this batch, if not 0."""
    replicas: int = 1
    """More than one: server and load share all cores."""
    least: float = 0
    """Seconds of a turn at least: what is under way when it ends has been paid for, and isn't counted."""


@dataclass(frozen=True)
class Turn:
    """What one server did in one turn."""

    rate: float
    cpu: float
    """Microseconds a request."""
    figures: Figures | None = None


ALL = ("onejob", "triton", "mlserver", "litserve", "bentoml", "fastapi")
BINARY = ("onejob", "triton", "fastapi")
PYTHON = ("onejob-python", "triton")
CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case("mlp-binary", "MLP, binary tensors, 64 connections", MLP, "binary", 64, ("onejob-capture", *BINARY)),
        Case("mlp-json", "MLP, JSON, 64 connections", MLP, "json", 64, ALL),
        Case("mlp-python", "MLP, binary tensors, 64 connections, Triton's model.py in both", MLP, "binary", 64, PYTHON),
        Case("mlp-one", "MLP, binary tensors, 1 connection", MLP, "binary", 1, BINARY),
        Case("resnet-8", "ResNet-18, binary tensors, 8 connections", RESNET, "binary", 8, BINARY, 8),
        Case("resnet-64", "ResNet-18, binary tensors, 64 connections", RESNET, "binary", 64, BINARY, 16, least=12),
        Case("resnet-json", "ResNet-18, JSON, 8 connections", RESNET, "json", 8, ALL),
        Case("two-replicas", "MLP, binary tensors, 64 connections, 2 replicas", MLP, "binary", 64, BINARY, 0, 2),
    )
}


def measure(stage: Stage, load: Load, case: Case, servers: Sequence[str], turns: int, seconds: float) -> Measured:
    """Run a case: `servers` are those of it that are wanted."""
    seconds = max(seconds, case.least)
    with ExitStack() as stack:
        cores = "" if case.replicas == 1 else f"{stage.cores.server},{stage.cores.load}"
        running = [
            stack.enter_context(stage.running(SERVERS[name], case.model, replicas=case.replicas, cores=cores))
            for name in servers
        ]
        runner = load if case.replicas == 1 else load.on(cores)
        for one in running:
            _turn(one, runner, case, WARM_SECONDS)
        idle = _idle(running)
        found: dict[str, list[Turn]] = {one.server.name: [] for one in running}
        busy = [one for one in running if idle[one.server.name] > BUSY]
        for one in busy:
            one.tree.pause()
        for turn in range(turns):
            for one in running if turn % 2 else running[::-1]:
                one.tree.resume()
                found[one.server.name].append(_turn(one, runner, case, seconds))
                if one in busy:
                    one.tree.pause()
            if case.engine_batch:
                found.setdefault(ENGINE, []).append(_engine(stage, case, seconds))
        return Measured(case, found, idle, {one.server.name: one.tree.memory().rss for one in running})


@dataclass(frozen=True)
class Measured:
    """All turns of a case; the `n`-th of each server belong together."""

    case: Case
    turns: Mapping[str, Sequence[Turn]]
    idle: Mapping[str, float]
    """Share of a core that each used when it was not asked."""
    memory: Mapping[str, float]
    """MiB (rss), after all turns."""


def _turn(one: Running, load: Load, case: Case, seconds: float) -> Turn:
    one.tree.boost()  # workers that were started since, too
    before = one.tree.cpu()
    figures = load.run(one.port, one.message(case.wire), case.connections, seconds)
    used = one.tree.cpu() - before
    one.tree.check()
    return Turn(figures.rate, used / max(1, figures.requests) * 1e6, figures)


def _engine(stage: Stage, case: Case, seconds: float) -> Turn:
    script, file = Path(__file__).with_name("engine.py"), case.model.file(stage.models)
    argv = ["taskset", "-c", stage.cores.server, sys.executable, "-P", str(script), str(file)]
    process = subprocess.Popen(
        [*argv, str(case.engine_batch), str(seconds)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    boost(process.pid)
    out, _ = process.communicate()
    if process.returncode:
        raise FailedError(f"{argv!r} ended with {process.returncode}")
    return Turn(**json.loads(out))


def _idle(running: Sequence[Running]) -> dict[str, float]:
    time.sleep(0.5)
    before, begun = [one.tree.cpu() for one in running], time.perf_counter()
    time.sleep(IDLE_SECONDS)
    took = time.perf_counter() - begun
    return {one.server.name: (one.tree.cpu() - was) / took for one, was in zip(running, before, strict=True)}
