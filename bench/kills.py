"""What a replica's end costs its clients: kill -9, SIGTERM of a replica, and SIGTERM of the whole endpoint, under load.

    nice python bench/kills.py [--turns 20] > bench/results/kills.txt

Eight clients ask without pause, each for what nobody else asks, and check every answer; a prober asks for readiness
every 20 ms, as an orchestrator does, and waits a second at most. A request is lost if its connection ends without the
answer; the clients come back on new connections.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence

from machine import describe
from serve.tiny import Endpoint, endpoint

from onejob.testing.sockets import Neighbour, read_answer

CLIENTS = 8
LIMIT = 30.0


class Prober:
    """Asks for readiness again and again."""

    def __init__(self, port: int) -> None:
        self.seen: list[tuple[float, bool]] = []
        """(when it was asked, whether the answer was yes)."""
        self._port = port
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(10)

    def first(self, wanted: bool, since: float) -> float | None:
        """Seconds until it first heard this."""
        return next((at - since for at, ready in self.seen if at >= since and ready is wanted), None)

    def _run(self) -> None:
        while not self._over.is_set():
            begun = time.monotonic()
            ready = self._ask()
            self.seen.append((time.monotonic() if not ready else begun, ready))
            time.sleep(0.02)

    def _ask(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1) as sock:
                sock.sendall(b"GET /v2/health/ready HTTP/1.1\r\nConnection: close\r\n\r\n")
                return read_answer(sock).status == 200
        except (OSError, EOFError):
            return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    print(f"$ python bench/kills.py {' '.join(sys.argv[1:])}".rstrip())
    print(describe(), flush=True)
    for replicas in (1, 2):
        for name, number in (("kill -9", signal.SIGKILL), ("SIGTERM", signal.SIGTERM)):
            ends_of_replicas(replicas, name, number, options.turns)
    ends_of_endpoints(options.turns)


def ends_of_replicas(replicas: int, name: str, number: signal.Signals, turns: int) -> None:
    off, on, lost, asked, wrong = [], [], [], 0, 0
    for _ in range(turns):  # each time anew: one that dies again soon is started later, and that is another question
        with endpoint(replicas) as made:
            clients, prober = start(made.port), Prober(made.port)
            more(clients)
            pid, begun = made.pids[0], time.monotonic()
            os.kill(pid, number)
            on.append(until_back(made, pid, replicas) - begun)
            more(clients)
            prober.stop()
            answered, bad = stop(clients)
            off.append(prober.first(False, begun))
            lost.append(sum(client.lost for client in clients))
            asked, wrong = asked + answered, wrong + bad
    unready = [each for each in off if each is not None and each < LIMIT]
    print(
        f"\n{name} of one of {replicas} replica(s), {turns} times: {asked:,} requests answered, {wrong} of them wrongly"
    )
    print(f"  lost each time: {spread(lost)}, of {CLIENTS} connections")
    print(f"  all replicas ready again after {spread(on)} s; ready was off in {len(unready)} of {turns}", end="")
    print(f", first after {spread(unready)} s" if unready else "", flush=True)


def ends_of_endpoints(turns: int) -> None:
    lost, took, asked, wrong = [], [], 0, 0
    for _ in range(turns):
        with endpoint(2) as made:
            clients = start(made.port)
            more(clients)
            begun = time.monotonic()
            made.stop()
            took.append(time.monotonic() - begun)
            answered, bad = stop(clients)
            asked, wrong = asked + answered, wrong + bad
            lost.append(sum(client.lost for client in clients))  # who comes back then is refused: no request is lost
    print(
        f"\nSIGTERM of an endpoint of 2 replicas, {turns} times: {asked:,} requests answered, {wrong} of them wrongly"
    )
    print(f"  lost each time: {spread(lost)}; it took {spread(took)} s", flush=True)


def start(port: int) -> list[Neighbour]:
    clients = [Neighbour(port, number + 5) for number in range(CLIENTS)]
    for client in clients:
        client.reconnect = True
        client.start()
    return clients


def stop(clients: Sequence[Neighbour]) -> tuple[int, int]:
    """Requests that were answered, and how many wrongly."""
    for client in clients:
        client.stop()
    return sum(client.asked for client in clients), sum(len(client.wrong) for client in clients)


def more(clients: Sequence[Neighbour], amount: int = 50) -> None:
    """Wait until each has had so many more answers."""
    wanted = [client.asked + amount for client in clients]
    end = time.monotonic() + LIMIT
    while any(client.asked < least for client, least in zip(clients, wanted, strict=True)):
        if time.monotonic() > end:
            raise RuntimeError("some are answered no more")
        time.sleep(0.005)


def until_back(made: Endpoint, pid: int, replicas: int) -> float:
    end = time.monotonic() + LIMIT
    while pid in (pids := made.pids) or len(pids) < replicas:
        if time.monotonic() > end:
            raise RuntimeError(made.log()[-2000:])
        time.sleep(0.01)
    return time.monotonic()


def spread(values: Sequence[float]) -> str:
    """Median, least and most."""
    if not values:
        return "never"
    return f"{statistics.median(values):.2g} ({min(values):.2g} to {max(values):.2g})"


if __name__ == "__main__":
    main()
