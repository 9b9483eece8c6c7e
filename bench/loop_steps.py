"""The loop's own steps, run one after another without an endpoint: for benches that need many challengers.

Each step is planned by the product's planner and run by its entry in this process, in a folder of its own; what a
step leaves is the next one's input. Traffic is written by serving's own capture, labels as the ledger seals them. What
is left out: HTTP, processes, the ledger. Training is the product's step with one process.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from onejob.core.artifact import Artifact, FileEntry, digest_file, walk_files
from onejob.core.context import InputArtifact, StepContext
from onejob.core.plan import Existing, Step, Upstream
from onejob.core.plugin import load
from onejob.core.records import Segment
from onejob.core.tensor import TensorSpec
from onejob.core.traffic import CAPTURE
from onejob.data.engines.shards import write_split
from onejob.data.spec import Spec as DataSpec
from onejob.data.spec import plan_extend
from onejob.loop import commands
from onejob.loop.tasks import lay_out
from onejob.monitor import capture, labels
from onejob.monitor.engines.reading import cut_of
from onejob.monitor.plan import Window, gate_since, gate_step, labelled_step, watch_since, watch_step
from onejob.monitor.spec import Spec as MonitorSpec
from onejob.serve.capture import Capture, Record, Rules, Signature
from onejob.serve.identify import Roles, Told
from onejob.serve.spool import sealed_in
from onejob.train.spec import Spec as TrainSpec
from onejob.train.spec import plan as plan_train

FAMILY = "onejob.families.tabular"
DAY = 86_400.0
REQUEST_ROWS = 100
ANY = Existing("00" * 32)


@dataclass
class Loop:
    """A job's specs, and a folder for what its steps leave."""

    folder: Path
    data: DataSpec
    train: TrainSpec
    monitor: MonitorSpec
    base: InputArtifact
    """The dataset of the job's first run."""
    traffic: list[InputArtifact] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def place(self, name: str) -> Path:
        folder = self.folder / f"{next(self.numbers):05d}-{name}"
        folder.mkdir(parents=True)
        return folder

    def run(self, step: Step, inputs: Mapping[str, InputArtifact]) -> InputArtifact:
        """A step's only output."""
        work = self.place(step.name)
        context = StepContext(step.name, step.options, step.setup, inputs, work, work, self.folder, step.seed or 0, 1)
        with contextlib.redirect_stdout(io.StringIO()):
            load(step.entry)(context)
        (output,) = step.outputs
        told = json.loads((work / "out" / f"{output}.json").read_text())
        return artifact(work / "out" / output, told["kind"], told["meta"])

    # ---- what comes in -------------------------------------------------------------------------------------------

    def capture(self, frame: pl.DataFrame) -> None:
        """One segment of traffic: the rows of `frame` (`time` in microseconds, `key`, the inputs), in order of time."""
        columns = self.data.columns
        inputs = {name: TensorSpec(name, "BYTES", (-1, 1)) for name in columns.categories}
        inputs |= {name: TensorSpec(name, "FP64", (-1, 1)) for name in columns.numbers}
        outputs = {"probability": TensorSpec("probability", "FP32", (-1, 1))}
        signature = Signature(inputs, outputs, True, Roles(columns.label, columns.time, columns.id))
        rules = Rules.of({"segment": 1 << 40, "age": 1e9})
        folder = self.place("captured")
        writer = Capture(folder, {"endpoint": "bench", "engine": "served"}, signature, rules)
        for number, start in enumerate(range(0, frame.height, REQUEST_ROWS)):
            part = frame.slice(start, REQUEST_ROWS)
            times = part["time"].to_list()
            told = Told(times[-1], times=times, keys=part["key"].to_list())
            rows = {name: part[name].to_list() for name in inputs}
            # the monitor's steps ask the models anew, so what was answered doesn't matter
            answer = {"probability": np.full((part.height, 1), 0.5, np.float32)}
            writer.add(Record((f"r{times[0]}-{number}",), (part.height,), 100, told, rows, answer))
            if number % 100 == 99:
                writer.flush()
        writer.flush()
        writer.seal()
        assert not any(writer.dropped.values()), writer.dropped
        (path,) = sealed_in(folder / CAPTURE)
        target = self.place("traffic")
        shutil.move(path, target / "segment.arrows")
        self.traffic.append(artifact(target, "traffic", capture.summary(target / "segment.arrows")))

    def labels(self, frame: pl.DataFrame, label: pl.Series, order: int = 1) -> InputArtifact:
        """One batch: the labels of `frame`'s rows, a day late; null is a label that doesn't come."""
        told = zip(frame["key"].to_list(), frame["time"].to_list(), label.to_list(), strict=True)
        lines = []
        for number, (key, time, value) in enumerate((each for each in told if each[2] is not None), 1):
            moment = time + round(DAY * 1e6)
            line = {"order": order, "line": number, "arrived": moment, "key": key, "label": value, "time": moment}
            lines.append(json.dumps(line) + "\n")
        folder = self.place("labels")
        (folder / "labels.jsonl").write_text("".join(lines))
        return artifact(folder, "labels", labels.summary(folder / "labels.jsonl"))

    # ---- the steps -----------------------------------------------------------------------------------------------

    def labelled(self, batches: Sequence[InputArtifact], since: float, until: float, now: float) -> InputArtifact:
        """Labelled rows of a window, as seen at `now`."""
        parts = [*self.traffic, *(each for each in batches if each.meta["begins"] <= now)]
        found = {f"{part.kind}.{number:06d}": part for number, part in enumerate(parts, 1)}
        segments = [
            Segment(n, "bench", p.digest, p.kind, p.meta["begins"], p.meta["ends"], p.meta["rows"])
            for n, p in enumerate(parts, 1)
        ]
        step = labelled_step(self.monitor, segments, Window(since, until, now))
        return self.run(step, {name: found[name] for name in step.inputs})

    def extend(self, rows: InputArtifact, cut: float) -> InputArtifact:
        """The dataset of a retraining on all history up to the cut."""
        upstream = Upstream("bench", str(self.folder), 0, {}, family=FAMILY)
        (step,) = plan_extend(self.data, upstream, base=ANY, labelled=ANY, cut=cut).steps
        return self.run(step, {"dataset": self.base, "labelled": rows})

    def fit(self, dataset: InputArtifact, seed: int) -> InputArtifact:
        """A checkpoint."""
        upstream = Upstream("bench", str(self.folder), seed, {"dataset": ANY}, family=FAMILY)
        (step,) = plan_train(self.train, upstream).steps
        return self.run(step, {"dataset": dataset})

    def gate(self, rows: InputArtifact, champion: Model, challenger: Model, **rules: Any) -> dict[str, Any]:
        """The decision; `rules` replace those of [monitor.gate]."""
        spec = self.monitor
        assert spec.gate is not None
        spec = spec.model_copy(update={"gate": spec.gate.model_copy(update=rules)})
        given = {
            "labelled": rows,
            "champion": champion.checkpoint,
            "challenger": challenger.checkpoint,
            "dataset": challenger.dataset,
            "champion_dataset": champion.dataset,
        }
        named: dict[str, Any] = dict.fromkeys(given, ANY)
        step = gate_step(spec, family=FAMILY, **named)
        found: dict[str, Any] = json.loads(self.run(step, given).file("decision.json").read_text())
        return found

    def watch(self, rows: InputArtifact, champion: Model, former: Model, since: float) -> dict[str, Any]:
        """The report of a champion on probation since `since`."""
        given = {
            "labelled": rows,
            "dataset": champion.dataset,
            "champion": champion.checkpoint,
            "former": former.checkpoint,
        }
        named: dict[str, Any] = dict.fromkeys(given, ANY)
        step = watch_step(self.monitor, family=FAMILY, since=since, **named)
        found: dict[str, Any] = json.loads(self.run(step, given).file("report.json").read_text())
        return found

    def gate_from(self, cut: float) -> float:
        return gate_since(self.monitor, cut)

    def watch_from(self, since: float) -> float:
        return watch_since(self.monitor, since)

    def spoilt(self, dataset: InputArtifact, fault: Callable[[pl.DataFrame], pl.DataFrame]) -> InputArtifact:
        """The dataset with a fault in its training rows."""
        folder = self.place("spoilt")
        shards = dataset.meta["splits"]["train"]["shards"]
        frame = fault(pl.concat([pl.read_ipc(dataset.file(each["path"])) for each in shards]))
        shutil.copytree(dataset.file("holdout"), folder / "holdout")
        splits = {**dataset.meta["splits"], "train": write_split(frame, folder, "train")}
        return artifact(folder, "dataset", {**dataset.meta, "splits": splits})

    def forget(self, *made: InputArtifact) -> None:
        """Gives the disk back what isn't needed any more."""
        for each in made:
            shutil.rmtree(each.path, ignore_errors=True)


