"""The year of the demo with several seeds: the loop beside a model that is never retrained and one that always is.

    python bench/year.py [--seeds 7 8 9] [--set monitor.gate.margin=0.02]

Each seed plays the whole example in a home and a folder of its own (nothing of the user's is touched), through the
endpoint, over HTTP, as `onejob demo flights` does. Prints the months of each seed, the means over seeds, and whether
each figure that is asked for holds. Exit code 1 where one doesn't.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import machine

from onejob.loop import commands
from onejob.loop.commands.start import copy_example
from onejob.loop.commands.year import SEALS
from onejob.loop.year import POLICIES, Month, Year


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8, 9])
    parser.add_argument("--set", dest="sets", action="append", default=[], help="as of `onejob run`; may be repeated")
    args = parser.parse_args()
    print(machine.describe())
    years = [play(seed, args.sets) for seed in args.seeds]
    sys.exit(0 if report(years) else 1)


def play(seed: int, sets: Sequence[str]) -> Year:
    """One year; each month is printed when it is over."""
    with tempfile.TemporaryDirectory(prefix="onejob-bench-") as folder:
        place = copy_example("flights", Path(folder) / "flights")
        text = (place / "job.toml").read_text()
        (place / "job.toml").write_text(text.replace("seed = 7", f"seed = {seed}"))
        started = time.monotonic()
        with commands.open(Path(folder) / "home") as session:
            view = commands.run(session, place, [*SEALS, *sets])
            print(f"\nseed {seed}: the first answer could be asked for after {time.monotonic() - started:.0f} s")
            try:
                year = commands.play_year(session, place, show).year
            finally:
                assert view.endpoint is not None
                commands.stop(session, view.endpoint.name)
        print(f"  the year took {year.seconds:.0f} s, {year.failed_requests} requests failed", flush=True)
    return year


def show(month: Month) -> None:
    told = "  ".join(f"{name} {f.auc:.3f}/{f.log_loss:.3f}" for name, f in month.policies.items())
    print(f"  {month.month}  {month.n:6,}  {month.late_share:.3f}  {told}  {month.gate.decision}", flush=True)
    if month.gate.decision != "promote":
        print(f"           {month.gate.reason}", flush=True)


def report(years: Sequence[Year]) -> bool:
    """The means over seeds, and each figure that is asked for."""
    print(f"\nmean over {len(years)} seeds     AUC   log loss")
    auc = {name: fmean(year.mean(name).auc for year in years) for name in POLICIES}
    loss = {name: fmean(year.mean(name).log_loss for year in years) for name in POLICIES}
    for name in POLICIES:
        print(f"  {name:<18} {auc[name]:.4f}   {loss[name]:.4f}")
    worst = max(month_gap(years, at) for at in range(len(years[0].months)))
    asked = (
        ("loop AUC >= 0.70", auc["loop"], auc["loop"] >= 0.70),
        ("loop log loss <= 0.515", loss["loop"], loss["loop"] <= 0.515),
        ("within 0.006 of always in AUC", auc["always"] - auc["loop"], auc["always"] - auc["loop"] <= 0.006),
        ("within 0.01 of always in log loss", loss["loop"] - loss["always"], loss["loop"] - loss["always"] <= 0.01),
        ("no month more than 0.02 log loss worse than static", worst, worst <= 0.02),
        (
            "no request failed",
            float(sum(year.failed_requests for year in years)),
            not any(y.failed_requests for y in years),
        ),
    )
    for text, value, holds in asked:
        print(f"  {'holds' if holds else 'DOES NOT HOLD':<14} {text}: {value:.4f}")
    return all(holds for _, _, holds in asked)


def month_gap(years: Sequence[Year], at: int) -> float:
    """How much worse than static the loop was in a month, in log loss, over the seeds."""
    months = [year.months[at].policies for year in years]
    return fmean(policies["loop"].log_loss - policies["static"].log_loss for policies in months)


if __name__ == "__main__":
    main()
