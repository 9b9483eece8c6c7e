"""Step keys: they depend on their components alone, and every difference is told in the right words."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onejob.core.artifact import canonical
from onejob.core.code import Closure, ModuleCode
from onejob.core.key import StepKey, build_key, explain
from onejob.core.plan import Needs, Output, Step

BASE: dict[str, Any] = {
    "format": 1,
    "stage": "train",
    "step": "train",
    "entry": "onejob.train.engines.torch:train",
    "options": {
        "epochs": 4,
        "optimizer": {"name": "adam", "lr": 0.001},
        "steps": ["drop_nulls", {"split": {"by": "time", "test": 0.1}}],
        "name": "5",
    },
    "inputs": {"dataset": "1234abcd5678" + "0" * 52},
    "code": {
        "project": {
            "helper.py": {"digest": "a1", "parts": {"function scale": "1", "constant FACTOR": "2", "imports": "3"}},
            "model.py": {"digest": "b1", "parts": {"class Net": "1"}},
        },
        "engine": {
            "onejob/train/engines/torch.py": {"digest": "c1", "parts": {"function train": "1"}},
            "onejob/core/plan.py": {"digest": "d1", "parts": {"class Step": "1"}},
        },
        "reads": {"weights.npy": "e1"},
    },
    "packages": {"polars": "2.0.0", "numpy": "2.1.0", "cupy": "absent"},
    "python": "3.11.7",
    "hardware": {"device": "cpu", "flags": ["avx", "avx2"]},
    "seed": 7,
    "world": 1,
    "threads": 1,
}


def changed(change: Callable[[dict[str, Any]], object]) -> StepKey:
    components = copy.deepcopy(BASE)
    change(components)
    return StepKey(components)


def put(path: str, value: object) -> Callable[[dict[str, Any]], object]:
    """A change that sets a value; a path's parts are set apart by slashes, with "~" for a slash."""

    def change(components: dict[str, Any]) -> None:
        *parents, last = (part.replace("~", "/") for part in path.split("/"))
        here: Any = components
        for part in parents:
            here = here[int(part) if isinstance(here, list) else part]
        here[int(last) if isinstance(here, list) else last] = value

    return change


def drop(path: str) -> Callable[[dict[str, Any]], object]:
    def change(components: dict[str, Any]) -> None:
        *parents, last = (part.replace("~", "/") for part in path.split("/"))
        here: Any = components
        for part in parents:
            here = here[part]
        del here[last]

    return change


def module(digest: str, **parts: str) -> dict[str, Any]:
    return {"digest": digest, "parts": {name.replace("_", " "): value for name, value in parts.items()}}


