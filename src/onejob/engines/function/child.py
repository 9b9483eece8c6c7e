"""The process in which a user's function runs.

    python -m onejob.engines.function.child JSON

JSON tells the socket's descriptor, the parent, the file, the threads, and where modules may be. The child says `READY`
with what the model takes and gives, and sends an example if the model has one; or `FAILED` and why. Then it answers one
call after the other, until the socket is closed. It dies with its parent, whatever that dies of. What it prints goes to
the parent's log.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

from onejob.core.artifact import Json
from onejob.engines.function.channel import FAILED, READY, Channel
from onejob.engines.function.code import Code, load
from onejob.errors import InferenceError, ModelCodeError

PR_SET_PDEATHSIG = 1
LONGEST = 2000
"""Characters of an exception's words that are told."""
TRACEBACKS = 100
"""Places in the user's code whose traceback is logged once; more are only told to the caller."""


def main(argv: list[str]) -> int:
    order: dict[str, Json] = json.loads(argv[0])
    _die_with(int(order["parent"]))
    faulthandler.enable()  # a native crash leaves its traceback in the log
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: None)  # meant for the parent, which ends this process when it has drained
    os.dup2(2, 1)
    os.set_inheritable(order["socket"], False)
    channel = Channel(socket.socket(fileno=order["socket"]), octets=True)
    folder = Path(order["folder"])
    sys.path += [entry for entry in order["path"] if entry not in sys.path]
    told = Told(folder)
    try:
        os.chdir((folder / order["file"]).parent)  # so that the file may open what lies beside it
        code = load(folder, order["file"], threads=int(order["threads"]), triton=order.get("triton"))
    except BaseException as error:  # SystemExit too: the parent must hear why
        channel.say(FAILED, 0, told.of(error))
        return 1
    inputs, outputs = [spec.to_json() for spec in code.inputs], [spec.to_json() for spec in code.outputs]
    signature = {"inputs": inputs, "outputs": outputs, "joins": code.joins, "picky": code.picky}
    channel.say(READY, 0, {**signature, "example": code.example is not None})
    if code.example is not None:
        channel.send(0, code.example)
    with contextlib.suppress(ConnectionError):  # the parent has gone
        serve(channel, code, told)
    code.close()
    return 0


def serve(channel: Channel, code: Code, told: Told) -> None:
    """Answer one call after the other until the other end closes the socket."""
    while True:
        try:
            _, call, arrays = channel.receive()
        except EOFError:
            return
        try:
            outputs = code.infer(arrays)
        except Exception as error:
            channel.say(FAILED, call, told.of(error))
            continue
        finally:
            del arrays  # before the answer, which says whether their memory may be used again
        try:
            channel.send(call, outputs)
        except (MemoryError, OSError, ValueError) as error:
            channel.say(FAILED, call, told.of(error))
        del outputs


class Told:
    """Exceptions in words: the last line of the traceback, and the last place in the model's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[str] = set()

    def of(self, error: BaseException) -> Json:
        place = self._place(error)
        if isinstance(error, InferenceError):  # the user's own, or about what the user's code gave
            return {**error.to_json(), "message": error.message[:LONGEST], "place": error.place or place}
        if place not in self._seen and len(self._seen) < TRACEBACKS:
            self._seen.add(place)
            traceback.print_exception(error)
        words = " ".join("".join(traceback.format_exception_only(error)).split())[:LONGEST]
        return ModelCodeError(words, place=place).to_json()

    def _place(self, error: BaseException) -> str:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, SyntaxError) and error.filename:
            return f"{self._short(error.filename)}:{error.lineno}"
        own = [frame for frame in frames if Path(frame.filename).is_relative_to(self._folder)]
        return f"{self._short(own[-1].filename)}:{own[-1].lineno}" if own else ""

    def _short(self, name: str) -> str:
        path = Path(name)
        return str(path.relative_to(self._folder)) if path.is_relative_to(self._folder) else name


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
