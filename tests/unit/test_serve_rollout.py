"""What the host decides, without processes: back-off, verdicts, what becomes of a trial; and the plan of [serve]."""

from __future__ import annotations

import pytest

from onejob.core.counters import BUCKETS, Counters
from onejob.core.plan import Existing, Output, Upstream
from onejob.errors import JobFileError
from onejob.serve.rollout import (
    BACKOFF_CAP,
    START_TRIES,
    Readings,
    Standing,
    Tally,
    Trial,
    backoff,
    judge,
    weigh,
)
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
        "batch": {"max": 64, "wait_ms": 2.0, "latency_ms": None},
        "threads": None,
        "queue": 1024,
        "timeout": 30.0,
        "grace": 10.0,
    }
    named = plan(Spec(name="films"), upstream(checkpoint=checkpoint)).serving
    assert named is not None
    assert (named.name, named.artifact) == ("films", checkpoint)
    with pytest.raises(JobFileError, match="no model to serve"):
        plan(Spec(), upstream())


def test_a_canary_is_planned_only_where_the_job_has_one() -> None:
    planned = plan(Spec.model_validate({"rollout": {"canary": 0.1, "hold": "5m"}}), upstream(engine=Existing("e")))
    assert planned.serving is not None
    assert planned.serving.options["rollout"] == {
        "canary": 0.1,
        "hold": 300.0,
        "requests": 100,
        "shadow": False,
        "max_errors": 0.01,
        "max_slower": 1.5,
    }
    trial = Trial.of(planned.serving.options)
    assert trial == Trial(
        share=0.1, hold=300.0, requests=100, shadow=False, max_errors=0.01, max_slower=1.5, floor_ms=3.0
    )
    without = plan(Spec.model_validate({"rollout": {"shadow": True}}), upstream(engine=Existing("e"))).serving
    assert without is not None
    assert "rollout" not in without.options
    assert Trial.of(without.options) is None


TRIAL = Trial(share=0.1, hold=60.0, requests=100, shadow=False, max_errors=0.01, max_slower=1.5)


def tally(answered: int = 0, failed: int = 0, ms: float = 5.0) -> Tally:
    counters = Counters()
    for _ in range(answered):
        counters.observe(int(ms * 1e6))
    return Tally(answered, failed, tuple(counters.latency))


@pytest.mark.parametrize(
    ("former", "new", "seconds", "word"),
    [
        (tally(900), tally(100), 59.0, "wait"),
        (tally(900), tally(100), 60.0, "full"),
        (tally(900), tally(99), 600.0, "wait"),  # the least number of requests
        (tally(900), tally(99, 1), 60.0, "full"),  # 1 % is allowed
        (tally(900), tally(98, 2), 59.0, "wait"),  # too few to say, before the time has come
        (tally(900), tally(98, 2), 60.0, "back"),
        (tally(900), tally(0, 3), 1.0, "wait"),
        (tally(900), tally(0, 4), 1.0, "back"),
        (tally(900), tally(90, 10), 1.0, "back"),
        (tally(810, 90), tally(90, 10), 60.0, "full"),  # the old engine fails as often
        (tally(900), tally(100, ms=30.0), 1.0, "back"),
        (tally(900), tally(99, ms=30.0), 1.0, "wait"),  # too few to say how slow it is
        (tally(99), tally(100, ms=30.0), 1.0, "wait"),  # and so with the old engine
        (tally(900), tally(100, ms=6.0), 60.0, "full"),
        (tally(900, ms=0.2), tally(100, ms=0.9), 60.0, "full"),  # under a millisecond
    ],
)
def test_what_becomes_of_a_trial(former: Tally, new: Tally, seconds: float, word: str) -> None:
    assert weigh(TRIAL, Readings(former, new, seconds))[0] == word


def mixed(low: int, high: int) -> Tally:
    """So many answers of 5 ms, and of 50."""
    return Tally(
        low + high, 0, tuple(a + b for a, b in zip(tally(low).latency, tally(high, ms=50.0).latency, strict=True))
    )


def test_latency_must_be_clearly_worse_while_the_trial_lasts_and_less_so_at_its_end() -> None:
    """A tenth of slow answers moves the 90th percentile; of a few requests, so many may be chance."""
    for high, before, after in ((10, "wait", "full"), (14, "wait", "back"), (25, "back", "back")):
        new = mixed(100 - high, high)
        assert weigh(TRIAL, Readings(tally(900), new, 59.0))[0] == before
        assert weigh(TRIAL, Readings(tally(900), new, 60.0))[0] == after


def test_why_a_trial_went_back_has_figures() -> None:
    _, why = weigh(TRIAL, Readings(tally(900), tally(90, 10), 1.0))
    assert why == ("10 of its 100 requests failed (10.00%), 0 of 900 with the old engine (0.00%); max_errors is 0.01")
    _, why = weigh(TRIAL, Readings(tally(900), tally(100, ms=30.0), 1.0))
    assert "ms over 100 requests" in why
    assert "max_slower is 1.5" in why
    assert weigh(TRIAL, Readings(Tally(), Tally(), 1.0, faulty="the engine hangs")) == ("back", "the engine hangs")
    assert weigh(TRIAL, Readings(Tally(), Tally(), 1.0, deaths=1)) == ("wait", "")
    assert weigh(TRIAL, Readings(Tally(), Tally(), 1.0, deaths=2))[0] == "back"


def test_tallies_add_up() -> None:
    both = tally(3, 1) + tally(2, 2)
    assert (both.requests, both.failed, sum(both.latency), len(both.latency)) == (8, 3, 5, BUCKETS)


@pytest.mark.parametrize(
    "wrong",
    [{"name": "a/b"}, {"port": 70000}, {"replicas": 0}, {"batch": {"max": 0}}, {"x": 1}, {"rollout": {"canary": 1.5}}],
)
def test_spec_refuses(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Spec.model_validate(wrong)
