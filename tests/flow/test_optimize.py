"""The optimize stage on a small trained model: the graphs, their bytes, the judgement and the choice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import polars as pl
import pytest
import torch
from safetensors.torch import save_file

from onejob.core.artifact import digest_file
from onejob.core.context import InputArtifact, StepContext
from onejob.engines import open_model
from onejob.errors import DamagedError, StepError
from onejob.families.tabular.encode import fit
from onejob.families.tabular.model import build
from onejob.families.tabular.options import Options
from onejob.optimize.engines import choose
from onejob.optimize.passes import export, int8, openvino
from onejob.optimize.rows import load_encoding, read_rows

FAMILY = "onejob.families.tabular"
BUDGET = {"metric": "auc", "drop": 0.01, "confidence": 0.95}
FAST = {"target": "latency", "threads": 1, "batch": 16, "rounds": 5, "calls": 3, "resamples": 100}


@dataclass(frozen=True)
class Made:
    """The artifacts of a job up to its candidates."""

    dataset: InputArtifact
    checkpoint: InputArtifact
    candidates: dict[str, InputArtifact]


def frame(rows: int, seed: int) -> pl.DataFrame:
    """Rows where a carrier and a distance (sometimes null) say something about being late."""
    chance = np.random.default_rng(seed)
    carrier = chance.integers(0, 12, rows)
    distance = chance.gamma(2, 500, rows)
    late = chance.random(rows) < 1 / (1 + np.exp(-(carrier / 3 - 2.5 + distance / 1500)))
    known = chance.random(rows) > 0.05
    return pl.DataFrame(
        {
            "carrier": [f"C{code}" for code in carrier],
            "distance": [float(value) if there else None for value, there in zip(distance, known, strict=True)],
            "late": late.astype(np.int8),
        }
    )


def make_dataset(folder: Path, train: int, holdout: int) -> InputArtifact:
    columns = {"label": "late", "categories": ["carrier"], "numbers": ["distance"], "time": None}
    splits: dict[str, Any] = {}
    for split, rows, seed in (("train", train, 1), ("holdout", holdout, 2)):
        (folder / split).mkdir(parents=True)
        frame(rows, seed).write_ipc(folder / split / "00000.arrow", compression="uncompressed")
        splits[split] = {"rows": rows, "shards": [{"path": f"{split}/00000.arrow", "rows": rows}]}
    schema = {"carrier": "String", "distance": "Float64", "late": "Int8"}
    meta = {"format": 1, "family": "tabular", "columns": columns, "schema": schema, "splits": splits}
    return InputArtifact("d" * 64, "dataset", meta, folder)


def make_checkpoint(folder: Path, dataset: InputArtifact, family: str = FAMILY) -> InputArtifact:
    """A model trained for a moment, so that a spoiled one is worse."""
    folder.mkdir(parents=True)
    data = frame(dataset.meta["splits"]["train"]["rows"], 1)
    columns = {
        "carrier": data["carrier"].to_numpy().astype(object),
        "distance": data["distance"].fill_null(float("nan")).to_numpy(),
        "late": data["late"].to_numpy(),
    }
    options = Options(hidden=[128, 64]).model_dump()
    encoding = fit(columns, dataset.meta["columns"], options)
    module = build(encoding, options, seed=3)
    features, label = encoding.encode(columns), torch.from_numpy(encoding.encode_label(columns["late"]))
    inputs = [torch.from_numpy(features[spec.name]) for spec in encoding.features]
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(30):
        optimizer.zero_grad()
        module.loss(module(*inputs), label).mean().backward()
        optimizer.step()
    save_file(module.state_dict(), folder / "model.safetensors")
    (folder / "encoding.json").write_text(json.dumps(encoding.to_json()))
    meta = {"format": 1, "family": family, "model": options, "columns": dataset.meta["columns"]}
    return InputArtifact("c" * 64, "checkpoint", meta, folder)


def context(work: Path, inputs: dict[str, InputArtifact], options: dict[str, Any], **more: Any) -> StepContext:
    work.mkdir(parents=True)
    setup = more.pop("setup", {})
    return StepContext(
        work.name, {"family": FAMILY, **options}, setup, inputs, work, work / "scratch", work / "project", **more
    )


def output(step: StepContext, name: str) -> InputArtifact:
    declared = json.loads((step.work / "out" / f"{name}.json").read_text())
    return InputArtifact("e" * 64, declared["kind"], declared["meta"], step.work / "out" / name)


def measured(step: StepContext) -> dict[str, Any]:
    return json.loads((step.work / "measured.json").read_text())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("optimize")
    dataset = make_dataset(root / "dataset", 3000, 2000)
    checkpoint = make_checkpoint(root / "checkpoint", dataset)
    exported = context(root / "export", {"checkpoint": checkpoint, "dataset": dataset}, {})
    export.run(exported)
    assert measured(exported)["export"]["max_error"] < 1e-4
    base = output(exported, "candidate")
    quantised = context(root / "int8", {"base": base, "dataset": dataset}, {"calibration_rows": 200})
    int8.run(quantised)
    compiled = context(root / "openvino", {"base": base}, {})
    openvino.run(compiled)
    candidates = {
        "onnxruntime-fp32": base,
        "onnxruntime-int8": output(quantised, "candidate"),
        "openvino-fp32": output(compiled, "candidate"),
    }
    return Made(dataset, checkpoint, candidates)


def chosen(work: Path, made: Made, candidates: dict[str, InputArtifact], **more: Any) -> StepContext:
    options = {**FAST, "budget": more.pop("budget", BUDGET), "candidates": list(candidates)}
    inputs = {"dataset": made.dataset, "checkpoint": made.checkpoint, **candidates}
    step = context(work, inputs, {**options, **more.pop("options", {})}, **more)
    choose.run(step)
    return step


def spoiled(folder: Path, candidate: InputArtifact, change: Any) -> InputArtifact:
    """The candidate with every weight changed."""
    shutil.copytree(candidate.path, folder)
    model = onnx.load(folder / "model.onnx")
    for tensor in model.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        if values.dtype == np.float32:
            tensor.CopyFrom(onnx.numpy_helper.from_array(change(values).astype(np.float32), tensor.name))
    onnx.save(model, folder / "model.onnx")
    return InputArtifact("f" * 64, "candidate", candidate.meta, folder)


def test_the_engines_agree_with_pytorch_on_every_held_out_row(made: Made) -> None:
    encoding = load_encoding(FAMILY, made.checkpoint)
    rows = read_rows(made.dataset, encoding, "holdout")
    assert len(rows) == 2000
    expected = open_model(made.checkpoint.path, made.checkpoint.meta).infer(rows.features)["logit"]
    assert expected.std() > 0.3, "the model says something"
    for name in ("onnxruntime-fp32", "openvino-fp32"):
        candidate = made.candidates[name]
        model = open_model(candidate.path, candidate.meta)
        assert model.precision == "fp32"
        assert [spec.name for spec in model.inputs] == [spec.name for spec in encoding.features]
        assert np.abs(model.infer(rows.features)["logit"] - expected).max() < 1e-4
        assert np.abs(model.infer(rows.take(slice(7, 8)))["logit"] - expected[7:8]).max() < 1e-4


def test_the_artifacts_are_as_the_contract_says(made: Made) -> None:
    encoding = digest_file(made.checkpoint.file("encoding.json"))
    for name, candidate in made.candidates.items():
        engine, _, precision = name.partition("-")
        assert candidate.kind == "candidate"
        assert candidate.meta["format"] == 1
        assert candidate.meta["family"] == FAMILY
        assert candidate.meta["engine"] == engine
        assert candidate.meta["precision"] == precision
        assert candidate.meta["model"] == made.checkpoint.meta["model"]
        assert sorted(path.name for path in candidate.path.iterdir()) == ["encoding.json", "model.onnx"]
        assert digest_file(candidate.file("encoding.json")) == encoding
    files = {name: digest_file(one.file("model.onnx")) for name, one in made.candidates.items()}
    assert files["openvino-fp32"] == files["onnxruntime-fp32"] != files["onnxruntime-int8"]


def test_the_graph_tells_nothing_of_where_it_was_made(made: Made) -> None:
    data = made.candidates["onnxruntime-fp32"].file("model.onnx").read_bytes()
    for word in (b"File ", b".py", b"families", b"stack_trace", b"namespace", torch.__version__.encode()):
        assert word not in data, word


def test_int8_is_quantised_and_smaller(made: Made) -> None:
    base, quantised = (made.candidates[name].file("model.onnx") for name in ("onnxruntime-fp32", "onnxruntime-int8"))
    assert quantised.stat().st_size < 0.5 * base.stat().st_size
    graph = onnx.load(quantised).graph
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    scales = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    weights = [
        node for node in graph.node if node.op_type == "DequantizeLinear" and kinds.get(node.input[0]) == 3
    ]  # 3: int8
    assert any(scales[node.input[1]] == (128,) for node in weights), "a scale for each of 128 channels"
    activations = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    assert activations
    assert {kinds[node.input[2]] for node in activations} == {2}  # 2: uint8
    encoding = load_encoding(FAMILY, made.checkpoint)
    rows = read_rows(made.dataset, encoding, "holdout")
    answers = [
        open_model(one.path, one.meta).infer(rows.features)["logit"]
        for one in (made.candidates["onnxruntime-fp32"], made.candidates["onnxruntime-int8"])
    ]
    assert 1e-4 < np.abs(answers[0] - answers[1]).mean() < 0.1, "near, but not the same"


OWN_FAMILY = '''
from onejob.families.tabular.model import CategoriesAndNumbers, build as build_tabular

class Own(CategoriesAndNumbers):
    """A user's module: its source lies in the user's folder."""

    def forward(self, categories, numbers):
        (logit,) = super().forward(categories, numbers)
        return (logit + 0.5,)

def build(encoding, options, seed=0):
    module = build_tabular(encoding, options, seed)
    module.__class__ = Own
    return module
'''

RUN = """
import sys, json, pathlib
root = pathlib.Path(sys.argv[1]); sys.path[:0] = [str(root), *sys.argv[2:]]
from test_optimize import context, make_dataset, make_checkpoint, output
from onejob.optimize.passes import export, int8
dataset = make_dataset(root / "dataset", 500, 200)
checkpoint = make_checkpoint(root / "checkpoint", dataset, family="ownfamily")
step = context(root / "export", {"checkpoint": checkpoint, "dataset": dataset}, {"family": "ownfamily"})
export.run(step)
more = context(root / "int8", {"base": output(step, "candidate"), "dataset": dataset},
               {"family": "ownfamily", "calibration_rows": 100})
