"""Do the monitor's and the gate's levels hold, on independent rows and on real traffic? And how late do they alarm?

    nice python bench/levels.py [--streams 500] > bench/results/levels.txt

Needs `pip install onejob[bench,data,flights]`. Three kinds of streams in which nothing changes, each made of the same
flights (4 March to 22 December, scored by a logistic model fitted on January and February):

    rows    every row drawn on its own: what benchmarks of detectors use
    days    whole days drawn with their rows: clusters as in real traffic, each day independent of the last
    weeks   whole weeks drawn: days that resemble the day before, too

A difference of losses is shifted so that its mean over the pool is exactly 0: equal models, the hardest healthy case.
A level is said to hold if the share seen is at most the level plus two standard errors. Seeds are fixed.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from flight_days import KINDS, PER_DAY, Array, Flights, Pool, load, title, verdict
from levels_gate import gate_levels

from onejob.monitor import blocks, describe, harm, warning

HEALTHY = 60  # days before a shift
WINTER = np.arange(59)
COLUMNS = ("temp", "wind_speed", "visib", "distance")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    began = time.perf_counter()
    flights = load()
    print(f"$ nice python bench/levels.py {' '.join(sys.argv[1:])}".rstrip())
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {args.streams} streams of each kind\n")
    for name in args.only:
        since = time.perf_counter()
        PARTS[name](flights, args.streams)
        print(f"  ({time.perf_counter() - since:.0f} s)\n", flush=True)
    print(f"{time.perf_counter() - began:.0f} s in all")


def against_reference(flights: Flights, score: Array) -> Array:
    """The model's loss minus that of the trailing label share, for each row."""
    prior = float(np.nanmean(flights.late[flights.day < 59]))
    return blocks.log_losses(flights.late, score) - blocks.log_losses(flights.late, flights.reference(prior))


def harm_levels(flights: Flights, streams: int) -> None:
    pool = Pool(flights)
    rows = pool.by_day(against_reference(flights, flights.score(WINTER)))
    daily = np.array([day.mean() for day in rows])
    centred = daily - daily.mean()
    title("harm: the model's loss minus the trailing label share's")
    near = np.corrcoef(centred[1:], centred[:-1])[0, 1]
    beyond = np.mean(centred < -harm.BOUND)
    print(
        f"  the pool: {len(rows)} days, mean {daily.mean():+.4f}, spread {daily.std():.4f}, correlation with the next"
    )
    print(f"  day {near:+.2f}; once shifted to 0, {beyond:.1%} of the gains lie beyond the bound of {harm.BOUND}")
    print("  e-process: share of healthy streams that alarm within 1000 blocks (by row: 60 days)")
    for kind in KINDS:
        e_process_level(kind, pool.means(np.random.default_rng(1), kind, rows, streams, 1000))
    weekly = pool.means(np.random.default_rng(1), "weeks", rows, streams, 7000).reshape(streams, 1000, 7).mean(axis=2)
    e_process_level("weeks", weekly, "by week ")
    e_process_level(
        "as is", daily[pool.draw(np.random.default_rng(1), "weeks", streams, 1000)], note="(weeks, unshifted)"
    )
    for kind in ("rows", "days"):
        seen = [row_wise_harm(stream) for stream in pool.streams(np.random.default_rng(2), kind, rows, streams, 60)]
        share = float(np.mean(seen))
        print(f"    by row    {kind:5}  level 0.01  seen {share:.3f}  {verdict(share, 0.01, streams)}")
    print("  restarted form, threshold 365: mean run to a false alarm (4000 blocks a stream)")
    for kind in KINDS:
        values = pool.means(np.random.default_rng(3), kind, rows, streams, 4000)
        alarms = sum(len(harm.restarted(factors, 365.0)[1]) for factors in harm.fractions(values, harm.BOUND))
        run = streams * 4000 / max(1, alarms)
        print(f"    by block  {kind:5}  promised 365  seen {run:.0f}  {'holds' if run >= 365 else 'DOES NOT HOLD'}")


