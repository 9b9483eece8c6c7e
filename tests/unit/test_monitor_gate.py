"""The gate's decisions: proofs, doubts, slices, coverage, looks, probation."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from onejob.monitor import gate, harm
from onejob.monitor.blocks import Block, Grouping

BETTER = gate.Rules("better", 0.0)
NOT_WORSE = gate.Rules("not_worse", 0.01)
ROWS = 50


def grouping(days: int, rows: int = ROWS) -> Grouping:
    return Grouping(tuple(f"{day:03d}" for day in range(days)), np.repeat(np.arange(days), rows), np.zeros(days))


def answers(daily: np.ndarray, seed: int = 1, **slices: np.ndarray) -> gate.Answers:
    """Rows whose difference is their day's, plus much noise of their own."""
    days = grouping(len(daily))
    noise = np.random.default_rng(seed).normal(size=len(days.index))
    return gate.Answers(days, daily[days.index] + 0.1 * noise, noise > 1.5, slices)


def days(count: int, mean: float, spread: float = 0.02, seed: int = 2) -> np.ndarray:
    """Daily differences with exactly this mean."""
    drawn = np.random.default_rng(seed).normal(size=count)
    return np.asarray((drawn - drawn.mean()) / drawn.std() * spread + mean)


def decide(daily: np.ndarray, rules: gate.Rules, **more: object) -> gate.Decision:
    return gate.decide(gate.compare(answers(daily), rules), rules, **more)  # type: ignore[arg-type]


def test_students_t() -> None:
    """Against printed tables."""
    table = {
        (0.975, 1): 12.706,
        (0.95, 2): 2.920,
        (0.975, 3): 3.182,
        (0.95, 13): 1.771,
        (0.99, 30): 2.457,
        (0.9995, 5): 6.869,
        (0.975, 1000): 1.962,
    }
    for (probability, degrees), wanted in table.items():
        assert gate.t_quantile(probability, degrees) == pytest.approx(wanted, abs=6e-4)
    assert gate.t_quantile(0.05, 7) == pytest.approx(-gate.t_quantile(0.95, 7))
    assert gate.t_quantile(0.5, 4) == pytest.approx(0.0, abs=1e-9)


def test_bounds_are_of_blocks_not_of_rows() -> None:
    daily = days(20, 0.0)
    found = gate.compare(answers(daily), NOT_WORSE).overall
    assert (found.blocks, found.rows) == (20, 20 * ROWS)
    by_hand = gate.t_quantile(0.975, 19) * found.spread / math.sqrt(20)
    assert found.high == pytest.approx(found.mean + by_hand)
    assert found.high - found.low > 3 * 0.1 / math.sqrt(20 * ROWS)  # what rows would have claimed


def test_a_better_challenger_is_promoted_by_either_rule() -> None:
    for rules in (BETTER, NOT_WORSE):
        decision = decide(days(28, -0.05), rules)
        assert decision.verdict == "promote"
        assert "proven" in decision.reasons[0]
        assert decision.missing == ()


def test_an_equal_challenger_is_held_by_better_and_promoted_by_not_worse() -> None:
    held = decide(days(60, 0.0), BETTER)
    assert (held.verdict, held.reasons[0][:10]) == ("hold", "not proven")
    assert decide(days(60, 0.0), NOT_WORSE).verdict == "promote"


def test_a_worse_challenger_is_rejected() -> None:
    for rules in (BETTER, NOT_WORSE):
        decision = decide(days(28, 0.05), rules)
        assert decision.verdict == "reject"
        assert decision.reasons[0].startswith("surely not")


def test_better_wants_its_margin() -> None:
    asked = dataclasses.replace(BETTER, margin=0.04)
    assert decide(days(28, -0.05, spread=0.01), asked).verdict == "promote"
    small = decide(days(28, -0.02, spread=0.01), asked)
    assert small.verdict == "reject"
    assert "surely not 0.04 better" in small.reasons[0]