SENTENCES: list[tuple[Callable[[dict[str, Any]], object], list[str]]] = [
    (put("options/epochs", 5), ["option epochs 4 -> 5"]),
    (put("options/epochs", 4.0), ["option epochs 4 -> 4.0"]),
    (put("options/epochs", True), ["option epochs 4 -> true"]),
    (put("options/epochs", None), ["option epochs 4 -> none"]),
    (put("options/epochs", "none"), ['option epochs 4 -> "none"']),
    (put("options/name", 5), ['option name "5" -> 5']),
    (put("options/optimizer/lr", 0.01), ["option optimizer.lr 0.001 -> 0.01"]),
    (put("options/optimizer/name", "sgd"), ["option optimizer.name adam -> sgd"]),
    (put("options/optimizer", "sgd"), ['option optimizer {"lr":0.001,"name":"adam"} -> sgd']),
    (put("options/dropout", 0.1), ["option dropout added: 0.1"]),
    (put("options/a.b c", 0.1), ['option "a.b c" added: 0.1']),
    (drop("options/epochs"), ["option epochs removed (was 4)"]),
    (put("options/steps/1/split/test", 0.2), ["option steps[1].split.test 0.1 -> 0.2"]),
    (put("options/steps", ["drop_nulls"]), ['option steps[1] removed (was {"split":{"by":"time","test":0.1}})']),
    (put("options/steps", ["sort", *BASE["options"]["steps"]]), ["option steps[0] added: sort"]),
    (put("options/steps", BASE["options"]["steps"][::-1]), ["option steps: other order: ["]),
    (put("options/name", "x" * 100), [f'option name "5" -> {"x" * 57}...']),
    (put("inputs/dataset", "99" * 32), ["input dataset 1234abcd5678 -> 999999999999"]),
    (put("inputs/labels", "99" * 32), ["input labels added"]),
    (drop("inputs/dataset"), ["input dataset removed"]),
    (put("code/project/helper.py", module("a2", function_scale="9", constant_FACTOR="2", imports="3")), [
        "helper.py changed (function scale)"
    ]),
    (put("code/project/helper.py", module("a2", function_scale="1", constant_FACTOR="9", decorator_of_load="1")), [
        "helper.py changed (constant FACTOR; decorator of load; imports)"
    ]),
    (put("code/project/helper.py/digest", "a2"), ["helper.py changed (order of its parts)"]),
    (put("code/project/more.py", module("x")), ["more.py is reached now"]),
    (drop("code/project/model.py"), ["model.py is no longer reached"]),
    (put("code/reads/weights.npy", "e2"), ["file weights.npy changed"]),
    (put("code/reads/more.npy", "e2"), ["file more.npy added"]),
    (drop("code/reads/weights.npy"), ["file weights.npy removed"]),
    (put("code/engine/onejob~train~engines~torch.py", module("c2", function_train="2")), [
        "onejob's own code changed (train/engines/torch.py: function train)"
    ]),
    (put("code/engine/onejob~core~job.py", module("c2")), ["onejob's own code changed (core/job.py is reached now)"]),
    (put("packages/polars", "2.1.0"), ["polars 2.0.0 -> 2.1.0"]),
    (put("packages/rich", "14.0"), ["package rich added (14.0)"]),
    (put("packages/cupy", "13.1"), ["package cupy added (13.1)"]),
    (put("packages/polars", "absent"), ["package polars is not installed (was 2.0.0)"]),
    (put("packages/jax", "absent"), ["package jax is not installed"]),
    (drop("packages/polars"), ["package polars is no longer imported (was 2.0.0)"]),
    (put("python", "3.12.1"), ["Python 3.11.7 -> 3.12.1"]),
    (put("hardware/device", "H200"), ["hardware device cpu -> H200"]),
    (put("hardware/flags", ["avx", "avx2", "amx"]), ["hardware flags[2] added: amx"]),
    (put("hardware", None), ['hardware {"device":"cpu","flags":["avx","avx2"]} -> none']),
    (put("seed", 8), ["seed 7 -> 8"]),
    (put("seed", None), ["seed 7 -> none"]),
    (put("world", 2), ["world size 1 -> 2"]),
    (put("threads", 2), ["threads 1 -> 2"]),
    (put("entry", "mine:train"), ["entry onejob.train.engines.torch:train -> mine:train"]),
    (put("stage", "data"), ["stage train -> data"]),
    (put("step", "train.two"), ["step train -> train.two"]),
    (put("format", 2), ["format of the key 1 -> 2"]),
    (put("later", 1), ["later none -> 1"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "sentences"), SENTENCES, ids=[text[0] for _, text in SENTENCES])
def test_every_change_changes_the_digest_and_is_told(
    change: Callable[[dict[str, Any]], object], sentences: list[str]
) -> None:
    old, new = StepKey(BASE), changed(change)
    assert old.digest != new.digest
    told = [one.sentence() for one in explain(old, new)]
    if sentences[0].endswith("["):  # the beginning of a long one
        told = [text[: len(sentences[0])] for text in told]
    assert told == sentences


@given(st.sets(st.integers(0, len(SENTENCES) - 1), max_size=4))
def test_explanations_are_empty_exactly_where_digests_are_equal(chosen: set[int]) -> None:
    components = copy.deepcopy(BASE)
    for at in chosen:
        try:
            SENTENCES[at][0](components)
        except (KeyError, IndexError, TypeError):  # another change took away what this one changes
            continue
    old, new = StepKey(BASE), StepKey(components)
    assert (old.digest == new.digest) == (explain(old, new) == []) == (canonical(BASE) == canonical(components))
    assert (explain(new, old) == []) == (explain(old, new) == [])


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, VALUES)
def test_any_two_options_are_told_apart_exactly_if_their_digests_differ(one: Any, two: Any) -> None:
    old, new = StepKey({**BASE, "options": {"x": one}}), StepKey({**BASE, "options": {"x": two}})
    changes = explain(old, new)
    assert (old.digest == new.digest) == (changes == [])
    assert all(change.component.startswith("options.x") and "option x" in change.sentence() for change in changes)
    assert not any("\0order" in change.sentence() or "<object" in change.sentence() for change in changes)


@given(st.randoms())
def test_the_order_of_entries_and_the_way_through_json_do_not_count(dice: random.Random) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            names = list(value)
            dice.shuffle(names)
            return {name: shuffled(value[name]) for name in names}
        return value

    key = StepKey(shuffled(BASE))
    assert key.digest == StepKey(BASE).digest == StepKey(json.loads(canonical(key.components))).digest
    assert explain(key, StepKey(BASE)) == []


def test_parts_only_explain() -> None:
    assert changed(put("code/project/helper.py/parts", {})).digest == StepKey(BASE).digest
    assert explain(StepKey(BASE), changed(put("code/project/helper.py/parts", {}))) == []


