"""Which engine answers: shares and keys; what a new engine can't answer, the old one does; copies; counters of both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_serve_http import Doubler, Scene, message

from onejob.core.counters import Counters, read_snapshots
from onejob.serve.journal import RequestLog
from onejob.serve.model import ServedModel
from onejob.serve.policy import Limits
from onejob.serve.protocols.http_api import Api
from onejob.serve.registry import Registry
from onejob.serve.router import Router, picks
from onejob.serve.service import Identity, Service

META = {"engine": "onnxruntime", "columns": {"id": "flight"}}
INFER = "/v2/models/m/infer"


class Tripler(Doubler):
    def infer(self, arrays: Any) -> Any:
        return {name: array * 1.5 for name, array in super().infer(arrays).items()}


class Both:
    """An old and a new engine behind one Api."""

    def __init__(self, folder: Path, *, share: float = 1.0, shadow: bool = False, meta: Any = None) -> None:
        self.log = RequestLog(folder / "requests")
        self._folder = folder
        self.engines = Doubler(), Tripler()
        self.old, self.new = (
            Service(
                ServedModel(engine),
                Identity("m", digest, number, meta or META, None, "1:1.0"),
                Limits(rows=8, queue=4),
                self.log,
                folder / "metrics",
            )
            for number, (digest, engine) in enumerate(zip(("old", "new"), self.engines, strict=True))
        )
        self.new.shadow = shadow
        self.router = Router(self.old, new=self.new, share=share, shadow=shadow)
        self.registry = Registry("old", "1:1.0", 1)
        self.registry.put("m", {"1": self.router})
        self.api = Api(self.registry)

    def lines(self) -> list[dict[str, Any]]:
        """The request log's."""
        self.log.flush()
        self.log.close()
        texts = [path.read_text() for path in (self._folder / "requests").iterdir()]
        return [json.loads(line) for text in texts for line in text.splitlines()]

    async def ask(self, body: bytes, **headers: str) -> tuple[int, str, list[float]]:
        """Status, the engine that says it answered, and the values."""
        scene = Scene(self.api, 10_000)
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        scene.feed(f"POST {INFER} HTTP/1.1\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode() + body)
        for _ in range(2000):
            if scene.transport.sent:
                break
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)  # a copy may still be asked
        head, _, answer = scene.transport.sent.partition(b"\r\n\r\n")
        first, *rest = head.decode().split("\r\n")
        engine = dict(line.split(": ", 1) for line in rest)["x-onejob-engine"]
        told = json.loads(answer)
        if "parameters" in told:
            assert told["parameters"]["engine"] == engine
        return int(first.split()[1]), engine, told["outputs"][0]["data"] if "outputs" in told else []


