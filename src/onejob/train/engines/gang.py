"""The ranks of a training as one: they meet at a store, then add up tensors over gloo.

The shim gives RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and to rank 0 the listening socket itself
(ONEJOB_STORE_FD): the port can't be taken by anybody else, and a new generation of the gang has a new one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from onejob.errors import RankError
from onejob.train import ranks

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others in one sum: rank 0 may be scoring the held-out rows meanwhile."""


class Gang:
    """The ranks of a training; alone, nothing needs to be sent."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world

    def sum(self, tensor: Tensor) -> None:
        """Add up a tensor over all ranks, in place."""
        if self.world > 1:
            with _named(self.rank):
                dist.all_reduce(tensor)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in the order of the ranks."""
        if self.world == 1:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.world)]
        with _named(self.rank):
            dist.all_gather(found, tensor)
        return found

    def first(self, value: int) -> int:
        """Rank 0's value."""
        return int(self.gather(torch.tensor([value]))[0])

    def wait(self) -> None:
        """Go on once every rank is here."""
        self.first(0)

    def close(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()


def join(rank: int, world: int, *, fingerprint: str, limit: float, say: Callable[[str], None]) -> Gang:
    """Meet the other ranks; RankError names who doesn't arrive within `limit` seconds, or runs something else."""
    if world == 1:
        return Gang()
    started = time.monotonic()
    address = os.environ["MASTER_ADDR"]
    store = _store(address, int(os.environ["MASTER_PORT"]), rank, limit, say)
    left = max(1.0, limit - (time.monotonic() - started))
    ranks.arrive(
        store, rank, world, fingerprint=fingerprint, limit=left, clock=time.monotonic, sleep=time.sleep, say=say
    )
    if address in ("127.0.0.1", "localhost", "::1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would look up the host's name, which may not resolve
    with _named(rank):
        dist.init_process_group("gloo", store=PrefixStore("gang", store), rank=rank, world_size=world, timeout=PATIENCE)
    return Gang(rank, world)


def _store(address: str, port: int, rank: int, limit: float, say: Callable[[str], None]) -> Any:
    """Rank 0's store, on the socket that the shim opened for it; or a connection to it."""
    if rank == 0:
        descriptor = os.environ.get("ONEJOB_STORE_FD")
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=limit),
            master_listen_fd=int(descriptor) if descriptor else None,
        )
    # The socket listens before rank 0 is there, so connecting succeeds and torch then waits without any limit: in a
    # thread, so that it can be left behind
    found: list[Any] = []
    thread = threading.Thread(target=_connect, args=(address, port, limit, found), daemon=True)
    thread.start()
    started, told = time.monotonic(), 0
    while not found:
        thread.join(ranks.PAUSE)
        waited = time.monotonic() - started
        if waited >= limit or not (thread.is_alive() or found):
            raise ranks.missing_error([0], waited, rank)
        if waited >= (told + 1) * ranks.EVERY:
            told = int(waited // ranks.EVERY)
            say(ranks.waiting([0], waited, rank))
    return found[0]


def _connect(address: str, port: int, limit: float, found: list[Any]) -> None:
    try:
        found.append(TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=limit)))
    except dist.DistError:
        return  # refused until the limit: rank 0 is gone, and its absence is named by whoever waits for us


@contextmanager
def _named(rank: int) -> Iterator[None]:
    """gloo's own words name an address; say which rank heard them."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        raise RankError(
            f"rank {rank} lost the others: {str(error).splitlines()[0]}", cure="The log says which rank ended, and why."
        ) from error
