"""Runs a model under a Triton Inference Server that is started for it and kept running.

The artifact is what another of our engines runs: its metadata has {"engine": "triton", "triton": {"engine": NAME, …}},
as `through` makes it. Triton's own backend runs it where this Triton has one for it, else its Python backend, with our
engine inside. A folder that has a config.pbtxt is a model of Triton's already, and served as it is.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from onejob.core.artifact import Json
from onejob.core.ports import Support
from onejob.core.tensor import DATATYPES, TensorSpec
from onejob.engines import Arrays
from onejob.engines.kept import Kept
from onejob.engines.triton import server
from onejob.engines.triton.config import NATIVE, Batching
from onejob.engines.triton.repository import CONFIG, engine_of, write_model
from onejob.errors import InferenceError, UnavailableError, UsageError

WAIT_SECONDS = 10.0
"""How long a call waits for a server that is being started again."""
NAME = "model"
BACKENDS = ("auto", "native", "python")
UNHEALTHY = "is not healthy"
"""What Triton says when the process of its Python model has ended."""


@dataclass(frozen=True, slots=True)
class Options:
    """How Triton is to run the model."""

    engine: str = ""
    """Which of our engines its artifact is for; by its file if not told."""
    backend: str = "auto"
    """`native`: only Triton's own backend for it will do; `python`: our engine inside Triton's Python backend; `auto`:
    the first, where it is there and computes in the model's precision, else the second."""
    max_batch_size: int = 65536
    server: str = ""
    """Its program; else the one on PATH."""


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of the model."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    precision: str
    widened: frozenset[str] = frozenset()
    """Tensors that have one dimension more on the wire, of size 1."""


def through(meta: Mapping[str, Json], **options: Json) -> dict[str, Json]:
    """The metadata of an artifact, changed so that Triton runs it; the options are those of `Options`."""
    return {**meta, "engine": "triton", "triton": {"engine": str(meta.get("engine", "pytorch")), **options}}


