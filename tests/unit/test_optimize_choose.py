"""Which candidate becomes the engine: a table of figures and what follows from them."""

from __future__ import annotations

import pytest

from onejob.errors import StepError
from onejob.optimize.accept import Comparison
from onejob.optimize.choose import Figures, choose, clearly_faster
from onejob.optimize.measure import Clocks, Latency, measure

BASE = "onnxruntime-fp32"
ROUNDS = 21


def latency(ms: float, batch: int = 1, wobble: float = 0.0) -> Latency:
    rounds = tuple(ms * (1 + wobble * (n % 5 - 2)) for n in range(ROUNDS))
    return Latency(batch=batch, p50=ms, p90=ms * 1.1, cpu=ms, calls=ROUNDS * 50, rounds=rounds)


def figures(name: str, one_row: float, full: float = 1.0, *, accepted: bool = True, reason: str = "") -> Figures:
    times = {"latency": latency(one_row), "throughput": latency(full, batch=64)}
    return Figures(name, accepted, reason or ("fine" if accepted else "loses too much"), latency=times)


def test_the_fastest_accepted_one_wins() -> None:
    choice = choose([figures(BASE, 1.0), figures("openvino-fp32", 0.9), figures("int8", 0.5)], "latency", base=BASE)
    assert choice.name == "int8"
    assert choice.why == (
        "int8 answers one row in 0.5 ms, the fastest within the budget: 2.00 times as fast as onnxruntime-fp32."
    )


@pytest.mark.parametrize(
    ("candidates", "target", "chosen"),
    [
        pytest.param([figures(BASE, 1.0), figures("int8", 0.5, accepted=False)], "latency", BASE, id="not accepted"),
        pytest.param([figures(BASE, 1.0), figures("slow", 3.0)], "latency", BASE, id="slower"),
        pytest.param([figures(BASE, 1.0), figures("int8", 0.985)], "latency", BASE, id="a tie goes to the simpler"),
        pytest.param(
            [figures(BASE, 1.0), figures("openvino-fp32", 0.5), figures("int8", 0.495)],
            "latency",
            "openvino-fp32",
            id="a tie of the faster two",
        ),
        pytest.param([figures(BASE, 1.0, 9.0), figures("int8", 2.0, 3.0)], "throughput", "int8", id="throughput"),
        pytest.param([figures(BASE, 1.0, 9.0), figures("int8", 2.0, 3.0)], "latency", BASE, id="latency"),
        pytest.param([figures(BASE, 1.0, accepted=False), figures("int8", 2.0)], "latency", "int8", id="base rejected"),
        pytest.param(
            [figures(BASE, 1.0), Figures("broken", False, "does not answer")], "latency", BASE, id="unmeasured"
        ),
    ],
)
def test_the_choice(candidates: list[Figures], target: str, chosen: str) -> None:
    choice = choose(candidates, target, base=BASE)
    assert choice.name == chosen
    assert choice.why.startswith(f"{chosen} answers ")


def test_nothing_within_the_budget_is_an_error_that_says_why_of_each() -> None:
    candidates = [figures(BASE, 1.0, accepted=False, reason="cannot be certified"), Figures("b", False, "is broken")]
    with pytest.raises(StepError, match=r"onnxruntime-fp32: cannot be certified; b: is broken.*Allow a greater drop"):
        choose(candidates, "latency", base=BASE)


def test_faster_is_judged_round_by_round() -> None:
    drift = [1 + n / 5 for n in range(ROUNDS)]  # the machine gets slower all the while, for both alike
    assert clearly_faster([0.9 * t for t in drift], drift)
    assert not clearly_faster(drift, [0.9 * t for t in drift])
    assert not clearly_faster([0.98 * t for t in drift], drift), "less than is worth a less simple engine"
    half = [0.5 if n % 2 else 1.5 for n in range(ROUNDS)]
    assert not clearly_faster(half, [1.0] * ROUNDS), "as often slower as faster"


def test_figures_as_json_have_nulls_where_there_is_no_number() -> None:
    comparison = Comparison(rows=9, reference=0.7, metric=0.7, drop=0.0, bound=float("inf"), difference=1e-6)
    one = Figures(
        "a", True, "fine", precision="fp32", size=10, comparison=comparison, latency={"latency": latency(2.0)}
    )
    data = one.to_json()
    assert data["bound"] is None
    assert data["metric"] == 0.7
    assert data["latency"] == [
        {"batch": 1, "p50_ms": 2.0, "p90_ms": 2.2, "cpu_ms": 2.0, "rows_per_second": 500.0, "calls": 1050}
    ]
    assert Figures("b", False, "broken").to_json()["metric"] is None


class Machine:
    """A fake clock that the candidates' calls move on; it records who was called when."""

    def __init__(self) -> None:
        self.now = 0
        self.called: list[tuple[str, int]] = []

    def candidate(self, name: str, ns: int):
        def call(n: int) -> None:
            self.called.append((name, n))
            self.now += ns

        return call

    def clocks(self) -> Clocks:
        return Clocks(wall=lambda: self.now, cpu=lambda: self.now * 2)


def test_measuring_interleaves_the_candidates_and_moves_on_the_order() -> None:
    machine = Machine()
    calls = {"a": machine.candidate("a", 1_000_000), "b": machine.candidate("b", 3_000_000)}
    found = measure(calls, 8, rounds=4, calls=2, clocks=machine.clocks())
    timed = machine.called[40:]  # after the warm-up
    assert [name for name, _ in timed] == list("aabb" + "bbaa" + "aabb" + "bbaa")
    assert [n for name, n in timed if name == "a"] == list(range(8)), "other rows each time"
    assert found["a"].p50 == 1.0
    assert found["a"].p90 == 1.0
    assert found["a"].cpu == 2.0
    assert found["a"].calls == 8
    assert found["a"].batch == 8
    assert found["b"].rounds == (3.0, 3.0, 3.0, 3.0)


def test_percentiles_are_over_all_calls_and_rounds_keep_their_medians() -> None:
    now, taken = 0, iter([0] * 20 + [1, 1, 9, 2, 2, 8])

    def call(_: int) -> None:
        nonlocal now
        now += next(taken) * 1_000_000

    found = measure({"a": call}, 1, rounds=2, calls=3, clocks=Clocks(wall=lambda: now, cpu=lambda: 0))["a"]
    assert found.rounds == (1.0, 2.0)
    assert found.p50 == 2.0
    assert found.p90 == 8.0
