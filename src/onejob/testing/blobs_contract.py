"""The contract of a blob store, as tests that every adapter passes.

A test module inherits `BlobsContract` and gives two fixtures: `blobs`, an empty store, and `damage`, a function that
changes the stored bytes of a digest behind the store's back.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from onejob.core.artifact import digest_bytes
from onejob.core.ports import Blobs
from onejob.errors import DamagedError, NotFoundError, StoreError

Damage = Callable[[str], None]
BYTES = b"some bytes\0\xff"
DIGEST = digest_bytes(BYTES)


class BlobsContract:
    """What every blob store does; inherit it in a module of tests."""

    def test_bytes_come_back_under_their_digest(self, blobs: Blobs) -> None:
        assert not blobs.has(DIGEST)
        assert blobs.put(BYTES) == (DIGEST, len(BYTES))
        assert blobs.has(DIGEST)
        assert blobs.get(DIGEST).read_bytes() == BYTES
        assert blobs.put(b"") == (digest_bytes(b""), 0)
        assert blobs.get(digest_bytes(b"")).read_bytes() == b""

    def test_a_file_is_kept_and_stays_where_it_was(self, blobs: Blobs, tmp_path: Path) -> None:
        source = tmp_path / "a 'file' \".bin"
        source.write_bytes(BYTES)
        assert blobs.put(source) == (DIGEST, len(BYTES))
        assert blobs.get(DIGEST).read_bytes() == BYTES
        assert source.read_bytes() == BYTES
        source.unlink()
        assert blobs.get(DIGEST).read_bytes() == BYTES

    def test_a_symbolic_link_is_followed(self, blobs: Blobs, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(BYTES)
        (tmp_path / "link").symlink_to("file")
        assert blobs.put(tmp_path / "link") == (DIGEST, len(BYTES))
        assert not blobs.get(DIGEST).is_symlink()

    def test_twice_is_once(self, blobs: Blobs, tmp_path: Path) -> None:
        source = tmp_path / "file"
        source.write_bytes(BYTES)
        for put in (source, BYTES, source):
            blobs.put(put)
        assert [(digest, size) for digest, size, _ in blobs] == [(DIGEST, len(BYTES))]

    def test_a_blob_is_read_only(self, blobs: Blobs) -> None:
        blobs.put(BYTES)
        assert blobs.get(DIGEST).stat().st_mode & 0o222 == 0

    def test_damage_is_found_when_it_is_read(self, blobs: Blobs, damage: Damage) -> None:
        blobs.put(BYTES)
        blobs.get(DIGEST)
        damage(DIGEST)
        with pytest.raises(DamagedError, match=DIGEST):
            blobs.get(DIGEST)
        assert blobs.has(DIGEST), "it is there, if not sound"

    def test_putting_the_bytes_again_heals_a_damaged_blob(self, blobs: Blobs, damage: Damage) -> None:
        blobs.put(BYTES)
        damage(DIGEST)
        blobs.put(BYTES)
        assert blobs.get(DIGEST).read_bytes() == BYTES

    def test_what_is_not_there_is_said(self, blobs: Blobs, tmp_path: Path) -> None:
        for digest in (DIGEST, "../../etc/passwd", ""):
            with pytest.raises(NotFoundError):
                blobs.get(digest)
        assert blobs.delete(DIGEST) == 0
        with pytest.raises(StoreError):
            blobs.put(tmp_path / "nosuch")
        assert list(blobs) == []

    def test_deleted_bytes_are_gone(self, blobs: Blobs) -> None:
        blobs.put(BYTES)
        blobs.get(DIGEST)
        assert blobs.delete(DIGEST) == len(BYTES)
        assert not blobs.has(DIGEST)
        assert list(blobs) == []
        with pytest.raises(NotFoundError):
            blobs.get(DIGEST)

    def test_the_time_is_that_of_the_last_put(self, blobs: Blobs, tmp_path: Path) -> None:
        before = time.time() - 1.0
        source = tmp_path / "old"
        source.write_bytes(BYTES)
        os.utime(source, (1000.0, 1000.0))
        for put in (source, BYTES):
            blobs.put(put)
            assert [written >= before for _, _, written in blobs] == [True]

    def test_many_may_put_the_same_bytes_at_once(self, blobs: Blobs, tmp_path: Path) -> None:
        source = tmp_path / "file"
        source.write_bytes(BYTES)
        errors: list[Exception] = []

        def put() -> None:
            try:
                for _ in range(10):
                    assert blobs.put(source)[0] == DIGEST
                    assert blobs.get(DIGEST).read_bytes() == BYTES
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=put) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert [digest for digest, _, _ in blobs] == [DIGEST]
