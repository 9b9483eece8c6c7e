"""A short year, for real: two months of traffic through an endpoint, labels a day late, one retraining, one promotion.

The world turns over after training: who was late is in time, so the first model must lose, and the loop must notice.
"""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from onejob.errors import ConflictError
from onejob.loop import commands
from onejob.loop.commands.year import YearView
from onejob.loop.session import Session
from onejob.loop.views import RunView

JOB = """
name = "tiny"

[data]
family = "tabular"
source = "rows.csv"
steps = [{ "helper:between" = { first = "2023-12-20", last = "2023-12-31" } }, { split = { by = "time", test = 0.2 } }]
expect = { rows_min = 100, holdout_min = 20 }
columns = { label = "late", categories = ["carrier"], numbers = ["hour"], time = "departs", id = "flight" }

[train]
epochs = 6
batch = 64
lr = 1e-2
model = { hidden = [8], dropout = 0.0 }

[optimize]
budget = { metric = "auc", drop = 0.2 }
candidates = ["onnxruntime-fp32"]
rounds = 5
calls = 5

[serve]

[monitor]
retrain = { on = ["labels"], labels_min = 500, cooldown = "40d", hold_out = "9d" }
gate = { promote = "better", margin = 0.0, blocks_min = 7 }
"""

YEAR = """
step = "helper:between"
options = { first = "2024-01-01", last = "2024-02-29" }
"""

HELPER = '''"""Rows of some days."""

import polars as pl


def between(rows: pl.LazyFrame, first: str, last: str) -> pl.LazyFrame:
    departs = pl.col("departs").str.to_datetime("%Y-%m-%dT%H:%M:%SZ", time_zone="UTC")
    day = departs.dt.date()
    asked = day.is_between(pl.lit(first).str.to_date(), pl.lit(last).str.to_date())
    return rows.filter(asked).with_columns(departs=departs)
'''

DAYS, A_DAY = 91, 48


def rows_csv() -> str:
    """Days to train on in which evenings are late, and two months in which mornings are."""
    source = random.Random(3)
    begin = datetime.datetime(2023, 12, 1, tzinfo=datetime.UTC)
    lines = ["flight,departs,carrier,hour,late"]
    for number in range(DAYS * A_DAY):
        departs = begin + datetime.timedelta(minutes=30 * number)
        evening = departs.hour >= 12
        often = evening if departs.year == 2023 else not evening
        late = source.random() < (0.8 if often else 0.1)
        lines.append(f"f{number},{departs:%Y-%m-%dT%H:%M:%SZ},{source.choice('AB')},{departs.hour},{int(late)}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with commands.open(tmp_path / "home") as opened:
        yield opened
        commands.stop(opened, "tiny")


def play(session: Session, folder: Path) -> tuple[YearView, list[RunView]]:
    folder.mkdir()
    for name, text in (("job.toml", JOB), ("year.toml", YEAR), ("helper.py", HELPER), ("rows.csv", rows_csv())):
        (folder / name).write_text(text)
    commands.run(session, folder, sets=["monitor.capture.age=1s"])
    seen: list[RunView] = []
    return commands.play_year(session, folder, on_view=seen.append), seen


def test_a_year_is_played_through_the_endpoint_and_the_loop_follows_the_world(session: Session, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    view, seen = play(session, folder)
    first, second = view.year.months
    assert [(month.month, month.n) for month in view.year.months] == [("2024-01", 31 * A_DAY), ("2024-02", 29 * A_DAY)]
    assert view.year.failed_requests == 0

    # January: the first model, for everybody; at its end a retraining on labels, and a proof
    assert first.policies["loop"].auc == pytest.approx(first.policies["static"].auc, abs=1e-6)
    assert first.policies["loop"].log_loss > first.policies["constant"].log_loss, "worse than no model"
    assert (first.gate.decision, first.promoted) == ("promote", True)
    assert "proven better" in first.gate.reason
    story = "\n".join(first.story)
    for text in (
        "signal: harm of",
        "signal: labels of",
        "retrains, since labels",
        "came back",
        "gate: look 1: promote",
        "takes the place",
    ):
        assert text in story
    assert {step.name for run in seen for step in run.steps} >= {"monitor.watch", "train", "monitor.gate"}

    # February: the new model answers; the old one goes on being scored
    assert second.policies["loop"].auc > 0.8 > 0.3 > second.policies["static"].auc
    assert second.policies["loop"].log_loss == pytest.approx(second.policies["always"].log_loss, abs=1e-6)
    assert second.policies["loop"].log_loss < second.policies["constant"].log_loss
    assert second.gate.decision == "none", "the cool-down isn't over"

    # what came back is in the ledger: each row once, its label a day late
    traffic, labels = (
        sum(segment.rows for segment in session.ledger.list_segments("tiny", kind=kind))
        for kind in ("traffic", "labels")
    )
    assert traffic == 60 * A_DAY
    assert labels == 59 * A_DAY, "the last day's labels come tomorrow"
    (retraining,) = session.ledger.list_turns("tiny", kind="retrain")
    assert session.ledger.get_run(retraining.run).cause["kind"] == "signal"
    endpoint = session.ledger.get_endpoint("tiny")
    assert endpoint is not None
    assert view.champion == endpoint.artifact
    assert "came back" in "\n".join(view.lineage)

    # files, and once is enough
    assert json.loads((folder / "year" / "year.json").read_text())["months"][0]["gate"]["decision"] == "promote"
    assert {Path(file).suffix for file in view.files} == {".json", ".svg", ".png"}
    assert all(Path(file).stat().st_size > 500 for file in view.files)
    with pytest.raises(ConflictError, match="a year was played with endpoint tiny before"):
        commands.play_year(session, folder)
