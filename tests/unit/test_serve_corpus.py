"""The fixed collection of hostile messages, each in several pieces: the answers that it must get, and no others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from onejob.testing.api import Replica
from onejob.testing.corpus import GOOD, GOOD_LENGTH, INFER, MESSAGES, STREAMS, UNFINISHED, Case
from onejob.testing.hostile import ask


@pytest.mark.parametrize("case", [*MESSAGES, *STREAMS], ids=lambda case: case.name)
def test_each_hears_what_it_must(tmp_path: Path, case: Case) -> None:
    async def run() -> None:
        replica = Replica(tmp_path)
        size = len(case.data)
        for step in (size, 256 << 10, size // 2 + 1, max(1, size // 97)):
            client = replica.client()
            await client.send([case.data[start : start + step] for start in range(0, size, step)])
            await client.settle()
            answers = client.answers()
            assert [answer.status for answer in answers] == list(case.statuses), answers
            for answer in answers:
                if answer.status != 200:
                    told = json.loads(answer.body)["error"]
                    assert told
                    assert len(told) < 8000
            client.leave()
        replica.close()

    asyncio.run(run())


@pytest.mark.parametrize("data", UNFINISHED, ids=range(len(UNFINISHED)))
@pytest.mark.parametrize("leaves", ["closes", "resets"])
def test_what_is_never_finished_is_forgotten(tmp_path: Path, data: bytes, leaves: str) -> None:
    async def run() -> None:
        replica = Replica(tmp_path)
        client, other = replica.client(), replica.client()
        if data:
            await client.send([data])
        await client.settle()
        if leaves == "resets":
            client.connection.connection_lost(ConnectionResetError())
        else:
            client.leave()
        await other.send([ask(INFER, GOOD, GOOD_LENGTH)])
        await other.settle()
        assert client.answers() == []
        assert [answer.status for answer in other.answers()] == [200]
        assert replica.connections == {other.connection}
        assert replica.room.left == replica.room.most
        replica.close()

    asyncio.run(run())
