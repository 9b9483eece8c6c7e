"""Bad input by the ten thousand: at an endpoint's parts in one process, then at an endpoint on sockets.

    nice python bench/fuzz.py                      # 50,000 streams of each kind, a quarter of an hour
    nice python bench/fuzz.py --streams 2000

hypothesis makes streams of one to six requests, right and wrong in every way (`onejob.testing.hostile`), in any pieces.
Three questions: does everybody hear what is due, and nobody what is another's; do the short way and the long way say
the same, in any pieces; and on sockets, with clients beside it that must not notice: does it crash, hang or grow? A
failure ends the run with the smallest stream that shows it; the same seed makes the same streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from machine import describe
from serve.tiny import Endpoint, endpoint

from onejob.testing.api import Answer, Replica, take_apart
from onejob.testing.corpus import MESSAGES, STREAMS, UNFINISHED
from onejob.testing.hostile import MODELS, Stream, ask, infer, streams
from onejob.testing.sockets import Neighbour, connect, exchange

STATUSES = {200, 400, 404, 405, 413, 431, 503, 504, 505}
"""What a client may hear. 500 is for engines that fail, and these don't."""
NEIGHBOURS = 4
ROUNDS = 10
SLICE = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=50_000, help="of each kind; on sockets a tenth of them")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    print(f"$ python bench/fuzz.py {' '.join(sys.argv[1:])}".rstrip())
    print(describe(), flush=True)
    for title, check in (("Everybody hears what is due", due), ("The short way and the long way", both_ways)):
        tried = Tried(title)
        tried.run(options.streams, options.seed, partial(in_memory, check, tried))
    with endpoint() as made:
        on_sockets(made, options.streams // 10, options.seed)
        held(made)


class Tried:
    """One kind of trial: how many streams, how many answers of each status, how long."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.statuses: Counter[int] = Counter()
        self.streams = 0

    def run(
        self, amount: int, number: int, check: Callable[[Stream], None], models: frozenset[str] = frozenset(MODELS)
    ) -> None:
        begun = time.perf_counter()
        rules = settings(
            max_examples=SLICE,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )

        def one(stream: Stream) -> None:
            check(stream)

        while self.streams < amount:  # hypothesis remembers all that it has tried, and gets slower
            seed(number + self.streams)(rules(given(stream=streams(models))(one)))()
        took = time.perf_counter() - begun
        told = ", ".join(f"{status}: {amount:,}" for status, amount in sorted(self.statuses.items()))
        print(f"\n{self.title}: {self.streams:,} streams in {took:.0f} s; answers {told}", flush=True)

    def count(self, answers: list[Answer]) -> None:
        self.streams += 1
        self.statuses.update(answer.status for answer in answers)


# ---- in one process


def in_memory(check: Callable[[Replica, Stream], Awaitable[list[Answer]]], tried: Tried, stream: Stream) -> None:
    async def run() -> list[Answer]:
        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
            replica = Replica(Path(folder))
            try:
                return await check(replica, stream)
            finally:
                replica.close()

    tried.count(asyncio.run(run()))


async def due(replica: Replica, stream: Stream) -> list[Answer]:
    x = np.random.default_rng(len(stream.data)).random(2, "f4") + np.float32(5)
    y = x * 2 + np.float32(1)
    body, length = infer("m", {"x": x})
    other, client = replica.client(), replica.client()
    for _ in range(2):
        await other.send([ask(b"/v2/models/m/infer", body, length)])
        await client.send(stream.pieces)
        await other.settle()
        await client.settle()
    answers = client.answers()
    check_answers(answers, None if stream.requests is None else 2 * stream.requests)
    assert [answer.body[-8:] for answer in other.answers()] == [y.tobytes()] * 2
    sent = bytes(client.transport.sent)
    assert not any(number.tobytes() in sent for number in (*x, *y)), "another's numbers"
    client.leave()
    other.leave()
    assert not replica.connections
    assert replica.room.left == replica.room.most
    assert not any(service.batcher.pending for service in replica.services.values())
    return answers


async def both_ways(replica: Replica, stream: Stream) -> list[Answer]:
    heard = []
    for quick, pieces in ((False, [stream.data]), (True, stream.pieces), (True, stream.pieces), (False, stream.pieces)):
        client = replica.client(quick=quick)
        await client.send(pieces)
        await client.settle()
        heard.append(client.answers())
        client.leave()
    plain = [[answer.plain for answer in answers] for answers in heard]
    assert plain[1:] == plain[:1] * 3
    return heard[0]


def check_answers(answers: list[Answer], requests: int | None) -> None:
    assert requests is None or len(answers) == requests
    for answer in answers:
        assert answer.status in STATUSES, answer
        assert answer.status == 200 or json.loads(answer.body)["error"]


# ---- on sockets


@contextmanager
def watched(made: Endpoint, title: str) -> Iterator[None]:
    """With clients beside it, who must be answered rightly by the same replica all the time."""
    pids, before, begun = made.pids, made.memory, len(made.log())
    neighbours = [Neighbour(made.port, number + 5).start() for number in range(NEIGHBOURS)]
    yield
    for neighbour in neighbours:
        neighbour.stop()
    wrong = [what for neighbour in neighbours for what in neighbour.wrong]
    assert not wrong, wrong[:3]
    assert made.pids == pids, "it was replaced"
    assert "Traceback" not in made.log()[begun:], made.log()[begun:][-2000:]
    time.sleep(3)
    asked, worst = sum(n.asked for n in neighbours), max(n.worst for n in neighbours)
    print(f"{title}: neighbours asked {asked:,} times, the slowest answer took {worst * 1e3:.0f} ms;", end=" ")
    print(f"memory {before:.1f} MiB before, {made.memory:.1f} after", flush=True)


def on_sockets(made: Endpoint, amount: int, number: int) -> None:
    tried = Tried("On sockets")

    def check(stream: Stream) -> None:
        answers = take_apart(exchange(made.port, stream.pieces))
        check_answers(answers, stream.requests)
        tried.count(answers)

    with watched(made, "  beside it"):
        tried.run(amount, number, check, frozenset(MODELS) - {"k"})


def held(made: Endpoint) -> None:
    """The fixed collection and unfinished requests, again and again: what does memory do?"""
    print("\nThe fixed collection, and 200 clients that leave in the middle of a request, by rounds")
    for turn in range(ROUNDS):
        with watched(made, f"  round {turn + 1}"):
            for case in (*MESSAGES, *STREAMS):
                answers = take_apart(exchange(made.port, [case.data]))
                assert [answer.status for answer in answers] == list(case.statuses), case.name
            for client in range(200):
                with connect(made.port) as sock:
                    sock.sendall(UNFINISHED[client % len(UNFINISHED)])


if __name__ == "__main__":
    main()