def play(folder: Path, work: Callable[[Both], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        both = Both(folder, **options)
        await work(both)
        both.old.batcher.close()
        both.new.batcher.close()

    asyncio.run(run())


def test_a_share_is_picked_by_hash_and_each_trial_draws_anew() -> None:
    keys = [f"key-{number}" for number in range(4000)]
    for share in (0.0, 0.1, 0.5, 1.0):
        picked = [key for key in keys if picks("d1", key, share)]
        assert abs(len(picked) / len(keys) - share) < 0.03
    tenth = {key for key in keys if picks("d1", key, 0.1)}
    assert tenth < {key for key in keys if picks("d1", key, 0.2)}
    assert len(tenth & {key for key in keys if picks("d2", key, 0.1)}) < len(tenth) / 3


def key_where(chosen: bool) -> str:
    return next(key for key in map(str, range(1000)) if picks("new", key, 0.5) == chosen)


def test_the_key_is_the_rows_then_the_headers_then_the_requests_id(tmp_path: Path) -> None:
    yes, no = key_where(True), key_where(False)

    async def work(both: Both) -> None:
        def chosen(columns: dict[str, Any], header: str, request: str) -> bool:
            return both.router.choose(columns, header, request) is both.new

        assert chosen({"flight": [yes]}, no, no)
        assert chosen({"flight": [None, yes, no]}, no, no)
        assert chosen({"flight": np.array([[int(yes)]])}, no, no)
        assert not chosen({"flight": [no]}, yes, yes)
        assert chosen({"flight": [None]}, yes, no)
        assert chosen({}, yes, no)
        assert chosen({}, "", yes)
        assert not chosen({}, no, yes)
        both.new.health.pause = "busy"  # one that hangs is asked no more
        assert not chosen({}, yes, yes)

    play(tmp_path, work, share=0.5)


def test_the_header_decides_over_http(tmp_path: Path) -> None:
    async def work(both: Both) -> None:
        for key in map(str, range(20)):
            expected = (200, "new", [3.0, 3.0]) if picks("new", key, 0.5) else (200, "old", [2.0, 2.0])
            assert await both.ask(message([1, 1]), x_request_key=key) == expected

    play(tmp_path, work, share=0.5)


def test_what_a_new_engine_cannot_answer_the_old_one_does(tmp_path: Path) -> None:
    async def work(both: Both) -> None:
        both.engines[1].broken = True
        assert await both.ask(message([1, 1]), x_request_id="r1") == (200, "old", [2.0, 2.0])
        assert both.new.counters.values.get("fallback") == 1
        assert (both.new.counters.failures, both.old.counters.get("success")) == (0, 1)
        assert both.router.tallies()["new"]["failed"] == 1
        both.engines[0].broken = True  # the request itself may be at fault: it isn't the new engine's failure
        assert (await both.ask(message([1, 1])))[:2] == (500, "old")
        assert both.router.tallies()["new"]["failed"] == 1
        assert both.router.tallies()["former"]["failed"] == 1
        assert (await both.ask(b"no json"))[:2] == (400, "old")
        lines = both.lines()
        assert [(line["digest"], line["status"]) for line in lines] == [("old", 200), ("old", 500), ("old", 400)]
        assert lines[0]["id"] == "r1"

    play(tmp_path, work)


def test_a_failure_after_the_new_engine_has_taken_all_is_its_own(tmp_path: Path) -> None:
    async def work(both: Both) -> None:
        both.engines[1].broken = True
        asked = asyncio.ensure_future(both.ask(message([1, 1])))
        await asyncio.sleep(0)  # queued with the new engine
        both.router.settle(keep_new=True)
        assert (await asked)[:2] == (500, "new")
        assert both.new.counters.failures == 1

    play(tmp_path, work)


@pytest.mark.parametrize("keep_new", [True, False])
def test_after_a_trial_one_engine_answers_all_and_no_count_is_lost(tmp_path: Path, keep_new: bool) -> None:
    async def work(both: Both) -> None:
        for key in map(str, range(10)):
            await both.ask(message([1, 1]), x_request_key=key)
        new = sum(picks("new", key, 0.5) for key in map(str, range(10)))
        assert 0 < new < 10
        leaves = both.router.settle(keep_new=keep_new)
        assert leaves is (both.old if keep_new else both.new)
        both.registry.forget_idle()
        kept = "new" if keep_new else "old"
        assert {(await both.ask(message([1, 1]), x_request_key=str(key)))[1] for key in range(10)} == {kept}
        snapshot = both.registry.snapshot()
        counted = {digest: Counters.from_json(own).get("success") for digest, own in snapshot["engines"].items()}
        before = {"old": 10 - new, "new": new}
        assert counted == {**before, kept: before[kept] + 10}
        assert snapshot["values"]["success"] == 20
        assert snapshot["digest"] == kept
        assert both.router.tallies() is None
        assert both.router.settle(keep_new=keep_new) is None

    play(tmp_path, work, share=0.5)


def test_copies_are_counted_apart_and_never_sent(tmp_path: Path) -> None:
    async def work(both: Both) -> None:
        assert await both.ask(message([1, 1])) == (200, "old", [2.0, 2.0])
        both.engines[1].broken = True
        assert await both.ask(message([1, 1])) == (200, "old", [2.0, 2.0])
        tallies = both.router.tallies()
        assert (tallies["new"]["answered"], tallies["new"]["failed"]) == (1, 1)
        assert tallies["former"]["answered"] == 2
        snapshot = both.registry.snapshot()
        assert (list(snapshot["engines"]), snapshot["values"]["success"]) == (["old"], 2)
        lines = both.lines()
        assert [line["digest"] for line in lines] == ["old", "old"]
        both.router.settle(keep_new=True)
        both.registry.forget_idle()
        both.engines[1].broken = False
        assert await both.ask(message([1, 1])) == (200, "new", [3.0, 3.0])
        counted = both.registry.snapshot()["engines"]
        assert {digest: Counters.from_json(own).get("success") for digest, own in counted.items()} == {
            "old": 2,
            "new": 1,
        }

    play(tmp_path, work, shadow=True)


def test_metrics_tell_the_engines_apart_over_replicas(tmp_path: Path) -> None:
    async def work(both: Both) -> None:
        await both.ask(message([1, 1]))
        both.engines[1].broken = True
        await both.ask(message([1, 1]))
        (tmp_path / "metrics").mkdir()
        other = {**both.registry.snapshot(), "id": "2:2.0"}
        (tmp_path / "metrics" / "2.json").write_text(json.dumps(other))
        by_engine = both.registry.all_snapshots().by("engines")
        assert {digest: own.get("success") for digest, own in by_engine.items()} == {"old": 2, "new": 2}
        assert by_engine["new"].get("fallback") == 2
        assert both.registry.all_snapshots().total().get("success") == 4
        assert read_snapshots(tmp_path / "metrics").total().get("success") == 4, "what was told is kept"

    play(tmp_path, work)
