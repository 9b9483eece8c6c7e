"""The [train] table becomes one step, or a list of all its mistakes."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from onejob.core.plan import Output, Step, Upstream
from onejob.errors import JobFileError
from onejob.train.spec import Spec, plan

DATASET = Output("data", "dataset")
UPSTREAM = Upstream("flights", "/project", 7, {"dataset": DATASET}, family="onejob.families.tabular")


def the_step(spec: Spec, upstream: Upstream = UPSTREAM) -> Step:
    (step,) = plan(spec, upstream).steps
    return step


def test_the_step_says_all_that_decides_its_result():
    step = the_step(Spec(lr=0.01, threads=2, resources={"processes": 2, "cpus": 1.5}, model={"hidden": [8]}))
    assert (step.name, step.stage, step.entry) == ("train", "train", "onejob.train.engines.torch:train")
    assert (step.inputs, step.outputs, step.hardware) == ({"dataset": DATASET}, ("checkpoint",), "device")
    assert (step.seed, step.threads, step.needs.processes, step.needs.cpus) == (7, 2, 2, 1.5)
    assert step.roots == tuple(f"onejob.families.tabular.{name}" for name in ("encode", "model", "metrics"))
    assert step.options["lr"] == 0.01
    assert step.options["family"] == "onejob.families.tabular"
    assert step.options["model"] == {"task": None, "hidden": [8], "dropout": 0.0, "embedding": 32, "min_count": 5}
    assert Step.from_json(step.to_json()) == step


def test_how_often_to_save_and_how_long_to_wait_do_not_count():
    first, other = the_step(Spec()), the_step(Spec(checkpoint=3, arrive="2m", timeout="1h", retries=9))
    assert other.setup == {"checkpoint": 3, "arrive": 120.0}
    assert first.options == other.options
    assert (other.timeout, other.retries) == (3600.0, 9)


def test_a_plugin_may_train():
    upstream = replace(UPSTREAM, plugins={"train/mine": "mine.engine:train"})
    assert the_step(Spec(engine="mine"), upstream).entry == "mine.engine:train"


def test_all_mistakes_are_reported_at_once():
    spec = Spec(engine="torhc", metric="aux", model={"hiden": [8], "dropout": 2, "hidden": [0]})
    with pytest.raises(JobFileError) as caught:
        plan(spec, UPSTREAM)
    assert caught.value.mistakes == [
        "[train] engine: no engine is called 'torhc'. Did you mean 'torch'?",
        "[train] model.hidden[0]: 0 must be at least 1",
        "[train] model.dropout: 2 must be less than 1.0",
        "[train] model.hiden: unknown key 'hiden'. Did you mean 'hidden'?",
        "[train] metric: the family has no score 'aux'. Did you mean 'auc'?",
    ]


def test_what_it_can_not_do_is_said():
    with pytest.raises(JobFileError, match="torch engine trains on CPUs"):
        plan(Spec(resources={"gpus": 1}), UPSTREAM)
    with pytest.raises(JobFileError, match=r"Add the table \[data\]"):
        plan(Spec(), replace(UPSTREAM, outputs={}))
    with pytest.raises(ValidationError):
        Spec(epochs=0)


def test_a_family_of_the_project_is_read_anew_and_leaves_no_module(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()
    upstream = replace(UPSTREAM, project=str(tmp_path), family="mine")
    for default in (3, 44):
        (tmp_path / "mine" / "options.py").write_text(
            f"from onejob.core.spec import Model\nclass Options(Model):\n    depth: int = {default}\n"
        )
        assert the_step(Spec(), upstream).options["model"] == {"depth": default}
    assert not [name for name in sys.modules if name.partition(".")[0] == "mine"]
    assert str(tmp_path) not in sys.path
