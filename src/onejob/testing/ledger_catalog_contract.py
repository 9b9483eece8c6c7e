"""The half of the ledger's contract that is about artifacts, refs, endpoints and the log; see ledger_contract."""

from __future__ import annotations

from typing import Any

import pytest

from onejob.core.ports import Ledger
from onejob.core.records import Owner, Run
from onejob.core.state import EndpointState
from onejob.errors import ConflictError, NotFoundError, UsageError
from onejob.testing.ledger_samples import TTL, A, Clock, OpenLedger, leave, new_run, request, some_artifact, won


class CatalogContract:
    """Artifacts, refs, endpoints and the log, and the fixtures of the whole contract."""

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def dead(self) -> set[str]:
        """Owners on the host `here` that have died."""
        return set()

    @pytest.fixture
    def ledger(self, open_ledger: OpenLedger, clock: Clock, dead: set[str]) -> Ledger:
        def alive(owner: Owner) -> bool | None:
            return None if owner.host != "here" else str(owner) not in dead

        return open_ledger(clock=clock, alive=alive)

    @pytest.fixture
    def run(self, ledger: Ledger) -> Run:
        return ledger.add_run(new_run())

    @pytest.fixture
    def token(self, ledger: Ledger, run: Run) -> str:
        """The token of A's lease on the run."""
        lease = ledger.lease("run", run.id, A, TTL)
        assert lease is not None
        return lease.token

    # ---- catalogue

    def test_artifacts_are_found_by_a_unique_prefix(self, ledger: Ledger) -> None:
        artifact = some_artifact("x")
        ledger.add_artifact(artifact, locations={"a.txt": "/data/a b.txt"})
        ledger.add_artifact(artifact)
        assert ledger.get_artifact(artifact.digest[:6]) == artifact
        assert ledger.locations(artifact.digest) == {"a.txt": "/data/a b.txt"}
        assert ledger.list_artifacts(kind="dataset") == [(artifact.digest, artifact, 1000.0)]
        assert ledger.list_artifacts(kind="Dataset") == []
        for text, error in (("abc", UsageError), ("xyzxyz", UsageError), ("0" * 64, NotFoundError)):
            with pytest.raises(error):
                ledger.get_artifact(text)

    def test_producers_newest_first(self, ledger: Ledger, run: Run) -> None:
        artifact = some_artifact("x")
        first = leave(ledger, run.id, "k1", {"out": artifact, "same": artifact})
        second = leave(ledger, run.id, "k2", {"out": artifact})
        assert [e.id for e in ledger.producers(artifact.digest)] == [second.id, first.id]

    def test_a_ref_moves_only_from_where_it_was_expected(self, ledger: Ledger) -> None:
        old, new = some_artifact("old"), some_artifact("new")
        ledger.add_artifact(old)
        ledger.add_artifact(new)
        with pytest.raises(ConflictError):
            ledger.set_ref("flights/engine@champion", old.digest, None, expect=new.digest)
        ledger.set_ref("flights/engine@champion", old.digest, None)
        ledger.set_ref("flights/engine@champion", old.digest, None)
        ledger.set_ref("flights/engine@champion", new.digest, None, expect=old.digest)
        with pytest.raises(ConflictError):
            ledger.set_ref("flights/engine@champion", old.digest, None, expect=old.digest)
        with pytest.raises(NotFoundError):
            ledger.set_ref("flights/engine@champion", "0" * 64, None)
        found = ledger.get_ref("flights/engine@champion")
        assert found is not None
        assert found.digest == new.digest
        assert ledger.get_ref("Flights/engine@champion") is None
        assert [r.name for r in ledger.list_refs("flights/")] == ["flights/engine@champion"]
        assert ledger.list_refs("FLIGHTS/") == []
        assert [e.data["was"] for e in ledger.events(subject="ref")] == [None, old.digest]

    def test_only_what_nothing_refers_to_is_dropped(self, ledger: Ledger, run: Run) -> None:
        texts = ("ref", "endpoint", "made", "read", "free")
        by_ref, by_endpoint, made, read, free = (some_artifact(text) for text in texts)
        for artifact in (by_ref, by_endpoint, read, free):
            ledger.add_artifact(artifact)
        ledger.set_ref("x", by_ref.digest, None)
        ledger.want_endpoint("e", artifact=by_endpoint.digest, execution=None, options={})
        maker = leave(ledger, run.id, "k1", {"out": made})
        won(ledger.claim(request(run.id, "k2", inputs={"in": read.digest}), A, TTL))
        for artifact in (by_ref, by_endpoint, made, read):
            with pytest.raises(ConflictError):
                ledger.drop_artifacts([free.digest, artifact.digest])
        assert ledger.get_artifact(free.digest) == free, "all or nothing"
        ledger.forget_execution(maker.id, "gc")
        ledger.drop_artifacts([free.digest, made.digest])
        ledger.drop_artifacts([free.digest])
        with pytest.raises(NotFoundError):
            ledger.get_artifact(made.digest)

    # ---- endpoints

    def test_another_wish_counts_the_generation_up(self, ledger: Ledger, clock: Clock) -> None:
        wish: dict[str, Any] = {"artifact": "ab" * 32, "execution": None, "options": {"port": 8000}}
        first = ledger.want_endpoint("flights", **wish)
        assert (first.state, first.generation) == (EndpointState.STARTING, 1)
        ledger.set_endpoint("flights", EndpointState.READY, port=8000, handle={"pid": 1})
        assert ledger.want_endpoint("flights", **wish).state is EndpointState.READY
        clock.now += 1
        other = ledger.want_endpoint("flights", **{**wish, "artifact": "cd" * 32})
        assert (other.state, other.generation, other.port) == (EndpointState.STARTING, 2, 8000)
        assert ledger.list_endpoints() == [other]
        assert ledger.get_endpoint("movies") is None

    def test_an_endpoint_says_where_it_stands(self, ledger: Ledger) -> None:
        ledger.want_endpoint("flights", artifact="ab" * 32, execution=None, options={})
        ledger.set_endpoint("flights", EndpointState.FAILED, error={"message": "no"})
        before = len(ledger.events())
        ledger.set_endpoint("flights", EndpointState.FAILED, error={"message": "no"})
        assert len(ledger.events()) == before
        ledger.set_endpoint("flights", EndpointState.STARTING)
        found = ledger.get_endpoint("flights")
        assert found is not None
        assert (found.state, found.error) == (EndpointState.STARTING, None)
        ledger.set_endpoint("flights", EndpointState.STOPPED)
        with pytest.raises(ConflictError):
            ledger.set_endpoint("flights", EndpointState.READY)
        with pytest.raises(NotFoundError):
            ledger.set_endpoint("nosuch", EndpointState.READY)

    # ---- what came back

    def test_a_segment_is_numbered_once_and_keeps_its_artifact(self, ledger: Ledger) -> None:
        ledger.want_endpoint("e", artifact="ab" * 32, execution=None, options={})
        early, late, other = (some_artifact(text, "traffic") for text in ("early", "late", "other"))
        first = ledger.add_segment("e", late, begins=200.0, ends=260.5, rows=7)
        second = ledger.add_segment("e", early, begins=100.0, ends=199.0, rows=3)
        assert ledger.add_segment("e", late, begins=200.0, ends=260.5, rows=7) == first, "twice is once"
        labels = ledger.add_segment("e", some_artifact("l", "labels"), begins=150.0, ends=300.0, rows=2)
        assert [first.number, second.number, labels.number] == [1, 2, 3]
        assert (first.digest, first.kind, first.begins, first.ends, first.rows) == (
            late.digest,
            "traffic",
            200.0,
            260.5,
            7,
        )
        assert ledger.list_segments("e", kind="traffic") == [first, second], "in the order of sealing"
        assert ledger.list_segments("e", after=2) == [labels]
        assert ledger.list_segments("e", since=199.5, until=250.0) == [first, labels]
        assert ledger.list_segments("e", until=150.0) == [second]
        assert ledger.list_segments("E") == []
        with pytest.raises(NotFoundError):
            ledger.add_segment("nosuch", other, begins=0.0, ends=0.0, rows=0)
        with pytest.raises(NotFoundError):
            ledger.get_artifact(other.digest)
        with pytest.raises(ConflictError, match="came back from the endpoint e"):
            ledger.drop_artifacts([early.digest])
        assert ledger.drop_segments("e", [2]) == ledger.drop_segments("e", [2, 3]) == 1
        ledger.drop_artifacts([early.digest])
        assert ledger.list_segments("e") == [first]

    # ---- log

    def test_the_log_is_read_by_subject_and_from_a_number_on(self, ledger: Ledger, clock: Clock) -> None:
        for subject in ("run/1", "step/1/train", "run/12", "step/12/train", "execution/ab", "run/1/x", "Run/1"):
            clock.now -= 1  # numbers give the order, whatever the clock does
            ledger.add_event(subject, "note", {"text": subject})
        assert [e.subject for e in ledger.events(subject="run/1")] == ["run/1", "step/1/train", "run/1/x"]
        assert [e.subject for e in ledger.events(subject="step/12")] == ["step/12/train"]
        everything = ledger.events()
        assert [e.seq for e in everything] == list(range(1, 8))
        assert ledger.events(after=2, limit=2) == everything[2:4]
        assert everything[0].data == {"text": "run/1"}
