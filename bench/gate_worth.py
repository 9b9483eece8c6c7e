"""What is the gate worth? Challengers with known faults, and sound ones, before the gate and on probation.

    nice python bench/gate_worth.py [--dates 6] [--cancelled] [--only sound]

The flights job, whose model is retrained at several dates of the year on all history up to ten days before. At each
date the champion is a sound model that is 30 days older, and these challengers come before the job's own gate
(not_worse by 0.01, days as blocks), each trained by the job's own [train]:

    sound               nothing is wrong; two seeds
    labels flipped      20 % of the labels of its training rows
    late labels lost    of the last 28 days 60 % of the labels of late flights never came, and don't come after it:
                        it is trained on the rest, and judged on the rest
    broken join         in its training rows the weather is that of other rows
    feature stuck       in its training rows minute_of_day is always the same; requests have the right one
    feature empty       in its training rows minute_of_day is always empty; requests have the right one

Whatever the gate said, each is then watched for its 14 days of probation beside the former champion, on the traffic
that followed: what probation would do if somebody promoted it by hand. Truth is the mean difference of their losses on
these days, by all labels.
"""

from __future__ import annotations

import argparse
import datetime
import math
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import machine
import numpy as np
import polars as pl
from loop_steps import DAY, Loop, Model, data_run, rows_of
from model import EXAMPLE, copy_job

from onejob.core.context import InputArtifact
from onejob.data.spec import Spec as DataSpec
from onejob.errors import ExpectationError
from onejob.monitor.spec import Spec as MonitorSpec
from onejob.train.spec import Spec as TrainSpec

DATES = ("2013-05-01", "2013-06-10", "2013-07-20", "2013-08-30", "2013-10-05", "2013-11-10")
HELD_OUT, OLDER, LOST, PROBATION = 10, 30, 28, 14
WAITED = PROBATION + 32
"""Days after a date at which its probation is read: the last block's horizon of 30 days has passed."""
WEATHER = ["temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib"]
MARCH_ON = {
    'first = "2013-01-01", last = "2013-02-28"': 'first = "2013-03-01", last = "2013-12-31"',
    '    { split = { by = "time", at = "2013-02-22" } },\n': "",
    "holdout_min = 2_000\n": "",
}
NEVER = {
    'asked.filter(pl.col("arr_delay").is_not_null())': "asked",
    ".cast(pl.Int8)": ".cast(pl.Int8).fill_null(-1)",
}
PIECE = round(14 * DAY * 1e6)
Fault = Callable[..., pl.DataFrame]
"""Called with the training rows and `rng`."""


def flipped(frame: pl.DataFrame, rng: np.random.Generator) -> pl.DataFrame:
    chosen = pl.Series(rng.random(frame.height) < 0.2)
    return frame.with_columns(late=pl.when(chosen).then(1 - pl.col("late")).otherwise("late").cast(pl.Int8))


def other_weather(frame: pl.DataFrame, rng: np.random.Generator) -> pl.DataFrame:
    return frame.with_columns(frame.select(WEATHER)[rng.permutation(frame.height)])


def stuck(frame: pl.DataFrame, rng: np.random.Generator) -> pl.DataFrame:
    return frame.with_columns(minute_of_day=pl.lit(720).cast(frame.schema["minute_of_day"]))


def empty(frame: pl.DataFrame, rng: np.random.Generator) -> pl.DataFrame:
    return frame.with_columns(minute_of_day=pl.lit(None).cast(frame.schema["minute_of_day"]))


def whole(frame: pl.DataFrame, rng: np.random.Generator) -> pl.DataFrame:
    return frame


