"""The gate's part of levels.py: equal models, label coverage, slices, faulty challengers and their probation."""

from __future__ import annotations

import math

import numpy as np
from flight_days import FIRST, KINDS, LAST, Array, Flights, Pool, title, verdict

from onejob.monitor import gate, harm
from onejob.monitor.blocks import Grouping, log_losses

RULES = gate.Rules("not_worse", 0.01)
WINTER = np.arange(59)


def gate_levels(flights: Flights, streams: int) -> None:
    trials = max(2000, 4 * streams)
    year = np.random.default_rng(99).permutation(np.arange(FIRST, LAST))
    late = flights.features.copy()
    late[:, -16:] = 0  # without the weather
    pairs = {
        "two random halves of the year": (Pool(flights), flights.score(year[::2]), flights.score(year[1::2])),
        "January-February, January-June": (
            Pool(flights, 188, LAST),
            flights.score(WINTER),
            flights.score(np.arange(181)),
        ),
        "half of the year, without weather": (
            Pool(flights),
            flights.score(year[::2]),
            flights.score(year, features=late),
        ),
    }
    title("gate: equal models (the difference shifted to 0), share called better or worse, nominal 0.05 each")
    for name, (pool, champion, challenger) in pairs.items():
        equal_models(
            name, pool, log_losses(flights.late, challenger) - log_losses(flights.late, champion), streams, trials
        )
    coverage_levels(flights, streams)
    slice_levels(flights, streams)
    faults(flights, streams, year)


def equal_models(name: str, pool: Pool, difference: Array, streams: int, trials: int) -> None:
    rows = pool.by_day(difference)
    daily = np.array([day.mean() for day in rows])
    centred = daily - daily.mean()
    skew, near = np.mean(centred**3) / daily.std() ** 3, np.corrcoef(centred[1:], centred[:-1])[0, 1]
    print(
        f"  models fitted on {name}: {len(daily)} days, mean {daily.mean():+.4f}, spread {daily.std():.4f}, "
        f"skewness {skew:+.1f}, correlation with the next day {near:+.2f}"
    )
    for kind in KINDS:
        for length in (7, 14, 28):
            values = pool.means(np.random.default_rng(9), kind, rows, trials, length)
            level_of(f"t on days     {kind:5}  {length:2} days ", values)
    weekly = pool.means(np.random.default_rng(9), "weeks", rows, trials, 56).reshape(trials, 8, 7).mean(axis=2)
    level_of("t on weeks    weeks   8 weeks", weekly)
    for kind in ("rows", "days"):
        seen = np.mean([
            each.mean() < -1.645 * each.std() / math.sqrt(len(each))
            for each in pool.streams(np.random.default_rng(10), kind, rows, streams, 14)
        ])  # fmt: skip
        print(f"    z on rows     {kind:5}  14 days   better {seen:.3f}  {verdict(float(seen), 0.05, streams)}")
    looks(pool, rows, trials)
    power(pool, rows, trials)


def level_of(what: str, values: Array) -> None:
    bounds = [gate.bound(each, 0, 0.95) for each in values]
    better, worse = np.mean([each.high < 0 for each in bounds]), np.mean([each.low > 0 for each in bounds])
    boot = np.mean([bootstrap_high(each) < 0 for each in values])
    said = [verdict(float(share), 0.05, len(values)) for share in (better, worse)]
    print(
        f"    {what}  better {better:.3f}  {said[0]:13}  worse {worse:.3f}  {said[1]:13}  "
        f"(block bootstrap, better {boot:.3f})"
    )


def bootstrap_high(values: Array) -> float:
    """The upper end of the block bootstrap's percentile interval, for comparison only."""
    rng = np.random.default_rng(11)
    return float(np.quantile(values[rng.integers(0, len(values), (200, len(values)))].mean(axis=1), 0.95))


def looks(pool: Pool, rows: list[Array], trials: int) -> None:
    """The same challenger before the gate again and again, a week later each time, with ever more blocks."""
    ends = range(14, 57, 7)
    for kind in ("days", "weeks"):
        plain = shared = 0
        for values in pool.means(np.random.default_rng(12), kind, rows, trials, 56):
            plain += any(gate.bound(values[:end], 0, 0.95).high < 0 for end in ends)
            shared += any(
                gate.bound(values[:end], 0, 1 - 0.05 / (look * (look + 1))).high < 0 for look, end in enumerate(ends, 1)
            )
        share = shared / trials
        print(
            f"    seven looks   {kind:5}  14-56 days  better {share:.3f}  {verdict(share, 0.05, trials)} with the "
            f"error shared among the looks, {plain / trials:.3f} without"
        )


