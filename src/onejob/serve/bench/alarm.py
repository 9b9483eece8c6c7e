"""A timer that rings to the microsecond: the loops' own timers count in milliseconds, a hundred requests late.

A Linux timerfd, which an event loop watches like a socket. Python has it from 3.13 on; before that libc is asked.
"""

from __future__ import annotations

import ctypes
import os

_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_LIBC = ctypes.CDLL(None, use_errno=True)
SECOND = 1_000_000_000


class _Timer(ctypes.Structure):
    """struct itimerspec: how often it rings again (never), and when it rings."""

    _fields_ = (
        ("again_s", ctypes.c_long),
        ("again_ns", ctypes.c_long),
        ("s", ctypes.c_long),
        ("ns", ctypes.c_long),
    )


class Alarm:
    """Readable from the set moment on, until it is set again."""

    def __init__(self) -> None:
        self.fd: int = _LIBC.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._timer = _Timer()
        self._timer_ref = ctypes.byref(self._timer)

    def set(self, at: int) -> None:
        """Ring at this moment of `time.monotonic_ns`; at once if it has passed."""
        self._timer.s, self._timer.ns = divmod(max(at, 1), SECOND)  # zero would disarm it
        if _LIBC.timerfd_settime(self.fd, _ABSOLUTE, self._timer_ref, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def close(self) -> None:
        os.close(self.fd)