def test_no_difference_at_all_is_not_better() -> None:
    same = gate.Answers(grouping(28), np.zeros(28 * ROWS), np.zeros(28 * ROWS, bool))
    assert gate.decide(gate.compare(same, BETTER), BETTER).verdict == "hold"
    assert gate.decide(gate.compare(same, NOT_WORSE), NOT_WORSE).verdict == "promote"


def test_too_few_blocks_are_held_whatever_they_say() -> None:
    for mean in (-0.5, 0.5):
        decision = decide(days(10, mean), NOT_WORSE)
        assert decision.verdict == "hold"
        assert decision.reasons == ("10 blocks with labels, and 14 are asked",)
        assert decision.missing == ("4 more blocks",)
    nothing = gate.Answers(grouping(0), np.array([]), np.array([], bool))
    decision = gate.decide(gate.compare(nothing, NOT_WORSE), NOT_WORSE)
    assert decision.verdict == "hold"
    assert decision.to_json()["comparison"]["overall"]["high"] is None


def test_a_hold_says_how_many_blocks_are_missing() -> None:
    decision = decide(days(14, 0.0, spread=0.03), NOT_WORSE)
    assert decision.verdict == "hold"
    said = int(decision.missing[0].removeprefix("about ").removesuffix(" more blocks"))
    assert decide(days(14 + said, 0.0, spread=0.03), NOT_WORSE).verdict == "promote"
    hopeless = decide(days(14, 0.02, spread=0.03), NOT_WORSE)
    assert hopeless.missing == ("a better challenger: more blocks alone would hardly do",)


def test_small_blocks_and_rows_without_a_label_do_not_count() -> None:
    case = answers(days(20, 0.0))
    difference = case.difference.copy()
    difference[: 5 * ROWS] = np.nan
    found = gate.compare(dataclasses.replace(case, difference=difference), NOT_WORSE)
    assert (found.overall.blocks, found.small_blocks) == (15, 0)
    difference[:20] = 9.0
    found = gate.compare(dataclasses.replace(case, difference=difference), NOT_WORSE)
    assert (found.overall.blocks, found.small_blocks) == (15, 1)


def test_better_on_average_but_failing_on_one_slice() -> None:
    daily = days(28, -0.05)
    origin = np.where(np.arange(28 * ROWS) % 5 == 0, "JFK", "EWR")
    case = answers(daily, origin=origin)
    broken = np.where(origin == "JFK", case.difference + 0.15, case.difference)
    decision = gate.decide(gate.compare(dataclasses.replace(case, difference=broken), NOT_WORSE), NOT_WORSE)
    assert decision.comparison.overall.high < 0
    assert decision.verdict == "reject"
    assert "worse where origin is 'JFK'" in decision.reasons[0]
    assert decision.comparison.slices[0].value == "JFK"
    assert gate.decide(gate.compare(case, NOT_WORSE), NOT_WORSE).verdict == "promote"


def test_a_slice_of_few_rows_says_nothing_and_is_counted() -> None:
    origin = np.where(np.arange(28 * ROWS) % 300 == 0, "LGA", "EWR")
    found = gate.compare(answers(days(28, -0.05), origin=origin), NOT_WORSE)
    assert [each.value for each in found.slices] == ["EWR"]
    assert found.small_slices == 1


def test_slices_share_the_error_among_them() -> None:
    daily = days(28, 0.0)
    alone = gate.compare(answers(daily, plane=np.full(28 * ROWS, "a")), NOT_WORSE).slices[0].bound
    by_hand = gate.t_quantile(0.975, 27) * alone.spread / math.sqrt(28)
    assert alone.mean - alone.low == pytest.approx(by_hand)
    four = np.array(list("abcd"))[np.arange(28 * ROWS) % 4]
    for each in gate.compare(answers(daily, plane=four), NOT_WORSE).slices:
        by_hand = gate.t_quantile(1 - 0.025 / 4, 27) * each.bound.spread / math.sqrt(28)
        assert each.bound.mean - each.bound.low == pytest.approx(by_hand)


