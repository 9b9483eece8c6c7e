"""Readiness tells the truth: of an engine that hangs, fails, dies, recovers, or that nobody asks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from test_serve_http import Doubler

from onejob.serve.batch import Item
from onejob.serve.health import OVERDUE_NS, PROBE_NS, SUSPICIOUS_FAILURES
from onejob.serve.journal import RequestLog
from onejob.serve.model import ServedModel
from onejob.serve.policy import Fit, Limits
from onejob.serve.service import Identity, Service

SECOND = 1_000_000_000


class Moody(Doubler):
    """May be held, broken, or dead."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.why_dead = ""
        self.asked = 0

    def infer(self, arrays: Any) -> dict[str, Any]:
        self.asked += 1
        self.gate.wait(10)
        return super().infer(arrays)

    def dead(self) -> str:
        return self.why_dead


class Apart(Moody):
    """Computes in a process of its own, as far as its service can see."""

    def __init__(self) -> None:
        super().__init__()
        self.killed: list[str] = []

    def kill(self, why: str = "") -> None:
        self.killed.append(why)
        self.gate.set()


def play(
    folder: Path,
    work: Callable[[Service, Any], Awaitable[None]],
    *,
    timeout: int = 30 * SECOND,
    kind: Callable[[], Moody] = Moody,
) -> None:
    async def run() -> None:
        engine, fit = kind(), Fit()
        for rows in (1, 8, 1, 8):
            fit.add(rows, 2_000_000 * rows)  # so slow that it runs on a thread
        identity = Identity("m", "d1", 1, {"engine": "onnxruntime"}, None, "1:1.0")
        limits = Limits(rows=8, queue=100, timeout_ns=timeout)
        service = Service(ServedModel(engine), identity, limits, RequestLog(folder), folder, fit=fit)
        try:
            await work(service, engine)
        finally:
            engine.gate.set()
            service.batcher.close()

    asyncio.run(run())


async def checks(service: Service, until: Callable[[], bool], limit: float = 5) -> float:
    """Check as a replica does, until something holds; gives the seconds that it took."""
    begun = time.monotonic()
    while not until():
        service.health.check(time.perf_counter_ns())
        assert time.monotonic() - begun < limit, "never came"
        await asyncio.sleep(0.02)
    return time.monotonic() - begun


def test_a_model_that_nobody_asks_is_asked_by_itself_and_nobody_counts_it(tmp_path: Path) -> None:
    async def work(service: Service, engine: Moody) -> None:
        await checks(service, lambda: engine.asked >= 2 and service.ready)
        assert service.counters.values == {}
        assert sum(service.counters.latency) == 0

    play(tmp_path, work)


def test_a_hanging_engine_is_not_ready_within_a_second_and_ready_again_when_it_answers(tmp_path: Path) -> None:
    async def work(service: Service, engine: Moody) -> None:
        engine.gate.clear()
        took = await checks(service, lambda: not service.ready)
        assert took < (PROBE_NS + OVERDUE_NS) / SECOND + 0.5, "nobody had asked it anything"
        assert "busy with one batch" in service.unready_reason
        assert not service.health.fault, "it may come back"
        engine.gate.set()
        await checks(service, lambda: service.ready)

    play(tmp_path, work)


def test_one_that_hangs_past_the_timeout_must_be_replaced(tmp_path: Path) -> None:
    async def work(service: Service, engine: Moody) -> None:
        engine.gate.clear()
        await checks(service, lambda: bool(service.health.fault))
        assert service.health.fault == "the engine hangs"
        engine.gate.set()
        await asyncio.sleep(0.2)
        service.health.check(time.perf_counter_ns())
        assert not service.ready

    play(tmp_path, work, timeout=SECOND)


def test_a_failing_engine_is_not_ready_though_nobody_asks(tmp_path: Path) -> None:
    async def work(service: Service, engine: Moody) -> None:
        engine.broken = True
        await checks(service, lambda: not service.ready)
        assert "the engine fails" in service.unready_reason
        engine.broken = False
        await checks(service, lambda: service.ready)
        engine.broken = True
        before = engine.asked
        await checks(service, lambda: bool(service.health.fault))
        assert engine.asked - before >= SUSPICIOUS_FAILURES

    play(tmp_path, work)


def test_an_engine_whose_process_died_says_so_at_once(tmp_path: Path) -> None:
    async def work(service: Service, engine: Moody) -> None:
        engine.why_dead = "its process was killed"
        service.health.check(time.perf_counter_ns())
        assert (service.ready, service.unready_reason) == (False, "its process was killed")
        engine.why_dead = ""
        service.health.check(time.perf_counter_ns())
        assert service.ready

    play(tmp_path, work)


def test_an_answer_to_a_client_is_proof_enough(tmp_path: Path) -> None:
    async def work(service: Service, engine: Moody) -> None:
        answered = 0

        def done(item: Item) -> None:
            service.answered("r", item, item.error, 200, item.received)

        for _ in range(40):
            service.submit(service.model.example(1), Item({}, 0, done, time.perf_counter_ns(), 0))
            answered += 1
            await asyncio.sleep(0.02)
            service.health.check(time.perf_counter_ns())
        assert engine.asked == answered, "it was never asked by itself"

    play(tmp_path, work)


def test_an_engine_in_a_process_of_its_own_is_started_again_in_the_same_replica(tmp_path: Path) -> None:
    async def work(service: Service, engine: Apart) -> None:
        assert not service.batcher.inline, "however quick it is"
        engine.gate.clear()
        await checks(service, lambda: bool(engine.killed))
        assert engine.killed[0].startswith("no answer for 1.")
        assert not service.health.fault
        await checks(service, lambda: service.ready)

    play(tmp_path, work, timeout=SECOND, kind=Apart)


def test_the_time_in_which_nothing_of_the_process_ran_is_not_the_engines(tmp_path: Path) -> None:
    """A container that was frozen for a minute in the middle of a batch: the engine is neither overdue nor hanging."""

    async def work(service: Service, engine: Moody) -> None:
        engine.gate.clear()
        await checks(service, lambda: service.batcher.stuck_ns() > 0)
        minute = 60 * SECOND
        service.batcher._busy_since -= minute
        assert service.health._probe is not None
        for name in ("received", "deadline"):
            setattr(service.health._probe, name, getattr(service.health._probe, name) - minute)
        service.health._last_ok -= minute
        service.health.excuse(minute)
        service.batcher.expire()
        service.health.check(time.perf_counter_ns())
        assert service.ready
        engine.gate.set()
        await checks(service, lambda: service.health._probe is None)
        assert service.ready
        assert service.health._probe_failures == 0

    play(tmp_path, work, timeout=30 * SECOND)
