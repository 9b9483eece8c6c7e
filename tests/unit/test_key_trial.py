"""The trial: a step calls a helper in another module; the helper changes; the step must run again, and say why.

Caches that look at the step's own source only, as several known tools do, fail it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from onejob.core.artifact import Artifact, FileEntry, digest_bytes
from onejob.core.code import closure
from onejob.core.key import StepKey, build_key, explain
from onejob.core.plan import Source, Step
from onejob.core.spec import StageSpec, counted

FILES = {
    "steps.py": '''"""The user's step."""

from helper import *
from pack.inner import deep


def train(context):
    return scale(21) + deep()
''',
    "helper.py": '''import functools
from extra import offset

FACTOR = 2


def logged(function):
    return function


@functools.cache
def scale(x, by=1):
    """Scales."""
    return x * by + offset()


class Scaler:
    def fit(self, rows):
        return max(rows)


try:
    import quick
except ImportError:
    quick = None
''',
    "extra.py": "def offset():\n    return 0\n",
    "quick.py": "SPEED = 1\n",
    "pack/__init__.py": "from .again import again\nVERSION = 1\n",
    "pack/again.py": "def again():\n    return 1\n",
    "pack/inner.py": "def deep():\n    import late\n    return late.value\n",
    "late.py": "value = 3\n",
    "unrelated.py": "x = 1\n",
}


@dataclass(frozen=True)
class World:
    """Everything that the key of the step is made of."""

    files: Mapping[str, str]
    rows: str = "1,2\n3,4\n"
    epochs: int = 4
    seed: int = 7
    packages: Mapping[str, str] = (("polars", "2.0"),)  # type: ignore[assignment]

    def key(self, folder: Path) -> StepKey:
        """Write the project and make the step's key, as a new process would."""
        for name, text in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

        class Spec(StageSpec):
            epochs: int = self.epochs
            """A default of the stage's own table: the job file doesn't name it."""

        step = Step(
            name="train",
            stage="train",
            entry="steps:train",
            options=counted(Spec()),
            inputs={"source": Source((("flights.csv", str(folder / "flights.csv")),))},
            outputs=("checkpoint",),
            seed=self.seed,
        )
        digest = digest_bytes(self.rows.encode())
        source = Artifact("source", (FileEntry("flights.csv", digest, len(self.rows)),))
        code = closure([step.entry], folder)
        assert code.warnings == ()
        files = {"source": {"flights.csv": digest}}
        return build_key(step, {"source": source.digest}, code, dict(self.packages), "3.11", None, sources=files)


BEFORE = World(FILES)


def edited(name: str, old: str, new: str) -> World:
    assert FILES[name].count(old) == 1
    return replace(BEFORE, files={**FILES, name: FILES[name].replace(old, new)})


RUNS_AGAIN = [
    (edited("helper.py", "x * by", "x * by * 50"), "helper.py changed (function scale)"),
    (edited("helper.py", "FACTOR = 2", "FACTOR = 3"), "helper.py changed (constant FACTOR)"),
    (edited("helper.py", "@functools.cache", "@logged"), "helper.py changed (decorator of scale)"),
    (edited("helper.py", "by=1", "by=2"), "helper.py changed (default argument of scale)"),
    (edited("helper.py", "max(rows)", "min(rows)"), "helper.py changed (method Scaler.fit)"),
    (edited("helper.py", '"""Scales."""', '"""Scales well."""'), "helper.py changed (function scale)"),
    (edited("extra.py", "return 0", "return 1"), "extra.py changed (function offset)"),
    (edited("quick.py", "SPEED = 1", "SPEED = 2"), "quick.py changed (constant SPEED)"),
    (edited("pack/__init__.py", "VERSION = 1", "VERSION = 2"), "pack/__init__.py changed (constant VERSION)"),
    (edited("pack/again.py", "return 1", "return 2"), "pack/again.py changed (function again)"),
    (edited("pack/inner.py", "return late.value", "return 2"), "pack/inner.py changed (function deep)"),
    (edited("late.py", "value = 3", "value = 4"), "late.py changed (constant value)"),
    (edited("steps.py", "scale(21)", "scale(22)"), "steps.py changed (function train)"),
    (replace(BEFORE, packages=(("polars", "2.1"),)), "polars 2.0 -> 2.1"),
    (replace(BEFORE, rows="1,2\n3,5\n"), "source flights.csv changed"),
    (replace(BEFORE, epochs=5), "option epochs 4 -> 5"),
    (replace(BEFORE, seed=8), "seed 7 -> 8"),
]


@pytest.mark.parametrize(("after", "sentence"), RUNS_AGAIN, ids=[sentence for _, sentence in RUNS_AGAIN])
def test_a_change_makes_the_step_run_again_and_is_named(after: World, sentence: str, tmp_path: Path) -> None:
    old, new = BEFORE.key(tmp_path), after.key(tmp_path)
    assert old.digest != new.digest
    assert [change.sentence() for change in explain(old, new)] == [sentence]


@pytest.mark.parametrize(
    "after",
    [
        BEFORE,
        edited("helper.py", "return x * by", "# a comment\n    return x * by"),
        edited("helper.py", "FACTOR = 2", "FACTOR = (\n    2\n)  # twice"),
        edited("helper.py", '"""Scales."""', "'Scales.'"),
        edited("late.py", "value = 3", "\n\n\nvalue   =   3"),
        edited("unrelated.py", "x = 1", "x = 2"),
    ],
)
def test_a_comment_formatting_or_a_module_that_is_not_reached_does_not(after: World, tmp_path: Path) -> None:
    old, new = BEFORE.key(tmp_path), after.key(tmp_path)
    assert old.digest == new.digest
    assert explain(old, new) == []


def test_a_new_import_brings_its_module_along(tmp_path: Path) -> None:
    after = edited("extra.py", "def offset", "import unrelated\ndef offset")
    told = [change.sentence() for change in explain(BEFORE.key(tmp_path), after.key(tmp_path))]
    assert told == ["extra.py changed (imports)", "unrelated.py is reached now"]


def test_two_folders_give_one_key(tmp_path: Path) -> None:
    assert BEFORE.key(tmp_path / "one") == BEFORE.key(tmp_path / "an other")