int8.run(more)
"""


def test_the_bytes_depend_neither_on_the_folder_nor_on_the_process(tmp_path: Path) -> None:
    """A user's family in two folders of different depth, in two processes that hash differently."""
    roots = [tmp_path / "one", tmp_path / "an other" / "and deeper"]
    processes = []
    for seed, root in enumerate(roots):
        family = root / "ownfamily"
        family.mkdir(parents=True)
        (family / "__init__.py").touch()
        (family / "encode.py").write_text("from onejob.families.tabular.encode import *\n")
        (family / "metrics.py").write_text("from onejob.families.tabular.metrics import *\n")
        (family / "model.py").write_text(OWN_FAMILY)
        command = [sys.executable, "-c", RUN, str(root), str(Path(__file__).parent)]
        environment = {**os.environ, "PYTHONHASHSEED": str(seed + 1)}
        processes.append(subprocess.Popen(command, env=environment, cwd=root, stderr=subprocess.PIPE, text=True))
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    for name in ("export/out/candidate", "int8/out/candidate"):
        one, other = (root / name for root in roots)
        assert (one / "model.onnx").read_bytes() == (other / "model.onnx").read_bytes(), name
        assert one.with_suffix(".json").read_bytes() == other.with_suffix(".json").read_bytes()


def test_a_graph_that_answers_otherwise_than_pytorch_fails_with_the_row(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = onnx.load(
        spoiled(tmp_path / "wrong", made.candidates["onnxruntime-fp32"], lambda w: w * 1.01).file("model.onnx")
    )
    monkeypatch.setattr(export, "_exported", lambda module, encoding, rows: wrong)
    step = context(tmp_path / "export", {"checkpoint": made.checkpoint, "dataset": made.dataset}, {})
    with pytest.raises(StepError, match=r"differs from PyTorch by .* most at checked row \d+: \{'categories'"):
        export.run(step)
    assert not (step.work / "out" / "candidate.json").exists()


def test_weights_that_do_not_fit_are_named(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made.checkpoint.path, tmp_path / "checkpoint")
    save_file({"head.weight": torch.zeros(1, 64)}, tmp_path / "checkpoint" / "model.safetensors")
    checkpoint = InputArtifact("c" * 64, "checkpoint", made.checkpoint.meta, tmp_path / "checkpoint")
    with pytest.raises(DamagedError, match=r"model\.safetensors: the weights don't fit"):
        export.run(context(tmp_path / "export", {"checkpoint": checkpoint, "dataset": made.dataset}, {}))


def test_the_choice_leaves_an_engine_and_the_figures_of_all(made: Made, tmp_path: Path) -> None:
    step = chosen(tmp_path / "choose", made, made.candidates, setup={"skipped": {"tensorrt": "needs a GPU"}})
    report = measured(step)
    figures = report["candidates"]
    assert set(figures) == {*made.candidates, "tensorrt"}
    assert figures["tensorrt"]["reason"] == "skipped: needs a GPU"
    for name in ("onnxruntime-fp32", "openvino-fp32"):
        assert figures[name]["accepted"], figures[name]
        assert figures[name]["difference"] < 1e-4
        assert figures[name]["metric"] == pytest.approx(report["reference"], abs=1e-4)
        assert figures[name]["churn"] == 0
        assert [one["batch"] for one in figures[name]["latency"]] == [1, 16]
    assert figures["onnxruntime-int8"]["bound"] >= figures["onnxruntime-int8"]["drop"]
    assert report["rows"] == 2000
    assert report["reference"] > 0.6
    engine, winner = output(step, "engine"), made.candidates[report["chosen"]]
    assert figures[report["chosen"]]["accepted"]
    assert report["why"].startswith(report["chosen"])
    assert engine.kind == "engine"
    assert engine.meta == winner.meta
    for name in ("model.onnx", "encoding.json"):
        assert digest_file(engine.file(name)) == digest_file(winner.file(name))


def test_a_spoiled_candidate_is_rejected_with_the_reason_and_not_chosen(made: Made, tmp_path: Path) -> None:
    base = made.candidates["onnxruntime-fp32"]
    chance = np.random.default_rng(0)
    candidates = {
        "onnxruntime-fp32": base,
        "worse": spoiled(tmp_path / "worse", base, lambda w: w + chance.normal(scale=0.3, size=w.shape)),
        "nan": spoiled(tmp_path / "nan", base, lambda w: w * np.nan),
        "torn": InputArtifact("1" * 64, "candidate", base.meta, tmp_path / "torn"),
        "unmade": InputArtifact("2" * 64, "candidate", {**base.meta, "failed": "no operator"}, tmp_path / "unmade"),
        "unknown": InputArtifact("3" * 64, "candidate", {**base.meta, "engine": "abacus"}, base.path),
    }
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "model.onnx").write_bytes(base.file("model.onnx").read_bytes()[:1000])
    step = chosen(tmp_path / "choose", made, candidates)
    figures = measured(step)["candidates"]
    assert "of auc; 0.01 may be lost" in figures["worse"]["reason"]
    assert figures["worse"]["latency"], "what was rejected keeps its figures"
    assert figures["worse"]["churn"] > 0
    assert "output 'logit' is not a number in 2000 held-out rows, first in row 0" in figures["nan"]["reason"]
    assert "can't load it" in figures["torn"]["reason"]
    assert figures["unmade"]["reason"] == "could not be made: no operator"
    assert "no engine is called 'abacus'" in figures["unknown"]["reason"]
    assert [name for name, one in figures.items() if one["accepted"]] == ["onnxruntime-fp32"]
    assert measured(step)["chosen"] == "onnxruntime-fp32"


