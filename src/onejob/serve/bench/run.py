"""Carry a load out: all loads on all targets in their turns, or the search for the highest rate that keeps a goal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from onejob.serve.bench.crew import Crew
from onejob.serve.bench.outcome import Outcome, Tick
from onejob.serve.bench.report import Step, step_of
from onejob.serve.bench.schedule import CLOSED, OPEN, Load, Turn, turns
from onejob.serve.bench.search import Goals, Search
from onejob.serve.bench.target import Target
from onejob.serve.bench.wish import CONNECTIONS_OPEN, ROUNDS, SECONDS, Wish, loads_of

LOOK_AROUND = 2.0
"""Seconds of the closed loop by which a search finds where to begin."""


@dataclass(frozen=True, slots=True)
class Look:
    """A turn as it goes on."""

    target: str
    load: str
    turn: int
    """From 1."""
    turns: int
    """0: it isn't known yet how many."""
    seconds: float | None
    """That the turn measures."""
    ticks: Sequence[Tick]


@dataclass
class Result:
    """One target under one load."""

    target: int
    load: Load
    rounds: list[Outcome] = field(default_factory=list)

    @property
    def total(self) -> Outcome:
        """All rounds together."""
        made = Outcome(self.load)
        for outcome in self.rounds:
            made.add(outcome)
        return made


@dataclass
class Found:
    """Where the search on one target ended."""

    target: int
    search: Search
    steps: list[Step] = field(default_factory=list)


@dataclass
class Findings:
    """All that was measured; as far as it went, if a person stopped it."""

    results: list[Result] = field(default_factory=list)
    searches: list[Found] = field(default_factory=list)
    interrupted: bool = False


OnLook = Callable[[Look], object]


def measure(targets: Sequence[Target], wish: Wish, on_look: OnLook) -> Findings:
    """Every load on every target, in turns; Ctrl-C ends it, and what was measured so far is given."""
    loads, findings = loads_of(wish), Findings()
    with Crew(targets, wish.processes, wish.cpus) as crew:
        try:
            if wish.goals is not None:
                _search(crew, targets, wish, loads[0], wish.goals, findings, on_look)
            else:
                _measure(crew, targets, wish, loads, findings, on_look)
        except KeyboardInterrupt:  # between two turns
            findings.interrupted = True
        findings.interrupted |= crew.interrupted
    return findings


def _measure(
    crew: Crew, targets: Sequence[Target], wish: Wish, loads: Sequence[Load], findings: Findings, on_look: OnLook
) -> None:
    rounds = wish.rounds or (ROUNDS if len(targets) > 1 else 1)
    planned = turns(
        len(targets), loads, warmup=wish.warmup, seconds=wish.measured, requests=wish.requests, rounds=rounds
    )
    results = {(load, target): Result(target, load) for load in loads for target in range(len(targets))}
    for number, turn in enumerate(planned, 1):
        outcome = _take(crew, targets, turn, wish, number, len(planned), on_look)
        result = results[turn.load, turn.target]
        if outcome.requests or not crew.interrupted:
            result.rounds.append(outcome)
            if result not in findings.results:
                findings.results.append(result)
        if crew.interrupted:
            return


def _search(
    crew: Crew,
    targets: Sequence[Target],
    wish: Wish,
    load: Load,
    goals: Goals,
    findings: Findings,
    on_look: OnLook,
) -> None:
    """Step by step on each target in turn, so that a disturbance meets all of them."""
    number = 0

    def take(target: int, load: Load, seconds: float) -> Outcome:
        nonlocal number
        number += 1
        turn = Turn(target, load, wish.warmup, seconds, round=number)
        return _take(crew, targets, turn, wish, number, 0, on_look)

    for target in range(len(targets)):
        start = load.rate
        if start is None:
            start = take(target, Load(CLOSED, load.connections), min(LOOK_AROUND, wish.measured or SECONDS)).rate / 2
            if crew.interrupted:
                return
        findings.searches.append(Found(target, Search(start)))
    going = list(findings.searches)
    while going:
        for found in list(going):
            rate = found.search.next_rate
            if rate is None:
                going.remove(found)
                continue
            step = Load(OPEN, (wish.connections or (CONNECTIONS_OPEN,))[0], rate, None, wish.arrivals)
            outcome = take(found.target, step, wish.measured or SECONDS)
            if crew.interrupted:
                return
            why = goals.broken_by(outcome)
            found.steps.append(step_of(outcome, rate, why))
            found.search.learn(not why)


def _take(
    crew: Crew, targets: Sequence[Target], turn: Turn, wish: Wish, number: int, total: int, on_look: OnLook
) -> Outcome:
    look = Look(targets[turn.target].name, str(turn.load), number, total, turn.seconds, ())
    on_look(look)
    return crew.take(
        turn,
        timeout=wish.timeout,
        seed=wish.seed * 1_000_003 + turn.round,  # the same arrivals for all targets of a round
        on_tick=lambda ticks: on_look(replace(look, ticks=tuple(ticks))),
    )
