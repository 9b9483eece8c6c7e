"""A state machine against the ledger: whatever happens in whatever order, no lease is held twice, events fold to the
state, at most one execution of a key is live, and slots are never exceeded."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from onejob.core.records import Owner
from onejob.core.state import EXECUTION, RUN, ExecutionState, RunState, allowed, final
from onejob.errors import ConflictError, LeaseLostError
from onejob.store.ledger import SqlLedger
from onejob.store.slots import Held, shares
from onejob.testing.ledger_samples import FAR, TTL, A, B, Clock, new_run, request, some_artifact
from onejob.testing.postgres import PostgresServer

KEYS = ("k1", "k2", "k3", "k4")
OWNERS = st.sampled_from([A, B, FAR])
CPUS, GPUS = 3.0, (0, 1)
NAMES = itertools.count(1)


class LedgerMachine(RuleBasedStateMachine):
    """The model: for each leased thing the token that counts, and every token that was ever given for it."""

    new_url: Callable[[], str]

    @initialize()
    def open(self) -> None:
        self.clock = Clock()
        self.dead: set[str] = set()
        self.ledger = SqlLedger(type(self).new_url(), clock=self.clock, alive=self.alive)
        self.holder: dict[tuple[str, int | str], tuple[str, str]] = {}
        self.tokens: dict[tuple[str, int | str], list[str]] = {}
        for _ in range(2):
            run = self.ledger.add_run(new_run())
            self.tokens["run", run.id] = []

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()

    def alive(self, owner: Owner) -> bool | None:
        return None if owner.host != "here" else str(owner) not in self.dead

    def given(self, what: tuple[str, int | str], owner: Owner, token: str) -> None:
        """A token was given: a new one only to a new holder, and never one that was given before to another."""
        held = self.holder.get(what)
        if held is not None and held[0] == str(owner):
            assert held[1] == token, "ours already, so the same token"
        else:
            assert token not in self.tokens[what], "a token fences, so it never comes again"
            self.tokens[what].append(token)
        self.holder[what] = (str(owner), token)

    @rule(seconds=st.sampled_from([1.0, TTL / 2, TTL, -1e6, 1e6, -5.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(owner=st.sampled_from([A, B]))
    def die_and_come_again(self, owner: Owner) -> None:
        self.dead ^= {str(owner)}

    @rule(
        key=st.sampled_from(KEYS),
        owner=OWNERS,
        cpus=st.sampled_from([0.5, 1.0, 2.0, 9.0]),
        gpus=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    )
    def claim(self, key: str, owner: Owner, cpus: float, gpus: float) -> None:
        wish = request(1, key, needs={"cpus": cpus, "gpus": gpus}, capacity={"cpus": CPUS, "gpus": list(GPUS)})
        known = self.ledger.list_executions(key=key)
        claim = self.ledger.claim(wish, owner, TTL)
        if any(e.state is ExecutionState.DONE and not e.forgotten for e in known):
            assert claim.answer == "done"
        elif any(not final(EXECUTION, e.state) for e in known):
            assert claim.answer == "busy"
        else:
            assert claim.answer in ("won", "full")
        if claim.answer == "won":
            assert claim.execution is not None
            assert claim.execution.lease is not None
            what = ("execution", claim.execution.id)
            self.tokens[what] = []
            self.given(what, owner, claim.execution.lease.token)

    @rule(data=st.data(), owner=OWNERS)
    def lease(self, data: st.DataObject, owner: Owner) -> None:
        what = data.draw(st.sampled_from(sorted(self.tokens, key=str)))
        lease = self.ledger.lease(*what, owner, TTL)
        if lease is not None:
            self.given(what, owner, lease.token)

    @rule(data=st.data(), act=st.sampled_from(["renew", "release"]))
    def renew_or_release(self, data: st.DataObject, act: str) -> None:
        what, token, current = self.pick(data)
        if token is None:
            return
        if act == "renew":
            assert self.ledger.renew(*what, token, TTL) is current
            return
        self.ledger.release(*what, token)
        if current:
            del self.holder[what]

    @rule(data=st.data(), state=st.sampled_from(list(ExecutionState)))
    def change_execution(self, data: st.DataObject, state: ExecutionState) -> None:
        what, token, current = self.pick(data, "execution")
        if token is None or state is ExecutionState.CLAIMED:
            return
        execution = self.ledger.get_execution(str(what[1]))
        outputs = {"out": some_artifact(execution.key)} if state is ExecutionState.DONE else None
        try:
            if state is ExecutionState.RUNNING:
                self.ledger.start_execution(execution.id, token, {"pid": 1})
            else:
                self.ledger.finish_execution(execution.id, token, state, outputs=outputs)
        except LeaseLostError:
            assert not current
            return
        except ConflictError:
            assert not allowed(EXECUTION, execution.state, state)
            return
        assert allowed(EXECUTION, execution.state, state)
        assert current or execution.state is state, "only the holder changes anything; ending twice is ending once"
        if final(EXECUTION, state):
            self.holder.pop(what, None)

    @rule(data=st.data(), state=st.sampled_from(list(RunState)))
    def change_run(self, data: st.DataObject, state: RunState) -> None:
        what, token, current = self.pick(data, "run")
        if token is None:
            return
        old = self.ledger.get_run(int(what[1])).state
        try:
            self.ledger.set_run(int(what[1]), state, token=token)
        except LeaseLostError:
            assert not current
        except ConflictError:
            assert current
            assert not allowed(RUN, old, state)
        else:
            assert current
            assert allowed(RUN, old, state)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        if done := self.ledger.list_executions(states=[ExecutionState.DONE]):
            self.ledger.forget_execution(data.draw(st.sampled_from(sorted(e.id for e in done))), "a test")

    def pick(self, data: st.DataObject, kind: str = "") -> tuple[tuple[str, int | str], str | None, bool]:
        """Something leased, one of all the tokens ever given for it, and whether that is the one that counts."""
        things = sorted((what for what in self.tokens if what[0] == kind or not kind), key=str)
        if not things:
            return ("", ""), None, False
        what = data.draw(st.sampled_from(things))
        if not self.tokens[what]:
            return what, None, False
        token = data.draw(st.sampled_from(self.tokens[what]))
        return what, token, self.holder.get(what, ("", ""))[1] == token

    @invariant()
    def the_lease_is_the_models(self) -> None:
        for what in self.tokens if hasattr(self, "ledger") else ():
            known = self.ledger.get_run(int(what[1])) if what[0] == "run" else self.ledger.get_execution(str(what[1]))
            held = None if known.lease is None else (known.lease.owner, known.lease.token)
            assert held == self.holder.get(what)

    @invariant()
    def one_is_live_and_slots_suffice(self) -> None:
        if not hasattr(self, "ledger"):
            return
        live = self.ledger.list_executions(states=[ExecutionState.CLAIMED, ExecutionState.RUNNING])
        assert max(Counter(e.key for e in live).values(), default=0) <= 1
        held = [Held(e.id, "", e.needs["cpus"], e.needs["gpus"], tuple(e.needs["gpu_ids"])) for e in live]
        assert sum(h.cpus for h in held) <= CPUS or len(held) == 1
        for device in GPUS:
            assert sum(shares(h).get(device, 0.0) for h in held) <= 1.0

    @invariant()
    def events_fold_to_the_state(self) -> None:
        if not hasattr(self, "ledger"):
            return
        folded: dict[str, str] = {}
        events = self.ledger.events()
        for event in events:
            if event.kind in {*ExecutionState, *RunState} and event.subject.startswith(("run/", "execution/")):
                assert folded.get(event.subject) == event.data.get("from")
                folded[event.subject] = event.kind
        states = {f"run/{run.id}": str(run.state) for run in self.ledger.list_runs()}
        states |= {f"execution/{e.id}": str(e.state) for e in self.ledger.list_executions()}
        assert folded == states
        assert [event.seq for event in events] == list(range(1, len(events) + 1))


@pytest.fixture
def sqlite_urls(tmp_path: Path) -> Callable[[], str]:
    return lambda: str(tmp_path / f"{next(NAMES)}.db")


@pytest.fixture
def postgres_urls(postgres: PostgresServer) -> Iterator[Callable[[], str]]:
    names: list[str] = []

    def new() -> str:
        names.append(f"machine{next(NAMES)}")
        return postgres.database(names[-1])

    yield new
    for name in names:
        postgres.drop(name)


@pytest.mark.parametrize(("urls", "examples"), [("sqlite_urls", 20), ("postgres_urls", 5)], ids=["sqlite", "postgres"])
def test_the_ledger_keeps_its_promises(request: pytest.FixtureRequest, urls: str, examples: int) -> None:
    class Machine(LedgerMachine):
        new_url = staticmethod(request.getfixturevalue(urls))

    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples, stateful_step_count=30, deadline=None, suppress_health_check=checks, database=None
        ),
    )
