"""The monitor's steps as plans: which segments matter, what counts in the key, and the service's signals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onejob.core.plan import Existing, Output, Step
from onejob.core.plugin import load
from onejob.core.records import Segment
from onejob.errors import UsageError
from onejob.loop.keys import code_of
from onejob.monitor.plan import (
    Earlier,
    Window,
    gate_since,
    gate_step,
    labelled_step,
    slo_signals,
    watch_since,
    watch_step,
)
from onejob.monitor.spec import DAY, Slo, Spec

FAMILY = "onejob.families.tabular"
GATE = {"promote": "better", "margin": 0.01}
ROWS, SET, ENGINE = Output("monitor.labelled", "labelled"), Existing("d" * 64), Existing("e" * 64)


def spec(**table: Any) -> Spec:
    return Spec.model_validate(table)


def segment(number: int, kind: str, begins: float, ends: float) -> Segment:
    return Segment(number, "tiny", f"{number:064d}", kind, begins, ends, 10)


def watch(rules: Spec, **more: Any) -> Step:
    return watch_step(
        rules, **{"family": FAMILY, "labelled": ROWS, "dataset": SET, "champion": ENGINE, "since": 0, **more}
    )


def gate(rules: Spec, **more: Any) -> Step:
    given = {"family": FAMILY, "labelled": ROWS, "champion": ENGINE, "challenger": SET, "dataset": SET}
    return gate_step(rules, **{**given, **more})


def test_segments_of_the_window_are_read_and_all_labels_from_its_begin_on() -> None:
    known = [
        segment(1, "traffic", 0, 99),
        segment(2, "labels", 0, 99),
        segment(3, "traffic", 90, 110),
        segment(4, "labels", 500, 600),
        segment(5, "traffic", 150, 200),
        segment(6, "traffic", 200, 300),
    ]
    step = labelled_step(spec(), known, Window(100, 200, 250))
    assert step.inputs == {
        "traffic.000003": Existing(f"{3:064d}"),
        "labels.000004": Existing(f"{4:064d}"),
        "traffic.000005": Existing(f"{5:064d}"),
    }
    assert step.options == {"from": 100, "until": 200, "now": 250, "horizon": 30 * DAY}
    assert (step.name, step.outputs, step.hardware) == ("monitor.labelled", ("labelled",), "none")


def test_without_traffic_there_is_nothing_to_look_at() -> None:
    with pytest.raises(UsageError, match="no traffic"):
        labelled_step(spec(), [segment(2, "labels", 0, 99)], Window(0, 100, 100))


def test_the_watch_takes_what_it_is_given() -> None:
    plain = watch(spec())
    assert set(plain.inputs) == {"labelled", "dataset", "champion"}
    assert (plain.options["probation"], plain.options["labels_min"]) == (None, None)
    whole = watch(spec(gate=GATE, retrain={"labels_min": 9}), former=ENGINE, before=Earlier(SET, 7.0), fresh_from=5.0)
    assert set(whole.inputs) == {"labelled", "dataset", "champion", "former", "before"}
    assert (whole.options["probation"], whole.options["labels_min"], whole.options["fresh_from"]) == (14, 9, 5.0)
    assert (plain.options["settled_until"], whole.options["settled_until"]) == (None, 7.0)
    assert watch(spec(gate=GATE)).options["probation"] is None, "nothing is on probation without a former champion"
    by_week = spec(gate={**GATE, "probation": "15d"}, block={"by": "week"})
    assert watch(by_week, former=ENGINE).options["probation"] == 3


def test_the_gate_needs_rules_and_counts_its_looks() -> None:
    with pytest.raises(UsageError, match="no rules"):
        gate(spec())
    one, again = gate(spec(gate=GATE)), gate(spec(gate=GATE), look=2, champion_dataset=ENGINE)
    assert (one.options["look"], again.options["look"]) == (1, 2)
    assert set(again.inputs) - set(one.inputs) == {"champion_dataset"}
    assert one.setup == {"replay": 200}
    assert "approve" not in one.options["gate"], "who applies a decision doesn't change it"
    assert gate(spec(gate={**GATE, "approve": "hand"})).options == one.options


def test_windows_reach_back_far_enough() -> None:
    assert watch_since(spec(), 100 * DAY) == 71 * DAY
    assert gate_since(spec(), 100 * DAY) == 44 * DAY


@pytest.mark.parametrize("make", [watch, gate])
def test_entries_exist_and_their_code_can_be_followed(make: Any, tmp_path: Path) -> None:
    step = make(spec(gate=GATE))
    assert callable(load(step.entry))
    assert step.hardware == "exact"
    assert Step.from_json(step.to_json()) == step
    found = code_of(step, tmp_path)
    assert found.warnings == ()
    assert "numpy" in found.modules


def test_the_labelled_step_s_entry_exists(tmp_path: Path) -> None:
    step = labelled_step(spec(), [segment(1, "traffic", 0, 9)], Window(0, 10, 10))
    assert callable(load(step.entry))
    assert code_of(step, tmp_path).warnings == ()


def test_a_service_that_fails_or_is_slow_signals_and_a_healthy_one_doesn_t() -> None:
    def line(time: float, errors: int, bucket: str) -> dict[str, Any]:
        return {"time": time, "seconds": 60.0, "requests": 100, "errors": errors, "latency": {bucket: 100}}

    rules = Slo(p99_ms=50, error_rate=0.01)
    ends = [60.0 * n for n in range(1, 121)]
    healthy = [line(end, 0, "10") for end in ends]
    assert slo_signals(rules, healthy, 7200.0) == []
    failing = slo_signals(rules, [line(end, 50, "10") for end in ends], 7200.0)
    assert {each["evidence"]["objective"] for each in failing} == {"error_rate"}
    assert all(each["kind"] == "slo" and each["value"] >= each["threshold"] for each in failing)
    slow = slo_signals(rules, [line(end, 0, "80") for end in ends], 7200.0)
    assert {each["evidence"]["objective"] for each in slow} == {"p99_ms"}
    assert slo_signals(Slo(), [line(end, 50, "80") for end in ends], 7200.0) == []
