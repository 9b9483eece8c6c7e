"""Trains with PyTorch: one process, or a gang of ranks that hold the same model and share each batch.

A step depends on (seed, step, rows of its global batch) and on the state before it, nothing else. So a training that
is killed and goes on from a checkpoint ends with the same bytes as one that never was. The loss of a batch is the mean
over its rows whatever the ranks: each adds (sum of its rows' losses) / (rows of the batch), also where it has no rows.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from math import isfinite
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onejob.core import faults
from onejob.core.artifact import Json, canonical, digest_json, short
from onejob.core.context import StepContext, Stopped, append_line, read_lines
from onejob.core.plugin import load
from onejob.engines.dataset import read_split
from onejob.errors import DataError, StepError
from onejob.train import checkpoint
from onejob.train.engines.gang import Gang, join
from onejob.train.engines.replica import Replica
from onejob.train.order import State, share, steps_per_epoch, take
from onejob.train.schedule import rate

EVALUATE_ROWS = 8192  # rows in one forward pass over the held-out rows
BAD_ROWS = 5  # how many rows of a non-finite loss each rank names


@dataclass(frozen=True, slots=True)
class Recipe:
    """The step's options that count, as the plan resolved them."""

    family: str
    engine: str
    epochs: int
    batch: int
    lr: float
    schedule: str
    warmup: int
    weight_decay: float
    optimizer: str
    clip: float
    keep: str
    metric: str | None
    model: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Split:
    """Rows as the model takes them."""

    features: tuple[Tensor, ...]
    label: Tensor
    rows: int

    def at(self, rows: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        return tuple(feature[rows] for feature in self.features), self.label[rows]


def train(context: StepContext) -> None:
    """Entry of the step `train`: input `dataset`, output `checkpoint`; on every rank of the gang."""
    torch.set_num_threads(context.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(context.seed)  # for families that draw; our own don't
    recipe = Recipe(**context.options)
    gang = join(
        context.rank,
        context.world,
        fingerprint=_fingerprint(context),
        limit=float(context.setup.get("arrive", 60.0)),
        say=lambda line: print(line, flush=True),
    )
    training = Training(context, recipe, gang)
    training.resume()
    training.run()
    training.finish()
    gang.close()


class Training:
    """A training under way; `step` counts the steps that are done."""

    def __init__(self, context: StepContext, recipe: Recipe, gang: Gang) -> None:
        self.context, self.recipe, self.gang = context, recipe, gang
        self.started = time.monotonic()
        self.dataset = context.inputs["dataset"]
        self.family = _Family.load(recipe.family)
        self.encoding, self.data, self.holdout = self._read()
        self.replica = Replica(
            self.family.model.build(self.encoding, dict(recipe.model), context.seed),
            recipe.optimizer,
            recipe.weight_decay,
        )
        self.total = recipe.epochs * steps_per_epoch(self.data.rows, recipe.batch)
        self.order = State(self.dataset.digest, context.seed, 0, 0)
        self.step = 0
        self.saved: int | None = None
        self.resumed_from: int | None = None
        self.scores: dict[str, float] = {}
        self.best: dict[str, Json] | None = None
        self.best_weights: dict[str, NDArray[Any]] = {}
        self.folder = context.scratch / "checkpoints"
        self.history = context.scratch / "metrics.jsonl"

    # ---- the steps -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end; raises Stopped, with everything saved, once any rank is asked to stop."""
        every = int(self.context.setup.get("checkpoint", 100))
        while self.step < self.total:
            epoch = self.order.epoch
            stop = self._one_step()
            if self.order.epoch != epoch:
                self._evaluate(epoch)
            if stop or self.step % every == 0 or self.step == self.total:
                self._save()
            if stop and self.step < self.total:
                raise Stopped(f"stopped after step {self.step} of {self.total}; the next start goes on from there")

    def _one_step(self) -> bool:
        before = time.monotonic()
        batch, after = take(self.order, self.data.rows, self.recipe.batch)
        mine = torch.from_numpy(share(batch, self.gang.rank, self.gang.world))
        losses = self._backward(mine, len(batch))
        self.gang.sum(self.replica.bucket)
        loss, stop = self.replica.bucket[-2:].tolist()
        norm = self.replica.norm()
        if not isfinite(loss) or not isfinite(norm):
            raise self._not_finite(mine, losses, loss)
        recipe = self.recipe
        lr = rate(self.step, self.total, lr=recipe.lr, schedule=recipe.schedule, warmup=recipe.warmup)
        self.replica.step(lr, recipe.clip, norm)
        faults.reach("train.step")
        epoch, self.order, self.step = self.order.epoch, after, self.step + 1
        rows_per_s = len(batch) / max(1e-9, time.monotonic() - before)
        self._report({"split": "train", "epoch": epoch, "step": self.step, "loss": loss, "lr": lr}, rows_per_s)
        return bool(stop > 0)

    def _backward(self, mine: Tensor, batch: int) -> Tensor:
        """Gradients of this rank's rows into the bucket; gives their losses. No rows (a small last batch): zeros."""
        self.replica.clear()
        losses = torch.zeros(0)
        if len(mine):
            features, label = self.data.at(mine)
            module: Any = self.replica.module
            module.rows(self.context.seed, self.step, mine)
            losses = module.loss(module(*features), label)
            (losses.sum() / batch).backward()
            losses = losses.detach()
        self.replica.bucket[-2] = losses.sum() / batch
        self.replica.bucket[-1] = float(self.context.stopping())
        return losses

    def _not_finite(self, mine: Tensor, losses: Tensor, loss: float) -> StepError:
        """Name the rows: every rank tells the others of its own, and all raise the same error."""
        own = mine[~torch.isfinite(losses)][:BAD_ROWS]
        told = torch.full((BAD_ROWS,), -1, dtype=torch.int64)
        told[: len(own)] = own
        rows = [row for part in self.gang.gather(told) for row in part.tolist() if row >= 0]
        what = f"the loss is {loss}" if not isfinite(loss) else "the gradient is not finite"
        where = f", from training rows {', '.join(map(str, rows))}" if rows else ""
        kept = f" The checkpoint of step {self.saved} is kept." if self.saved is not None else ""
        return StepError(
            f"{what} at step {self.step} (epoch {self.order.epoch}){where}",
            place="train",
            cure=f"Try a smaller lr or clip, or look at these rows.{kept}",
        )

    # ---- scores --------------------------------------------------------------------------------------------------

    def _evaluate(self, epoch: int) -> None:
        """Score the held-out rows at the end of an epoch, on rank 0; the others wait in their next sum."""
        if self.gang.rank or not self.holdout.rows:
            return
        self.scores = self.family.metrics.score(self.holdout.label.numpy(), self._outputs())
        self._report({"split": "holdout", "epoch": epoch, "step": self.step, **self.scores})
        shown = "  ".join(f"{name} {value:.4f}" for name, value in self.scores.items())
        print(f"epoch {epoch + 1}/{self.recipe.epochs}  step {self.step}/{self.total}  {shown}", flush=True)
        if self.recipe.keep == "best":
            self._keep_best()

    def _outputs(self) -> dict[str, NDArray[Any]]:
        module = self.replica.module.eval()
        parts = []
        with torch.inference_mode():
            for start in range(0, self.holdout.rows, EVALUATE_ROWS):
                parts.append(module(*(feature[start : start + EVALUATE_ROWS] for feature in self.holdout.features)))
        module.train()
        names = [spec.name for spec in self.encoding.outputs]
        return {name: torch.cat([part[n] for part in parts]).numpy() for n, name in enumerate(names)}

    def _keep_best(self) -> None:
        higher = self.family.metrics.HIGHER_IS_BETTER
        metric = self.recipe.metric or next((name for name in higher if name in self.scores), None)
        if metric not in self.scores:
            raise DataError(
                f"the held-out rows have no score {metric!r}, by which the best model is to be kept",
                cure=f'They have: {", ".join(self.scores) or "none"}. Set [train] metric, or keep = "last".',
            )
        value = self.scores[metric]
        if self.best is None or (value > self.best["value"] if higher[metric] else value < self.best["value"]):
            self.best = {"step": self.step, "metric": metric, "value": value, "scores": dict(self.scores)}
            self.best_weights = self.replica.weights()

    def _report(self, line: dict[str, Json], rows_per_s: float | None = None) -> None:
        if self.gang.rank:
            return
        if rows_per_s is not None:
            line = {**line, "rows_per_s": round(rows_per_s, 1)}
            self.context.progress(self.step, self.total, "steps")
        self.context.metric(line)
        append_line(self.history, line)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Save on all ranks; when any returns, the checkpoint counts."""
        if self.saved == self.step:
            return
        tensors = self.replica.tensors()
        replica = checkpoint.replica_digest(tensors)
        digests = self.gang.gather(torch.tensor(list(bytes.fromhex(replica)), dtype=torch.uint8))
        checkpoint.require_equal([bytes(digest.tolist()).hex() for digest in digests], self.step)
        own = {f"best/{name}": array for name, array in self.best_weights.items()}
        checkpoint.write_shard(self.folder, self.step, self.gang.rank, self.gang.world, tensors, replica, own)
        self.gang.wait()
        if self.gang.rank == 0:
            checkpoint.publish(self.folder, self.step, self.gang.world, self._state())
        self.gang.wait()
        self.saved = self.step

    def _state(self) -> dict[str, Json]:
        return {
            "recipe": self._recipe_digest(),
            "order": self.order.to_json(),
            "scores": self.scores,
            "best": self.best,
        }

    def _recipe_digest(self) -> str:
        return digest_json({**self.context.options, "encoding": self.encoding.to_json()})

    def resume(self) -> None:
        """Go on from the newest complete checkpoint, if there is one; rank 0 says which."""
        self.context.scratch.mkdir(parents=True, exist_ok=True)
        found = None
        if self.gang.rank == 0:
            found = checkpoint.newest_complete(self.folder, self.gang.world, self.context.warn)
            checkpoint.discard_newer(self.folder, found.step if found else -1)
        step = self.gang.first(found.step if found else -1)
        if step >= 0:
            self._restore(found or checkpoint.read(self.folder, step, self.gang.world))
        if self.gang.rank == 0:
            self._rewrite_history()

    def _restore(self, found: checkpoint.Checkpoint) -> None:
        order = State.from_json(found.state["order"])
        other = [
            name
            for name, theirs, ours in (
                ("dataset", order.dataset, self.order.dataset),
                ("seed", order.seed, self.order.seed),
                ("options", found.state["recipe"], self._recipe_digest()),
            )
            if theirs != ours
        ]
        if other:
            raise StepError(
                f"the checkpoint of step {found.step} belongs to another training: other {', '.join(other)}",
                place=str(self.folder),
                cure="Remove this folder to start anew.",
            )
        self.replica.restore(found.tensors)
        self.order, self.step = order, found.step
        self.saved = self.resumed_from = found.step
        self.scores, self.best = dict(found.state["scores"]), found.state["best"]
        self.best_weights = {
            name.removeprefix("best/"): array for name, array in found.tensors.items() if name.startswith("best/")
        }
        if self.gang.rank == 0:
            print(f"goes on from the checkpoint of step {found.step} of {self.total}", flush=True)
        else:
            self.best_weights = {}  # rank 0 keeps them

    def _rewrite_history(self) -> None:
        """Metrics of steps that will be made again are dropped; the rest is told again to a new execution."""
        lines = [line for line in read_lines(self.history) if line["step"] <= self.step]
        checkpoint.write_durable(self.history, b"".join(canonical(line) + b"\n" for line in lines))
        if not (self.context.work / "metrics.jsonl").exists():
            for line in lines:
                self.context.metric(line)

    # ---- the beginning and the end -------------------------------------------------------------------------------

    def _read(self) -> tuple[Any, Split, Split]:
        """The encoding, learnt from the training rows, and both splits as tensors."""
        meta = self.dataset.meta
        roles = meta["columns"]
        names = [roles["label"], *roles["categories"], *roles["numbers"]]
        columns = read_split(self.dataset.path, meta, "train", names)
        encoding = self.family.encode.fit(columns, roles, dict(self.recipe.model))
        data = _split(encoding, columns, roles["label"])
        held = meta["splits"].get("holdout", {"rows": 0})["rows"]
        if not held:
            if self.recipe.keep == "best":
                raise DataError("the dataset has no held-out rows to tell the best model by", cure='Or keep = "last".')
            return encoding, data, Split((), torch.zeros(0), 0)
        return encoding, data, _split(encoding, read_split(self.dataset.path, meta, "holdout", names), roles["label"])

    def finish(self) -> None:
        """Rank 0 leaves the checkpoint artifact and what was measured."""
        if self.gang.rank:
            return
        weights = self.best_weights if self.best else self.replica.weights()
        out = self.context.out("checkpoint")
        checkpoint.write_durable(out / "model.safetensors", checkpoint.to_bytes(weights, {"format": 1}))
        checkpoint.write_durable(out / "encoding.json", canonical(self.encoding.to_json()))
        meta = {
            "format": 1,
            "family": self.recipe.family,
            "model": dict(self.recipe.model),
            "train": {"epochs": self.recipe.epochs, "steps": self.total, "rows": self.data.rows},
            "columns": self.dataset.meta["columns"],
        }
        self.context.emit("checkpoint", "checkpoint", meta)
        seconds = time.monotonic() - self.started
        rows = (self.total - (self.resumed_from or 0)) * self.recipe.batch
        self.context.measure(
            {
                "seconds": round(seconds, 3),
                "rows_per_s": round(rows / max(1e-9, seconds), 1),
                "scores": self.best["scores"] if self.best else self.scores,
                "best_step": self.best["step"] if self.best else None,
                "resumed_from": self.resumed_from,
            }
        )


@dataclass(frozen=True, slots=True)
class _Family:
    """The three modules of a family."""

    encode: ModuleType
    model: ModuleType
    metrics: ModuleType

    @classmethod
    def load(cls, package: str) -> _Family:
        return cls(*(load(f"{package}.{name}") for name in ("encode", "model", "metrics")))


def _split(encoding: Any, columns: Mapping[str, NDArray[Any]], label: str) -> Split:
    features = encoding.encode(columns)
    truth = torch.from_numpy(np.ascontiguousarray(encoding.encode_label(columns[label])))
    return Split(tuple(torch.from_numpy(features[spec.name]) for spec in encoding.features), truth, len(truth))


def _fingerprint(context: StepContext) -> str:
    """What all ranks must have in common, as a line that a person can compare."""
    packages = " ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "onejob"))
    options = short(digest_json({"options": dict(context.options), "seed": context.seed, "threads": context.threads}))
    data = short(context.inputs["dataset"].digest)
    return f"python {platform.python_version()} {packages} options {options} dataset {data}"
