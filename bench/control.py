"""The control: does the `better` gate promote anything where retraining doesn't help?

    pip download --no-deps nannyml==0.13.1 && unzip nannyml-*.whl 'nannyml/datasets/data/employment_MA*' -d FOLDER
    nice python bench/control.py FOLDER/nannyml/datasets/data [--linear]

US census, Massachusetts, is somebody employed: 68,785 rows of 2015, and 208,892 of 2016 to 2018. A job's model is
trained on 2015 and stays champion, so that every challenger meets the same one. At the end of each quarter of 2016 to
2018 a challenger is trained on all history up to the cut, four weeks before, and held against it on the days since.
With `--linear` the model is a linear one and trained for fewer steps than it needs: more rows are more steps, so there
retraining truly helps, and the gate should say so.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import numpy as np
import polars as pl
from loop_steps import DAY, Loop, Model, data_run, rows_of

from onejob.core.context import InputArtifact
from onejob.data.spec import Spec as DataSpec
from onejob.monitor.spec import Spec as MonitorSpec
from onejob.train.spec import Spec as TrainSpec

CATEGORIES = [
    *("SCHL", "MAR", "RELP", "DIS", "ESP", "CIT", "MIG", "MIL"),
    *("ANC", "NATIVITY", "DEAR", "DEYE", "DREM", "SEX", "RAC1P"),
]
COLUMNS = {"label": "employed", "time": "asked", "id": "key", "categories": CATEGORIES, "numbers": ["AGEP"]}
JOB = f"""
name = "control"
[data]
family = "tabular"
source = "rows.parquet"
steps = [{{ split = {{ by = "time", test = 0.1 }} }}]
columns = {{ label = "employed", time = "asked", id = "key", numbers = ["AGEP"], categories = {CATEGORIES!r} }}
"""
TRAIN: dict[str, Any] = {
    "epochs": 16,
    "batch": 1024,
    "lr": 4e-3,
    "keep": "best",
    "model": {"hidden": [128, 64], "dropout": 0.1},
}
LINEAR: dict[str, Any] = {"epochs": 8, "batch": 2048, "lr": 1e-2, "model": {"hidden": []}}
HELD_OUT = 28
GATE = {"promote": "better", "margin": 0.0, "blocks_min": 14, "replay": 50}
MARGINS = (0.0, 0.002, 0.005, 0.01)
WITHIN = "within a year the rows have no order in time (the file of 2018 is sorted by kind of household)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the folder with employment_MA_reference.pq and the others")
    parser.add_argument("--seeds", type=int, nargs="+", default=[7], help="challengers of each quarter")
    parser.add_argument("--linear", action="store_true", help="a model without hidden layers")
    args = parser.parse_args()
    if args.linear:
        TRAIN.update(LINEAR)
    began = time.perf_counter()
    print(f"$ nice python bench/control.py DATA {' '.join(sys.argv[2:])}".rstrip())
    print(machine.describe())
    frame = census(args.data)
    print(f"\na row's moment: drawn at random within its year, for {WITHIN}")
    print("a block: a day of UTC; 182 to 198 rows a day on average, each with its label a day later\n")
    with tempfile.TemporaryDirectory(prefix="onejob-bench-") as folder:
        verdicts = play(Path(folder), frame, args.seeds)
    promoted = sum(each["verdict"] == "promote" for each in verdicts)
    print(f"\n{promoted} of {len(verdicts)} challengers promoted by `better` with margin {GATE['margin']:g}")
    print(f"{time.perf_counter() - began:.0f} s in all")


def census(folder: Path) -> pl.DataFrame:
    """All rows in the order of the moments given to them."""
    old, new, late = (
        pl.read_parquet(folder / f"employment_MA_{name}.pq") for name in ("reference", "analysis", "analysis_target")
    )
    text = [pl.col(CATEGORIES).cast(pl.String)]
    names = ["id", "year", "employed", "AGEP", *CATEGORIES]
    frame = pl.concat([part.with_columns(text).select(names) for part in (old, new.join(late, on="id"))])
    begin = pl.datetime("year", 1, 1, time_zone="UTC").dt.epoch("us")
    length = pl.datetime(pl.col("year") + 1, 1, 1, time_zone="UTC").dt.epoch("us") - begin
    drawn = pl.Series("drawn", np.random.default_rng(1).random(frame.height))
    moment = begin + drawn * length
    return frame.with_columns(time=moment.cast(pl.Int64), key=pl.format("p{}", "id")).sort("time", "key")


def play(folder: Path, frame: pl.DataFrame, seeds: list[int]) -> list[dict[str, Any]]:
    loop = prepare(folder, frame)
    live = frame.filter(pl.col("year") > 2015)
    batches = []
    for _, part in live.group_by(pl.col("time") // round(91 * DAY * 1e6), maintain_order=True):
        loop.capture(part)
        batches.append(loop.labels(part, part["employed"]))
    champion = Model(loop.base, loop.fit(loop.base, seeds[0]))
    everything = loop.labelled(batches, START, END, END + 2 * DAY)
    by_seed(loop, everything, champion)
    print(f"verdicts by margin: {', '.join(f'{margin:g}' for margin in MARGINS)}; P promote, h hold, r reject")
    print("truth: the difference on all days from the cut to the end of 2018\n")
    head = "until    seed  rows trained on  blocks  difference, one-sided bounds         truth    flips"
    print(f"{head}  by margin  reason at 0")
    verdicts = []
    for now in quarters():
        cut = now - HELD_OUT * DAY
        rows, recent = (loop.labelled(batches, since, now, now) for since in (START, loop.gate_from(cut)))
        dataset = loop.extend(rows, cut)
        for seed in seeds:
            challenger = Model(dataset, loop.fit(dataset, seed + 100))
            found = [loop.gate(recent, champion, challenger, **{**GATE, "margin": margin}) for margin in MARGINS]
            verdicts.append(found[0])
            truth = loop.gate(everything, champion, challenger, **GATE)["comparison"]["overall"]["mean"]
            tell(now, seed + 100, dataset.meta["splits"]["train"]["rows"], found, truth)
            loop.forget(challenger.checkpoint)
        loop.forget(rows, recent, dataset)
    return verdicts


def by_seed(loop: Loop, everything: InputArtifact, champion: Model) -> None:
    """How much of a difference is the seed's: the champion's own rows, trained on again."""
    for seed in (207, 208, 209):
        twin = Model(loop.base, loop.fit(loop.base, seed))
        overall = loop.gate(everything, champion, twin, **GATE)["comparison"]["overall"]
        bounds = f"{overall['mean']:+.4f} ({overall['low']:+.4f} to {overall['high']:+.4f})"
        print(f"the champion's twin, same rows of 2015, seed {seed}: differs on 2016 to 2018 by {bounds}", flush=True)


START = datetime.datetime(2016, 1, 1, tzinfo=datetime.UTC).timestamp()
END = datetime.datetime(2019, 1, 1, tzinfo=datetime.UTC).timestamp()


def quarters() -> list[float]:
    ends = [(year, month) for year in (2016, 2017, 2018) for month in (4, 7, 10, 13)]
    moments = [datetime.datetime(y + (m > 12), 1 if m > 12 else m, 1, tzinfo=datetime.UTC) for y, m in ends]
    return [each.timestamp() for each in moments]


def prepare(folder: Path, frame: pl.DataFrame) -> Loop:
    """The job's first run, on 2015."""
    job = folder / "control"
    job.mkdir(parents=True)
    moment = pl.col("time").cast(pl.Datetime("us", "UTC")).alias("asked")
    frame.filter(pl.col("year") == 2015).with_columns(moment).drop("time", "id", "year").write_parquet(
        job / "rows.parquet"
    )
    (job / "job.toml").write_text(JOB)
    base = data_run(job / "job.toml", folder / "home", folder / "base")
    data = DataSpec.model_validate({"source": "rows.parquet", "columns": COLUMNS})
    monitor = MonitorSpec.model_validate({"gate": GATE})
    print(f"the job's dataset: {rows_of(base).height:,} rows of 2015")
    return Loop(folder / "made", data, TrainSpec.model_validate(TRAIN), monitor, base)


def tell(now: float, seed: int, rows: int, found: list[dict[str, Any]], truth: float) -> None:
    when = datetime.datetime.fromtimestamp(now - DAY, datetime.UTC)
    overall = found[0]["comparison"]["overall"]
    bounds = f"{overall['mean']:+.4f} ({overall['low']:+.4f} to {overall['high']:+.4f})"
    by_margin = " ".join("P" if each["verdict"] == "promote" else each["verdict"][0] for each in found)
    print(
        f"{when:%Y-%m}  {seed:4}  {rows:15,}  {overall['blocks']:6}  {bounds:36} {truth:+.4f}  "
        f"{found[0]['comparison']['flips']:5.1%}  {by_margin}    {'; '.join(found[0]['reasons'])}",
        flush=True,
    )


if __name__ == "__main__":
    main()
