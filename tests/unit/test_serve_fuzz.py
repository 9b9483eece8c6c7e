"""Anything may come over a connection: it is answered, in order, in words, and never with what is another client's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from onejob.testing.api import Answer, Replica
from onejob.testing.hostile import Stream, ask, infer, streams

STATUSES = {200, 400, 404, 405, 413, 415, 431, 503, 504, 505}
"""What a client may hear. 500 is for engines that fail, and these don't."""


class Victim:
    """A client that asks what nobody else knows, and must hear its own answer."""

    def __init__(self, replica: Replica) -> None:
        self.client = replica.client()
        self.number = 0

    @property
    def secrets(self) -> list[bytes]:
        """What must not be in anybody else's answer."""
        x = self._values()
        return [each.tobytes() for each in (*x, *(x * 2 + np.float32(1)))]

    def _values(self) -> Any:
        rng = np.random.default_rng(self.number)
        return (rng.random(2) * 3 + 5).astype("<f4")

    def ask(self) -> None:
        self.number += 1
        body, length = infer("m", {"x": self._values()})
        self.client.transport.sent.clear()
        self.client.connection.data_received(ask(b"/v2/models/m/infer", body, length))

    async def check(self) -> None:
        await self.client.settle()
        (answer,) = self.client.answers()
        length = int(answer.headers["inference-header-content-length"])
        assert answer.body[length:] == (self._values() * 2 + np.float32(1)).tobytes()


def play(folder: Path, work: Callable[[Replica], Awaitable[None]]) -> None:
    async def run() -> None:
        replica = Replica(folder)
        try:
            await work(replica)
        finally:
            replica.close()

    asyncio.run(run())


def check_answers(answers: list[Answer], stream: Stream) -> None:
    assert stream.requests is None or len(answers) == stream.requests
    for answer in answers:
        assert answer.status in STATUSES, answer
        if answer.status != 200:
            assert answer.headers["content-type"] == "application/json"
            assert json.loads(answer.body)["error"]


FEW = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@FEW
@given(stream=streams())
def test_whatever_comes_is_answered_and_nobody_hears_what_is_anothers(
    stream: Stream, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def work(replica: Replica) -> None:
        victim, client = Victim(replica), replica.client()
        victim.ask()
        await victim.check()
        victim.ask()
        await client.send(stream.pieces)
        await client.settle()
        await victim.check()
        answers = client.answers()
        check_answers(answers, stream)
        sent = bytes(client.transport.sent)
        assert not any(secret in sent for secret in victim.secrets)
        client.leave()
        victim.ask()
        await victim.check()
        assert replica.connections == {victim.client.connection}
        assert all(service.batcher.pending == 0 for service in replica.services.values())

    play(tmp_path_factory.mktemp("fuzz"), work)


@FEW
@given(stream=streams())
def test_the_short_way_and_the_long_way_say_the_same_in_any_pieces(
    stream: Stream, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def work(replica: Replica) -> None:
        heard = []
        for quick, pieces in (
            (False, [stream.data]),
            (True, stream.pieces),
            (True, stream.pieces),
            (False, stream.pieces),
        ):
            client = replica.client(quick=quick)
            await client.send(pieces)
            await client.settle()
            heard.append([answer.plain for answer in client.answers()])
            client.leave()
        assert heard[1:] == heard[:1] * 3

    play(tmp_path_factory.mktemp("fuzz"), work)
