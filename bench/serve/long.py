"""What takes long: start to first answer, many idle connections, many requests, many models loaded and unloaded."""

from __future__ import annotations

import http.client
import random
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from serve import wire
from serve.models import MLP, Model
from serve.processes import FailedError, Tree
from serve.servers import SERVERS, Server
from serve.stage import Running, Stage
from serve.wrk import Figures, Load

CONNECTIONS = 64
SLICE_SECONDS = 10
SETTLE_SECONDS = 3.0


def starts(stage: Stage, names: Sequence[str], turns: int) -> None:
    """Seconds from the start of the process to the first answer, and memory then, in turns."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for _ in range(turns):
        for name in names:
            with stage.running(SERVERS[name], MLP) as one:
                memory = one.tree.memory()
                found[name].append((one.first, memory.rss, memory.own))
    print(f"\nStart to first answer, MLP, {turns} starts: median (least to most); MiB after the first answers")
    for name, values in found.items():
        seconds, rss, own = zip(*values, strict=True)
        told = f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"
        print(f"  {name:16} {told:28} rss {statistics.median(rss):.0f}, own {statistics.median(own):.0f}", flush=True)


def idle(stage: Stage, load: Load, name: str, connections: int, hold: float) -> None:
    """Memory with so many connections that have been answered once and then say nothing, and what others get then."""
    with stage.running(SERVERS[name], MLP) as one:
        message = one.message("binary")
        alone = load.run(one.port, message, 8, SLICE_SECONDS)
        print(f"\n{connections} idle connections, {name}: MiB (own)")
        print(f"  before      {_settled(one.tree):8.1f}   8 other connections: {_brief(alone)}")
        with _held(one, connections):
            print(f"  at first    {one.tree.memory().own:8.1f}")
            beside = load.run(one.port, message, 8, SLICE_SECONDS)
            time.sleep(hold)
            print(f"  after {hold:3.0f} s {_settled(one.tree):8.1f}   8 other connections: {_brief(beside)}")
        print(f"  all closed  {_settled(one.tree):8.1f}", flush=True)


def soak(stage: Stage, load: Load, name: str, requests: int) -> None:
    """Memory over so many requests: at each tenth, and the last beside the first."""
    with stage.running(SERVERS[name], MLP) as one:
        print(f"\n{requests:,} requests, {name}: MiB (own) at each tenth")
        done = failed = 0
        levels: list[float] = []
        while done < requests:
            figures = load.run(one.port, one.message("binary"), CONNECTIONS, SLICE_SECONDS)
            done, failed = done + figures.requests, failed + figures.failed
            one.tree.check()
            while len(levels) < min(10, done * 10 // requests):
                levels.append(one.tree.memory().own)
        print("  " + " ".join(f"{level:.1f}" for level in levels))
        growth = levels[-1] / levels[0] - 1
        print(f"  {done:,} answered, {failed} failed; last over first {growth:+.1%}", flush=True)


def reloads(stage: Stage, name: str, models: int, cycles: int) -> None:
    """So many models in one server over the repository API; then as often one of them unloaded and loaded again."""
    names = [f"mlp{number:03d}" for number in range(models)]
    with stage.launched(SERVERS[name], MLP, names=names) as (setting, tree):
        _until_ready(setting.port, tree)
        _repository(setting.port, names[0], "load")  # what the first one needs, the server keeps
        _repository(setting.port, names[0], "unload")
        empty = _settled(tree)
        begun = time.perf_counter()
        for each in names:
            _repository(setting.port, each, "load")
        loaded = time.perf_counter() - begun
        _ask_all(setting.port, names, SERVERS[name], MLP)
        full = _settled(tree)
        print(f"\n{models} models in one server, {name}: MiB (own)")
        print(f"  empty {empty:.1f}, loaded {full:.1f} ({(full - empty) / models:.2f} a model), in {loaded:.1f} s")
        choose, took, worst = random.Random(7), [], 0.0
        for _ in range(cycles):
            each = choose.choice(names)
            begun = time.perf_counter()
            _repository(setting.port, each, "unload")
            _repository(setting.port, each, "load")
            took.append(time.perf_counter() - begun)
            worst = max(worst, tree.memory().own) if len(took) % 50 == 0 else worst
        _ask_all(setting.port, names, SERVERS[name], MLP)
        after = _settled(tree)
        print(
            f"  after {cycles} unloads and loads {after:.1f} ({after / full - 1:+.1%}), at most "
            f"{max(worst, after):.1f}; one took {statistics.median(took) * 1e3:.1f} ms"
        )
        for each in names:
            _repository(setting.port, each, "unload")
        print(f"  all unloaded {_settled(tree):.1f}", flush=True)


@contextmanager
def _held(one: Running, connections: int) -> Iterator[list[socket.socket]]:
    """Kept-alive connections, each answered once."""
    request = b"GET /v2/health/live HTTP/1.1\r\nHost: bench\r\n\r\n"
    held: list[socket.socket] = []
    try:
        for _ in range(connections):
            sock = socket.create_connection(("127.0.0.1", one.port), timeout=30)
            held.append(sock)
            sock.sendall(request)
            if not sock.recv(4096).startswith(b"HTTP/1.1 "):
                raise FailedError(f"{one.server.name} took {len(held) - 1} connections, not {connections}")
        yield held
    finally:
        for sock in held:
            sock.close()


def _settled(tree: Tree) -> float:
    time.sleep(SETTLE_SECONDS)
    return tree.memory().own


def _brief(figures: Figures) -> str:
    return f"{figures.rate:.0f}/s, p50 {figures.p50:.2f} ms, p99 {figures.p99:.2f} ms, {figures.failed} failed"


def _repository(port: int, name: str, verb: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", f"/v2/repository/models/{name}/{verb}", b"{}")
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise FailedError(f"{verb} of {name}: {answer.status} {body[:500]!r}")


def _ask_all(port: int, names: Sequence[str], server: Server, model: Model) -> None:
    for name in names:
        wire.ask(port, wire.binary(server.path.format(model=name), wire.row(model)))


def _until_ready(port: int, tree: Tree) -> None:
    for _ in range(3000):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            tree.check()
            time.sleep(0.02)
        finally:
            connection.close()
    raise FailedError(f"never ready\n{tree.told()}")
