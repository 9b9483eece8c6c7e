"""The flights model on the month after it was trained: mean ROC AUC over three seeds, from PyTorch and from the engine.

    python bench/model.py [--seeds 7 8 9]

Runs the example job in homes of their own (nothing of the user's is touched), builds March with the same steps, and
scores it with the checkpoint and with the chosen engine. Then runs the job of the first seed again in another home and
another folder, and compares the digests of dataset, checkpoint and candidates.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
import numpy as np

from onejob.core.plugin import load
from onejob.engines import open_model
from onejob.engines.dataset import read_split
from onejob.loop import commands
from onejob.loop.session import Session
from onejob.loop.tasks import lay_out

EXAMPLE = Path(commands.__file__).parents[2] / "examples" / "flights"
MARCH = {
    'first = "2013-01-01", last = "2013-02-28"': 'first = "2013-03-01", last = "2013-03-31"',
    '    { split = { by = "time", at = "2013-02-22" } },\n': "",
    "holdout_min = 2_000\n": "",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8, 9])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="onejob-bench-") as folder:
        root = Path(folder)
        first = copy_job(root / "a" / "flights")
        with commands.open(root / "home") as session:
            march = march_rows(session, root / "march")
            scores = [score_seed(session, first, seed, march) for seed in args.seeds]
            digests = digests_of(session, args.seeds[0], first)
        other = copy_job(root / "elsewhere" / "deeper" / "job")
        with commands.open(root / "other home") as session:
            again = digests_of(session, args.seeds[0], other)
    report(args.seeds, scores, digests, again)


def copy_job(folder: Path, changes: dict[str, str] | None = None, *, name: str = "flights") -> Path:
    """The example without its endpoint, with some texts of the job file replaced."""
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / "job.toml").read_text()
    for old, new in (changes or {}).items():
        assert old in text, f"the example no longer says {old!r}"
        text = text.replace(old, new)
    cut = "[serve]" if changes is None else "[train]"
    text = text[: text.index(cut)].replace('name = "flights"', f'name = "{name}"')
    (folder / "job.toml").write_text(text)
    return folder / "job.toml"


def march_rows(session: Session, folder: Path) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """March, built by the job's own steps: columns by name, and the label."""
    commands.run(session, copy_job(folder, MARCH, name="march"))
    artifact, place = unpack(session, "march/dataset@latest", folder / "rows")
    columns = artifact["columns"]
    rows = read_split(place, artifact, "train", [*columns["categories"], *columns["numbers"], columns["label"]])
    label = rows.pop(columns["label"])
    return rows, label


def score_seed(session: Session, job: Path, seed: int, march: tuple[dict[str, Any], Any]) -> dict[str, float]:
    """AUC on March of the checkpoint and of the engine of one seed."""
    commands.run(session, job, [f"run.seed={seed}"])
    found = {}
    for kind in ("checkpoint", "engine"):
        meta, place = unpack(session, f"flights/{kind}@latest", job.parent / f"{kind}-{seed}")
        encoding = load(f"{meta['family']}.encode:load")(json.loads((place / "encoding.json").read_text()))
        model = open_model(place, meta, threads=1)
        outputs = model.infer(encoding.encode(march[0]))
        label = encoding.encode_label(march[1])
        found[kind] = load(f"{meta['family']}.metrics:score")(label, outputs)["auc"]
        found[f"{kind}_name"] = meta.get("engine", "pytorch")
        found["rows"] = len(label)
    return found


def unpack(session: Session, ref: str, folder: Path) -> tuple[dict[str, Any], Path]:
    """An artifact's metadata, and its files laid out in a folder."""
    known = session.ledger.get_ref(ref)
    assert known is not None, ref
    artifact = session.ledger.get_artifact(known.digest)
    lay_out(session, artifact, folder)
    return dict(artifact.meta), folder


def digests_of(session: Session, seed: int, job: Path) -> dict[str, str]:
    """What each step but the choice has left; the choice is measured, so it may differ."""
    view = commands.run(session, job, [f"run.seed={seed}"])
    made = {step.name: session.ledger.get_execution(step.execution or "").outputs for step in view.steps}
    return {
        f"{step}: {name}": digest
        for step, outputs in made.items()
        for name, digest in outputs.items()
        if step != "optimize.choose"
    }


def report(seeds: list[int], scores: list[dict[str, float]], one: dict[str, str], two: dict[str, str]) -> None:
    print(machine.describe())
    print(f"march: {scores[0]['rows']:,} flights")
    print("seed   PyTorch   engine    difference   engine is")
    for seed, score in zip(seeds, scores, strict=True):
        gap = abs(score["checkpoint"] - score["engine"])
        print(f"{seed:4}   {score['checkpoint']:.5f}   {score['engine']:.5f}   {gap:.1e}      {score['engine_name']}")
    print(f"mean   {np.mean([s['checkpoint'] for s in scores]):.5f}   {np.mean([s['engine'] for s in scores]):.5f}")
    print("\ntwo fresh homes, two folders:")
    for name in one:
        print(f"  {'same' if one[name] == two.get(name) else 'DIFFERENT'}  {name} {one[name][:12]}")
    sys.exit(0 if one == two else 1)


if __name__ == "__main__":
    main()