def e_process_level(kind: str, values: Array, unit: str = "by block", note: str = "") -> None:
    peaks = harm.e_process(harm.fractions(values, harm.BOUND)).max(axis=1)
    for alpha in (0.01, 0.05):
        share = float(np.mean(peaks >= 1 / alpha))
        said = f"{verdict(share, alpha, len(values))} {note}".rstrip()
        print(f"    {unit}  {kind:5}  level {alpha:.2f}  seen {share:.3f}  {said}")


def row_wise_harm(values: Array) -> bool:
    """As a test that takes each row for an observation of its own would say."""
    wealth = harm.e_process(harm.fractions(values, blocks.largest_difference()))
    return bool(wealth.max() >= 100)


def delays(flights: Flights, streams: int) -> None:
    """Delays at known shifts, beside detectors of the package river, on the same streams."""
    from river import drift  # noqa: PLC0415 - the bench's own extra

    pool, score, rng = Pool(flights), flights.score(WINTER), np.random.default_rng(4)
    mixed = rng.permutation(score)
    shifts = {
        "none": score,
        "half of the scores mixed up": np.where(rng.random(len(score)) < 0.5, mixed, score),
        "all scores mixed up": mixed,
        "scores too high (logit + 1)": 1 / (1 + np.exp(-np.log(score / (1 - score)) - 1)),
        "scores upside down": 1 - score,
    }
    title(f"delays in days at a shift on day {HEALTHY + 1}, 250 days in all")
    print(
        "  a cell: streams with a false alarm before the shift | median delay after it | streams without an alarm then"
    )
    print("  harm and 'ADWIN by day' see the days' mean differences, 'by row' the errors (score > 0.5 or not), 1 in 6")
    print(f"  {'stream':6}{'shift':29}{'harm from':>9}{'to':>8} " + "".join(f"{name:>21}" for name in DETECTORS))
    before = [pool.by_day(each) for each in (against_reference(flights, score), errors(flights, score))]
    for kind, name in [("days", name) for name in shifts] + [("rows", "none"), ("rows", "all scores mixed up")]:
        after = [
            pool.by_day(each) for each in (against_reference(flights, shifts[name]), errors(flights, shifts[name]))
        ]
        found: dict[str, list[tuple[bool, float]]] = {detector: [] for detector in DETECTORS}
        rng = np.random.default_rng(5)
        for days in pool.draw(rng, "days", streams, 250):
            values, wrong = shifted_stream(rng, kind, days, before, after)
            for detector, run in DETECTORS.items():
                found[detector].append(first_alarms(run(drift, values, wrong)))
        means = [np.mean([day.mean() for day in side[0]]) for side in (before, after)]
        cells = "".join(f"{told(results):>21}" for results in found.values())
        print(f"  {kind:6}{name:29}{means[0]:>+9.3f}{means[1]:>+8.3f} {cells}", flush=True)


def errors(flights: Flights, score: Array) -> Array:
    return np.where(np.isfinite(flights.late), (score > 0.5) != flights.late, np.nan)


def shifted_stream(
    rng: np.random.Generator, kind: str, days: Array, before: list[list[Array]], after: list[list[Array]]
) -> tuple[Array, list[Array]]:
    """The days' mean differences, and the days' errors by row."""
    if kind == "days":
        sides = [(before if at < HEALTHY else after) for at in range(len(days))]
        values = np.array([side[0][day].mean() for side, day in zip(sides, days, strict=True)])
        return values, [side[1][day][::6] for side, day in zip(sides, days, strict=True)]
    rest = len(days) - HEALTHY
    halves = [(np.concatenate(side[0]), np.concatenate(side[1]), n) for side, n in ((before, HEALTHY), (after, rest))]
    values = np.concatenate([rng.choice(loss, (n, PER_DAY)).mean(axis=1) for loss, _, n in halves])
    return values, [day for _, wrong, n in halves for day in rng.choice(wrong, (n, 150))]


