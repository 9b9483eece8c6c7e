"""Named arrays between two processes: small ones in the message itself, large ones in shared memory (memory.py).

A message is one packet: PREFIX, notes on regions, the sizes of text arrays, the head (layout.py) or words, and the
body where it isn't in a region. An array that somebody keeps never changes: its memory isn't used again until then.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import weakref
from array import array as numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from onejob.core.artifact import Json
from onejob.engines.function.layout import Array, Arrays, Plan, Plans, pack, unpack
from onejob.engines.function.memory import Memory, Region, sent

ARRAYS, READY, FAILED = 0, 1, 2
"""Kinds of messages; the last two carry words, as JSON."""
INLINE = 1 << 15
"""Bytes that go in the message itself; beyond that a region is cheaper."""
PACKET = 1 << 17
"""Most bytes of a message."""
PREFIX = struct.Struct("<IIIIIIQ")
"""Kind, call, region (0: none), count of notes, count of texts, bytes of the head, bytes of the body."""


class Channel:
    """One end. Calls are numbered, so that an answer which nobody waits for is never taken for another's."""

    def __init__(self, sock: socket.socket, *, octets: bool = False) -> None:
        """`octets`: text comes as bytes."""
        self._sock = sock
        self._memory = Memory()
        self._plans = Plans()
        self._octets = octets
        self._scratch = bytearray(INLINE)
        self._packet = bytearray(PACKET)
        self._view = memoryview(self._packet)

    def send(self, call: int, arrays: Arrays) -> None:
        """Send arrays. OSError: the other end is gone, or there is no memory; nothing was sent then."""
        plan = self._plans.of(arrays)
        texts = [pack(array) for array in arrays.values() if array.dtype.hasobject]
        starts, total = plan.places([len(text) for text in texts])
        region = self._memory.take(total) if total > INLINE else None
        target: Any = region.memory if region else self._scratch
        written = iter(texts)
        for part, start, array in zip(plan.parts, starts, arrays.values(), strict=True):
            if part.dtype is None:
                text = next(written)
                target[start : start + len(text)] = text
            elif part.size:
                np.ndarray(part.shape, part.dtype, target, start)[...] = array
        body = memoryview(self._scratch)[: 0 if region else total]
        self._write(ARRAYS, call, plan.head, body, texts=[len(text) for text in texts], region=region)

    def say(self, kind: int, call: int, words: Json) -> None:
        """Send words; OSError when the other end is gone."""
        self._write(kind, call, json.dumps(words).encode())

    def receive(self) -> tuple[int, int, Any]:
        """Kind, call, and arrays or words; EOFError when the other end is gone."""
        size, came, _, _ = self._sock.recvmsg_into([self._packet], socket.CMSG_SPACE(4))
        if not size:
            raise EOFError
        kind, call, number, notes, texts, head, total = PREFIX.unpack_from(self._packet)
        at = PREFIX.size
        told: tuple[int, ...] = ()
        if notes or texts:
            told = struct.unpack_from(f"<{notes}i{texts}I", self._packet, at)
            at += 4 * len(told)
            self._memory.heed(told[:notes])
        for _, _, data in came:
            self._memory.map(number, int.from_bytes(data[:4], "little"))
        words = bytes(self._view[at : at + head])
        if kind != ARRAYS:
            return kind, call, json.loads(words)
        plan = self._plans.read(words)
        if number:
            return kind, call, _shared(plan, told[notes:], self._memory.theirs(number), self._octets)
        at += head
        return kind, call, _arrays(plan, told[notes:], bytearray(self._view[at : at + total]), self._octets)

    def shutdown(self) -> None:
        """Whoever waits here, or at the other end, is told that this is the end."""
        with contextlib.suppress(OSError):  # it is already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and let go of the memory."""
        self._sock.close()
        self._memory.close()

    def _write(
        self,
        kind: int,
        call: int,
        head: bytes,
        body: bytes | memoryview = b"",
        *,
        texts: Sequence[int] = (),
        region: Region | None = None,
    ) -> None:
        notes = self._memory.notes()
        number = region.number if region else 0
        prefix = PREFIX.pack(kind, call, number, len(notes), len(texts), len(head), len(body))
        if notes or texts:
            prefix += struct.pack(f"<{len(notes)}i{len(texts)}I", *notes, *texts)
        if len(prefix) + len(head) + len(body) > PACKET:
            raise ValueError(f"a message of {len(head)} bytes about its arrays is too long")
        if region is None or region.descriptor is None:
            self._sock.sendmsg([prefix, head, body])
            return
        self._sock.sendmsg([prefix, head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers("i", [region.descriptor]))])
        sent(region)


def _arrays(plan: Plan, texts: Sequence[int], body: Any, octets: bool) -> dict[str, Array]:
    starts, _ = plan.places(texts)
    sizes = iter(texts)
    found = {}
    for part, start in zip(plan.parts, starts, strict=True):
        if part.dtype is None:
            found[part.name] = unpack(memoryview(body)[start : start + next(sizes)], part.shape, octets=octets)
        elif part.size:
            found[part.name] = np.ndarray(part.shape, part.dtype, body, start)
        else:
            found[part.name] = np.empty(part.shape, part.dtype)
    return found


def _shared(plan: Plan, texts: Sequence[int], region: Region, octets: bool) -> dict[str, Array]:
    """Arrays in a region; it is the other end's again when the last of them is gone."""
    found = _arrays(plan, texts, region.memory, octets)
    region.used, region.lent = True, [weakref.ref(found[part.name]) for part in plan.parts if part.size]
    return found
