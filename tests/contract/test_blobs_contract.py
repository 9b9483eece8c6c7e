"""Blobs in a folder pass the contract, and do what only a folder does."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onejob.core.artifact import digest_bytes
from onejob.core.faults import VARIABLE
from onejob.errors import StorageFullError, StoreError
from onejob.store.blobs import DirBlobs
from onejob.testing.blobs_contract import BYTES, DIGEST, BlobsContract

PUT = """
import sys
from pathlib import Path
from onejob.store.blobs import DirBlobs
home, source = Path(sys.argv[1]), Path(sys.argv[2])
DirBlobs(home / "blobs", home / "tmp").put(source)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "my 'home'"


@pytest.fixture
def blobs(home: Path) -> DirBlobs:
    return DirBlobs(home / "blobs", home / "tmp")


@pytest.fixture
def damage(blobs: DirBlobs) -> Callable[[str], None]:
    def flip(digest: str) -> None:
        path = blobs.path(digest)
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        data[0] ^= 1
        path.write_bytes(bytes(data))

    return flip


def files(home: Path) -> list[str]:
    return sorted(path.name for path in home.rglob("*") if path.is_file() and path.name != ".lock")


class TestDirBlobs(BlobsContract):
    def test_a_file_of_the_home_is_linked_and_one_from_elsewhere_copied(
        self, blobs: DirBlobs, home: Path, tmp_path: Path
    ) -> None:
        ours, theirs = home / "ours", tmp_path / "theirs"
        for source in (ours, theirs):
            source.write_bytes(str(source).encode())
            source.chmod(0o640)
            os.utime(source, (1000.0, 1000.0))
        placed = [blobs.get(blobs.put(source)[0]) for source in (ours, theirs)]
        assert placed[0].samefile(ours)
        assert not placed[1].samefile(theirs)
        assert theirs.stat().st_mode & 0o777 == 0o640, "a file of the user's is not touched"
        assert min(written for _, _, written in blobs) > 1000.0, "the time of a blob is that of the put"
        assert files(home / "tmp") == []

    def test_the_folder_is_sharded(self, blobs: DirBlobs, home: Path) -> None:
        blobs.put(BYTES)
        assert (home / "blobs" / DIGEST[:2] / DIGEST).read_bytes() == BYTES

    def test_only_blobs_older_than_a_time_are_deleted(self, blobs: DirBlobs) -> None:
        blobs.put(BYTES)
        os.utime(blobs.path(DIGEST), (1000.0, 1000.0))
        assert blobs.delete_older(DIGEST, 1000.0) == 0
        blobs.put(BYTES)
        assert blobs.delete_older(DIGEST, 2000.0) == 0, "put again, so it is wanted again"
        os.utime(blobs.path(DIGEST), (1000.0, 1000.0))
        assert blobs.delete_older(DIGEST, 2000.0) == len(BYTES)
        assert not blobs.has(DIGEST)

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
    def test_a_full_disk_leaves_nothing_behind(
        self, blobs: DirBlobs, home: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        def full(file: int) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StorageFullError, match="onejob gc"):
            blobs.put(BYTES)
        assert files(home) == []

    def test_a_file_past_the_limit_is_a_full_disk(self, blobs: DirBlobs, home: Path, tmp_path: Path) -> None:
        source = tmp_path / "big"
        source.write_bytes(os.urandom(200_000))
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # noqa: E731
        ended = subprocess.run(
            [sys.executable, "-c", PUT, home, source], capture_output=True, text=True, preexec_fn=limit
        )
        assert "StorageFullError" in ended.stderr
        assert files(home) == []
        assert blobs.put(source)[1] == 200_000

    @pytest.mark.parametrize("point", ["blobs.after_write", "blobs.after_rename"])
    def test_a_killed_writer_leaves_no_half_blob(self, blobs: DirBlobs, home: Path, tmp_path: Path, point: str) -> None:
        source = tmp_path / "file"
        source.write_bytes(BYTES)
        environment = {**os.environ, VARIABLE: point}
        ended = subprocess.run([sys.executable, "-c", PUT, home, source], env=environment)
        assert ended.returncode == -9
        assert [digest for digest, _, _ in blobs] == ([DIGEST] if point == "blobs.after_rename" else [])
        assert blobs.put(source) == (DIGEST, len(BYTES))
        assert blobs.get(DIGEST).read_bytes() == BYTES
        left = len(files(home / "tmp"))
        assert left == (point == "blobs.after_write")
        assert blobs.clean(0.0) == 0, "the writer may be alive still"
        assert blobs.clean(float("inf")) == len(BYTES) * left
        assert files(home / "tmp") == []

    def test_a_folder_that_can_not_be_made_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(StoreError, match="--home"):
            DirBlobs(tmp_path / "file" / "blobs", tmp_path / "tmp")

    def test_bytes_written_while_they_are_linked_are_copied(
        self, blobs: DirBlobs, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = home / "busy"
        source.write_bytes(BYTES)
        writer = source.open("r+b", buffering=0)
        moved = iter(range(1, 100))

        def fsync(file: int) -> None:
            os.utime(source, (next(moved), 1.0))
            writer.seek(0)
            writer.write(b"SOME")
            os.utime(source, ns=(0, next(moved)))

        monkeypatch.setattr(os, "fsync", fsync)
        digest, _ = blobs.put(source)
        writer.close()
        path = blobs.get(digest)
        assert digest_bytes(path.read_bytes()) == digest
        assert not path.samefile(source)
