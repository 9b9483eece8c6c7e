"""The load: wrk with one thread, which sends one message again and again on so many connections.

wrk corrects its latencies for coordinated omission by the mean interval of its run, so a stalled server can't hide.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from serve.processes import FailedError, boost
from serve.wire import Message

SETTLED = 10
"""A run of fewer mean latencies tells nothing of who is stuck."""
STUCK = 0.5
"""A closed loop has all its connections waiting: with less than this part of them, some wait for ever."""
LUA = r"""
local file = io.open(%s, "rb")
wrk.method = "POST"
wrk.body = file:read("*a")
file:close()
%s
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format('\nJSON {"requests":%%d,"us":%%d,"p50":%%d,"p99":%%d,"mean":%%.1f,"failed":%%d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99), latency.mean,
    e.connect + e.read + e.write + e.status + e.timeout))
end
"""


@dataclass(frozen=True)
class Figures:
    """Of one run of the load."""

    requests: int
    seconds: float
    p50: float
    p99: float
    """Milliseconds."""
    failed: int
    load: float
    """Share of its core that wrk itself used: near 1 it was the load that was measured."""

    @property
    def rate(self) -> float:
        return self.requests / self.seconds


class Load:
    """wrk on its cores, with its scripts in a folder."""

    def __init__(self, folder: Path, cores: str) -> None:
        if shutil.which("wrk") is None:
            raise SystemExit("wrk is not installed: apt-get install wrk")
        self._folder = folder
        self._cores = cores

    def on(self, cores: str) -> Load:
        """The same on other cores."""
        return Load(self._folder, cores)

    def run(self, port: int, message: Message, connections: int, seconds: float) -> Figures:
        """One run; FailedError if wrk fails."""
        script = self._script(message)
        argv = ["taskset", "-c", self._cores, "wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s"]
        argv += ["--timeout", "30s", "-s", str(script), f"http://127.0.0.1:{port}{message.path}"]
        before = os.times()
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
        boost(process.pid)
        out, _ = process.communicate()
        after = os.times()
        line = next((line for line in out.splitlines() if line.startswith("JSON ")), None)
        if process.returncode or line is None:
            raise FailedError(f"wrk failed: {out}")
        told = json.loads(line[5:])
        used = after.children_user + after.children_system - before.children_user - before.children_system
        taken = told["us"] / 1e6
        settled = told["us"] > SETTLED * told["mean"]  # else those that are under way at the end are too many
        if settled and told["requests"] / told["us"] * told["mean"] < connections * STUCK:  # Little's law
            raise FailedError(f"of {connections} connections some got no answer any more: {line}")
        return Figures(told["requests"], taken, told["p50"] / 1e3, told["p99"] / 1e3, told["failed"], used / taken)

    def _script(self, message: Message) -> Path:
        body = self._folder / "body"
        body.write_bytes(message.body)
        headers = "\n".join(f'wrk.headers["{name}"] = "{value}"' for name, value in message.headers.items())
        script = self._folder / "post.lua"
        script.write_text(LUA % (json.dumps(str(body)), headers))
        return script


def version() -> str:
    told = subprocess.run(["wrk", "-v"], capture_output=True, text=True, check=False).stdout
    return " ".join(told.split()[:2])