def test_a_budget_too_tight_for_the_rows_rejects_what_it_cannot_certify(made: Made, tmp_path: Path) -> None:
    budget = {"metric": "auc", "drop": 0.0005, "confidence": 0.95}
    step = chosen(tmp_path / "choose", made, made.candidates, budget=budget)
    figures = measured(step)["candidates"]
    assert not figures["onnxruntime-int8"]["accepted"]
    assert measured(step)["chosen"] != "onnxruntime-int8"
    assert figures["onnxruntime-fp32"]["accepted"], "the same outputs need no certificate"
    if figures["onnxruntime-int8"]["drop"] <= 0.0005:
        assert "cannot be certified: needs about" in figures["onnxruntime-int8"]["reason"]


def test_a_metric_where_bigger_is_worse(made: Made, tmp_path: Path) -> None:
    base = made.candidates["onnxruntime-fp32"]
    candidates = {"onnxruntime-fp32": base, "sure": spoiled(tmp_path / "sure", base, lambda w: w * 1.5)}
    budget = {"metric": "log_loss", "drop": 0.01, "confidence": 0.95}
    figures = measured(chosen(tmp_path / "choose", made, candidates, budget=budget))["candidates"]
    assert not figures["sure"]["accepted"]
    assert figures["sure"]["drop"] > 0.01
    assert figures["sure"]["metric"] > figures["onnxruntime-fp32"]["metric"]