def test_a_slice_fails_only_if_it_is_surely_and_notably_worse() -> None:
    def fails(mean: float, spread: float) -> bool:
        case = answers(days(28, mean, spread), plane=np.full(28 * ROWS, "a"))
        return gate.compare(case, NOT_WORSE).slices[0].fails

    assert fails(0.05, 0.02)
    assert not fails(0.02, 0.005)  # surely worse, but by less than 0.03
    assert not fails(0.05, 0.2)  # worse by more than that, but perhaps by chance


def test_flips_are_reported_and_may_need_a_person() -> None:
    case = gate.compare(answers(days(28, -0.05)), NOT_WORSE)
    assert case.flips == pytest.approx(0.067, abs=0.02)
    strict = dataclasses.replace(NOT_WORSE, max_flips=0.01)
    assert gate.decide(case, strict).missing == ("a promotion by hand",)


def covered(late_missing: float, days_: int, seed: int) -> gate.Coverage:
    rng = np.random.default_rng(seed)
    score = rng.random(days_ * 200)
    late = rng.random(len(score)) < 0.5 * score
    labelled = ~(late & (rng.random(len(score)) < late_missing)) & (rng.random(len(score)) < 0.97)
    return gate.coverage(grouping(days_, 200), labelled, score, [1 / 3, 2 / 3])


def test_late_labels_that_are_missing_hold_the_challenger() -> None:
    found = gate.gaps(covered(0.0, 56, 1), covered(0.6, 14, 2), NOT_WORSE)
    assert [gap.unusual for gap in found] == [True] * 4
    falls = [gap.usual - gap.recent for gap in found]
    assert falls[3] > falls[2] > falls[1]  # the higher the score, the more is missing
    decision = decide(days(28, -0.05), NOT_WORSE, gaps=found)
    assert decision.verdict == "hold"
    assert "unusual pattern in traffic: all rows" in decision.reasons[0]
    assert "promotion by hand" in decision.missing[0]
    assert decide(days(28, 0.05), NOT_WORSE, gaps=found).verdict == "hold"  # losses of other rows prove nothing


def test_a_pattern_that_the_whole_hides_is_seen_in_its_band() -> None:
    rules = dataclasses.replace(NOT_WORSE, coverage_fall=0.05)
    found = gate.gaps(covered(0.0, 56, 1), covered(0.15, 14, 2), rules)
    assert [gap.unusual for gap in found] == [False, False, False, True]


def test_the_usual_coverage_is_no_gap_and_the_training_rows_are_looked_at_too() -> None:
    assert not any(gap.unusual for gap in gate.gaps(covered(0.0, 56, 1), covered(0.0, 14, 2), NOT_WORSE))
    trained = gate.gaps(covered(0.0, 56, 1), covered(0.6, 56, 2), NOT_WORSE, what="training rows")
    assert trained[0].what == "training rows: all rows"
    assert trained[0].unusual


def test_usual_days_that_scatter_allow_more() -> None:
    shares = np.tile([[0.5], [1.0]], (20, 1))
    usual = gate.Coverage(tuple(map(str, range(40))), shares)
    recent = gate.Coverage(("a", "b"), np.array([[0.6], [0.7]]))
    (gap,) = gate.gaps(usual, recent, NOT_WORSE)
    assert not gap.unusual
    steady = gate.Coverage(usual.ids, np.full((40, 1), 0.75))
    (gap,) = gate.gaps(steady, recent, NOT_WORSE)
    assert gap.unusual