def power(pool: Pool, rows: list[Array], trials: int) -> None:
    for truth in (0.01, 0.02, 0.05):
        said = []
        for length in (14, 28, 56):
            values = pool.means(np.random.default_rng(13), "days", rows, trials // 2, length) - truth
            said.append(f"{length} days {np.mean([gate.bound(each, 0, 0.975).high < 0 for each in values]):.0%}")
        print(f"    truly better by {truth}: promoted at the first look after {', '.join(said)}")


def picked(flights: Flights, days: Array) -> tuple[Array, Grouping]:
    """The rows of drawn days, each draw a block of its own."""
    edges = np.searchsorted(flights.day, [days + FIRST, days + FIRST + 1])
    rows = np.concatenate([np.arange(low, high) for low, high in edges.T])
    index = np.repeat(np.arange(len(days)), edges[1] - edges[0])
    return rows, Grouping(tuple(f"{day:03d}" for day in range(len(days))), index, np.zeros(len(days)))


def coverage_levels(flights: Flights, streams: int) -> None:
    pool, score = Pool(flights), flights.score(WINTER)
    edges = np.quantile(score[pool.mask], [1 / 3, 2 / 3]).tolist()
    labelled = np.isfinite(flights.late)
    cases = {
        "nothing": (0.0, 0.0),
        "20 % of the late": (0.2, 0.0),
        "60 % of the late": (0.6, 0.0),
        "10 % of all": (0.1, 0.1),
    }
    print("  label coverage: usual 56 days, recent 14 days; cancelled flights never have a label; share held")
    for kind in ("days", "weeks"):
        for name, (late, punctual) in cases.items():
            rng, held = np.random.default_rng(14), 0
            for days in pool.draw(rng, kind, streams, 70):
                lost = rng.random(len(labelled)) < np.where(flights.late > 0.5, late, punctual)
                sides = []
                for part, known in ((days[:56], labelled), (days[56:], labelled & ~lost)):
                    rows, grouping = picked(flights, part)
                    sides.append(gate.coverage(grouping, known[rows], score[rows], edges))
                held += any(gap.unusual for gap in gate.gaps(sides[0], sides[1], RULES))
            print(f"    {kind:5}  missing: {name:18} held {held / streams:.3f}")


def slice_levels(flights: Flights, streams: int) -> None:
    """Slices of equal models: how often one of them is called worse; and one slice that truly is."""
    pool, score = Pool(flights), flights.score(WINTER)
    year = np.random.default_rng(99).permutation(np.arange(FIRST, LAST))
    equal = log_losses(flights.late, flights.score(year[::2])) - log_losses(flights.late, flights.score(year[1::2]))
    for carrier in np.unique(flights.carrier):
        mine = (flights.carrier == carrier) & pool.mask
        equal[mine] -= np.nanmean(equal[mine])
    broken = np.where(flights.carrier == "DL", np.random.default_rng(15).permutation(score), score)
    faulty = log_losses(flights.late, broken) - log_losses(flights.late, score)
    print("  slices by carrier and origin, 28 days: share in which one fails")
    for name, values in {"equal models": equal, "scores of one carrier mixed up": faulty}.items():
        failed = 0
        for days in pool.draw(np.random.default_rng(16), "days", streams, 28):
            rows, grouping = picked(flights, days)
            slices = {"carrier": flights.carrier[rows], "origin": flights.origin[rows]}
            answers = gate.Answers(grouping, values[rows], np.zeros(len(rows), bool), slices)
            failed += any(each.fails for each in gate.compare(answers, RULES).slices)
        print(f"    {name:32} {failed / streams:.3f}")


def faults(flights: Flights, streams: int, year: Array) -> None:
    """Challengers with known faults: what the bounds alone decide in 28 days, and what probation does afterwards."""
    pool, rng = Pool(flights), np.random.default_rng(18)
    champion, half = flights.score(year[::2]), year[1::2]
    flipped = np.where(rng.random(len(flights.late)) < 0.2, 1 - flights.late, flights.late)
    lost = (flights.late > 0.5) & (rng.random(len(flights.late)) < 0.6)
    weather, dead = flights.features.copy(), flights.features.copy()
    weather[:, -16:] = rng.permutation(weather[:, -16:])
    dead[:, 7:] = np.where(np.arange(7, dead.shape[1]) < dead.shape[1] - 16, 0, dead[:, 7:])
    seen = np.where(lost, np.nan, flights.late)
    cases = {
        "equal": (flights.score(half), flights.late),
        "20 % of the labels flipped": (flights.score(half, late=flipped), flights.late),
        "60 % of the late labels missing": (flights.score(half, late=seen), flights.late),
        "the same, missing in the gate too": (flights.score(half, late=seen), seen),
        "a broken join (weather)": (flights.score(half, features=weather), flights.late),
        "dead features (carrier, hour, dest)": (flights.score(half, features=dead), flights.late),
    }
    print("  challengers of known faults, on days: not_worse by 0.01 after 28 days, by the bounds alone;")
    print("  and what 28 days of probation at 0.05 do with them, were they promoted")
    for kind in ("days", "weeks"):
        rows = pool.by_day(log_losses(flights.late, flights.score(half)) - log_losses(flights.late, champion))
        values = pool.means(np.random.default_rng(20), kind, rows, 4 * streams, 28)
        wealth = harm.e_process(harm.fractions(values, gate.PROBATION_BOUND))
        back = float(np.mean(wealth.max(axis=1) >= 20))
        print(f"    probation of an equal model, {kind}: rolled back {back:.4f}  {verdict(back, 0.05, 4 * streams)}")
    print(f"    {'fault':36}{'truth':>8}{'promote':>9}{'hold':>7}{'reject':>8}   rolled back  median day")
    for name, (score, label) in cases.items():
        gated = pool.by_day(log_losses(label, score) - log_losses(label, champion))
        truth = pool.by_day(log_losses(flights.late, score) - log_losses(flights.late, champion))
        fair, real = (np.array([day.mean() for day in side]) for side in (gated, truth))
        drawn = pool.draw(np.random.default_rng(19), "days", 2 * streams, 28)
        limits = [gate.bound(each, 0, 0.975) for each in fair[drawn[:streams]]]
        promote, reject = np.mean([b.high <= 0.01 for b in limits]), np.mean([b.low > 0.01 for b in limits])
        over = harm.e_process(harm.fractions(real[drawn[streams:]], gate.PROBATION_BOUND)) >= 20
        back = over.any(axis=1)
        median = f"{np.median(over.argmax(axis=1)[back]) + 1:.0f}" if back.any() else "-"
        print(
            f"    {name:36}{real.mean():>+8.3f}{promote:>9.1%}{1 - promote - reject:>7.1%}{reject:>8.1%}"
            f"{back.mean():>14.1%}{median:>12}"
        )
