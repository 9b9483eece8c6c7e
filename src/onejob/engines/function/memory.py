"""Memory that two processes share: each has regions for what it sends, and maps those of the other.

A region is a memfd: it has no name, so nothing is left behind whoever is killed, and the size of /dev/shm is no limit.
A region is used again when the other end has let go of the arrays in it, which it tells in its notes: `n` means "your
region n, which I have let go of", `-n` "my region n, which is gone".
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SPARE = 2
"""Regions that are kept for later although nobody uses them."""
LEAST = 1 << 20


@dataclass
class Region:
    """One of them; its pages take no memory until they are written."""

    number: int
    memory: mmap.mmap
    size: int
    descriptor: int | None = None
    """To be sent with the first message that uses it."""
    free: bool = False
    """Of mine: nobody uses it."""
    used: bool = False
    """Of theirs: a message came in it, and they weren't told yet that its arrays are gone."""
    lent: list[weakref.ref[np.ndarray[Any, Any]]] = field(default_factory=list)
    """These arrays."""


class Memory:
    """The regions of one end, and those of the other that it has been told of."""

    def __init__(self) -> None:
        self._mine: dict[int, Region] = {}
        self._theirs: dict[int, Region] = {}
        self._count = 0
        self._gone: list[int] = []

    def take(self, size: int) -> Region:
        """A region of mine with room for `size` bytes, that nobody uses."""
        fitting = [region for region in self._mine.values() if region.free and region.size >= size]
        region = min(fitting, key=lambda one: one.size) if fitting else self._make(size)
        region.free = False
        return region

    def map(self, number: int, descriptor: int) -> None:
        """Take note of a region of the other end; the descriptor is closed."""
        try:
            size = os.fstat(descriptor).st_size
            self._theirs[number] = Region(number, mmap.mmap(descriptor, size), size)
        finally:
            os.close(descriptor)

    def theirs(self, number: int) -> Region:
        return self._theirs[number]

    def notes(self) -> list[int]:
        """What the other end is to be told."""
        found, self._gone = [-number for number in self._gone], []
        for region in self._theirs.values():
            if region.used and all(one() is None for one in region.lent):
                region.used, region.lent = False, []
                found.append(region.number)
        return found

    def heed(self, notes: Iterable[int]) -> None:
        """What the other end told."""
        for number in notes:
            if number < 0:
                self._theirs.pop(-number, None)
            elif region := self._mine.get(number):
                region.free = True

    def close(self) -> None:
        """Let go of everything; arrays that somebody keeps keep their memory."""
        for region in self._mine.values():
            sent(region)
        self._mine.clear()
        self._theirs.clear()

    def _make(self, size: int) -> Region:
        idle = sorted((region for region in self._mine.values() if region.free), key=lambda one: one.size)
        for region in idle[: max(0, len(idle) - SPARE + 1)]:
            del self._mine[region.number]
            self._gone.append(region.number)
        self._count += 1
        room = max(LEAST, 1 << (size - 1).bit_length())
        descriptor = os.memfd_create("onejob-arrays", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, room)
            region = Region(self._count, mmap.mmap(descriptor, room), room, descriptor)
        except OSError:
            os.close(descriptor)
            raise
        self._mine[region.number] = region
        return region


def sent(region: Region) -> None:
    """Its descriptor has gone with a message, or is not wanted any more."""
    if region.descriptor is not None:
        os.close(region.descriptor)
        region.descriptor = None