def test_a_replay_that_breaks_rejects_even_without_evidence() -> None:
    failing = gate.Replay(1000, 3, 0, 4.0, 4.0)
    assert decide(days(5, -0.05), NOT_WORSE, replay=failing).reasons[0].startswith("3 of 1000 replayed requests failed")
    slow = gate.Replay(1000, 0, 0, 20.0, 4.0)
    assert decide(days(28, -0.05), NOT_WORSE, replay=slow).verdict == "reject"
    few = gate.Replay(10, 0, 0, 20.0, 4.0, gate.tail_level(10))
    assert "p50 of 10 replayed requests is 20.0 ms" in decide(days(28, -0.05), NOT_WORSE, replay=few).reasons[0]
    noise = gate.Replay(1000, 0, 0, 1.1, 0.5)
    assert decide(days(28, -0.05), NOT_WORSE, replay=noise).verdict == "promote"
    fine = gate.Replay(1000, 2, 2, 6.0, 4.0)
    assert decide(days(28, -0.05), NOT_WORSE, replay=fine).verdict == "promote"


def test_each_look_has_its_part_of_the_error() -> None:
    daily = days(28, -0.05)
    highs = [gate.compare(answers(daily), NOT_WORSE, look=look).overall.high for look in (1, 2, 3)]
    assert highs == sorted(highs)
    assert sum(1 / (look * (look + 1)) for look in range(1, 10_000)) == pytest.approx(1.0, abs=1e-3)


def test_equal_models_are_seldom_called_better_on_clustered_rows() -> None:
    rng = np.random.default_rng(4)
    trials, promoted, by_rows = 400, 0, 0
    for _ in range(trials):
        case = answers(0.05 * rng.normal(size=14), seed=int(rng.integers(1 << 30)))
        promoted += gate.decide(gate.compare(case, BETTER), BETTER).verdict == "promote"
        rows = case.difference
        by_rows += rows.mean() < -1.645 * rows.std() / math.sqrt(len(rows))
    assert promoted / trials <= 0.05
    assert by_rows / trials > 0.25  # why rows are not the unit


def test_a_decision_is_data() -> None:
    found = gate.gaps(covered(0.0, 56, 1), covered(0.6, 14, 2), NOT_WORSE)
    decision = decide(days(28, -0.05), NOT_WORSE, gaps=found, replay=gate.Replay(1, 0, 0, 1.0, 1.0), look=2)
    told = json.loads(json.dumps(decision.to_json(), allow_nan=False))
    assert told["verdict"] == "hold"
    assert told["rules"]["promote"] == "not_worse"
    assert told["look"] == 2
    assert told["gaps"][0]["unusual"] is True


def counted(values: list[float]) -> harm.Harm:
    blocks = [Block(f"{day:03d}", 500, value) for day, value in enumerate(values)]
    return harm.update_all(gate.on_probation(), blocks)


def test_probation_finds_soon_what_the_gate_let_through() -> None:
    """A loss of 0.04 on average, as after a training on flipped labels: within four weeks."""
    assert gate.probation(counted(days(28, 0.04, spread=0.03).tolist()), 28).verdict == "roll_back"


def test_probation_rolls_back_keeps_or_watches() -> None:
    back = gate.probation(counted([0.15] * 28), 28)
    assert back.verdict == "roll_back"
    assert "the former champion was better: by 0.1500" in back.reason
    assert gate.probation(counted([-0.02] * 28), 28).verdict == "keep"
    assert gate.probation(counted([-0.02] * 10), 28).reason == "10 of 28 blocks seen"
    assert gate.probation(counted([0.15] * 28 + [-0.2] * 100), 28).verdict == "roll_back"  # it has been proven once
    json.dumps(back.to_json(), allow_nan=False)


@pytest.mark.parametrize(("requests", "level"), [(0, 0.5), (1, 0.5), (10, 0.5), (20, 0.75), (200, 0.975), (5000, 0.99)])
def test_the_tail_is_one_that_so_many_requests_can_tell(requests: int, level: float) -> None:
    assert gate.tail_level(requests) == pytest.approx(level)