class TritonModel:
    """A model under a Triton of its own; `infer` may be called from several threads, and they take turns."""

    octets = True
    """BYTES elements cross as bytes."""

    def __init__(self, start: Callable[[Any], server.Server], repository: Path, name: str, told: Told | None) -> None:
        self._repository = repository
        self._name = name
        self._place = f"Triton model {name}"
        self._kept = Kept(start, self._place)
        try:
            running = self._kept.first()
            told = told or _ask(running, name)
        except BaseException:
            self.close()
            raise
        self.inputs, self.outputs, self.precision = told.inputs, told.outputs, told.precision
        self._names = [spec.name for spec in told.outputs]
        self._widened = told.widened

    def infer(self, arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
        self._check(arrays)
        wide = self._widened
        sent = {name: array[..., np.newaxis] if name in wide else array for name, array in arrays.items()}
        running = self._kept.get(WAIT_SECONDS)
        try:
            with running.lock:
                found = running.client.infer(self._name, sent, self.inputs)
        except OSError:
            why = self._kept.end_of(running)
            raise InferenceError(f"{why} before it had answered", place=self._place) from None
        except InferenceError as error:
            if UNHEALTHY in error.message:
                self._kept.end_of(running)  # so that the next call doesn't meet it
            raise
        running.useful = True
        return {name: found[name][..., 0] if name in wide else found[name] for name in self._names}

    def dead(self) -> str:
        """Why the server, or the process of its Python model, isn't there; empty while it is."""
        return self._kept.dead()

    def kill(self, why: str = "") -> None:
        """End the server now, whatever it does; another one takes its place."""
        self._kept.kill(why)

    def close(self) -> None:
        """End the server, and remove its repository."""
        self._kept.close()
        shutil.rmtree(self._repository, ignore_errors=True)

    def _check(self, arrays: Arrays) -> None:
        if arrays.keys() != {spec.name for spec in self.inputs}:
            wanted = ", ".join(spec.name for spec in self.inputs)
            raise InferenceError(f"the inputs are {wanted}, not {', '.join(arrays)}", place=self._place)
        for spec in self.inputs:
            array = arrays[spec.name]
            if array.dtype != np.dtype(DATATYPES[spec.datatype]) or array.ndim != len(spec.shape):
                told = (
                    f"input {spec.name!r} is {array.dtype} {list(array.shape)}, not {spec.datatype} {list(spec.shape)}"
                )
                raise InferenceError(told, place=self._place)


def open_model(folder: Path, meta: Mapping[str, Json], threads: int = 1) -> TritonModel:
    """Start a Triton for the model in an artifact's folder.

    UnavailableError without a tritonserver, or without the backend that is wanted; InferenceError in Triton's words if
    it can't load the model.
    """
    options = _options(meta)
    program = server.find(options.server)
    repository = server.make_folder()
    try:
        told, name, more = _prepare(folder, meta, repository, options, server.backends(program), threads)
    except BaseException:
        shutil.rmtree(repository, ignore_errors=True)
        raise
    return TritonModel(
        lambda adopt: server.start(program, repository, name, more, threads, adopt), repository, name, told
    )


def supported() -> Support:
    """Whether there is a tritonserver, and with which backends."""
    try:
        program = server.find()
    except UnavailableError as error:
        return Support("triton", "engine", False, error.message, error.cure)
    return Support("triton", "engine", True, f"{program} with the backends {', '.join(server.backends(program))}")


def _prepare(
    folder: Path, meta: Mapping[str, Json], repository: Path, options: Options, there: Sequence[str], threads: int
) -> tuple[Told | None, str, Sequence[str]]:
    """Fill the repository; what is known of the model, its name, and options for the server."""
    if (folder / CONFIG).is_file():
        name = folder.resolve().name
        (repository / name).symlink_to(folder.resolve())
        return None, name, ()
    inner = {key: value for key, value in meta.items() if key != "triton"} | {"engine": options.engine}
    # requests come joined: Triton need not wait for more of them
    batching = Batching(options.max_batch_size, dynamic=False)
    native = _native(engine_of(folder, inner), options, there)
    path = server.packages(sys.path)
    config = write_model(
        folder, inner, repository, NAME, native=native, threads=threads, batching=batching, link=True, path=path
    )
    precision = str(meta.get("precision") or "as declared")
    return Told(config.inputs, config.outputs, precision, config.widened), NAME, ("--disable-auto-complete-config",)


def _native(engine: str, options: Options, there: Sequence[str]) -> Sequence[str]:
    """The backends of Triton's own that may be used."""
    found = NATIVE.get(engine)
    if options.backend == "native" and (found is None or found.backend not in there):
        wanted = f"this Triton has no backend {found.backend!r}" if found else f"Triton has no backend for {engine!r}"
        cure = f"It has: {', '.join(there)}. With backend 'python' our engine runs inside Triton."
        raise UnavailableError(wanted, place="engine triton", cure=cure)
    if found is None or found.backend not in there or options.backend == "python":
        return ()
    return (found.backend,) if found.exact or options.backend == "native" else ()


def _options(meta: Mapping[str, Json]) -> Options:
    given = dict(meta.get("triton") or {})
    known = [field.name for field in fields(Options)]
    if unknown := [name for name in given if name not in known]:
        raise UsageError(f"unknown option {unknown[0]!r}", place="engine triton", cure=f"Known: {', '.join(known)}.")
    options = Options(**given)
    if options.backend not in BACKENDS:
        cure = f"Known: {', '.join(BACKENDS)}."
        raise UsageError(f"unknown backend {options.backend!r}", place="engine triton", cure=cure)
    return options


def _ask(running: server.Server, name: str) -> Told:
    """What Triton says of a model whose configuration isn't ours."""
    told = running.client.ask("GET", f"/v2/models/{name}")
    inputs, outputs = (
        tuple(TensorSpec(one["name"], one["datatype"], tuple(map(int, one["shape"]))) for one in told[key])
        for key in ("inputs", "outputs")
    )
    if bad := next((spec.name for spec in (*inputs, *outputs) if spec.datatype not in DATATYPES), None):
        raise UnavailableError(f"tensor {bad!r} has a datatype that isn't known here", place=f"Triton model {name}")
    return Told(inputs, outputs, "as configured")