def test_nothing_within_the_budget_fails_but_keeps_the_figures(made: Made, tmp_path: Path) -> None:
    base = made.candidates["onnxruntime-fp32"]
    candidates = {"onnxruntime-fp32": spoiled(tmp_path / "worse", base, lambda w: -w)}
    step = context(
        tmp_path / "choose",
        {"dataset": made.dataset, "checkpoint": made.checkpoint, **candidates},
        {**FAST, "budget": BUDGET, "candidates": list(candidates)},
    )
    with pytest.raises(StepError, match=r"\[optimize\] budget: no candidate is within the budget"):
        choose.run(step)
    assert measured(step)["candidates"]["onnxruntime-fp32"]["drop"] > 0.01
    assert measured(step)["chosen"] is None


def test_a_metric_that_the_label_does_not_have(made: Made, tmp_path: Path) -> None:
    budget = {"metric": "rmse", "drop": 0.1, "confidence": 0.95}
    with pytest.raises(StepError, match=r"budget\.metric: the metric 'rmse' has no value.*accuracy, auc"):
        chosen(tmp_path / "choose", made, made.candidates, budget=budget)


def test_a_graph_without_anything_to_quantise_is_a_finding_not_a_failure(made: Made, tmp_path: Path) -> None:
    base = made.candidates["onnxruntime-fp32"]
    shutil.copytree(base.path, tmp_path / "base")
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("ReduceMax", ["numbers", "axis"], ["top"], keepdims=1),
            onnx.helper.make_node("Neg", ["top"], ["logit"]),
        ],
        "g",
        [
            onnx.helper.make_tensor_value_info("categories", onnx.TensorProto.INT64, ["batch", 1]),
            onnx.helper.make_tensor_value_info("numbers", onnx.TensorProto.FLOAT, ["batch", 2]),
        ],
        [onnx.helper.make_tensor_value_info("logit", onnx.TensorProto.FLOAT, ["batch", 1])],
        [onnx.numpy_helper.from_array(np.array([1]), "axis")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "base" / "model.onnx")
    changed = InputArtifact("b" * 64, "candidate", base.meta, tmp_path / "base")
    step = context(tmp_path / "int8", {"base": changed, "dataset": made.dataset}, {"calibration_rows": 100})
    int8.run(step)
    candidate = output(step, "candidate")
    assert candidate.meta["failed"] == "no operator of this graph can be quantised"
    assert [path.name for path in candidate.path.iterdir()] == ["encoding.json"]
    assert (step.work / "warnings.jsonl").exists()
