"""`init --from`: what is guessed of a CSV file, for each kind of label, and paths that need quoting."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from onejob.errors import SourceError
from onejob.loop.commands.start import init


@pytest.mark.parametrize(
    ("labels", "metric", "task"),
    [
        (["0", "1"], "auc", None),
        (["TRUE", "FALSE"], "auc", None),
        (["yes", "no"], "accuracy", None),
        (["low", "mid", "high"], "accuracy", None),
        (["3", "4", "5"], "accuracy", "multiclass"),
        ([str(number) for number in range(50)], "r2", "regression"),
        ([f"{number / 7}" for number in range(50)], "r2", None),
    ],
)
def test_the_metric_fits_the_label(labels: list[str], metric: str, task: str | None, tmp_path: Path) -> None:
    source = tmp_path / 'it\'s "quoted".csv'
    rows = [f"{number},{labels[number % len(labels)]}" for number in range(100)]
    source.write_text("\n".join(['"size, in m",label', *rows]) + "\n")
    made = init(tmp_path / "new", source=source)
    job = tomllib.loads(Path(made.files[0]).read_text())
    assert job["optimize"]["budget"]["metric"] == metric
    assert job["train"].get("model", {}).get("task") == task, "whole numbers may be classes or a quantity"
    assert job["data"]["source"] == str(source)
    assert (job["data"]["columns"]["label"], job["data"]["columns"]["numbers"]) == ("label", ["size, in m"])


def test_a_file_that_is_not_there_gets_the_nearest_that_is(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,label\n1,2\n")
    with pytest.raises(SourceError, match="there is no such file") as caught:
        init(tmp_path / "new", source=tmp_path / "row.csv")
    assert "rows.csv" in caught.value.cure
    assert not (tmp_path / "new").exists()