LOSES = "late labels lost"
CASES: tuple[tuple[str, Fault], ...] = (
    ("sound", whole),
    ("sound", whole),
    ("labels flipped", flipped),
    (LOSES, whole),
    ("broken join", other_weather),
    ("feature stuck", stuck),
    ("feature empty", empty),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dates", type=int, default=len(DATES))
    parser.add_argument("--cancelled", action="store_true", help="cancelled flights are asked about too")
    parser.add_argument("--only", choices=sorted({name for name, _ in CASES}), help="one kind of challenger")
    args = parser.parse_args()
    began = time.perf_counter()
    print(f"$ nice python bench/gate_worth.py {' '.join(sys.argv[1:])}".rstrip())
    print(machine.describe())
    with tempfile.TemporaryDirectory(prefix="onejob-bench-") as folder:
        year = Year(Path(folder), cancelled=args.cancelled, only=args.only)
        print(f"\ntraffic: {year.rows.height:,} flights of March to December, {year.never:,} without a label ever")
        print("probation: what it would do with each, were it promoted\n")
        print("date   challenger        gate     truth    probation  because")
        found = [one for day in DATES[: args.dates] for one in year.judge(day)]
    summary(found)
    print(f"\n{time.perf_counter() - began:.0f} s in all")


class Year:
    """The traffic of March to December, and the job that is retrained on it."""

    def __init__(self, folder: Path, *, cancelled: bool, only: str | None) -> None:
        self.only = only
        with (EXAMPLE / "job.toml").open("rb") as file:
            job = tomllib.load(file)
        base = data_run(copy_job(folder / "job" / "flights", {}), folder / "home", folder / "base")
        self.rows = traffic_rows(folder, cancelled=cancelled)
        self.never = int((self.rows["late"] < 0).sum())
        job["train"]["resources"] = {"processes": 1}
        job["monitor"]["gate"]["replay"] = 100
        data, train = DataSpec.model_validate(job["data"]), TrainSpec.model_validate(job["train"])
        self.loop = Loop(folder / "made", data, train, MonitorSpec.model_validate(job["monitor"]), base)
        for _, part in self.rows.group_by(pl.col("time") // PIECE, maintain_order=True):
            self.loop.capture(part)
        self.label = self.rows["late"].replace({-1: None})
        self.whole = {piece: self._batch(piece, self.label) for piece in self._pieces()}

    def judge(self, day: str) -> list[dict[str, Any]]:
        """All challengers of a date."""
        now = datetime.datetime.fromisoformat(f"{day}T06:00+00:00").timestamp()
        loop, number = self.loop, DATES.index(day)
        begin = float(self.rows["time"][0]) / 1e6
        feeds = {False: list(self.whole.values()), True: self._lossy(now, number)}
        seen = {lossy: loop.labelled(feed, begin, now, now) for lossy, feed in feeds.items()}
        later = {lossy: self._after(feed, now) for lossy, feed in feeds.items()}
        champion = self._champion(seen[False], now, number)
        sets = {lossy: self._extended(rows, now - HELD_OUT * DAY) for lossy, rows in seen.items()}
        found = []
        for place, (name, fault) in enumerate(CASES):
            if self.only not in (None, name):
                continue
            lossy, seed = name == LOSES, 100 + 10 * number + place
            if isinstance(base := sets[lossy], ExpectationError):
                found.append(refused(day, name, base))
                continue
            rng = np.random.default_rng(seed)
            dataset = base if fault is whole else loop.spoilt(base, partial(fault, rng=rng))
            challenger = Model(dataset, loop.fit(dataset, seed))
            decision = loop.gate(seen[lossy], champion, challenger)
            reports = {key: loop.watch(later[key], challenger, champion, now) for key in {lossy, False}}
            found.append(told(day, name, decision, reports[lossy], reports[False]))
            loop.forget(challenger.checkpoint)
        made = [one for one in sets.values() if isinstance(one, InputArtifact)]
        loop.forget(*seen.values(), *later.values(), *made, champion.dataset, champion.checkpoint)
        return found

    def _extended(self, rows: InputArtifact, cut: float) -> InputArtifact | ExpectationError:
        """The dataset of a retraining, or why the job's own expectations refuse it."""
        try:
            return self.loop.extend(rows, cut)
        except ExpectationError as error:
            return error

    def _champion(self, rows: InputArtifact, now: float, number: int) -> Model:
        dataset = self.loop.extend(rows, now - (HELD_OUT + OLDER) * DAY)
        return Model(dataset, self.loop.fit(dataset, 7 + number))

    def _after(self, feed: list[InputArtifact], now: float) -> InputArtifact:
        """What the watch sees at the end of probation."""
        return self.loop.labelled(feed, self.loop.watch_from(now), now + PROBATION * DAY, now + WAITED * DAY)

    def _pieces(self) -> list[int]:
        return (self.rows["time"] // PIECE).unique(maintain_order=True).to_list()

    def _batch(self, piece: int, label: pl.Series) -> InputArtifact:
        chosen = self.rows["time"] // PIECE == piece
        return self.loop.labels(self.rows.filter(chosen), label.filter(chosen))

    def _lossy(self, now: float, number: int) -> list[InputArtifact]:
        """The feed of labels that loses most late ones from 28 days before the date on."""
        since = round((now - LOST * DAY) * 1e6)
        chance = pl.Series(np.random.default_rng(number).random(self.rows.height))
        lost = (self.rows["time"] >= since) & (self.rows["late"] == 1) & (chance < 0.6)
        label = pl.select(pl.when(lost).then(None).otherwise(self.label)).to_series()
        until = round((now + PROBATION * DAY) * 1e6) // PIECE
        return [
            self._batch(piece, label) if since // PIECE <= piece <= until else batch
            for piece, batch in self.whole.items()
        ]


def traffic_rows(folder: Path, *, cancelled: bool) -> pl.DataFrame:
    """March to December by the job's own [data] steps; label -1 where a flight never arrived."""
    job = copy_job(folder / "year" / "flights", MARCH_ON, name="year")
    if cancelled:
        helper = job.parent / "helper.py"
        text = helper.read_text()
        for old, new in NEVER.items():
            assert old in text, f"the example no longer says {old!r}"
            text = text.replace(old, new)
        helper.write_text(text)
        job.write_text(re.sub(r"\[data\.expect\].*", "", job.read_text(), flags=re.DOTALL))
    made = data_run(job, folder / "year home", folder / "year rows")
    frame = rows_of(made).with_columns(time=pl.col("departs").dt.epoch("us"), key=pl.col("flight_id"))
    shutil.rmtree(made.path)
    return frame.sort("time", "key")


def told(
    day: str, name: str, decision: dict[str, Any], watched: dict[str, Any], true: dict[str, Any]
) -> dict[str, Any]:
    """One challenger: its line is printed, its figures are given back."""
    truth = float(np.mean([each["former_difference"] for each in true["blocks"] if each["labelled"]]))
    begun, alarm = watched["probation"], watched["probation"]["reading"]["e_alarm"]
    after = {"roll_back": f"back {alarm[5:] if alarm else ''}", "keep": "kept"}.get(begun["verdict"], "unsure")
    because = "; ".join(brief(decision["reasons"]))
    print(f"{day[5:]}  {name:17} {decision['verdict']:8} {truth:+.4f}  {after:10} {because}", flush=True)
    mended = true["probation"]["verdict"]
    return {"name": name, "gate": decision["verdict"], "truth": truth, "probation": begun["verdict"], "mended": mended}


def refused(day: str, name: str, error: ExpectationError) -> dict[str, Any]:
    """A challenger that was never trained."""
    broken = error.message.splitlines()[-1]
    print(f"{day[5:]}  {name:17} {'refused':8} {'-':>7}  {'-':10} [data.expect] {broken}", flush=True)
    return {"name": name, "gate": "refused", "truth": math.nan, "probation": "", "mended": ""}


def brief(reasons: list[str]) -> list[str]:
    """Reasons that differ only in which rows lack labels, as one."""
    gaps = [each for each in reasons if each.startswith("labels are missing")]
    rest = [each for each in reasons if each not in gaps]
    more = f" (and {len(gaps) - 1} more such reasons)" if len(gaps) > 1 else ""
    return [*rest, *(f"{each}{more}" for each in gaps[:1])]


def summary(found: list[dict[str, Any]]) -> None:
    print("\ncaught: promoted by the gate, rolled back on probation; kept: promoted, and not rolled back")
    print("alone: were all promoted by hand, so many would have been rolled back (all labels there)")
    print("harm: truth above the 0.01 that the rule allows; missed: kept, and such harm")
    print("refused: by [data.expect] of its retraining, so that no model was made\n")
    print("challenger         n   mean truth  harm  refused  rejected  held  promoted  caught  kept  missed  alone")
    for name in dict.fromkeys(each["name"] for each in found):
        some = [each for each in found if each["name"] == name]
        let = [each for each in some if each["gate"] == "promote"]
        kept = [each for each in let if each["probation"] != "roll_back"]
        counts = [
            sum(each["truth"] > 0.01 for each in some),
            *(sum(each["gate"] == verdict for each in some) for verdict in ("refused", "reject", "hold", "promote")),
            len(let) - len(kept),
            len(kept),
            sum(each["truth"] > 0.01 for each in kept),
            sum(each["mended"] == "roll_back" for each in some),
        ]
        cells = "".join(f"{n:>{w}}" for n, w in zip(counts, (6, 9, 10, 6, 10, 8, 6, 8, 7), strict=True))
        print(f"{name:17} {len(some):2}  {np.nanmean([each['truth'] for each in some]):+10.4f}{cells}")


if __name__ == "__main__":
    main()