def e_alarms(drift: Any, values: Array, wrong: list[Array]) -> list[int]:
    over = np.flatnonzero(harm.e_process(harm.fractions(values, harm.BOUND)) >= 100)
    return [int(at) for at in over[:1]]


def restarted_alarms(drift: Any, values: Array, wrong: list[Array]) -> list[int]:
    return harm.restarted(harm.fractions(values, harm.BOUND), 365.0)[1]


def adwin_by_day(drift: Any, values: Array, wrong: list[Array]) -> list[int]:
    return alarms_of(drift.ADWIN(), [[value] for value in np.clip(values + 0.5, 0, 1)])


def adwin_by_row(drift: Any, values: Array, wrong: list[Array]) -> list[int]:
    return alarms_of(drift.ADWIN(), [day.tolist() for day in wrong])


def ddm_by_row(drift: Any, values: Array, wrong: list[Array]) -> list[int]:
    return alarms_of(drift.binary.DDM(), [(day > 0.5).tolist() for day in wrong])


def alarms_of(detector: Any, days: list[list[Any]]) -> list[int]:
    alarms = []
    for at, day in enumerate(days):
        for value in day:
            detector.update(value)
            if detector.drift_detected:
                alarms.append(at)
    return alarms


DETECTORS: dict[str, Callable[[Any, Array, list[Array]], list[int]]] = {
    "harm, e-process": e_alarms,
    "harm, restarted": restarted_alarms,
    "ADWIN by day": adwin_by_day,
    "ADWIN by row": adwin_by_row,
    "DDM by row": ddm_by_row,
}


def first_alarms(alarms: list[int]) -> tuple[bool, float]:
    after = [at - HEALTHY + 1 for at in alarms if at >= HEALTHY]
    return any(at < HEALTHY for at in alarms), float(after[0]) if after else math.inf


def told(results: list[tuple[bool, float]]) -> str:
    delays = np.array([delay for _, delay in results])
    seen = delays[np.isfinite(delays)]
    median = f"{np.median(seen):.0f}" if seen.size else "-"
    return f"{np.mean([early for early, _ in results]):.1%} | {median} | {np.mean(~np.isfinite(delays)):.0%}"


def warning_levels(flights: Flights, streams: int) -> None:
    pool, score = Pool(flights), flights.score(WINTER)
    watched = {"score": score, **{name: flights.columns[name] for name in COLUMNS}}
    daily = np.array([[day.mean() for day in pool.by_day(values)] for values in watched.values()]).T
    rows = np.column_stack([values[pool.mask] for values in watched.values()])
    title("warning: conformal test martingale of block means, level 0.01")
    print("  reference 8 weeks, live 34 weeks; strata are weekdays, and days are drawn within their weekday")
    for columns, count in (("score and four inputs", 5), ("score alone", 1)):
        for kind in KINDS:
            rng = np.random.default_rng(6)
            drawn = (warning_stream(rng, kind, pool, daily, rows)[:, :count] for _ in range(streams))
            share = float(np.mean([warning.read(watch(each)).peak >= 100 for each in drawn]))
            print(f"    by block  {kind:5}  {columns:22} seen {share:.3f}  {verdict(share, 0.01, streams)}")
        alarm = warning.read(watch(daily[:, :count])).alarm
        print(
            f"    by block  the year as it was, {columns}: first alarm on live day {int(alarm) - 55 if alarm else None}"
        )
    scores = pool.by_day(score)
    for kind in ("rows", "days"):
        rng = np.random.default_rng(7)
        seen = np.array([row_wise_warning(rng, pool, kind, scores) for _ in range(streams)])
        share, alarmed = float(np.mean(np.isfinite(seen))), seen[np.isfinite(seen)]
        median = f", median after {np.median(alarmed):.0f} rows" if alarmed.size else ""
        print(
            f"    by row    {kind:5}  score alone, 3000 rows  seen {share:.3f}  {verdict(share, 0.01, streams)}{median}"
        )
    print(
        "  delay in days, on days, at a shift of score and temperature (two columns of five) by so many spreads of days"
    )
    for size in (0.5, 1.0, 2.0):
        rng, found = np.random.default_rng(8), []
        for _ in range(streams):
            drawn_days = warning_stream(rng, "days", pool, daily, rows)
            drawn_days[56 + HEALTHY :, :2] += size * daily.std(axis=0)[:2]
            alarm = warning.read(watch(drawn_days)).alarm
            found.append(int(alarm) - 56 - HEALTHY + 1 if alarm else math.inf)
        print(f"    {size:3.1f}  {told([(delay <= 0, delay if delay > 0 else math.inf) for delay in found])}")


