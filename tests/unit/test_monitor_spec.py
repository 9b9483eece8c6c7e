"""[monitor]: what a job may say, and what it gets without saying it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from onejob.core.mistakes import mistakes_of
from onejob.core.spec import counted
from onejob.monitor.spec import DAY, Spec


def read(**table: Any) -> Spec:
    """As the job file is read: strictly, from JSON."""
    return Spec.model_validate_json(json.dumps(table), strict=True)


def mistakes(**table: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        read(**table)
    return [f"{'.'.join(map(str, each.path))}: {each.text}" for each in mistakes_of(Spec, table, caught.value)]


def test_an_empty_table_watches_by_the_day_and_neither_retrains_nor_promotes() -> None:
    spec = read()
    assert (spec.block.by, spec.block.zone, spec.horizon) == ("day", "UTC", 30 * DAY)
    assert (spec.harm.alpha, spec.harm.run_length, spec.harm.reference_blocks) == (0.01, 100, 28)
    assert (spec.retrain, spec.gate, spec.slo.p99_ms, spec.slo.error_rate) == (None, None, None, None)


def test_the_whole_table_is_read() -> None:
    spec = read(
        block={"by": "hour", "zone": "America/New_York"},
        harm={"alpha": 0.05},
        slo={"p99_ms": 50, "error_rate": 0.01},
        retrain={"on": ["labels", "schedule"], "every": "30d", "cooldown": "7d", "history": "120d", "hold_out": "7d"},
        gate={"promote": "not_worse", "margin": 0.002, "approve": "hand", "slices": ["carrier"]},
    )
    assert spec.retrain is not None
    assert spec.gate is not None
    assert (spec.retrain.every, spec.retrain.history, spec.retrain.budget) == (30 * DAY, 120 * DAY, 4)
    assert read(retrain={}).retrain.history == "all"  # type: ignore[union-attr]
    assert (spec.gate.blocks_min, spec.gate.probation, spec.gate.approve) == (7, 14 * DAY, "hand")


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"block": {"zone": "Mars"}}, "block.zone: 'Mars': no time zone is called so"),
        ({"block": {"by": "month"}}, "block.by: 'month' is not"),
        ({"gate": {"promote": "better"}}, "gate.margin: is missing"),
        ({"gate": {"margin": 0.1}}, "gate.promote: is missing"),
        ({"retrain": {"on": ["drift"]}}, "retrain.on"),
        ({"retrain": {"on": []}}, "retrain.on: [] must have at least 1 entry"),
        ({"slo": {"error_rate": 2}}, "slo.error_rate: 2 must be less than 1"),
        ({"harm": {"alpha": 0}}, "harm.alpha: 0 must be greater than 0"),
        ({"resources": {"processes": 2}}, "the monitor's steps work in one process"),
    ],
)
def test_a_mistake_names_key_and_value(table: dict[str, Any], told: str) -> None:
    assert any(told in each for each in mistakes(**table)), mistakes(**table)


def test_how_often_is_collected_counts_in_no_key_and_the_rules_do() -> None:
    values = counted(read(gate={"promote": "better", "margin": 0.1}))
    assert {"block", "harm", "horizon", "gate"} <= set(values)
    assert not {"interval", "keep", "capture"} & set(values)
    assert "replay" not in values["gate"]
