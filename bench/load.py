"""What the load generator itself costs: `onejob bench` beside wrk, in turns, against a server that only answers.

    python bench/load.py [--turns 5] [--seconds 3] [--connections 64] [--server-cpu 1] [--load-cpu 0]

The server is a uvloop protocol that parses each request and writes the same bytes: an inference answer of 200 bytes
of tensors. It is kept on one core, the load on the other. Requests/s are what both together reach; the CPU time of the
load for a request is its own, and says how many one core can send.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import httptools
import machine
import uvloop

HEAD = b'{"model_name":"fixed","outputs":[{"name":"y","datatype":"FP32","shape":[1,10]}]}'
ANSWER = b"".join(
    (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n" % (len(HEAD) + 200),
        b"x-request-id: 0123456789abcdef0123456789\r\nx-onejob-engine: " + b"a" * 64 + b"\r\n",
        b"Inference-Header-Content-Length: %d\r\n\r\n" % len(HEAD),
        HEAD,
        b"x" * 200,
    )
)
BODY = b"x" * 342
PATH = "/v2/models/fixed/anything"


class Fixed(asyncio.Protocol):
    """Answers every request alike."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._transport.write(ANSWER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--server-cpu", type=int, default=1)
    parser.add_argument("--load-cpu", type=int, default=0)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        uvloop.run(serve(options.serve))
        return
    rise()
    print(machine.describe())
    with server(options.server_cpu) as port, tempfile.TemporaryDirectory() as folder:
        url = f"http://127.0.0.1:{port}{PATH}"
        body, script = Path(folder, "body.bin"), Path(folder, "post.lua")
        body.write_bytes(BODY)
        script.write_text(f'wrk.method = "POST"\nwrk.body = string.rep("x", {len(BODY)})\n')
        found: dict[str, list[tuple[float, float]]] = {"onejob bench": [], "wrk": []}
        for _ in range(options.turns):
            found["onejob bench"].append(by_onejob(url, body, options))
            found["wrk"].append(by_wrk(url, script, options))
    print(f"{options.connections} connections, {options.turns} turns of {options.seconds} s; medians")
    for name, turns in found.items():
        rate, cost = (statistics.median(values) for values in zip(*turns, strict=True))
        print(f"{name:14} {rate:9,.0f} requests/s   {cost:6.2f} us of CPU a request (one core: {1e6 / cost:,.0f}/s)")
    pairs = zip(found["onejob bench"], found["wrk"], strict=True)
    rates, costs = zip(*((ours[0] / wrk[0], ours[1] / wrk[1]) for ours, wrk in pairs), strict=True)
    print(f"onejob / wrk, turn by turn: requests/s {spread(rates)}, CPU a request {spread(costs)}")


def by_onejob(url: str, body: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Requests/s, and microseconds of CPU that the load took for one."""
    command = [sys.executable, "-m", "onejob", "bench", url, "--data", str(body), "--json"]
    command += ["-c", str(options.connections), "-d", str(options.seconds), "--cpus", str(options.load_cpu)]
    done = subprocess.run(command, capture_output=True, check=True)
    (result,) = json.loads(done.stdout)["results"]
    assert not result["errors"], result["errors_by_kind"]
    return result["requests_per_s"], result["client_cpu_us"]


def by_wrk(url: str, script: Path, options: argparse.Namespace) -> tuple[float, float]:
    command = ["taskset", "-c", str(options.load_cpu), "wrk", "-t1", f"-c{options.connections}"]
    command += [f"-d{options.seconds}s", "-s", str(script), url]
    before = children()
    text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    spent = children() - before
    count = re.search(r"(\d+) requests in", text)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    assert count is not None
    assert rate is not None
    return float(rate[1]), spent / int(count[1]) * 1e6


def children() -> float:
    """Seconds of CPU of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def server(cpu: int) -> Iterator[int]:
    """The server on a core and a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    process = subprocess.Popen([sys.executable, __file__, "--serve", str(port)])
    os.sched_setaffinity(process.pid, {cpu})
    try:
        wait_for(port)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def wait_for(port: int) -> None:
    for _ in range(500):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.01)
    raise SystemExit("the server didn't start")


def rise() -> None:
    """Keep neighbours out of the way, where that is allowed."""
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("-20")


async def serve(port: int) -> None:
    listener = await asyncio.get_running_loop().create_server(Fixed, "127.0.0.1", port)
    await listener.serve_forever()


def spread(values: tuple[float, ...]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
