"""`onejob gc` leaves the files of the engine that an endpoint's host may fall back on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from loop_world import World

from onejob.core.artifact import Artifact
from onejob.loop.commands.keep import gc


def test_gc_keeps_the_engine_that_serves_while_another_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    session = world.supervisor()
    try:
        made = Artifact("engine", {}, ())
        session.ledger.add_artifact(made)
        session.ledger.want_endpoint("tiny", artifact=made.digest, execution=None, options={})
        place = session.home.endpoint("tiny")
        for name in (made.digest, "champion", "older"):
            (place / "engines" / name).mkdir(parents=True)
        (place / "rollout.json").write_text(json.dumps({"serving": {"engine": {"digest": "champion"}}, "back": None}))
        gc(session, grace=-1e12)
        assert {path.name for path in (place / "engines").iterdir()} == {made.digest, "champion"}
    finally:
        world.close()
