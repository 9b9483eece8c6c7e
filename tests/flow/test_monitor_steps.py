"""The monitor's steps on captured traffic: labelled rows, a retraining's dataset, the watch, the gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from monitor_world import COLUMNS, DAY, FAMILY, START, Days, World

from onejob.core.artifact import Json
from onejob.core.context import InputArtifact
from onejob.core.plan import Existing, Upstream
from onejob.core.records import Segment
from onejob.data.spec import Spec as DataSpec
from onejob.data.spec import plan_extend
from onejob.engines.dataset import read_split
from onejob.errors import DataError
from onejob.monitor.plan import GATE, Earlier, Window, gate_step, labelled_step, watch_since, watch_step
from onejob.monitor.spec import Spec

DATA = DataSpec.model_validate({"source": "rows.csv", "columns": COLUMNS})
UPSTREAM = Upstream("tiny", "/", 7, {}, family=FAMILY)
ANY = Existing("ab" * 32)


def rules(**more: Any) -> Spec:
    told = {"gate": {"promote": "better", "margin": 0.0, "blocks_min": 7, "replay": 20}, **more}
    return Spec.model_validate({"horizon": "10d", **told})


def segments(parts: dict[str, InputArtifact]) -> list[Segment]:
    """As the ledger numbers them."""
    found = []
    for number, part in enumerate(parts.values(), 1):
        meta = part.meta
        found.append(Segment(number, "tiny", part.digest, part.kind, meta["begins"], meta["ends"], meta["rows"]))
    return found


def labelled(world: World, *parts: InputArtifact, days: float, spec: Spec | None = None) -> InputArtifact:
    """The step over everything, as seen after so many days."""
    named = {f"{part.kind}.{number:06d}": part for number, part in enumerate(parts, 1)}
    step = labelled_step(spec or rules(), segments(named), Window(START, START + 1000 * DAY, START + days * DAY))
    assert set(step.inputs) == set(named)
    return world.run(step, named, "labelled")


def report_of(made: InputArtifact) -> dict[str, Json]:
    return json.loads(made.file("report.json").read_text())


def decision_of(made: InputArtifact) -> dict[str, Json]:
    return json.loads(made.file("decision.json").read_text())


# ---- labelled rows -----------------------------------------------------------------------------------------------


def test_labelled_rows_under_duplicates_corrections_and_unknown_labels(tmp_path: Path) -> None:
    world, days = World(tmp_path), Days(2, 100)
    moment = round((START + 2 * DAY) * 1e6)
    odd = [
        {"key": "f0-0", "label": int(days.late[0]), "time": moment},
        {"key": "f0-1", "label": 1 - int(days.late[1]), "time": moment},
        {"key": "nobody", "label": 1, "time": moment},
    ]
    keep = np.arange(len(days)) >= 0
    keep[5] = False
    again = world.traffic(days, size=20)
    made = labelled(world, world.traffic(days), again, world.labels(days, keep=keep), world.batch(odd, 2), days=2)
    frame = pl.read_ipc(made.file("rows.arrow"))
    assert made.meta["counts"]["repeated"] == 200, "the same rows, captured again, count once"
    told = {name: count for name, count in made.meta["counts"].items() if count and name != "repeated"}
    assert told == {"duplicates": 1, "corrections": 1, "waiting": 1, "pending": 1}
    by_key = {row["onejob_key"]: row for row in frame.iter_rows(named=True)}
    assert len(frame) == len(by_key) == 200
    assert by_key["f0-1"]["late"] == 1 - days.late[1], "the later batch corrects"
    assert (by_key["f0-5"]["late"], by_key["f0-5"]["onejob_label_time"]) == (None, None)
    assert by_key["f0-0"]["onejob_label_time"] == round((days.time[0] + DAY) * 1e6), "said again makes it no later"
    assert frame["onejob_time"].is_sorted()
    others = [key for key in by_key if key not in ("f0-1", "f0-5")]
    truth = dict(zip(days.key.tolist(), days.late.tolist(), strict=True))
    assert all(by_key[key]["late"] == truth[key] for key in others)
    np.testing.assert_allclose(frame["x"], days.x)
    assert frame["carrier"].to_list() == days.carrier.tolist()
    assert frame["onejob_output_probability"].to_list() == [0.5] * 200
    assert set(frame["onejob_digest"]) == {"served"}
    assert made.meta["columns"] == COLUMNS


def test_a_window_leaves_out_what_lies_outside(tmp_path: Path) -> None:
    world, days = World(tmp_path), Days(4, 50)
    named = {"traffic.000001": world.traffic(days), "labels.000002": world.labels(days)}
    step = labelled_step(rules(), segments(named), Window(START + DAY, START + 3 * DAY, START + 4 * DAY))
    made = world.run(step, named, "labelled")
    times = pl.read_ipc(made.file("rows.arrow"))["onejob_time"] / 1e6
    assert (made.meta["rows"], times.min(), times.max() < START + 3 * DAY) == (100, START + DAY, True)


# ---- the dataset of a retraining ---------------------------------------------------------------------------------


def extended(world: World, base: InputArtifact, rows: InputArtifact, cut: float, history: Any = "all") -> InputArtifact:
    (step,) = plan_extend(DATA, UPSTREAM, base=ANY, labelled=ANY, cut=cut, history=history).steps
    return world.run(step, {"dataset": base, "labelled": rows}, "dataset")


def test_a_dataset_is_extended_by_captured_rows_and_the_cut_is_respected(tmp_path: Path) -> None:
    old, new = Days(10, 60, seed=3, first=-10), Days(6, 60)
    keep = np.arange(len(new)) % 10 > 0
    made = []
    for name in ("one", "other"):
        world = World(tmp_path / name)
        base = world.dataset(old)
        rows = labelled(world, world.traffic(new), world.labels(new, keep=keep), days=7)
        made.append((base, rows, extended(world, base, rows, START + 4 * DAY)))
    base, rows, dataset = made[0]
    assert dataset.digest == made[1][2].digest, "the same bytes, wherever it is made"
    assert dataset.meta["extended"] == {
        "base": base.digest,
        "labelled": rows.digest,
        "base_rows": 600,
        "captured_rows": int(keep.sum()),
        "begins": round(new.time[1], 6),
        "ends": round(new.time[-1], 6),
        "cut": START + 4 * DAY,
    }
    names = [*base.meta["schema"], "onejob_request", "onejob_row"]
    assert set(dataset.meta["schema"]) == set(names)
    parts = {s: read_split(dataset.path, dataset.meta, s, names) for s in ("train", "holdout")}
    cut = np.datetime64("2024-01-05")
    assert parts["train"]["departs"].max() < cut <= parts["holdout"]["departs"].min()
    assert len(parts["train"]["late"]) == 600 + int(keep[: 4 * 60].sum())
    assert parts["train"]["id"][:600].tolist() == old.key.tolist(), "also those that were held out at first"
    assert set(parts["train"]["onejob_request"][:600]) == {None}
    assert parts["train"]["onejob_request"][600:].tolist()[0] == "rf0-0"
    told = dict(zip(new.key.tolist(), zip(new.late.tolist(), new.x.tolist(), strict=True), strict=True))
    for part in parts.values():
        captured = [row for row, request in enumerate(part["onejob_request"]) if request is not None]
        assert all((part["late"][row], part["x"][row]) == told[part["id"][row]] for row in captured)


def test_history_cuts_off_what_is_old(tmp_path: Path) -> None:
    world = World(tmp_path)
    new = Days(6, 60)
    rows = labelled(world, world.traffic(new), world.labels(new), days=7)
    dataset = extended(world, world.dataset(Days(10, 60, first=-10)), rows, START + 4 * DAY, 3 * DAY)
    assert dataset.meta["extended"]["base_rows"] == 0
    assert dataset.meta["splits"]["train"]["rows"] == 180


# ---- the watch ---------------------------------------------------------------------------------------------------


def watched(world: World, days: Days, *, now: float, model: InputArtifact, **more: Any) -> dict[str, Json]:
    keep = more.pop("keep", None)
    since = more.pop("since", START)
    spec = more.pop("spec", rules(block={"rows_min": 20}))
    rows = labelled(world, world.traffic(days), world.labels(days, keep=keep), days=now, spec=spec)
    given = {"labelled": rows, "dataset": world.dataset(Days(30, 80, seed=4, first=-30)), "champion": model, **more}
    step = watch_step(spec, family=FAMILY, since=since, **dict.fromkeys(given, ANY))
    return report_of(world.run(step, given, "report"))


def test_a_quiet_stream_signals_no_harm(tmp_path: Path) -> None:
    world = World(tmp_path)
    report = watched(world, Days(40, 80), now=41, model=world.model(1.5))
    reading = report["harm"]["reading"]
    assert reading["blocks"] == 40
    assert reading["mean"] < -0.05, "the model beats the reference"
    assert report["signals"] == []
    block = report["blocks"][0]
    assert block["block"] == "2024-01-01"
    assert (block["rows"], block["labelled"], block["settled"]) == (80, 80, True)
    assert block["difference"] == pytest.approx(block["loss"] - block["reference_loss"])


def test_harm_is_found_soon_after_the_world_turned(tmp_path: Path) -> None:
    world = World(tmp_path)
    report = watched(world, Days(40, 80, turn=30), now=41, model=world.model(1.5))
    signals = [each for each in report["signals"] if each["kind"] == "harm"]
    assert signals, "injected harm"
    assert "2024-01-31" <= signals[0]["block"] <= "2024-02-05"
    assert signals[0]["value"] >= signals[0]["threshold"]
    assert report["blocks"][35]["difference"] > 0.3
    drifted = {each["column"]: each for each in report["description"]}
    assert set(drifted) == {"carrier", "x"}


def test_the_reference_knows_no_label_before_it_came(tmp_path: Path) -> None:
    """Labels of the turned days come 20 days late: the reference of these blocks is that of the days before."""
    world, days = World(tmp_path), Days(12, 300)
    days.late[days.day >= 6] = 1
    spec = rules(block={"rows_min": 20}, harm={"reference_blocks": 3})
    traffic = world.traffic(days)
    given = {"dataset": world.dataset(Days(30, 80, first=-30)), "champion": world.model(1.5)}
    losses = {}
    for delay in (0.5, 20):
        rows = labelled(world, traffic, world.labels(days, delay=delay * DAY), days=40, spec=spec)
        step = watch_step(spec, family=FAMILY, since=START, labelled=ANY, dataset=ANY, champion=ANY)
        losses[delay] = report_of(world.run(step, {"labelled": rows, **given}, "report"))["blocks"][9]["reference_loss"]
    assert losses[0.5] < 0.1, "three days of nothing but late rows are known"
    assert losses[20] > 0.7, "nothing of them is known"


def test_a_block_counts_once_its_labels_were_waited_for(tmp_path: Path) -> None:
    world, days = World(tmp_path), Days(15, 80)
    keep = ~((days.late == 1) & (days.day >= 8) & (np.arange(len(days)) % 2 == 0))
    early = watched(world, days, now=15.5, model=world.model(1.5), keep=keep)
    assert [each["settled"] for each in early["blocks"]] == [True] * 8 + [False] * 7
    late = watched(world, days, now=26, model=world.model(1.5), keep=keep)
    assert all(each["settled"] for each in late["blocks"]), "the horizon has passed"


def test_a_block_that_still_runs_does_not_count_though_every_row_has_its_label(tmp_path: Path) -> None:
    world, days = World(tmp_path), Days(6, 80)
    spec = rules(block={"rows_min": 20})
    rows = labelled(world, world.traffic(days), world.labels(days, delay=1), days=5.999, spec=spec)
    given = {"labelled": rows, "dataset": world.dataset(Days(5, 80, first=-5)), "champion": world.model(1.5)}
    step = watch_step(spec, family=FAMILY, since=START, **dict.fromkeys(given, ANY))
    report = report_of(world.run(step, given, "report"))
    assert [each["settled"] for each in report["blocks"]] == [True] * 5 + [False]
    assert report["harm"]["reading"]["blocks"] == 5


def test_only_what_came_since_the_champion_began_to_serve_counts(tmp_path: Path) -> None:
    world = World(tmp_path)
    report = watched(world, Days(10, 80), now=11, model=world.model(1.5), since=START + 5.5 * DAY)
    assert [(each["block"], each["rows"]) for each in report["blocks"]][:2] == [("2024-01-06", 40), ("2024-01-07", 80)]
    assert report["harm"]["reading"]["blocks"] == 5
    none = watched(world, Days(10, 80), now=11, model=world.model(1.5), since=START + 20 * DAY)
    assert (none["blocks"], none["signals"], none["description"]) == ([], [], [])


def test_fresh_labels_are_a_signal(tmp_path: Path) -> None:
    spec = rules(block={"rows_min": 20}, retrain={"labels_min": 400})
    world, days = World(tmp_path), Days(10, 80)
    rows = labelled(world, world.traffic(days), world.labels(days), days=11, spec=spec)
    given = {"labelled": rows, "dataset": world.dataset(Days(5, 80, first=-5)), "champion": world.model(1.5)}
    named = dict.fromkeys(given, ANY)
    retrained = world.dataset(Days(5, 80, first=-5), extended={"cut": START + 7 * DAY})
    step = watch_step(spec, family=FAMILY, since=START, **named)
    assert report_of(world.run(step, {**given, "dataset": retrained}, "report"))["labels"]["fresh"] == 240
    for since, fresh in ((None, 800), (START + 5 * DAY, 400), (START + 6 * DAY, 320)):
        step = watch_step(spec, family=FAMILY, since=START, fresh_from=since, **named)
        report = report_of(world.run(step, given, "report"))
        kinds = [(each["kind"], each["value"], each["block"]) for each in report["signals"]]
        assert report["labels"]["fresh"] == fresh
        assert kinds == ([("labels", fresh, "2024-01-10")] if fresh >= 400 else [])


def test_a_chain_of_watches_finds_what_one_over_all_rows_finds(tmp_path: Path) -> None:
    """Each watch reads only what can still change, and the reports are the same, however long the champion serves."""
    world, spec = World(tmp_path), rules(block={"rows_min": 20}, horizon="3d", harm={"reference_blocks": 7})
    days, model = Days(60, 80, turn=50), world.model(1.5)
    parts = {"traffic.000001": world.traffic(days), "labels.000002": world.labels(days)}
    base = world.dataset(Days(30, 80, seed=4, first=-30))

    def watch(until: float, earlier: InputArtifact | None = None, settled: float = 0.0) -> InputArtifact:
        before = Earlier(ANY, START + settled * DAY) if earlier else None
        since = watch_since(spec, before.settled_until if before else START)
        window = Window(since, START + until * DAY, START + until * DAY)
        rows = world.run(labelled_step(spec, segments(parts), window), parts, "labelled")
        given = {"labelled": rows, "dataset": base, "champion": model}
        step = watch_step(spec, family=FAMILY, since=START, before=before, **dict.fromkeys(given, ANY))
        return world.run(step, {**given, "before": earlier} if earlier else given, "report")

    whole, chained = report_of(watch(58)), watch(20)
    for until, settled in ((30, 17), (45, 27), (52, 42), (58, 49)):
        chained = watch(until, chained, settled)
    told = report_of(chained)
    for same in ("blocks", "harm", "labels", "signals"):
        assert told[same] == whole[same], same
    assert [each["kind"] for each in whole["signals"]].count("harm") >= 1
    assert len(whole["blocks"]) == 58
    assert told["coverage"]["rows"] == (58 - 49 + 15) * 80, "and it has read no more rows than those"


@pytest.mark.parametrize(("former", "verdict"), [(1.5, "roll_back"), (-1.5, "keep"), (0.0, "keep")])
def test_probation_compares_with_the_former_champion(tmp_path: Path, former: float, verdict: str) -> None:
    world = World(tmp_path)
    spec = rules(block={"rows_min": 20}, gate={"promote": "not_worse", "margin": 0.01, "probation": "14d"})
    report = watched(world, Days(16, 80), now=17, model=world.model(0.0), former=world.model(former), spec=spec)
    assert report["probation"]["verdict"] == verdict
    assert report["blocks"][0]["former_loss"] != report["blocks"][0]["loss"] or former == 0.0


def test_private_inputs_are_watched_by_what_was_served(tmp_path: Path) -> None:
    world, days, spec = World(tmp_path), Days(3, 80), rules(block={"rows_min": 20})
    model = world.model(1.5)
    rows = labelled(
        world,
        world.traffic(days, engine=model.digest, private={"carrier": "drop"}),
        world.labels(days),
        days=4,
        spec=spec,
    )
    given = {"labelled": rows, "dataset": world.dataset(Days(5, 80, first=-5)), "champion": model}
    step = watch_step(spec, family=FAMILY, since=START, **dict.fromkeys(given, ANY))
    report = report_of(world.run(step, given, "report"))
    assert report["blocks"][0]["loss"] == pytest.approx(np.log(2)), "0.5 was served to all"
    with pytest.raises(DataError, match="'carrier' is private"):
        extended(world, given["dataset"], rows, START + 2 * DAY)
    other = {**given, "champion": world.model(0.5)}
    with pytest.raises(DataError, match="'carrier' is private"):
        world.run(step, other, "report")


# ---- the gate ----------------------------------------------------------------------------------------------------


def judged(
    world: World,
    champion: InputArtifact,
    challenger: InputArtifact,
    *,
    days: Days,
    cut: float,
    now: float,
    keep: Any = None,
    **gate: Any,
) -> dict[str, Json]:
    told = {"promote": "better", "margin": 0.0, "blocks_min": 7, "replay": 20, **gate}
    spec = rules(gate=told, block={"rows_min": 20})
    rows = labelled(world, world.traffic(days), world.labels(days, keep=keep), days=now, spec=spec)
    base = world.dataset(Days(5, 80, first=-5), extended={"cut": START + cut * DAY})
    given = {"labelled": rows, "champion": champion, "challenger": challenger, "dataset": base}
    step = gate_step(spec, family=FAMILY, **dict.fromkeys(given, ANY))
    made = world.run(step, given, "decision")
    decision = decision_of(made)
    assert (step.name, made.kind, made.meta["verdict"]) == (GATE, "decision", decision["verdict"])
    return decision


def test_a_clearly_better_challenger_is_promoted(tmp_path: Path) -> None:
    world = World(tmp_path)
    decision = judged(world, world.model(0.0), world.model(1.5), days=Days(40, 80), cut=30, now=41)
    assert decision["verdict"] == "promote", decision["reasons"]
    assert decision["comparison"]["overall"]["blocks"] == 10
    assert decision["blocks"][0]["block"] == "2024-01-31", "nothing before the cut is compared"
    assert decision["replay"]["requests"] == 16
    assert decision["replay"]["errors"] == 0
    assert not any(gap["unusual"] for gap in decision["gaps"])
    assert {gap["what"].partition(":")[0] for gap in decision["gaps"]} == {
        "the compared traffic",
        "the traffic trained on",
    }


def test_too_few_blocks_hold_and_say_how_many_are_missing(tmp_path: Path) -> None:
    world = World(tmp_path)
    decision = judged(world, world.model(0.0), world.model(1.5), days=Days(40, 80), cut=35, now=41)
    assert decision["verdict"] == "hold"
    assert decision["missing"][0] == "2 more blocks"


def test_nothing_is_compared_that_either_model_may_have_seen(tmp_path: Path) -> None:
    world, days, spec = World(tmp_path), Days(40, 80), rules(block={"rows_min": 20})
    rows = labelled(world, world.traffic(days), world.labels(days), days=41, spec=spec)
    given = {"labelled": rows, "champion": world.model(0.0), "challenger": world.model(1.5)}
    past = Days(5, 80, first=-5)

    def first_block(**datasets: InputArtifact) -> str:
        step = gate_step(spec, family=FAMILY, **dict.fromkeys({**given, **datasets}, ANY))
        return decision_of(world.run(step, {**given, **datasets}, "decision"))["blocks"][0]["block"]

    early, late = (world.dataset(past, extended={"cut": START + cut * DAY}) for cut in (10, 20.5))
    assert first_block(dataset=early) == "2024-01-11"
    assert first_block(dataset=early, champion_dataset=late) == "2024-01-22", "a block that the cut divides is left out"
    seen = world.dataset(Days(10, 80))
    assert first_block(dataset=seen) == "2024-01-09", "trained on eight days of the very traffic"


def test_a_worse_challenger_is_rejected(tmp_path: Path) -> None:
    world = World(tmp_path)
    decision = judged(world, world.model(1.5), world.model(-0.5), days=Days(40, 80), cut=30, now=41)
    assert decision["verdict"] == "reject"
    assert "surely not" in decision["reasons"][0]


def test_an_equal_challenger_is_held(tmp_path: Path) -> None:
    world = World(tmp_path)
    decision = judged(world, world.model(1.5), world.model(1.5), days=Days(40, 80), cut=30, now=41)
    assert decision["verdict"] == "hold"


def test_a_challenger_that_fails_on_one_slice_is_rejected(tmp_path: Path) -> None:
    world = World(tmp_path)
    spoilt = world.model(1.5, carrier=(-4.0, 0.0, 0.0))
    decision = judged(
        world, world.model(0.2), spoilt, days=Days(40, 240), cut=20, now=41, promote="not_worse", margin=0.5
    )
    assert decision["verdict"] == "reject"
    assert decision["reasons"] == [each for each in decision["reasons"] if "carrier" in each]
    assert decision["comparison"]["slices"][0]["value"] == "AA"


@pytest.mark.parametrize("first", [30, 20], ids=["after the cut", "trained on too"])
@pytest.mark.parametrize("now", [40.0, 60.0], ids=["within the horizon", "past it"])
def test_missing_late_labels_hold(tmp_path: Path, first: int, now: float) -> None:
    world, days = World(tmp_path), Days(40, 200)
    missing = (days.late == 1) & (days.day >= first) & (np.random.default_rng(2).random(len(days)) < 0.6)
    # it forecasts too few late rows, which looks good where late labels are missing
    decision = judged(world, world.model(1.0), world.model(1.5, -1.6), days=days, cut=30, now=now, keep=~missing)
    assert decision["verdict"] == "hold"
    unusual = [gap["what"] for gap in decision["gaps"] if gap["unusual"]]
    assert any(what.startswith("the compared traffic") for what in unusual)
    if first == 20:
        assert any(what.startswith("the traffic trained on") for what in unusual)
    assert "unusual" in " ".join(decision["reasons"])


@pytest.mark.parametrize(("missing", "verdict"), [(0.6, "hold"), (0.1, "promote")])
def test_without_older_blocks_nearly_all_rows_must_have_a_label(tmp_path: Path, missing: float, verdict: str) -> None:
    world, days = World(tmp_path), Days(10, 200)
    keep = (days.late == 0) | (np.random.default_rng(2).random(len(days)) >= missing)
    decision = judged(world, world.model(0.0), world.model(1.5), days=days, cut=0, now=30, keep=keep)
    assert decision["verdict"] == verdict, decision["reasons"]
    assert "no older blocks" in decision["gaps"][0]["what"]


def test_usual_gaps_in_coverage_don_t_hold(tmp_path: Path) -> None:
    """Some rows never get a label, and always did not."""
    world, days = World(tmp_path), Days(40, 200)
    keep = np.random.default_rng(3).random(len(days)) < 0.9
    decision = judged(world, world.model(0.0), world.model(1.5), days=days, cut=30, now=60, keep=keep)
    assert decision["verdict"] == "promote", decision["reasons"]


def test_a_private_input_can_t_be_judged(tmp_path: Path) -> None:
    world, days, spec = World(tmp_path), Days(12, 80), rules()
    rows = labelled(world, world.traffic(days, private={"carrier": "hash"}), world.labels(days), days=13)
    one, other = world.model(0.0), world.model(1.5)
    given = {"labelled": rows, "champion": one, "challenger": other, "dataset": world.dataset(Days(5, 80, first=-5))}
    with pytest.raises(DataError, match="'carrier' is private"):
        world.run(gate_step(spec, family=FAMILY, **dict.fromkeys(given, ANY)), given, "decision")


# ---- other kinds of labels ---------------------------------------------------------------------------------------


def classed(days: Days) -> Days:
    """Three classes by x, of which a tenth is wrong."""
    chance = np.random.default_rng(8)
    names = np.array(["high", "low", "middle"], object)
    right = np.where(days.x > 0.6, 0, np.where(days.x < -0.6, 1, 2))
    days.late = names[np.where(chance.random(len(days)) < 0.9, right, chance.integers(0, 3, len(days)))]
    return days


def test_classes_are_watched_and_judged_though_the_challenger_knows_others(tmp_path: Path) -> None:
    world, days, spec = World(tmp_path), classed(Days(20, 80)), rules(block={"rows_min": 20})
    champion = world.engine("multiclass", ["high", "low", "middle"], (0, 0, 0), (0, 0, 0))
    challenger = world.engine("multiclass", ["a new one", "high", "low", "middle"], (0, 5, -5, 0), (-9, -3, -3, 0))
    rows = labelled(world, world.traffic(days), world.labels(days), days=21, spec=spec)
    base = world.dataset(classed(Days(30, 80, first=-30)))
    given = {"labelled": rows, "dataset": base, "champion": challenger}
    step = watch_step(spec, family=FAMILY, since=START, **dict.fromkeys(given, ANY))
    report = report_of(world.run(step, given, "report"))
    assert report["harm"]["reading"]["mean"] < -0.2, "it beats the shares of the classes"
    gated = rules(block={"rows_min": 20})
    given = {"labelled": rows, "dataset": base, "champion": champion, "former": challenger}
    step = watch_step(gated, family=FAMILY, since=START, **dict.fromkeys(given, ANY))
    report = report_of(world.run(step, given, "report"))
    assert report["probation"]["verdict"] == "roll_back", "the former champion was better, by its own classes"
    given = {"labelled": rows, "champion": champion, "challenger": challenger, "dataset": base}
    decision = decision_of(world.run(gate_step(spec, family=FAMILY, **dict.fromkeys(given, ANY)), given, "decision"))
    assert decision["verdict"] == "promote", decision["reasons"]
    assert decision["comparison"]["flips"] == pytest.approx(
        np.mean(np.abs(days.x) < 0.6) + np.mean(days.x < -0.6), abs=0.05
    )


def test_numbers_are_watched_and_judged_by_their_absolute_error(tmp_path: Path) -> None:
    world, days, spec = World(tmp_path), Days(20, 80), rules(block={"rows_min": 20})
    past = Days(30, 80, first=-30)
    for each in (days, past):
        each.late = 10 * each.x + np.random.default_rng(3).normal(size=len(each))
    champion, challenger = (world.engine("regression", [-1.0, 1.0], (slope,), (0.0,)) for slope in (0.0, 10.0))
    rows = labelled(world, world.traffic(days), world.labels(days), days=21, spec=spec)
    base = world.dataset(past)
    given = {"labelled": rows, "dataset": base, "champion": challenger}
    step = watch_step(spec, family=FAMILY, since=START, **dict.fromkeys(given, ANY))
    report = report_of(world.run(step, given, "report"))
    assert report["blocks"][0]["loss"] == pytest.approx(0.02, abs=0.01), "an error of 0.8 in four spreads of 10"
    assert report["blocks"][0]["difference"] < -0.1
    given = {"labelled": rows, "champion": champion, "challenger": challenger, "dataset": base}
    step = gate_step(spec, family=FAMILY, **dict.fromkeys(given, ANY))
    assert decision_of(world.run(step, given, "decision"))["verdict"] == "promote"
    wrong = rules(gate={"promote": "better", "margin": 0, "metric": "log_loss"})
    with pytest.raises(DataError, match="no meaning"):
        world.run(gate_step(wrong, family=FAMILY, **dict.fromkeys(given, ANY)), given, "decision")