def warning_stream(rng: np.random.Generator, kind: str, pool: Pool, daily: Array, rows: Array) -> Array:
    """[42 weeks of days, columns] block means."""
    length = 42 * 7
    if kind == "rows":
        return np.array([rows[rng.integers(0, len(rows), PER_DAY)].mean(axis=0) for _ in range(length)])
    if kind == "days":
        return np.asarray(daily[rng.integers(0, pool.days // 7, length) * 7 + np.arange(length) % 7])
    return np.asarray(daily[pool.draw(rng, "weeks", 1, length)[0]])


def watch(drawn: Array) -> warning.Watch:
    each = [
        warning.Observation(f"{at:04d}", str(at % 7), {str(name): float(value) for name, value in enumerate(values)})
        for at, values in enumerate(drawn)
    ]
    return warning.Watch(reference=tuple(each[:56]), live=tuple(each[56:]))


def row_wise_warning(rng: np.random.Generator, pool: Pool, kind: str, score: list[Array]) -> float:
    """The row at which a martingale of rows first reaches 100, against a reference of 3000 rows; inf if it doesn't."""
    everything = np.concatenate(score)
    if kind == "rows":
        live = rng.choice(everything, 3000)
    else:
        live = np.concatenate([score[day] for day in rng.integers(0, pool.days, 10)])[:3000]
    reference = np.sort(rng.choice(everything, 3000, replace=False))
    ranks = (np.searchsorted(reference, live) + rng.random(len(live))) / (len(reference) + 1)
    over = np.flatnonzero(warning.jumper(ranks) >= 100)
    return float(over[0] + 1) if over.size else math.inf


def description(flights: Flights, streams: int) -> None:
    """PSI of a healthy window: how often above 0.1, and above what moving rows or blocks allows."""
    pool = Pool(flights)
    rows = [day[::10] for day in pool.by_day(flights.score(WINTER))]
    title("description: the score in windows in which nothing has changed, reference 56 days, one row in ten")
    for length in (1, 7, 28):
        over = np.zeros(3)
        for days in pool.draw(np.random.default_rng(17), "days", streams, 56 + length):
            parts = (days[:56], days[56:])
            old, new = (np.concatenate([rows[day] for day in part]) for part in parts)
            block, block_new = (np.repeat(np.arange(len(p)), [len(rows[day]) for day in p]) for p in parts)
            found = describe.describe_numbers("score", old, new, blocks=(block, block_new)).psi
            assert found is not None
            _, by_row = describe.psi_by_chance(describe.BINS, len(new), len(old))
            over += [found.value > 0.1, found.value > by_row, found.value > found.chance_high]
        share = over / streams
        print(
            f"    window of {length:2} days: PSI > 0.1 in {share[0]:.3f}; above the 5 % of chance "
            f"by rows {share[1]:.3f}, by blocks {share[2]:.3f}  {verdict(share[2], 0.05, streams)}"
        )


PARTS: dict[str, Callable[[Flights, int], None]] = {
    "harm": harm_levels,
    "delays": delays,
    "warning": warning_levels,
    "gate": gate_levels,
    "description": description,
}

if __name__ == "__main__":
    main()
