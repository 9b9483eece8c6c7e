"""The job file that the README shows is a whole job: it plans to the end, and its data become a dataset."""

from __future__ import annotations

import re
from pathlib import Path

from onejob.core.artifact import Json
from onejob.loop import commands

README = Path(__file__).parents[2] / "README.md"


def shown() -> str:
    found = re.search(r"```toml\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert found, "the README shows no job file"
    return found[1]


def test_the_job_of_the_readme_plans_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(shown())
    with commands.open(tmp_path / "home") as session:
        view = commands.check(session, tmp_path)
    assert [step.name for step in view.steps][:2] == ["data", "train"]
    assert view.steps[-1].name == "optimize.choose"
    assert view.endpoint == "flights"
    assert not view.warnings


def test_the_data_of_the_readmes_job_become_a_dataset(tmp_path: Path) -> None:
    text = shown()
    (tmp_path / "job.toml").write_text(text[: text.index("[train]")])
    with commands.open(tmp_path / "home") as session:
        commands.run(session, tmp_path)
        ref = session.ledger.get_ref("flights/dataset@latest")
        assert ref is not None
        splits: dict[str, Json] = session.ledger.get_artifact(ref.digest).meta["splits"]
    assert sum(split["rows"] for split in splits.values()) == 336_776 - 9_430
