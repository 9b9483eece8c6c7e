"""What the host decides, without processes: back-off and verdicts; and the plan of [serve]."""

from __future__ import annotations

import pytest

from onejob.core.plan import Existing, Output, Upstream
from onejob.errors import JobFileError
from onejob.serve.rollout import BACKOFF_CAP, START_TRIES, Standing, backoff, judge
from onejob.serve.spec import Spec, plan


def test_backoff_doubles_up_to_a_cap() -> None:
    assert [backoff(n) for n in range(5)] == [0, 0.2, 0.4, 0.8, 1.6]
    assert backoff(10_000) == BACKOFF_CAP


def standing(*, ready: bool = False, reported: bool = False, deaths: int = 0, overdue: bool = False) -> Standing:
    return Standing(ready, reported, deaths, overdue)


@pytest.mark.parametrize(
    ("replicas", "verdict"),
    [
        ([standing()], "wait"),
        ([standing(ready=True), standing()], "wait"),
        ([standing(ready=True), standing(ready=True)], "switch"),
        ([standing(ready=True), standing(reported=True)], "give up"),
        ([standing(deaths=START_TRIES - 1)], "wait"),
        ([standing(deaths=START_TRIES)], "give up"),
        ([standing(overdue=True)], "give up"),
    ],
)
def test_a_generation_takes_over_when_all_are_ready_and_is_given_up_when_one_fails(
    replicas: list[Standing], verdict: str
) -> None:
    assert judge(replicas) == verdict


def upstream(**outputs: Output | Existing) -> Upstream:
    return Upstream(job="movies", project="/p", seed=0, outputs=outputs)


def test_plan_serves_the_engine_or_else_the_checkpoint() -> None:
    engine, checkpoint = Output("optimize.choose", "engine"), Existing("c1")
    planned = plan(Spec(), upstream(engine=engine, checkpoint=checkpoint))
    assert planned.steps == ()
    assert planned.serving is not None
    assert planned.serving.name == "movies"
    assert planned.serving.artifact == engine
    assert planned.serving.options == {
        "host": "127.0.0.1",
        "port": 0,
        "replicas": 1,
        "batch": {"max": 64, "wait_ms": 2.0},
        "threads": 1,
        "queue": 1024,
        "timeout": 30.0,
        "grace": 10.0,
    }
    named = plan(Spec(name="films"), upstream(checkpoint=checkpoint)).serving
    assert named is not None
    assert (named.name, named.artifact) == ("films", checkpoint)
    with pytest.raises(JobFileError, match="no model to serve"):
        plan(Spec(), upstream())


@pytest.mark.parametrize("wrong", [{"name": "a/b"}, {"port": 70000}, {"replicas": 0}, {"batch": {"max": 0}}, {"x": 1}])
def test_spec_refuses(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Spec.model_validate(wrong)
