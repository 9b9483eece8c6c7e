"""Traffic of a small endpoint, day by day, as serving captures it, and models that answer it well or badly."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import polars as pl
from onnx import TensorProto, helper, numpy_helper

from onejob.core.artifact import Artifact, FileEntry, digest_file, walk_files
from onejob.core.context import InputArtifact, StepContext
from onejob.core.plan import Step
from onejob.core.plugin import load
from onejob.core.tensor import TensorSpec
from onejob.core.traffic import CAPTURE
from onejob.data.engines.shards import write_split
from onejob.families.tabular.encode import fit
from onejob.monitor import capture as reading
from onejob.monitor import labels as label_reading
from onejob.serve.capture import Capture, Record, Rules, Signature
from onejob.serve.identify import Roles, Told
from onejob.serve.spool import sealed_in

FAMILY = "onejob.families.tabular"
DAY = 86_400.0
START = 1_704_067_200.0
"""2024-01-01, a Monday."""
CARRIERS = np.array(["AA", "B6", "UA"], object)
ROLES = Roles("late", "departs", "id")
COLUMNS = {"label": "late", "time": "departs", "id": "id", "categories": ["carrier"], "numbers": ["x"]}
SIGNATURE = Signature(
    {"carrier": TensorSpec("carrier", "BYTES", (-1, 1)), "x": TensorSpec("x", "FP64", (-1, 1))},
    {"probability": TensorSpec("probability", "FP32", (-1, 1))},
    True,
    ROLES,
)


class Days:
    """So many rows a day; the label depends on x and, with `turn`, on -x from that day on. Days have their weather."""

    def __init__(self, days: int, rows: int, *, seed: int = 1, first: int = 0, turn: int | None = None) -> None:
        chance = np.random.default_rng(seed)
        count = days * rows
        self.day = np.repeat(np.arange(first, first + days), rows)
        self.time = START + self.day * DAY + np.tile(np.linspace(0, DAY - 60, rows), days)
        self.x = chance.normal(size=count)
        self.carrier = CARRIERS[chance.integers(0, 3, count)]
        weather = np.repeat(chance.normal(0, 0.4, days), rows)
        slope = np.where(self.day >= (turn if turn is not None else 10**9), -1.5, 1.5)
        probability = 1 / (1 + np.exp(-(-0.8 + slope * self.x + weather)))
        self.late = (chance.random(count) < probability).astype(np.int64)
        self.key = np.array([f"f{first}-{number}" for number in range(count)], object)

    def __len__(self) -> int:
        return len(self.time)


class World:
    """A folder in which artifacts are made, and steps run on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made = 0

    def place(self, kind: str) -> Path:
        self.made += 1
        folder = self.folder / f"{self.made:03d}-{kind}"
        folder.mkdir(parents=True)
        return folder

    def model(
        self, slope: float, shift: float = -0.8, carrier: tuple[float, float, float] = (0, 0, 0)
    ) -> InputArtifact:
        """Answers `sigmoid(shift + slope · x + carrier)`, as an engine that the choice has left."""
        return self.engine("binary", [0, 1], (slope,), (shift,), carrier)

    def engine(
        self,
        task: str,
        labels: Sequence[Any],
        slopes: tuple[float, ...],
        shifts: tuple[float, ...],
        carrier: tuple[float, float, float] = (0, 0, 0),
    ) -> InputArtifact:
        """A model whose outputs are linear in x; `labels` are those of its training, which tell classes and scale."""
        folder = self.place("engine")
        days = Days(2, 500, seed=9)
        roles = {"label": "late", "categories": ["carrier"], "numbers": ["x"]}
        label = [labels[row % len(labels)] for row in range(len(days))]
        encoding = fit({"late": label, "carrier": days.carrier, "x": days.x}, roles, {"task": task, "min_count": 1})
        (folder / "encoding.json").write_text(json.dumps(encoding.to_json()))
        number = encoding.numbers[0]
        scaled = [slope * number.std for slope in slopes]
        moved = [shift + slope * number.mean for slope, shift in zip(slopes, shifts, strict=True)]
        save_linear(folder / "model.onnx", encoding.outputs[0].name, scaled, moved, (0.0, *carrier))
        return artifact(folder, "engine", {"family": FAMILY, "engine": "onnxruntime", "precision": "fp32"})

    def dataset(self, days: Days, **more: Any) -> InputArtifact:
        """What the data stage leaves: all but the last fifth is trained on."""
        folder = self.place("dataset")
        times = (days.time * 1e6).astype(np.int64)
        frame = pl.DataFrame(
            {
                "id": days.key.tolist(),
                "departs": pl.Series(times).cast(pl.Datetime("us", "UTC")),
                "late": days.late.astype(np.int8) if days.late.dtype == np.int64 else days.late.tolist(),
                "carrier": days.carrier.tolist(),
                "x": days.x,
            }
        )
        kept = len(days) * 4 // 5
        splits = {"train": frame[:kept], "holdout": frame[kept:]}
        meta = {
            "format": 1,
            "family": "tabular",
            "columns": COLUMNS,
            "schema": {name: str(dtype) for name, dtype in frame.schema.items()},
            "splits": {name: write_split(part, folder, name) for name, part in splits.items()},
            **more,
        }
        return artifact(folder, "dataset", meta)

    def traffic(
        self, days: Days, *, engine: str = "served", private: Mapping[str, str] | None = None, size: int = 50
    ) -> InputArtifact:
        """One segment with the rows, as a replica's capture writes it; requests of `size` rows."""
        folder = self.place("captured")
        rules = Rules.of({"private": dict(private or {}), "segment": 1 << 40, "age": 1e9})
        writer = Capture(folder, {"endpoint": "tiny", "engine": engine}, SIGNATURE, rules, free=lambda place: 1 << 40)
        moments = np.round(days.time * 1e6).astype(np.int64).tolist()
        for start in range(0, len(days), size):
            part = slice(start, min(len(days), start + size))
            rows = part.stop - part.start
            told = Told(moments[part.stop - 1], times=moments[part], keys=days.key[part].tolist())
            columns = {"carrier": days.carrier[part].tolist(), "x": days.x[part].tolist()}
            outputs = {"probability": np.full((rows, 1), 0.5, np.float32)}
            name = f"r{days.key[part.start]}"
            writer.add(Record((name,), (rows,), size=100, told=told, columns=columns, outputs=outputs))
            if start // size % 100 == 99:
                writer.flush()
        writer.flush()
        writer.seal()
        (path,) = sealed_in(folder / CAPTURE)
        target = self.place("traffic")
        (target / "segment.arrows").write_bytes(path.read_bytes())
        return artifact(target, "traffic", reading.summary(target / "segment.arrows"))

    def labels(self, days: Days, *, order: int = 1, delay: float = DAY, keep: Any = None) -> InputArtifact:
        """One batch, a label a row; `keep` is a mask of those that come."""
        lines, label = [], days.late.tolist()
        for row in np.flatnonzero(np.ones(len(days), bool) if keep is None else keep).tolist():
            moment = round((days.time[row] + delay) * 1e6)
            lines.append({"key": days.key[row], "label": label[row], "time": moment})
        return self.batch(lines, order)

    def batch(self, lines: list[dict[str, Any]], order: int = 1) -> InputArtifact:
        folder = self.place("labels")
        whole = [{"order": order, "line": n, "arrived": line["time"], **line} for n, line in enumerate(lines, 1)]
        (folder / "labels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in whole))
        return artifact(folder, "labels", label_reading.summary(folder / "labels.jsonl"))

    def run(self, step: Step, inputs: Mapping[str, InputArtifact], output: str) -> InputArtifact:
        """What the loop does around a step: its entry in a work folder, and the artifact of its output."""
        work = self.place(f"work-{step.name}")
        context = StepContext(step.name, step.options, step.setup, inputs, work, work, self.folder, step.seed or 0)
        load(step.entry)(context)
        declared = json.loads((work / "out" / f"{output}.json").read_text())
        return artifact(work / "out" / output, declared["kind"], declared["meta"])


def artifact(folder: Path, kind: str, meta: Mapping[str, Any]) -> InputArtifact:
    files = tuple(FileEntry(name, digest_file(path), path.stat().st_size) for name, path in walk_files(folder))
    return InputArtifact(Artifact(kind, files, meta).digest, kind, meta, folder)


def save_linear(path: Path, output: str, slopes: list[float], shifts: list[float], by_code: tuple[float, ...]) -> None:
    """output[k] = shifts[k] + slopes[k] · number + by_code[category]; code 0 is an unknown category."""
    categories = helper.make_tensor_value_info("categories", TensorProto.INT64, ["n", 1])
    numbers = helper.make_tensor_value_info("numbers", TensorProto.FLOAT, ["n", 1])
    answer = helper.make_tensor_value_info(output, TensorProto.FLOAT, ["n", len(slopes)])
    constants = {"slopes": [slopes], "shifts": [shifts], "table": by_code}
    given = [numpy_helper.from_array(np.array(value, np.float32), name) for name, value in constants.items()]
    nodes = [
        helper.make_node("MatMul", ["numbers", "slopes"], ["scaled"]),
        helper.make_node("Add", ["scaled", "shifts"], ["shifted"]),
        helper.make_node("Gather", ["table", "categories"], ["own"]),
        helper.make_node("Add", ["shifted", "own"], [output]),
    ]
    graph = helper.make_graph(nodes, "linear", [categories, numbers], [answer], given)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(made)
    path.write_bytes(made.SerializeToString())