def test_what_a_person_changed_comes_first() -> None:
    def change(components: dict[str, Any]) -> None:
        put("python", "3.12.1")(components)
        put("packages/polars", "3")(components)
        put("seed", 1)(components)
        put("options/epochs", 9)(components)
        put("code/project/helper.py/digest", "z")(components)

    told = [one.sentence().split()[0] for one in explain(StepKey(BASE), changed(change))]
    assert told == ["helper.py", "option", "seed", "polars", "Python"]


def test_long_explanations_are_cut() -> None:
    def change(components: dict[str, Any]) -> None:
        for at in range(9):
            components["code"]["engine"][f"onejob/x{at}.py"] = module("1")
        components["code"]["project"]["helper.py"] = module("2", **{f"function_f{at}": "1" for at in range(9)})

    helper, engine = explain(StepKey(BASE), changed(change))
    assert helper.sentence().endswith("; and 6 more)")
    assert engine.sentence().endswith("; and 3 more files)")
    assert len(helper.parts) == 12


def test_two_long_texts_that_begin_alike_are_not_shown_as_equal() -> None:
    old, new = changed(put("options/name", "x" * 100)), changed(put("options/name", "x" * 101))
    (change,) = explain(old, new)
    assert change.sentence() == f"option name changed (both begin with {'x' * 57}...)"


def test_one_entry_added_to_a_long_list_is_one_change() -> None:
    old, new = (
        changed(put("options/name", ["a"] * 300)),
        changed(put("options/name", [*["a"] * 150, "b", *["a"] * 150])),
    )
    assert [change.sentence() for change in explain(old, new)] == ["option name[150] added: b"]


# ---- building ----------------------------------------------------------------------------------------------------

STEP = Step(
    name="train",
    stage="train",
    entry="onejob.train.engines.torch:train",
    options={"epochs": 4},
    inputs={"dataset": Output("data", "dataset")},
    outputs=("checkpoint",),
    needs=Needs(cpus=2, memory=1 << 30, processes=2),
    seed=7,
    threads=3,
    hardware="device",
)
CODE = Closure({"helper.py": ModuleCode("a", {"imports": "1"})}, {}, ("numpy",), {}, ("helper.py:1: careful",))


def build(step: Step = STEP, code: Closure = CODE, **more: Any) -> StepKey:
    return build_key(step, {"dataset": "d" * 64}, code, {"numpy": "2.1"}, "3.11.7", "cpu", **more)


def test_a_key_has_every_component() -> None:
    assert build().components == {
        "format": 1,
        "stage": "train",
        "step": "train",
        "entry": "onejob.train.engines.torch:train",
        "options": {"epochs": 4},
        "inputs": {"dataset": "d" * 64},
        "code": {"project": {"helper.py": {"digest": "a", "parts": {"imports": "1"}}}, "engine": {}, "reads": {}},
        "packages": {"numpy": "2.1"},
        "python": "3.11.7",
        "hardware": "cpu",
        "seed": 7,
        "world": 2,
        "threads": 3,
    }


@pytest.mark.parametrize(
    "step",
    [
        replace(STEP, needs=Needs(cpus=8, memory=None, gpus=1, processes=2)),
        replace(STEP, timeout=60.0, retries=9),
        replace(STEP, setup={"secret": "by name"}),
        replace(STEP, inputs={"dataset": Output("elsewhere", "dataset")}),
    ],
)
def test_where_and_how_a_step_runs_does_not_count(step: Step) -> None:
    assert build(step) == build()


@pytest.mark.parametrize(
    "step",
    [
        replace(STEP, needs=Needs(processes=1)),
        replace(STEP, threads=1),
        replace(STEP, seed=None),
        replace(STEP, hardware="none"),
        replace(STEP, options={"epochs": 5}),
        replace(STEP, entry="mine:train"),
    ],
)
def test_what_decides_the_result_counts(step: Step) -> None:
    assert build(step).digest != build().digest


def test_warnings_and_names_of_modules_do_not_count() -> None:
    assert build(code=replace(CODE, warnings=(), modules=())).digest == build().digest


def test_hardware_is_left_out_where_it_does_not_matter() -> None:
    step = replace(STEP, hardware="none")
    assert build(step).components["hardware"] is None


def test_sources_are_told_by_their_files_and_count_by_their_digest_alone() -> None:
    old = build(sources={"dataset": {"flights.csv": "1", "planes.csv": "2", "gone.csv": "3"}})
    assert old.digest == build().digest
    components = {**build(sources={"dataset": {"flights.csv": "9", "planes.csv": "2", "new.csv": "4"}}).components}
    components["inputs"] = {"dataset": "e" * 64}
    told = [change.sentence() for change in explain(old, StepKey(components))]
    assert told == ["source flights.csv changed", "source gone.csv removed", "source new.csv added"]
    components.pop("sources")
    (change,) = explain(old, StepKey(components))
    assert change.sentence() == f"input dataset {'d' * 12} -> {'e' * 12}"