@dataclass(frozen=True)
class Model:
    dataset: InputArtifact
    checkpoint: InputArtifact

    @property
    def cut(self) -> float:
        found = cut_of(self.dataset)
        assert found is not None
        return found


def artifact(folder: Path, kind: str, meta: Mapping[str, Any]) -> InputArtifact:
    files = tuple(FileEntry(name, digest_file(path), path.stat().st_size) for name, path in walk_files(folder))
    return InputArtifact(Artifact(kind, files, meta).digest, kind, meta, folder)


def data_run(job: Path, home: Path, folder: Path) -> InputArtifact:
    """The dataset that `onejob run` of a job file makes, its files in `folder`."""
    with commands.open(home) as session, contextlib.redirect_stdout(io.StringIO()):
        view = commands.run(session, job)
        known = session.ledger.get_ref(f"{view.job}/dataset@latest")
        assert known is not None
        made = session.ledger.get_artifact(known.digest)
        lay_out(session, made, folder)
        return InputArtifact(made.digest, made.kind, made.meta, folder)


def rows_of(dataset: InputArtifact) -> pl.DataFrame:
    """All rows of a dataset, whichever split they are in."""
    shards = [each["path"] for split in dataset.meta["splits"].values() for each in split["shards"]]
    return pl.concat([pl.read_ipc(dataset.file(path)) for path in shards])
