"""[optimize]: its table, and the steps that it becomes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from onejob.core.plan import Existing, Output, Step, Upstream
from onejob.errors import JobFileError, UnavailableError
from onejob.optimize.spec import PASSES, Spec, plan

UPSTREAM = Upstream(
    job="flights",
    project="/project",
    seed=7,
    outputs={"dataset": Output("data", "dataset"), "checkpoint": Existing("c" * 64)},
    family="onejob.families.tabular",
)
BUDGET = {"metric": "auc", "drop": 0.005}


def steps(spec: Spec, upstream: Upstream = UPSTREAM, missing: tuple[str, ...] = ()) -> dict[str, Step]:
    return {step.name: step for step in plan(spec, upstream, installed=lambda name: name not in missing).steps}


def test_the_default_plan_exports_makes_two_more_candidates_and_chooses() -> None:
    found = steps(Spec(budget=BUDGET))
    assert list(found) == [
        "optimize.export",
        "optimize.openvino-fp32",
        "optimize.onnxruntime-int8",
        "optimize.choose",
    ]
    assert dict(found["optimize.choose"].inputs) == {
        "dataset": Output("data", "dataset"),
        "checkpoint": Existing("c" * 64),
        "onnxruntime-fp32": Output("optimize.export", "candidate"),
        "openvino-fp32": Output("optimize.openvino-fp32", "candidate"),
        "onnxruntime-int8": Output("optimize.onnxruntime-int8", "candidate"),
    }
    assert found["optimize.choose"].outputs == ("engine",)
    assert found["optimize.choose"].hardware == "exact"
    assert {step.stage for step in found.values()} == {"optimize"}
    assert set(found["optimize.openvino-fp32"].inputs) == {"base"}, "the same bytes need nothing else"
    for step in found.values():
        assert Step.from_json(step.to_json()) == step


def test_what_changes_the_measuring_leaves_the_candidates_as_they_are() -> None:
    one = steps(Spec(budget=BUDGET))
    other = steps(Spec(budget={**BUDGET, "drop": 0.01}, target="throughput", batch=32, rounds=7, threads=2))
    for name in ("optimize.export", "optimize.openvino-fp32", "optimize.onnxruntime-int8"):
        assert one[name] == other[name]
    assert one["optimize.choose"].options != other["optimize.choose"].options
    assert other["optimize.choose"].threads == 2


def test_calibration_counts_for_the_quantised_candidate_alone() -> None:
    one, other = steps(Spec(budget=BUDGET)), steps(Spec(budget=BUDGET, calibration_rows=100))
    changed = {name for name in one if one[name] != other[name]}
    assert changed == {"optimize.onnxruntime-int8"}
    assert other["optimize.onnxruntime-int8"].options["calibration_rows"] == 100


def test_a_default_candidate_that_is_not_installed_is_left_out_with_the_reason() -> None:
    found = steps(Spec(budget=BUDGET), missing=("openvino",))
    assert "optimize.openvino-fp32" not in found
    choice = found["optimize.choose"]
    assert "openvino-fp32" not in choice.inputs
    assert choice.setup["skipped"] == {"openvino-fp32": "needs openvino, which is not installed"}


def test_a_named_candidate_that_is_not_installed_is_refused_with_the_cure() -> None:
    with pytest.raises(UnavailableError, match=r"candidate 'openvino-fp32': needs openvino.*pip install"):
        steps(Spec(budget=BUDGET, candidates=["openvino-fp32"]), missing=("openvino",))
    with pytest.raises(UnavailableError, match="'onnxruntime-fp32': needs torch, onnx"):
        steps(Spec(budget=BUDGET), missing=("torch", "onnx"))


def test_the_export_is_always_a_candidate() -> None:
    assert list(steps(Spec(budget=BUDGET, candidates=["onnxruntime-int8"]))) == [
        "optimize.export",
        "optimize.onnxruntime-int8",
        "optimize.choose",
    ]


def test_mistakes_are_told_together_with_the_nearest_name() -> None:
    spec = Spec(budget={"metric": "acu", "drop": 0.1}, candidates=["onnxruntime-int4"])
    with pytest.raises(JobFileError) as caught:
        steps(spec, replace(UPSTREAM, outputs={}))
    assert len(caught.value.mistakes) == 4
    text = str(caught.value)
    assert "unknown candidate 'onnxruntime-int4'. Did you mean 'onnxruntime-int8'?" in text
    assert "unknown metric 'acu'. Did you mean 'auc'?" in text
    assert "there is no checkpoint to work on. Add the table [train]" in text


def test_a_plugin_brings_a_candidate_by_a_row() -> None:
    upstream = replace(UPSTREAM, plugins={"optimize/pruned": "pruner.onejob:run", "train/torch": "x:y"})
    found = steps(Spec(budget=BUDGET, candidates=["pruned"]), upstream)
    assert found["optimize.pruned"].entry == "pruner.onejob:run"
    assert found["optimize.choose"].options["candidates"] == ["onnxruntime-fp32", "pruned"]


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"budget": {"metric": "auc", "drop": 0}},
        {"budget": {**BUDGET, "confidence": 1}},
        {"budget": BUDGET, "target": "speed"},
        {"budget": BUDGET, "candidates": []},
        {"budget": BUDGET, "rounds": 1},
        {"budget": BUDGET, "tolerance": 1},
    ],
)
def test_what_makes_no_sense_is_refused(table: dict) -> None:
    with pytest.raises(ValidationError):
        Spec(**table)


def test_every_pass_names_an_entry_that_exists() -> None:
    from onejob.core.plugin import load

    for entry in PASSES.values():
        assert callable(load(entry.entry))
