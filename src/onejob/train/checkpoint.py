"""What a killed training goes on from: sharded, verified, and never half.

    checkpoints/<step>/rank-<r>-of-<w>.safetensors   a rank's share of the tensors, and the digest of its whole replica
                       manifest.json                 written last: every rank's file, size and digest, and the state

A checkpoint counts only when its manifest is there and every rank's bytes match it; the newest folder is not the newest
checkpoint. Every rank keeps the whole model, so the tensors are dealt out among the ranks, and the digests of the
replicas show whether the ranks still hold the same model. No pickles: safetensors and JSON.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from onejob.core import faults
from onejob.core.artifact import Json, canonical, digest_bytes, digest_file
from onejob.core.context import write_json
from onejob.errors import DamagedError, RankError, StepError, StorageFullError

Tensors = Mapping[str, NDArray[Any]]

FORMAT = 1
MANIFEST = "manifest.json"
KEEP = 2


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, verified while it was read."""

    step: int
    state: Mapping[str, Json]
    tensors: Tensors


def to_bytes(tensors: Tensors, note: Json) -> bytes:
    """A safetensors file whose bytes depend on the tensors and the note alone."""
    # one key: safetensors writes several in an arbitrary order
    plain = {name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)}
    return save(plain, {"onejob": canonical(note).decode()})


def write_shard(
    folder: Path, step: int, rank: int, world: int, tensors: Tensors, replica: str, own: Tensors | None = None
) -> None:
    """Write a rank's share of its replica and the replica's digest; durable on return.

    `own`: tensors that this rank alone holds, written whole.
    """
    names = sorted(tensors)[rank::world]
    mine = {**{name: tensors[name] for name in names}, **(own or {})}
    note = {"rank": rank, "world": world, "replica": replica}
    place = folder / str(step)
    place.mkdir(parents=True, exist_ok=True)
    write_durable(place / _name(rank, world), to_bytes(mine, note))
    faults.reach("checkpoint.after_shard")


def publish(folder: Path, step: int, world: int, state: Mapping[str, Json], *, keep: int = KEEP) -> None:
    """Make a checkpoint count: called by rank 0 when every rank's shard is there; older ones are dropped.

    RankError names the ranks whose replica differs from rank 0's.
    """
    place = folder / str(step)
    require_equal([_note(place / _name(rank, world))["replica"] for rank in range(world)], step)
    files = [place / _name(rank, world) for rank in range(world)]
    entries = [{"path": file.name, "digest": digest_file(file), "size": file.stat().st_size} for file in files]
    manifest = {"format": FORMAT, "step": step, "world": world, "files": entries, "state": dict(state)}
    faults.reach("checkpoint.before_manifest")
    write_json(place / MANIFEST, manifest)
    _sync(place)
    prune(folder, keep)


def require_equal(digests: Sequence[str], step: int) -> None:
    """RankError names the ranks whose replica's digest differs from rank 0's."""
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise RankError(
            f"the model of rank {', '.join(map(str, others))} differs from rank 0's at step {step}",
            cure="Its machine computes differently, or its memory is damaged; the checkpoint before is still sound.",
        )


def newest_complete(folder: Path, world: int, say: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
    """The newest checkpoint that is whole; `say` hears why a newer one was left out."""
    for step in _steps(folder):
        try:
            return read(folder, step, world)
        except DamagedError as error:
            say(f"checkpoint of step {step} is left out: {error.message}")
    return None


def read(folder: Path, step: int, world: int) -> Checkpoint:
    """Read a checkpoint and verify every byte; DamagedError if it is not whole, StepError if the world size differs."""
    place = folder / str(step)
    try:
        manifest = json.loads((place / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise DamagedError("it has no manifest: the training ended while it was written") from None
    except ValueError:
        raise DamagedError("its manifest is not JSON") from None
    if manifest.get("format") != FORMAT:
        raise DamagedError(f"its format is {manifest.get('format')!r}, not {FORMAT}")
    if manifest["world"] != world:
        raise StepError(
            f"the checkpoint of step {step} was made by {manifest['world']} processes, this training has {world}",
            place=str(place),
            cure="The order of sums, and so the result, depends on their number: start anew, or use as many as before.",
        )
    tensors: dict[str, NDArray[Any]] = {}
    for entry in manifest["files"]:
        tensors.update(load(_read(place / entry["path"], entry["digest"])))
    return Checkpoint(step, manifest["state"], tensors)


def discard_newer(folder: Path, step: int) -> None:
    """Drop what lies beyond the step that training goes on from: it was left out, and will be made again."""
    for other in _steps(folder):
        if other > step:
            _discard(folder / str(other))


def prune(folder: Path, keep: int = KEEP) -> None:
    """Drop all but the newest `keep` checkpoints with a manifest, and what is older than them."""
    with_manifest = [step for step in _steps(folder) if (folder / str(step) / MANIFEST).exists()]
    if len(with_manifest) < keep:
        return
    for step in _steps(folder):
        if step < with_manifest[keep - 1]:
            _discard(folder / str(step))


def replica_digest(tensors: Tensors) -> str:
    """One digest of all tensors: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(array.data)
    return digest.hexdigest()


def _discard(place: Path) -> None:
    # first the manifest: dying in between leaves an incomplete checkpoint, not a damaged one
    (place / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)


def _name(rank: int, world: int) -> str:
    return f"rank-{rank}-of-{world}.safetensors"


def _steps(folder: Path) -> list[int]:
    """Steps that have a folder, newest first."""
    return sorted((int(path.name) for path in _folders(folder) if path.name.isdecimal()), reverse=True)


def _folders(folder: Path) -> Iterator[Path]:
    return folder.iterdir() if folder.exists() else iter(())


def _note(path: Path) -> dict[str, Json]:
    try:
        with safe_open(path, "np") as file:
            note: dict[str, Json] = json.loads((file.metadata() or {})["onejob"])
            return note
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise DamagedError(f"{path.name} can't be read: {error}", place=str(path.parent)) from error


def _read(path: Path, digest: str) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing") from None
    if digest_bytes(data) != digest:
        raise DamagedError(f"the bytes of {path.name} don't match their digest")
    return data


def write_durable(path: Path, data: bytes) -> None:
    """Write aside, make durable, rename; StorageFullError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StorageFullError(
            f"no space left for {len(data):,} bytes", place=str(path), cure="Free some (`onejob gc`), then run again."
        ) from error
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
