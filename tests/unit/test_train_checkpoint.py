"""Sharded checkpoints: complete or not there."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onejob.errors import DamagedError, RankError, StepError, StorageFullError
from onejob.train import checkpoint


def tensors(value: float = 0.0) -> dict[str, Any]:
    return {f"model/{name}": np.full(3, value + n, np.float32) for n, name in enumerate("abcde")}


def shards(folder: Path, step: int, world: int = 2, value: float | None = None) -> None:
    found = tensors(step if value is None else value)
    for rank in range(world):
        checkpoint.write_shard(folder, step, rank, world, found, checkpoint.replica_digest(found))


def save(folder: Path, step: int, world: int = 2) -> None:
    shards(folder, step, world)
    checkpoint.publish(folder, step, world, {"step": step})


def test_what_was_saved_comes_back(tmp_path: Path):
    found = tensors(7)
    digest = checkpoint.replica_digest(found)
    checkpoint.write_shard(tmp_path, 7, 0, 2, found, digest, {"best/a": np.ones(2)})
    checkpoint.write_shard(tmp_path, 7, 1, 2, found, digest)
    checkpoint.publish(tmp_path, 7, 2, {"order": {"epoch": 1}})
    read = checkpoint.newest_complete(tmp_path, 2)
    assert read is not None
    assert (read.step, read.state) == (7, {"order": {"epoch": 1}})
    assert set(read.tensors) == {*found, "best/a"}
    assert all((read.tensors[name] == found[name]).all() for name in found)


def test_the_ranks_share_the_tensors(tmp_path: Path):
    shards(tmp_path, 1)
    names = [set(checkpoint.load((tmp_path / "1" / f"rank-{rank}-of-2.safetensors").read_bytes())) for rank in (0, 1)]
    assert names == [{"model/a", "model/c", "model/e"}, {"model/b", "model/d"}]


def test_without_a_manifest_it_does_not_count(tmp_path: Path):
    save(tmp_path, 5)
    shards(tmp_path, 9)
    said: list[str] = []
    found = checkpoint.newest_complete(tmp_path, 2, said.append)
    assert found is not None
    assert found.step == 5
    assert said == ["checkpoint of step 9 is left out: it has no manifest: the training ended while it was written"]


@pytest.mark.parametrize("name", ["rank-0-of-2.safetensors", "rank-1-of-2.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_damaged_bytes_are_found_and_the_one_before_is_taken(tmp_path: Path, name: str, damage: str):
    save(tmp_path, 5)
    save(tmp_path, 9)
    path = tmp_path / "9" / name
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data if damage == "flip" else data[:-1])
    said: list[str] = []
    found = checkpoint.newest_complete(tmp_path, 2, said.append)
    assert found is not None
    assert found.step == 5
    assert len(said) == 1


def test_none_is_found_where_none_is(tmp_path: Path):
    assert checkpoint.newest_complete(tmp_path / "not there", 2) is None
    (tmp_path / "notes").mkdir()
    assert checkpoint.newest_complete(tmp_path, 2) is None


def test_another_world_size_is_refused(tmp_path: Path):
    save(tmp_path, 5, world=2)
    with pytest.raises(StepError, match="made by 2 processes, this training has 1"):
        checkpoint.newest_complete(tmp_path, 1)


def test_replicas_that_differ_are_named_and_never_published(tmp_path: Path):
    save(tmp_path, 5, world=3)
    for rank, value in enumerate((9, 9, 10)):
        found = tensors(value)
        checkpoint.write_shard(tmp_path, 9, rank, 3, found, checkpoint.replica_digest(found))
    with pytest.raises(RankError, match="model of rank 2 differs from rank 0's at step 9"):
        checkpoint.publish(tmp_path, 9, 3, {})
    found_before = checkpoint.newest_complete(tmp_path, 3)
    assert found_before is not None
    assert found_before.step == 5


def test_a_shard_that_is_missing_keeps_the_manifest_away(tmp_path: Path):
    found = tensors()
    checkpoint.write_shard(tmp_path, 1, 0, 2, found, checkpoint.replica_digest(found))
    with pytest.raises(DamagedError, match="rank-1-of-2"):
        checkpoint.publish(tmp_path, 1, 2, {})
    assert checkpoint.newest_complete(tmp_path, 2) is None


def test_the_last_two_are_kept(tmp_path: Path):
    shards(tmp_path, 1)
    for step in (2, 4, 10):
        save(tmp_path, step)
    shards(tmp_path, 12)
    checkpoint.prune(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "12", "4"]


def test_what_lies_beyond_the_resumed_step_is_dropped(tmp_path: Path):
    save(tmp_path, 5)
    shards(tmp_path, 9)
    checkpoint.discard_newer(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["5"]


@given(st.permutations(list("abcde")))
def test_bytes_do_not_depend_on_the_order_of_the_tensors(order: list[str]):
    plain = tensors()
    mixed = {f"model/{name}": plain[f"model/{name}"] for name in order}
    assert checkpoint.to_bytes(mixed, {"b": 1, "a": 2}) == checkpoint.to_bytes(plain, {"a": 2, "b": 1})
    assert checkpoint.replica_digest(mixed) == checkpoint.replica_digest(plain)


def test_the_replica_digest_sees_every_value_name_type_and_shape():
    plain = tensors()
    others = [
        {**plain, "model/a": np.nextafter(plain["model/a"], np.float32(1))},
        {**plain, "model/a": plain["model/a"].view(np.int32)},
        {**plain, "model/a": plain["model/a"].reshape(3, 1)},
        {("model/z" if name == "model/a" else name): array for name, array in plain.items()},
    ]
    assert len({checkpoint.replica_digest(found) for found in (plain, *others)}) == 5


def test_a_full_disk_is_named_and_leaves_nothing_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFullError, match=r"model\.safetensors.*no space left"):
        checkpoint.write_durable(tmp_path / "model.safetensors", b"bytes")
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_is_json_that_names_every_file(tmp_path: Path):
    save(tmp_path, 3)
    manifest = json.loads((tmp_path / "3" / "manifest.json").read_text())
    assert [entry["path"] for entry in manifest["files"]] == ["rank-0-of-2.safetensors", "rank-1-of-2.safetensors"]
