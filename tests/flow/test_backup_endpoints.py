"""A backup of a home whose endpoints record: what isn't sealed yet comes back, and private keys still meet."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from onejob.core.artifact import Artifact, FileEntry
from onejob.core.tensor import TensorSpec
from onejob.core.traffic import CAPTURE, LABELS, OPEN, SEALED, SECRET
from onejob.loop.commands import keep
from onejob.loop.factory import open_session
from onejob.loop.home import Home
from onejob.loop.reconcile import reconcile
from onejob.loop.session import Session
from onejob.loop.traffic import files_of, seal_traffic
from onejob.monitor.capture import read_traffic
from onejob.monitor.joined import join
from onejob.monitor.labels import read_labels
from onejob.serve.capture import Capture, Record, Rules, Signature
from onejob.serve.identify import Roles, Told
from onejob.serve.labels import LabelLog

ROLES = Roles("late", None, "flight")
PRIVATE = {"flight": "hash"}
SPEC = {"x": TensorSpec("x", "FP64", (-1, 1))}


class World:
    """A home with an endpoint that hashes its keys, and its writers, which live on while the backup is made."""

    def __init__(self, session: Session) -> None:
        self.session = session
        meta = {"format": 1, "columns": {"label": "late", "time": None, "id": "flight"}}
        engine = Artifact("engine", (FileEntry("a", *session.blobs.put(b"a")),), meta)
        session.blobs.put(engine.manifest_bytes())
        session.ledger.add_artifact(engine)
        options = {"monitor": {"capture": {"private": PRIVATE}}}
        session.ledger.want_endpoint("flights", artifact=engine.digest, execution=None, options=options)
        session.ledger.set_endpoint("flights", "stopped")  # type: ignore[arg-type]
        folder = session.home.endpoint("flights")
        folder.mkdir(parents=True)
        signature = Signature(SPEC, {"y": SPEC["x"]}, True, ROLES)
        rules = Rules.of({"reserve": 1, "private": PRIVATE})
        self.capture = Capture(folder, {"endpoint": "flights", "engine": "d1"}, signature, rules)
        self.labels = LabelLog(folder, ROLES, None, private=PRIVATE)

    def ask(self, first: int, last: int) -> None:
        for n in range(first, last):
            value = np.array([float(n)])
            told = Told(n * 1_000_000, None, [f"k{n}"])
            self.capture.add(Record((f"r{n}",), (1,), 10, told, {"x": value}, {"y": value}))
        self.capture.flush()

    def label(self, first: int, last: int) -> None:
        self.labels.take([(n, {"id": f"k{n}", "label": n % 2}) for n in range(first, last)])


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with open_session(tmp_path / "home") as session:
        yield World(session)


def restored(world: World, tmp_path: Path) -> tuple[Session, Path]:
    file = tmp_path / "backup.tar"
    saved = keep.backup(world.session, file)
    session = open_session(tmp_path / "other")
    assert keep.restore(session, file) == saved
    return session, session.home.endpoint("flights")


def labelled(session: Session) -> dict[str, object]:
    """Request -> its label, over all that the ledger knows."""
    traffic = read_traffic(files_of(session, session.ledger.list_segments("flights", kind="traffic")))
    joined = join(traffic, read_labels(files_of(session, session.ledger.list_segments("flights", kind="labels"))))
    assert len(set(joined.traffic.request.tolist())) == len(joined.traffic), "each row is there once"
    return dict(zip(joined.traffic.request.tolist(), joined.label.tolist(), strict=True))


def test_what_is_not_sealed_comes_back_and_later_labels_find_it(world: World, tmp_path: Path) -> None:
    world.ask(0, 10)
    world.capture.seal()
    assert len(seal_traffic(world.session, "flights")) == 1, "the first ten are an artifact"
    world.ask(10, 20)
    world.capture.seal()  # the next ten wait for the loop
    world.label(0, 5)
    world.labels.seal()
    world.ask(20, 30)  # and these are in a file that is being written
    world.label(5, 8)
    folder = world.session.home.endpoint("flights")
    for place, half in ((CAPTURE, b"\xff\xff\xff\xff\x40"), (LABELS, b'{"order')):
        (path,) = (folder / place / OPEN).iterdir()
        with path.open("ab") as file:
            file.write(half)  # a record that is half written when the backup is made

    session, other = restored(world, tmp_path)
    with session:
        assert stat.S_IMODE((other / SECRET).stat().st_mode) == 0o600
        reconcile(session)
        assert labelled(session) == {f"r{n}": n % 2 if n < 8 else None for n in range(30)}
        late = LabelLog(other, ROLES, None, private=PRIVATE, clock=lambda: 0.0)  # a clock that is far behind
        late.take([(n, {"id": f"k{n}", "label": 7}) for n in range(7, 30)])
        late.seal()
        reconcile(session)
        assert labelled(session) == {f"r{n}": n % 2 if n < 7 else 7 for n in range(30)}
        for place in (CAPTURE, LABELS):
            assert [path for where in (OPEN, SEALED) for path in (other / place / where).iterdir()] == []


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_sealed_while_the_backup_is_made_is_not_missed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    found = keep._endpoint_files

    def meanwhile(home: Home) -> Iterator[tuple[str, Path]]:
        for name, path in found(home):
            if OPEN in path.parts and LABELS in path.parts:
                world.labels.seal()  # listed as open, and sealed before it can be copied
            if path.name == SECRET and kept:
                seal_traffic(world.session, "flights")  # copied, and then in the ledger
            yield name, path
            if OPEN in path.parts and CAPTURE in path.parts:
                world.ask(10, 20)  # copied as open, then more is written, and it is sealed
                world.capture.seal()

    monkeypatch.setattr(keep, "_endpoint_files", meanwhile)
    world.ask(0, 10)
    world.label(0, 20)
    session, _ = restored(world, tmp_path)
    with session:
        assert len(session.ledger.list_segments("flights")) == (2 if kept else 0)
        reconcile(session)
        assert labelled(session) == {f"r{n}": n % 2 for n in range(20)}
        assert len(session.ledger.list_segments("flights")) == 2, "the same bytes are the same artifact"
