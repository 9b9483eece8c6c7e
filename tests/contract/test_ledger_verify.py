"""Verify hashes a whole lineage again and names what is damaged, missing or changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onejob.core.artifact import Artifact, FileEntry, digest_bytes
from onejob.store.blobs import DirBlobs
from onejob.store.ledger import SqlLedger
from onejob.store.verify import Report, verify_lineage
from onejob.testing.ledger_samples import OpenLedger, leave, new_run

ROWS = b"carrier,delay\nUA,3\n"


class Chain:
    """source -> dataset -> engine, with real bytes."""

    def __init__(self, ledger: SqlLedger, blobs: DirBlobs, folder: Path) -> None:
        self.ledger, self.blobs = ledger, blobs
        self.file = folder / "flights 'of' 2013.csv"
        self.file.write_bytes(ROWS)
        self.source = Artifact("source", (FileEntry("flights.csv", digest_bytes(ROWS), len(ROWS)),))
        blobs.put(self.source.manifest_bytes())
        ledger.add_artifact(self.source, locations={"flights.csv": str(self.file)})
        run = ledger.add_run(new_run()).id
        self.dataset = self.keep("dataset", b"rows", b"profile")
        leave(ledger, run, "k1", {"out": self.dataset}, inputs={"source": self.source.digest})
        self.engine = self.keep("engine", b"weights", b"profile")
        self.made = leave(ledger, run, "k2", {"out": self.engine}, inputs={"dataset": self.dataset.digest})

    def keep(self, kind: str, *files: bytes) -> Artifact:
        entries = tuple(FileEntry(f"{n}.bin", *self.blobs.put(data)) for n, data in enumerate(files))
        artifact = Artifact(kind, entries)
        self.blobs.put(artifact.manifest_bytes())
        return artifact

    def verify(self) -> Report:
        return verify_lineage(self.ledger, self.blobs, self.engine.digest)


@pytest.fixture
def chain(open_ledger: OpenLedger, tmp_path: Path) -> Chain:
    ledger = open_ledger()
    assert isinstance(ledger, SqlLedger)
    return Chain(ledger, DirBlobs(tmp_path / "home" / "blobs", tmp_path / "home" / "tmp"), tmp_path)


def flip(path: Path) -> str:
    """Flip one bit of a file, leaving its size and time as they were; gives the digest of what is there then."""
    stat = path.stat()
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return digest_bytes(bytes(data))


def test_a_sound_lineage_is_followed_to_its_sources(chain: Chain) -> None:
    report = chain.verify()
    assert report.sound
    assert report.findings == []
    assert [link.kind for link in report.lineage] == ["engine", "dataset", "source"]
    assert [link.execution is None for link in report.lineage] == [False, False, True]
    assert report.lineage[0].inputs == {"dataset": chain.dataset.digest}
    assert report.files == 3 + 3 + 1, "manifests, files (the shared one once), the source"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_flipped_bit_is_named_even_where_size_and_time_are_the_same(chain: Chain) -> None:
    entry = chain.dataset.files[0]
    chain.blobs.get(entry.digest)
    actual = flip(chain.blobs.path(entry.digest))
    report = chain.verify()
    assert not report.sound
    (found,) = report.findings
    assert (found.what, found.kind, found.path) == ("damaged", "dataset", "0.bin")
    assert (found.expected, found.actual, found.place) == (entry.digest, actual, str(chain.blobs.path(entry.digest)))
    assert str(chain.blobs.path(entry.digest)) in str(found)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_shared_damaged_file_is_named_for_each_artifact(chain: Chain) -> None:
    flip(chain.blobs.path(chain.engine.files[1].digest))
    assert [(f.kind, f.path) for f in chain.verify().findings] == [("engine", "1.bin"), ("dataset", "1.bin")]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_damaged_manifest_is_named(chain: Chain) -> None:
    flip(chain.blobs.path(chain.dataset.digest))
    assert [(f.what, f.kind, f.path) for f in chain.verify().findings] == [("damaged", "dataset", "manifest")]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_missing_blob_is_named(chain: Chain) -> None:
    chain.blobs.delete(chain.engine.files[0].digest)
    (found,) = chain.verify().findings
    assert (found.what, found.path, found.actual) == ("missing", "0.bin", None)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_source_that_changed_or_went_is_told_and_is_no_damage(chain: Chain) -> None:
    chain.file.write_bytes(ROWS + b"AA,4\n")
    report = chain.verify()
    assert report.sound
    assert [(f.what, f.path, f.place) for f in report.findings] == [("source changed", "flights.csv", str(chain.file))]
    chain.file.unlink()
    assert [(f.what, f.actual) for f in chain.verify().findings] == [("source gone", None)]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_an_artifact_that_left_the_catalogue_is_read_from_its_manifest(chain: Chain) -> None:
    (made,) = chain.ledger.producers(chain.dataset.digest)
    chain.ledger.forget_execution(made.id, "a test")
    chain.ledger.drop_artifacts([chain.dataset.digest])
    assert chain.verify().findings == []
    chain.blobs.delete(chain.dataset.digest)
    assert [(f.what, f.artifact) for f in chain.verify().findings] == [("missing", chain.dataset.digest)]


def test_the_maker_that_an_endpoint_names_is_followed(chain: Chain) -> None:
    other = leave(chain.ledger, 1, "k3", {"out": chain.engine}, inputs={"dataset": chain.source.digest})
    newest = verify_lineage(chain.ledger, chain.blobs, chain.engine.digest)
    named = verify_lineage(chain.ledger, chain.blobs, chain.engine.digest, execution=chain.made.id)
    assert newest.lineage[0].execution == other.id
    assert named.lineage[0].execution == chain.made.id
    assert [link.kind for link in newest.lineage] == ["engine", "source"]
