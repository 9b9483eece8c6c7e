"""One process of a load: `python -m onejob.serve.bench.worker`. It takes orders as lines of JSON on stdin and tells
what it measures as lines of JSON on stdout; when stdin ends, so does it, so nothing is left of a load whose master
died.

    {"do": "target", "number", "address", "requests": [base64], "until_eof"}
    {"do": "turn", "target", "load", "warmup", "seconds", "requests", "timeout", "part", "parts", "seed"}
        -> {"say": "ready"}                       connected, as far as that can be had
    {"do": "go", "at"}                            a moment of this machine's monotonic clock, in nanoseconds
        -> {"say": "tick", "number", "arrived", "errors", "latency"}    a stretch of the measured time
        -> {"say": "end", …}                      when the last answer is there
    {"do": "stop"}                                ends the turn that goes on

The collector of cyclic garbage rests during a turn: nothing here makes cycles, and its pauses would be measured.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from time import monotonic_ns

import uvloop

from onejob.core.artifact import Json
from onejob.serve.bench.alarm import Alarm
from onejob.serve.bench.client import Client
from onejob.serve.bench.pace import FOREVER, Open, Pace, Paced, Tally
from onejob.serve.bench.schedule import CLOSED, PACED, Load, arrivals, share
from onejob.serve.bench.target import Address

TICK = 500_000_000
"""Nanoseconds of a stretch that is told of while a turn goes on."""
FLUSH = 0.05
"""Seconds between two times that latencies are put into the histogram."""
SWEEP = 0.25


class Worker:
    """Takes orders, one turn at a time."""

    def __init__(self) -> None:
        self._targets: dict[int, Mapping[str, Json]] = {}
        self._turn: Measuring | None = None
        self._task: asyncio.Task[None] | None = None

    async def obey(self, orders: asyncio.StreamReader) -> None:
        """Until the orders end."""
        while line := await orders.readline():
            order = json.loads(line)
            if order["do"] == "target":
                self._targets[order["number"]] = order
            elif order["do"] == "turn":
                self._turn = Measuring(order, self._targets[order["target"]])
                self._task = asyncio.get_running_loop().create_task(self._turn.run())
            elif self._turn is not None and order["do"] == "go":
                self._turn.go.set_result(int(order["at"]))
            elif self._turn is not None:
                self._turn.stop()
        if self._task is not None:
            self._task.cancel()


class Measuring:
    """One turn, from connecting to the last answer."""

    def __init__(self, order: Mapping[str, Json], target: Mapping[str, Json]) -> None:
        self._order = order
        self._loop = asyncio.get_running_loop()
        self.go: asyncio.Future[int] = self._loop.create_future()
        self._alarm = Alarm()
        self._tally = Tally()
        self._load = Load(**order["load"])
        self._pace = self._make_pace()
        self._client = Client(
            Address(**target["address"]),
            [base64.b64decode(text) for text in target["requests"]],
            self._pace,
            timeout=order["timeout"],
            until_eof=target["until_eof"],
        )
        self._began = self._ended = 0
        """When the measured time began and ended."""
        self._cpu = 0.0
        self._arrived = 0
        self._counts = self._tally.latency.counts.copy()
        self._told = self._told_arrived = self._told_errors = 0
        self._stopped = False

    async def run(self) -> None:
        order, pace = self._order, self._pace
        await self._client.open(share(self._load.connections, order["part"], order["parts"]))
        say("ready")
        at = await self.go
        self._loop.add_reader(self._alarm.fd, pace.ring)
        warmup = round(order["warmup"] * 1e9)
        length = FOREVER >> 1 if order["seconds"] is None else round(order["seconds"] * 1e9)
        requests = None if order["requests"] is None else share(order["requests"], order["part"], order["parts"])
        gc.collect()
        gc.disable()
        await asyncio.sleep((at - monotonic_ns()) / 1e9)
        if not self._stopped:
            pace.start(at, warmup, length, requests)
            self._client.begin()
            self._at(at + warmup, self._begin)
            await self._until_over()
        self._finish()

    def stop(self) -> None:
        """End at once, with what there is."""
        self._stopped = True
        self._pace.stop(monotonic_ns())
        if not self.go.done():
            self.go.set_result(monotonic_ns())

    async def _until_over(self) -> None:
        """Keep the books until the last answer is there, or has had its time."""
        swept = 0.0
        while True:
            await asyncio.sleep(FLUSH)
            self._tally.flush()
            if (now := self._loop.time()) - swept > SWEEP:
                swept = now
                self._client.sweep()
            over = self._pace.is_over(monotonic_ns()) and not self._client.busy
            if self._stopped or (over and (self._ended or monotonic_ns() < self._pace.end)):
                return  # once the time is up its end has been noted; before, all requests were sent

    # ---- the measured time

    def _make_pace(self) -> Pace:
        load, part, parts = self._load, self._order["part"], self._order["parts"]
        if load.loop == CLOSED:
            return Pace(self._tally, monotonic_ns)
        if load.loop == PACED:
            assert load.rate is not None
            interval = round(load.connections / load.rate * 1e9)
            first = (interval * number // load.connections for number in range(part, load.connections, parts))
            return Paced(self._tally, monotonic_ns, self._alarm.set, interval, first)
        order = self._order
        times = arrivals(load, order["warmup"], order["seconds"], part=part, parts=parts, seed=order["seed"])

        def in_ns() -> Iterator[int]:
            for chunk in times:
                yield from (chunk * 1e9).astype("int64").tolist()

        return Open(self._tally, monotonic_ns, self._alarm.set, in_ns())

    def _begin(self) -> None:
        if self._stopped:
            return
        self._began, self._cpu = monotonic_ns(), cpu_time()
        self._tally.restart()
        self._tick_at(1)
        if self._order["seconds"] is not None:
            self._at(self._pace.end, self._end)

    def _end(self) -> None:
        """The time to measure is over: what arrives from now on counts with its latency only."""
        if self._ended or not self._began:
            return
        self._ended = monotonic_ns()
        self._cpu = cpu_time() - self._cpu
        self._arrived = self._tally.arrived
        self._tick(min(self._ended, self._pace.end))

    def _finish(self) -> None:
        pace, tally = self._pace, self._tally
        self._client.close()
        tally.flush()
        last = pace.over_at if not self._stopped else 0
        if not self._ended:
            self._end()
            self._ended = last if last > self._began else self._ended
        self._loop.remove_reader(self._alarm.fd)
        self._alarm.close()
        gc.enable()
        say(
            "end",
            seconds=max(self._ended - self._began, 0) / 1e9 if self._began else 0.0,
            arrived=self._arrived,
            latency=tally.latency.to_json(),
            service=tally.service.to_json(),
            late=tally.late.to_json(),
            errors=dict(tally.errors),
            samples=tally.samples,
            unfinished=tally.unfinished,
            sent=tally.sent,
            received=tally.received,
            reconnects=tally.reconnects,
            cpu=self._cpu,
        )

    # ---- what is told meanwhile

    def _tick_at(self, number: int) -> None:
        self._at(self._pace.begin + number * TICK, self._next_tick, number)

    def _next_tick(self, number: int) -> None:
        if not (self._ended or self._stopped):
            self._tick(self._pace.begin + number * TICK)
            self._tick_at(number + 1)

    def _tick(self, now: int) -> None:
        """Tell of the time since the last tick."""
        tally = self._tally
        tally.flush()
        number = math.ceil((now - self._pace.begin) / TICK)
        if number <= self._told:
            return
        self._told = number
        begin = self._pace.begin + (number - 1) * TICK
        errors = sum(tally.errors.values())
        say(
            "tick",
            number=number,
            seconds=(now - self._pace.begin) / 1e9,
            length=max(now - begin, 1) / 1e9,
            arrived=tally.arrived - self._told_arrived,
            errors=errors - self._told_errors,
            latency=tally.latency.since(self._counts).to_json(),
        )
        self._counts = tally.latency.counts.copy()
        self._told_arrived, self._told_errors = tally.arrived, errors

    def _at(self, moment: int, call: Callable[..., None], *args: int) -> None:
        """Call at a moment of the monotonic clock, to the millisecond."""
        self._loop.call_later(max(moment - monotonic_ns(), 0) / 1e9, call, *args)


def cpu_time() -> float:
    """Seconds of CPU that this process has taken."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def say(what: str, **more: Json) -> None:
    """One line to the master."""
    line = json.dumps({"say": what, **more}, separators=(",", ":")).encode() + b"\n"
    with memoryview(line) as rest:
        done = 0
        while done < len(rest):
            done += os.write(sys.stdout.fileno(), rest[done:])


async def serve() -> None:
    """Take orders from stdin until it ends."""
    orders = asyncio.StreamReader(limit=1 << 31)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    await Worker().obey(orders)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the master's: it asks for what was measured so far
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection is a file
    uvloop.run(serve())


if __name__ == "__main__":
    main()
